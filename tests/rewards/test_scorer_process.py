"""A real scorer process behind a real, encrypted ZeroMQ hub: what an orchestrator sees of reward code that behaves well and badly."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.messages import Failed, FunctionFailed, FunctionKind, Outcome, RequestKind, Result, Score, ScorerReady, ScorerTask, Turns
from pipelinerl.observe.lines import read_journal
from tests.rewards.conftest import (
    PATIENCE_S,
    REPOSITORY,
    REWARDS,
    SECRETS,
    Scorer,
    descendants_of,
    encode,
    is_alive,
    processes_with,
    score,
    stop,
)

pytestmark = pytest.mark.process

DEADLINE_S = 3.0
"""Of calls that hang. Under a smaller one an ordinary call beside them that the machine holds up for a second or two looks like one."""
MARKER = f"marker-{uuid.uuid4()}"
"""Of the children of the call that hangs."""

Start = Callable[..., Scorer]


@pytest.fixture(scope="module")
def scorer(start_scorer: Start) -> Scorer:
    """Two slots, a reward that does what it is told, worth half, beside one of 10, and an environment."""
    scorer = start_scorer({"constant": 1.0, "act": 0.5}, environment="answer")
    ready = scorer.next(ScorerReady)
    assert (ready.scorer_id, ready.process_id, ready.num_slots) == (3, scorer.process.pid, 2)
    return scorer


@pytest.fixture(scope="module")
def hasty(start_scorer: Start) -> Scorer:
    """The same with three slots and a short deadline."""
    scorer = start_scorer({"constant": 1.0, "act": 0.5}, slots=3, deadline_s=DEADLINE_S, environment="answer")
    scorer.next(ScorerReady)
    return scorer


@pytest.fixture(scope="module")
def hung(hasty: Scorer) -> dict[str, Score]:
    """The answers about three calls that never return; the environment's is still to come. All at once, as each takes a whole deadline."""
    hasty.send(reply("hang"))
    hasty.send(score("plain", "hang"))
    hasty.send(score("first", "one", seconds_first=1000.0))
    hasty.send(score("parent", "children", marker=MARKER, started=str(hasty.run_folder / "children")))
    return hasty.scored("plain", "first", "parent")


def test_reward_is_the_weighted_sum_of_the_components(scorer: Scorer) -> None:
    answer = scorer.ask("one")
    assert answer.outcome is Outcome.OK
    assert answer.components == {"act": 1.0, "constant": 10.0}
    assert answer.reward == 0.5 * 1.0 + 1.0 * 10.0
    assert answer.error == ""


@pytest.mark.parametrize(
    ("completion", "outcome", "error"),
    [
        ("raise", Outcome.ERROR, "act raised KeyError: 'no such theorem'"),
        ("exit", Outcome.ERROR, "act raised SystemExit: leaving"),
        ("die", Outcome.ERROR, "act: its process ended with exit code 3"),
        ("crash", Outcome.ERROR, "act: its process was killed by SIGSEGV"),
        ("garbage", Outcome.ERROR, "act: its process was killed by SIGKILL"),
        ("none", Outcome.INVALID, "act returned None, expected a finite number"),
        ("nan", Outcome.INVALID, "act returned nan, expected a finite number"),
        ("text", Outcome.INVALID, "act returned 'high', expected a finite number"),
    ],
)
def test_failure_is_a_named_outcome_without_a_reward_and_the_slot_recovers(
    scorer: Scorer, completion: str, outcome: Outcome, error: str
) -> None:
    answer = scorer.ask(completion)
    assert (answer.outcome, answer.error, answer.reward, answer.components) == (outcome, error, None, {})
    check_slots_recover(scorer)


def check_slots_recover(scorer: Scorer) -> None:
    for index in range(4):
        scorer.send(score(f"after-{index}", "one"))
    after = scorer.scored(*(f"after-{index}" for index in range(4)))
    assert {answer.reward for answer in after.values()} == {10.5}


def test_hang_is_a_timeout_at_its_deadline_and_the_slot_recovers(hasty: Scorer, hung: dict[str, Score]) -> None:
    answer = hung["plain"]
    assert (answer.outcome, answer.reward, answer.components) == (Outcome.TIMEOUT, None, {})
    assert answer.error == "act did not return within 3 s; its process was killed"
    assert DEADLINE_S <= answer.duration_s < PATIENCE_S
    check_slots_recover(hasty)


def line_of(text: str) -> str:
    """`file:line` of the one line of the example rewards that has this text."""
    (number,) = [number for number, line in enumerate(REWARDS.read_text().splitlines(), 1) if text in line]
    return f"{REWARDS.relative_to(REPOSITORY)}:{number}"


def failed(scorer: Scorer, cause: str) -> FunctionFailed:
    """Wait until the scorer tells of a failure by this cause."""
    while True:
        told = scorer.next(FunctionFailed)
        if cause in told.cause:
            return told


def test_first_failure_of_a_function_is_told_with_its_line_and_traceback(start_scorer: Start) -> None:
    scorer = start_scorer({"act": 1.0}, environment="answer")
    scorer.next(ScorerReady)
    scorer.ask("raise")
    told = failed(scorer, "no such theorem")
    assert (told.function, told.kind, told.outcome, told.rollout_id) == ("act", FunctionKind.REWARD, Outcome.ERROR, "one")
    assert told.cause == "KeyError(\"'no such theorem'\")"
    assert told.where == line_of('raise KeyError("no such theorem")')
    assert 'raise KeyError("no such theorem")' in told.traceback
    log = Path(scorer.log.name).read_text()
    assert f"act (reward) failed on rollout one: error: {told.cause} at {told.where}\nTraceback" in log
    scorer.ask("nan")
    told = failed(scorer, "returned nan")
    assert (told.outcome, told.where, told.traceback) == (Outcome.INVALID, line_of("def act("), "")
    scorer.ask("crash")
    told = failed(scorer, "SIGSEGV")
    assert told.where == line_of("os.kill(os.getpid(), 11)")
    assert "Fatal Python error: Segmentation fault" in told.traceback
    scorer.ask("die")
    assert failed(scorer, "ended with exit code 3").where == line_of("def act(")
    reply_to(scorer, "raise")
    told = failed(scorer, "no such move")
    assert (told.function, told.kind, told.where) == ("answer", FunctionKind.ENVIRONMENT, line_of('raise KeyError("no such move")'))


def test_function_that_hangs_is_told_with_the_line_at_which_it_did(start_scorer: Start) -> None:
    scorer = start_scorer({"hang_later": 1.0, "act": {"deadline_s": 1.0}}, deadline_s=1.0)
    scorer.next(ScorerReady)
    scorer.send(score("in python", "hang"))
    scorer.send(score("in a loop", "later"))
    told = {one.function: one for one in (failed(scorer, "no answer"), failed(scorer, "no answer"))}
    assert {one.outcome for one in told.values()} == {Outcome.TIMEOUT}
    assert told["act"].cause == "no answer within 1 s, its deadline; its process was killed"
    assert told["act"].where == line_of("time.sleep(1000)  # here it hangs, too")
    assert "in _hang" in told["act"].traceback
    assert told["hang_later"].where == line_of("await asyncio.sleep(1000)  # here it hangs")


@pytest.mark.usefixtures("hung")
def test_killed_call_is_work_too(hasty: Scorer) -> None:
    hasty.ask("one")  # a span is written once its slot runs another
    assert any(span["end"] - span["start"] >= DEADLINE_S for span in spans_of(hasty))


def spans_of(scorer: Scorer) -> list[dict[str, Any]]:
    return [line for line in read_journal(scorer.run_folder / "journal" / "scorer-3.jsonl") if line["kind"] == "span"]


def reply(*said: str, seen: str = "") -> ScorerTask:
    """Ask the environment for its reply to these turns, between which it has said `?`."""
    text = "?".join(said)
    ends = [len("?".join(said[: number + 1])) - 1 for number in range(len(said))]
    turns = Turns(
        starts=np.array([0, *(end + 2 for end in ends[:-1])], np.int32), ends=np.array(ends, np.int32), states=("prompt",) * len(said)
    )
    return msgspec.structs.replace(score("0/1", text, seen=seen), kind=RequestKind.ENVIRONMENT, turns=(turns,))


def reply_to(scorer: Scorer, *said: str, seen: str = "") -> Result:
    """What the environment replies to these turns."""
    scorer.send(reply(*said, seen=seen))
    return scorer.result_of("0/1")


def test_environment_replies_to_what_was_said_and_its_text_is_tokenised_once(scorer: Scorer) -> None:
    first, second, keyed = reply_to(scorer, "echo"), reply_to(scorer, "a", "echo", seen="x"), reply_to(scorer, "state")
    assert [one.outcome for one in (first, second, keyed)] == [Outcome.OK] * 3
    assert first.observation is not None
    assert second.observation is not None
    assert keyed.observation is not None
    assert first.observation.token_ids.tolist() == encode("1 turns, replies , seen !").tolist()
    assert second.observation.token_ids.tolist() == encode("2 turns, replies ?, seen x!").tolist()
    assert keyed.observation.token_ids.tolist() == encode("go on").tolist()
    again = reply_to(scorer, "echo")
    assert again.observation is not None
    assert again.observation.state == first.observation.state != second.observation.state, "equal texts leave equal states"
    other = reply_to(scorer, "b", "state")
    assert other.observation is not None
    assert other.observation.state == keyed.observation.state, "and so do states of equal names"
    over = reply_to(scorer, "a", "over")
    assert (over.outcome, over.observation) == (Outcome.OK, None)


@pytest.mark.parametrize(
    ("said", "outcome", "error"),
    [
        ("raise", Outcome.ERROR, "answer raised KeyError: 'no such move'"),
        ("die", Outcome.ERROR, "answer: its process ended with exit code 3"),
        ("number", Outcome.INVALID, "answer returned 7, expected a text, a text and the name of a state, or None"),
        ("nothing", Outcome.INVALID, "answer said '', which is no token: return None where the episode is over"),
    ],
)
def test_environment_that_fails_says_how_and_has_said_nothing(scorer: Scorer, said: str, outcome: Outcome, error: str) -> None:
    replied = reply_to(scorer, said)
    assert (replied.outcome, replied.observation, replied.error) == (outcome, None, error)
    assert reply_to(scorer, "over").outcome is Outcome.OK


@pytest.mark.usefixtures("hung")
def test_environment_that_hangs_has_said_nothing(hasty: Scorer) -> None:
    replied = hasty.result_of("0/1")
    assert (replied.outcome, replied.observation) == (Outcome.TIMEOUT, None)
    assert replied.error == "answer did not return within 3 s; its process was killed"
    assert reply_to(hasty, "over").outcome is Outcome.OK


def test_function_that_returns_in_a_forked_child_too_is_answered_once_and_costs_nobody_else(scorer: Scorer) -> None:
    for _ in range(2):
        assert [scorer.ask(text).components["act"] for text in ("fork", "one")] == [7.0, 1.0]


def test_function_that_hangs_before_another_is_named(hung: dict[str, Score]) -> None:
    assert hung["first"].error.startswith("constant did not return")


def test_fast_calls_do_not_wait_behind_a_slow_one_and_run_once(scorer: Scorer, tmp_path: Path) -> None:
    warm = [f"warm-{index}" for index in range(60)]
    for name in warm:
        scorer.send(score(name, "one"))
    scorer.scored(*warm)
    path = tmp_path / "calls"
    fast = [f"fast-{index}" for index in range(40)]
    scorer.send(score("slow", "wait", until=str(tmp_path / "go")))
    for name in fast:
        scorer.send(score(name, "log", path=str(path), line=name))
    scorer.scored(*fast)
    scorer.ask("one")  # behind all that the other worker has
    lines = path.read_text()
    (tmp_path / "go").touch()
    scorer.scored("slow")
    scorer.send(score("both", "sleep", seconds=0.1))
    scorer.send(score("slots", "sleep", seconds=0.1))
    scorer.scored("both", "slots")
    assert path.read_text() == lines, "what was taken back from behind the slow one is not run there, too"


def test_completion_larger_than_any_socket_buffer_is_scored(scorer: Scorer) -> None:
    assert scorer.ask("x" * 150_000).components["act"] == 150_000


def test_hang_is_killed_with_its_children_even_those_in_sessions_of_their_own(hasty: Scorer, hung: dict[str, Score]) -> None:
    assert hung["parent"].outcome is Outcome.TIMEOUT
    assert len((hasty.run_folder / "children").read_text().split()) == 3
    hasty.wait_for_no_process_with(MARKER)


def test_children_of_a_worker_that_died_are_killed(scorer: Scorer) -> None:
    marker = f"marker-{uuid.uuid4()}"
    answer = scorer.ask("die with children", marker=marker)
    assert answer.error == "act: its process ended with exit code 5"
    scorer.wait_for_no_process_with(marker)


def test_daemon_of_a_live_worker_outlives_another_worker(scorer: Scorer, tmp_path: Path) -> None:
    marker = f"marker-{uuid.uuid4()}"
    scorer.send(score("with daemon", "daemon", marker=marker, until=str(tmp_path / "go")))
    scorer.wait_until(lambda: bool(processes_with(marker)), what="the daemon runs")
    assert scorer.ask("die").outcome is Outcome.ERROR
    assert scorer.ask("one").outcome is Outcome.OK  # by the next worker, born after what the dead one left was killed
    assert len(processes_with(marker)) == 1
    (tmp_path / "go").touch()
    assert scorer.scored("with daemon")["with daemon"].outcome is Outcome.OK


def test_samples_around_a_hanging_one_get_their_own_scores_once(hasty: Scorer, tmp_path: Path) -> None:
    for index in range(60):  # fast calls, so that the scorer hands many ahead
        hasty.send(score(f"fast-{index}", "one"))
    hasty.scored(*(f"fast-{index}" for index in range(60)))
    path = tmp_path / "calls"
    names = [f"s{index}" for index in range(40)]
    for index, name in enumerate(names):
        if index in (3, 17):
            hasty.send(score(name, "hang"))
        else:
            hasty.send(score(name, "log", path=str(path), line=name))
    answers = hasty.scored(*names)
    assert {name for name, answer in answers.items() if answer.outcome is Outcome.TIMEOUT} == {"s3", "s17"}
    assert {name for name, answer in answers.items() if answer.outcome is Outcome.OK} == set(names) - {"s3", "s17"}
    lines = path.read_text().split()
    assert max(lines.count(name) for name in names) <= 2
    assert sorted(set(lines)) == sorted(set(names) - {"s3", "s17"})


def test_worker_sees_no_secret_and_no_descriptor_of_the_run(scorer: Scorer, tmp_path: Path) -> None:
    assert scorer.ask("tell", path=str(tmp_path / "seen.json")).outcome is Outcome.OK
    seen = json.loads((tmp_path / "seen.json").read_text())
    for name, secret in SECRETS.items():
        assert name not in seen["environment"]
        assert secret not in json.dumps(seen)
    assert seen["environment"]["PATH"] == os.environ["PATH"]
    run_folder = str(scorer.run_folder)
    assert not [path for path in seen["files"] if path.startswith(run_folder) and not path.endswith("scorer.log")]
    assert [path.partition(":")[0] for path in seen["files"] if not path.startswith("/")] == ["socket"], "only its own channel"
    assert run_folder not in json.dumps(seen["environment"])
    secrets = [path.read_bytes().split()[1] for path in (scorer.run_folder / "keys").iterdir()]
    memory = _memory_of_group(_process_of(scorer))
    assert b"pipelinerl" in memory
    assert not [secret for secret in secrets if secret in memory]


def test_worker_has_its_own_session_folder_and_limits(scorer: Scorer, tmp_path: Path) -> None:
    scorer.ask("tell", path=str(tmp_path / "seen.json"))
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["process_id"] == seen["group"] == seen["session"]
    assert Path(seen["folder"]).parent.name.startswith("pipelinerl-scorer-")
    assert seen["environment"]["TMPDIR"] == seen["folder"]
    assert seen["core"] == [0, 0]
    assert 0 < seen["address_space"][1] <= 64 << 30
    assert seen["open_files"][1] <= 4096
    assert seen["num_threads_of_parent"] == 1, "forking a process with threads may deadlock the child"


def test_cancelled_requests_are_not_run_and_not_answered(scorer: Scorer, tmp_path: Path) -> None:
    path, until = tmp_path / "calls", tmp_path / "go"
    for index in range(2):
        scorer.send(score(f"slow-{index}", "log", path=str(path), line=f"slow-{index}", until=str(until)))
    scorer.wait_until(lambda: path.exists() and len(path.read_text().split()) == 2, what="both slots are taken")
    for index in range(6):
        scorer.send(score(f"queued-{index}", "log", path=str(path), line=f"queued-{index}"))
    for name in ("slow-0", *(f"queued-{index}" for index in range(5))):
        scorer.cancel(name)
    reply_to(scorer, "over")  # sent behind them, and the environment has slots of its own: they are heard
    until.touch()
    answers = scorer.scored("slow-1", "queued-5")
    assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
    assert scorer.ask("one").outcome is Outcome.OK
    lines = path.read_text().split()
    assert [line for line in lines if line.startswith("queued")] == ["queued-5"]


def test_load_and_spans_are_sent_and_journaled(scorer: Scorer) -> None:
    scorer.ask("one")
    first = scorer.new_load()
    slept, one = scorer.ask("sleep", seconds=0.1), scorer.ask("one")
    last = scorer.new_load()
    assert (first.num_running, last.num_running) == (0, 0)
    assert last.num_scored == first.num_scored + 2
    assert slept.duration_s >= 0.1
    assert last.busy_s - first.busy_s == pytest.approx(slept.duration_s + one.duration_s)
    lines = list(read_journal(scorer.run_folder / "journal" / "scorer-3.jsonl"))
    load = next(line for line in lines if line["kind"] == "load" and line["num_scored"] == last.num_scored)
    assert {name: load[name] for name in ("scorer_id", "num_running", "busy_s")} == {
        "scorer_id": 3,
        "num_running": last.num_running,
        "busy_s": last.busy_s,
    }
    lanes = {span["lane"] for span in spans_of(scorer)}
    # The environment's second slot runs something only where the first was not ready.
    assert lanes - {"scorer-3/answer/slot-1"} == {"scorer-3/slot-0", "scorer-3/slot-1", "scorer-3/answer/slot-0"}
    assert {span["name"] for span in spans_of(scorer)} == {"score"}


def test_stop_ends_with_exit_code_0_and_without_orphans(scorer: Scorer, tmp_path: Path) -> None:
    marker = f"marker-{uuid.uuid4()}"
    scorer.send(score("last", "children", marker=marker, started=str(tmp_path / "started")))
    scorer.wait_until((tmp_path / "started").exists, what="the children run")
    descendants = descendants_of(scorer.process.pid)
    assert len(descendants) >= 4  # the fork server, two workers, a child
    assert stop(scorer) == 0
    assert not [process_id for process_id in descendants if is_alive(process_id)]
    assert not processes_with(marker)


def test_killing_the_server_leaves_no_process(hasty: Scorer, tmp_path: Path) -> None:
    marker = f"marker-{uuid.uuid4()}"
    hasty.send(score("last", "children", marker=marker, started=str(tmp_path / "started")))
    hasty.wait_until((tmp_path / "started").exists, what="the children run")
    descendants = descendants_of(hasty.process.pid)
    assert len(descendants) >= 4
    os.kill(hasty.process.pid, signal.SIGKILL)
    hasty.wait_for_no_process_with(marker)
    hasty.wait_until(lambda: not any(map(is_alive, descendants)), what="they end, too")


def test_end_of_the_fork_server_ends_the_scorer_and_every_worker(start_scorer: Start, tmp_path: Path) -> None:
    """The launcher then starts it again; told to the orchestrator, it would end the run."""
    scorer = start_scorer({"act": 1.0}, deadline_s=100.0)
    scorer.next(ScorerReady)
    scorer.send(score("last", "log", path=str(tmp_path / "started"), line="begun", until="/nowhere"))
    scorer.wait_until((tmp_path / "started").exists, what="the call runs")
    descendants = descendants_of(scorer.process.pid)
    assert len(descendants) == 3
    os.kill(descendants[0], signal.SIGKILL)
    assert scorer.process.wait(20) == 1
    record = json.loads((scorer.run_folder / "failures" / "scorer-3.json").read_text())
    assert record["error"].startswith(f"PeerGone: the scorer's fork server (process {descendants[0]}) ended")
    assert record["is_consequence"]
    with pytest.raises(AssertionError, match="no Failed within"):
        scorer.next(Failed, within_s=0.5)
    assert not [process_id for process_id in descendants if is_alive(process_id)]


def test_function_that_does_not_exist_ends_the_scorer_at_start(start_scorer: Start) -> None:
    scorer = start_scorer({"atc": 1.0})
    failed = scorer.next(Failed)
    assert failed.error.startswith("ConfigError: ")
    assert "has no 'atc'; did you mean 'act'?" in failed.error
    assert scorer.process.wait(20) == 1
    assert json.loads((scorer.run_folder / "failures" / "scorer-3.json").read_text())["error"] == failed.error
    assert "Traceback" not in Path(scorer.log.name).read_text()


def _process_of(scorer: Scorer) -> int:
    answer = scorer.ask("process")
    return int(answer.components["act"])


def _memory_of_group(process_id: int) -> bytes:
    """All readable, writable memory of a process."""
    pieces = []
    maps = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    with open(f"/proc/{process_id}/mem", "rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            if rights.startswith("rw"):
                start, end = (int(edge, 16) for edge in span.split("-"))
                memory.seek(start)
                pieces.append(memory.read(end - start))
    return b"".join(pieces)

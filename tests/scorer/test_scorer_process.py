"""A real scorer process behind a real, encrypted ZeroMQ hub: what an orchestrator sees of reward code that behaves well and badly."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.messages import Cancel, Failed, Outcome, Replied, Reply, ScorerReady, Turns
from pipelinerl.metrics import read_journal
from tests.scorer.conftest import SECRETS, Scorer, descendants_of, encode, is_alive, processes_with, score, stop

DEADLINE_S = 1.5
PROMPT_S = 2.0
"""Slack for killing and for a busy machine."""

Start = Callable[..., Scorer]


@pytest.fixture(scope="module")
def scorer(start_scorer: Start) -> Scorer:
    """Two slots, a deadline of 1.5 seconds, a reward that does what it is told, worth half, beside one of 10, and an environment."""
    scorer = start_scorer({"constant": 1.0, "act": 0.5}, deadline_s=DEADLINE_S, environment="answer")
    ready = scorer.next(ScorerReady)
    assert (ready.scorer_id, ready.process_id, ready.num_slots) == (3, scorer.process.pid, 2)
    return scorer


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
        ("hang", Outcome.TIMEOUT, "act did not return within 1.5 s; its process was killed"),
    ],
)
def test_failure_is_a_named_outcome_without_a_reward_and_the_slot_recovers(
    scorer: Scorer, completion: str, outcome: Outcome, error: str
) -> None:
    begin = time.monotonic()
    answer = scorer.ask(completion)
    assert (answer.outcome, answer.error) == (outcome, error)
    assert answer.reward is None
    assert answer.components == {}
    if outcome is Outcome.TIMEOUT:
        assert DEADLINE_S <= answer.duration_s <= time.monotonic() - begin < DEADLINE_S + PROMPT_S, "at its deadline"
    for index in range(4):
        scorer.send(score(f"after-{index}", "one"))
    after = scorer.scored(*(f"after-{index}" for index in range(4)))
    assert {answer.reward for answer in after.values()} == {10.5}


def reply_to(scorer: Scorer, *said: str, seen: str = "") -> Replied:
    """What the environment replies to these turns, between which it has said `?`."""
    text = "?".join(said)
    ends = [len("?".join(said[: number + 1])) - 1 for number in range(len(said))]
    turns = Turns(
        starts=np.array([0, *(end + 2 for end in ends[:-1])], np.int32), ends=np.array(ends, np.int32), states=("prompt",) * len(said)
    )
    request = score("0/1", text, seen=seen)
    scorer.send(Reply(episode_id="0/1", attempt=2, prompt=request.prompt, token_ids=request.token_ids, turns=turns, finish=request.finish))
    replied = scorer.next(Replied)
    assert (replied.episode_id, replied.attempt, replied.turn) == ("0/1", 2, len(said) - 1)
    return replied


def test_environment_replies_to_what_was_said_and_its_text_is_tokenised_once(scorer: Scorer) -> None:
    first, second, keyed = reply_to(scorer, "echo"), reply_to(scorer, "a", "echo", seen="x"), reply_to(scorer, "state")
    assert [one.outcome for one in (first, second, keyed)] == [Outcome.OK] * 3
    assert first.heard is not None
    assert second.heard is not None
    assert keyed.heard is not None
    assert first.heard.token_ids.tolist() == encode("1 turns, replies , seen !").tolist()
    assert second.heard.token_ids.tolist() == encode("2 turns, replies ?, seen x!").tolist()
    assert keyed.heard.token_ids.tolist() == encode("go on").tolist()
    again = reply_to(scorer, "echo")
    assert again.heard is not None
    assert again.heard.state == first.heard.state != second.heard.state, "equal texts leave equal states"
    other = reply_to(scorer, "b", "state")
    assert other.heard is not None
    assert other.heard.state == keyed.heard.state, "and so do states of equal names"
    over = reply_to(scorer, "a", "over")
    assert (over.outcome, over.heard) == (Outcome.OK, None)


@pytest.mark.parametrize(
    ("said", "outcome", "error"),
    [
        ("raise", Outcome.ERROR, "answer raised KeyError: 'no such move'"),
        ("die", Outcome.ERROR, "answer: its process ended with exit code 3"),
        ("number", Outcome.INVALID, "answer returned 7, expected a text, a text and the name of a state, or None"),
        ("nothing", Outcome.INVALID, "answer said '', which is no token: return None where the episode is over"),
        ("hang", Outcome.TIMEOUT, "answer did not return within 1.5 s; its process was killed"),
    ],
)
def test_environment_that_fails_says_how_and_has_said_nothing(scorer: Scorer, said: str, outcome: Outcome, error: str) -> None:
    replied = reply_to(scorer, said)
    assert (replied.outcome, replied.heard, replied.error) == (outcome, None, error)
    assert reply_to(scorer, "over").outcome is Outcome.OK


def test_function_that_returns_in_a_forked_child_too_is_answered_once_and_costs_nobody_else(scorer: Scorer) -> None:
    for _ in range(2):
        assert [scorer.ask(text).components["act"] for text in ("fork", "one")] == [7.0, 1.0]


def test_function_that_hangs_before_another_is_named(scorer: Scorer) -> None:
    assert scorer.ask("one", seconds_first=1000.0).error.startswith("constant did not return")


def test_fast_calls_do_not_wait_behind_a_slow_one_and_run_once(scorer: Scorer, tmp_path: Path) -> None:
    warm = [f"warm-{index}" for index in range(60)]
    for name in warm:
        scorer.send(score(name, "one"))
    scorer.scored(*warm)
    path = tmp_path / "calls"
    fast = [f"fast-{index}" for index in range(40)]
    scorer.send(score("slow", "sleep", seconds=0.7))
    for name in fast:
        scorer.send(score(name, "log", path=str(path), line=name))
    assert list(scorer.scored("slow", *fast))[-1] == "slow"
    scorer.send(score("both", "sleep", seconds=0.1))
    scorer.send(score("slots", "sleep", seconds=0.1))
    scorer.scored("both", "slots")
    assert len(path.read_text().split()) <= len(fast) + 2, "a call may begin just before it is taken back, no more"


def test_completion_larger_than_any_socket_buffer_is_scored(scorer: Scorer) -> None:
    assert scorer.ask("x" * 150_000).components["act"] == 150_000


def test_hang_is_killed_with_its_children_even_those_in_sessions_of_their_own(scorer: Scorer, tmp_path: Path) -> None:
    marker = f"marker-{uuid.uuid4()}"
    scorer.send(score("parent", "children", marker=marker, started=str(tmp_path / "started")))
    end = time.monotonic() + 20
    while len(processes_with(marker)) < 3:
        assert time.monotonic() < end, f"expected three children, found {processes_with(marker)}"
        time.sleep(0.005)
    assert scorer.scored("parent")["parent"].outcome is Outcome.TIMEOUT
    scorer.wait_for_no_process_with(marker)


def test_children_of_a_worker_that_died_are_killed(scorer: Scorer) -> None:
    marker = f"marker-{uuid.uuid4()}"
    answer = scorer.ask("die with children", marker=marker)
    assert answer.error == "act: its process ended with exit code 5"
    scorer.wait_for_no_process_with(marker)


def test_daemon_of_a_live_worker_outlives_another_worker(scorer: Scorer) -> None:
    marker = f"marker-{uuid.uuid4()}"
    scorer.send(score("with daemon", "daemon", marker=marker, seconds=1.0))
    scorer.send(score("dies", "die", seconds=0.5))
    answers = scorer.scored("with daemon", "dies")
    assert [answers[name].outcome for name in ("with daemon", "dies")] == [Outcome.OK, Outcome.ERROR]
    assert len(processes_with(marker)) == 1


def test_samples_around_a_hanging_one_get_their_own_scores_once(scorer: Scorer, tmp_path: Path) -> None:
    for index in range(60):  # fast calls, so that the scorer hands many ahead
        scorer.send(score(f"fast-{index}", "one"))
    scorer.scored(*(f"fast-{index}" for index in range(60)))
    path = tmp_path / "calls"
    names = [f"s{index}" for index in range(40)]
    for index, name in enumerate(names):
        if index in (3, 17):
            scorer.send(score(name, "hang"))
        else:
            scorer.send(score(name, "log", path=str(path), line=name))
    answers = scorer.scored(*names)
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
    path = tmp_path / "calls"
    for index in range(2):
        scorer.send(score(f"slow-{index}", "log", path=str(path), line=f"slow-{index}", seconds=0.5))
    for index in range(6):
        scorer.send(score(f"queued-{index}", "log", path=str(path), line=f"queued-{index}"))
    for name in ("slow-0", *(f"queued-{index}" for index in range(5))):
        scorer.send(Cancel(rollout_id=name, attempt=0))
    answers = scorer.scored("slow-1", "queued-5")
    assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
    assert scorer.ask("one").outcome is Outcome.OK
    lines = path.read_text().split()
    assert [line for line in lines if line.startswith("queued")] == ["queued-5"]


def test_request_repeated_while_it_runs_is_answered_once(scorer: Scorer) -> None:
    for _ in range(3):
        scorer.send(score("again", "sleep", seconds=0.3))
    assert scorer.scored("again")["again"].components["act"] == 0.3
    scorer.send(score("again", "sleep", attempt=1, seconds=0.1))
    answer = scorer.scored("again")["again"]
    assert (answer.attempt, answer.components["act"]) == (1, 0.1)


def test_load_and_spans_are_sent_and_journaled(scorer: Scorer) -> None:
    scorer.ask("one")
    first = scorer.new_load()
    scorer.ask("sleep", seconds=0.7)
    scorer.ask("one")
    last = scorer.new_load()
    assert (first.num_running, last.num_running) == (0, 0)
    assert last.num_scored == first.num_scored + 2
    assert 0.7 <= last.busy_s - first.busy_s < 0.7 + PROMPT_S
    lines = list(read_journal(scorer.run_folder / "journal" / "scorer-3.jsonl"))
    load = next(line for line in lines if line["kind"] == "load" and line["num_scored"] == last.num_scored)
    assert {name: load[name] for name in ("scorer_id", "num_running", "busy_s")} == {
        "scorer_id": 3,
        "num_running": last.num_running,
        "busy_s": last.busy_s,
    }
    spans = [line for line in lines if line["kind"] == "span"]
    assert {span["lane"] for span in spans} == {f"scorer-3/{lane}slot-{slot}" for lane in ("", "answer/") for slot in range(2)}
    assert {span["name"] for span in spans} == {"score"}
    assert any(span["end"] - span["start"] >= DEADLINE_S for span in spans), "killed calls are work, too"


def test_stop_ends_with_exit_code_0_and_without_orphans(scorer: Scorer, tmp_path: Path) -> None:
    marker = f"marker-{uuid.uuid4()}"
    scorer.send(score("last", "children", marker=marker, started=str(tmp_path / "started")))
    _wait_for(tmp_path / "started")
    descendants = descendants_of(scorer.process.pid)
    assert len(descendants) >= 4  # the fork server, two workers, a child
    assert stop(scorer) == 0
    assert not [process_id for process_id in descendants if is_alive(process_id)]
    assert not processes_with(marker)


def test_killing_the_server_leaves_no_process(start_scorer: Start, tmp_path: Path) -> None:
    scorer = start_scorer({"act": 1.0}, deadline_s=100.0)
    scorer.next(ScorerReady)
    marker = f"marker-{uuid.uuid4()}"
    scorer.send(score("last", "children", marker=marker, started=str(tmp_path / "started")))
    _wait_for(tmp_path / "started")
    descendants = descendants_of(scorer.process.pid)
    assert len(descendants) >= 4
    os.kill(scorer.process.pid, signal.SIGKILL)
    scorer.wait_for_no_process_with(marker)
    end = time.monotonic() + 10
    while left := [process_id for process_id in descendants if is_alive(process_id)]:
        assert time.monotonic() < end, f"still alive: {left}"
        time.sleep(0.02)


def test_end_of_the_fork_server_ends_the_scorer_and_every_worker(start_scorer: Start, tmp_path: Path) -> None:
    """The launcher then starts it again; told to the orchestrator, it would end the run."""
    scorer = start_scorer({"act": 1.0}, deadline_s=100.0)
    scorer.next(ScorerReady)
    scorer.send(score("last", "log", path=str(tmp_path / "started"), line="begun", seconds=1000.0))
    _wait_for(tmp_path / "started")
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


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written"
        time.sleep(0.01)

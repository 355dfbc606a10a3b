"""A script that goes on is led through its calls: its own variables, and what it holds back, are what they were; on simulated time."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import runpy
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from orchestrator.ledger.answers import Answers, Kind
from orchestrator.scripted_run import ScriptedRun
from orchestrator.stages.script_replay import ScriptRecord, ScriptReplay
from orchestrator.stages.script_waits import ScriptWaits
from pipelinerl.errors import LedgerError, ScriptDiverged
from pipelinerl.messages import Sample, Trajectory
from pipelinerl.runtime.watch import Watch
from tests.sim.chaos import Faults, Survived, survive
from tests.sim.clock import simulate
from tests.sim.peers import World
from tests.sim.run import config

STEPS = 16
TRAIN = f"train [{hashlib.blake2b(digest_size=8).hexdigest()}]"
"""How the record names a call that is given nothing."""
Trace = list[tuple[int, bool, float, tuple[str, ...]]]


class Stateful:
    """A loop that keeps a running mean of rewards, and a buffer of rows: of each step's groups it trains half one step later."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        """Of each life: the steps that it has seen trained, each with what its variables held."""

    async def __call__(self, asked: ScriptedRun) -> None:
        trace: Trace = []
        self.traces.append(trace)
        mean, buffer, begun = 0.0, list[Sample](), list[Trajectory]()
        ahead = asked.sample(asked.prompts(6))
        while asked.step < asked.num_steps:
            scored = await asked.score([*begun, *await ahead])
            mean = 0.9 * mean + 0.1 * sum(one.score.reward or 0.0 for one in scored)
            is_last = asked.step + 1 == asked.num_steps
            ahead = asked.sample([] if is_last else asked.prompts(6 if mean < 2.0 else 5))
            begun = [] if is_last else [await anext(ahead), await anext(ahead)]  # read before the step, and scored after it
            rows = asked.advantages(scored)
            late = {row.trajectory.group_id for row in rows if row.trajectory.group_id % 2 and not is_last}
            now, buffer = (
                [*buffer, *(row for row in rows if row.trajectory.group_id not in late)],
                [row for row in rows if row.trajectory.group_id in late],
            )
            done = await asked.train(now)
            await asked.publish()
            trace.append((done.step, bool(done.metrics), mean, tuple(row.trajectory.rollout_id for row in buffer)))
        assert not await ahead


def survived(script: Any, folder: Path, *, steps: int = STEPS, **faults: Any) -> Survived:
    settings = config(trainer={"steps": steps}, pipeline={"max_staleness": 3})
    world = World(token_s=2e-3)
    return survive(settings, folder=folder, faults=Faults(until_s=30.0, **faults), world=world, script=script, replays=True)


@pytest.mark.slow
@pytest.mark.parametrize("faults", [{"orchestrator_s": 1.5}, {"orchestrator_s": 3.0, "trainer_s": 4.0, "engine_s": 3.0, "scorer_s": 3.0}])
@pytest.mark.parametrize("seed", [0, 1])
def test_variables_of_a_killed_script_and_what_it_holds_back_are_there_again(tmp_path: Path, faults: dict[str, Any], seed: int) -> None:
    script = Stateful()
    whole = survived(script, tmp_path, seed=seed, **faults)
    assert whole.problems() == []
    assert whole.disk.version == whole.checker.num_done == STEPS
    assert whole.kills["orchestrator"] >= 2
    assert len(script.traces) >= 3, "the others were killed before every peer was there"
    last = script.traces[-1]
    assert [step for step, *_ in last] == list(range(STEPS))
    for trace in script.traces:
        assert trace == last[: len(trace)]
    ends = collections.Counter((row[3], row[4]) for row in whole.rows if row[3] != "failed")
    assert {status for status, _ in ends} <= {"trained", "cancelled", "stale"}
    prompts = collections.defaultdict[str, set[int]](set)
    for row in whole.rows:
        if row[3] != "cancelled":
            prompts[row[2]].add(row[1])
    assert all(len(groups) == 1 for groups in prompts.values()), "no prompt is drawn twice, but in place of a group that was cancelled"
    if "trainer_s" not in faults:  # rows that were there when two trainers died do not train
        held_back = {name for trace in script.traces[:-1] for *_, buffer in trace[-1:] for name in buffer}
        assert held_back
        assert held_back <= {row[0] for row in whole.rows if row[3] == "trained"}


@pytest.mark.slow
def test_the_built_in_loop_as_a_script_is_led_through_its_calls_among_its_tasks(tmp_path: Path) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "scripts" / "streaming.py"))["train"]
    whole = survived(script, tmp_path, seed=1, orchestrator_s=2.0)
    assert whole.problems() == []
    assert whole.disk.version == STEPS
    assert whole.kills["orchestrator"] >= 2


async def draws_ahead(asked: ScriptedRun) -> None:
    """Sample the prompts that were drawn before the last step: the ledger knows of a draw only once it is sampled."""
    drawn = asked.prompts(4)
    while asked.step < asked.num_steps:
        scored = await asked.score(asked.sample(drawn))
        drawn = asked.prompts(4)
        await asked.train(asked.advantages(scored))
        await asked.publish()


def test_prompts_that_were_drawn_and_not_sampled_when_a_script_was_killed_are_not_drawn_again(tmp_path: Path) -> None:
    whole = survived(draws_ahead, tmp_path, seed=2, orchestrator_s=2.0)
    assert whole.problems() == []
    assert whole.kills["orchestrator"] >= 2
    drawn = collections.Counter(row[2] for row in whole.rows if row[3] == "trained")
    assert len(drawn) == 4 * STEPS
    assert set(drawn.values()) == {4}, "a group of four for each, and no prompt twice"


class Changed:
    """A loop that does something else in a later life, at its second step."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.furthest = 0
        """Steps that were trained in the lives before."""

    async def __call__(self, asked: ScriptedRun) -> None:
        is_other, furthest = self.furthest >= 3, 0
        while asked.step < asked.num_steps:
            is_changed = is_other and asked.step == 1
            if is_changed and self.what == "ends":
                return
            if is_changed and self.what == "saves":
                await asked.save()
            scored = await asked.score(asked.sample(asked.prompts(5 if is_changed and self.what == "prompts" else 4)))
            rows = asked.advantages(scored)
            await asked.train(rows[1:] if is_changed and self.what == "rows" else rows)
            await asked.publish()
            furthest += 1
            self.furthest = max(self.furthest, furthest)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("prompts", r"call 7 of the script is prompts, with other arguments when it was recorded"),
        ("saves", r"call 7 of the script is save, where it called prompts when it was recorded"),
        ("rows", r"call 11 of the script is train, with other arguments when it was recorded"),
        ("ends", r"the script ends, and its record goes on with called of call 7 prompts"),
    ],
)
def test_a_call_that_differs_from_the_record_is_named(tmp_path: Path, what: str, words: str) -> None:
    with pytest.raises(ScriptDiverged, match=words):
        survived(Changed(what), tmp_path, steps=40, seed=3, orchestrator_s=6.0)


class Hasty:
    """A loop that reads one rollout before each step and the others after it, and in a later life all of them before its second step."""

    def __init__(self, read: int | None) -> None:
        self.read = read
        """How many it then reads; None: it waits for the step instead, which it began and awaited later."""
        self.furthest = 0

    async def __call__(self, asked: ScriptedRun) -> None:
        is_other = self.furthest >= 3
        while asked.step < asked.num_steps:
            is_changed = is_other and asked.step == 1
            ahead = asked.sample(asked.prompts(1))
            begun = [await anext(ahead) for _ in range(4 if is_changed and self.read else 1)]
            rows = asked.advantages(await asked.score(asked.sample(asked.prompts(4))))
            step = asked.train(rows)
            if is_changed and self.read is None:
                await step
            asked.prompts(0)
            await step
            await asked.publish()
            await asked.score([*begun, *await ahead])
            self.furthest = max(self.furthest, asked.step)


@pytest.mark.parametrize("read", [4, None])
def test_a_script_that_waits_for_what_it_had_not_waited_for_is_named_and_does_not_stand_still(tmp_path: Path, read: int | None) -> None:
    words = r"the script waits for something else than it had when it made call \d+, (score|prompts|sample)\. A script that goes on"
    with pytest.raises(ScriptDiverged, match=words):
        survived(Hasty(read), tmp_path, steps=40, seed=3, orchestrator_s=6.0)


def test_a_record_that_does_not_lead_to_the_run_is_refused_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    with contextlib.closing(Answers(path)) as answers:
        answers.add(0, Kind.CALLED, words=TRAIN, number=0)
        answers.add(0, Kind.ANSWERED, body=b"done")
        answers.flush()
        answers.add(1, Kind.CALLED, words=TRAIN, number=1)
    waits = ScriptWaits(watch=Watch(stall_limit_s=10.0), owner="script")
    with contextlib.closing(Answers(path)) as answers:
        assert [event.words for event in answers.events] == [TRAIN, ""], "what waited has led to nothing"
        replay = ScriptReplay(ScriptRecord(answers, next_steps={"": 1}), waits=waits)
        assert replay.is_kept
        simulate(trains_again(replay))
        with pytest.raises(ScriptDiverged, match=r"leads up to step 1, and step 3 of the run comes next: .* without replay=True"):
            ScriptRecord(answers, next_steps={"": 3})
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT count(*) FROM events WHERE kind = 'answered'").fetchone() == (1,)
            database.execute("UPDATE events SET body = x'646f6d65' WHERE kind = 'answered'")
            database.commit()
        with pytest.raises(LedgerError, match="damaged after it was written: answered of call 0"):
            answers.body(answers.events[1])


async def trains_again(replay: ScriptReplay) -> None:
    """A step that has an answer is trained once more, by a trainer that starts again."""

    async def never() -> bytes:
        raise AssertionError("it is answered")

    call = replay.begin("train", step=0)
    assert await replay.wait(call, never, encode=None, decode=bytes) == b"done"
    replay.done(0, b"again")
    replay.check_over()

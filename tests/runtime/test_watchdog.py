"""A stall in each of the six stages: the watchdog names stage, peer and sample, shows all stacks, and ends the process with exit code 1."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.stages.batching import Batching
from orchestrator.stages.generation import Generation
from orchestrator.stages.prompts import Prompts
from orchestrator.stages.scoring import Scoring
from orchestrator.stages.training import Training
from orchestrator.stages.weight_sync import WeightSync
from pipelinerl.errors import Stalled
from pipelinerl.runtime.watch import LOOKS, guarded
from tests.processes import PATIENCE_S, program
from tests.sim.run import config, run

pytestmark = pytest.mark.process

LIMIT_S = 120.0
STALLS: dict[str, tuple[type[Any], str, tuple[str, ...]]] = {
    "prompts": (Prompts, "run", ("generation waits for prompts since", "prompts has given 0 prompts; 0 wait to be taken by generation")),
    "generation": (
        Generation,
        "_collect",
        (
            r"engines has given \d+ completions; \d+ wait to be taken by generation, the first rollout \d+/\d, attempt 0, of engine-\d",
            "scoring waits for trajectories since",
        ),
    ),
    "scoring": (
        Scoring,
        "run",
        (
            r"generation has given \d+ trajectories; \d+ wait to be taken by scoring, the first rollout \d+/\d, attempt 0, of engine-\d",
            "batching waits for scored since",
        ),
    ),
    "batching": (
        Batching,
        "run",
        (
            r"scoring has given \d+ scored; \d+ wait to be taken by batching, the first rollout \d+/\d, attempt 0, of engine-\d",
            "training waits for rows since",
        ),
    ),
    "training": (Training, "run", (r"batching has given \d+ rows; \d+ wait to be taken by training, the first of step 0",)),
    "weight_sync": (
        WeightSync,
        "run",
        (
            # The trainer's start, which is welcomed with a layout, comes first.
            r"training has given \d policies; \d wait to be taken by weight_sync, the first version 0",
            "generation waits for an admission credit",
        ),
    ),
}


async def stand_still(stage: object) -> None:
    """Neither end nor say what for."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("stage", STALLS)
def test_a_stall_in_any_stage_is_named_with_what_it_left_lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str):
    owner, method, expected = STALLS[stage]
    monkeypatch.setattr(owner, method, stand_still)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(config(pipeline={"stall_limit_s": LIMIT_S, "max_staleness": 1}), folder=tmp_path, limit_s=7200.0)
    stalled, _ = caught.value.split(Stalled)
    assert stalled is not None, caught.value
    verdict = str(leaf(stalled))
    quiet_s = int(re.match(r"nothing moved for (\d+) s\n", verdict)[1])  # pyright: ignore[reportOptionalSubscript]
    assert LIMIT_S <= quiet_s <= LIMIT_S * (1 + 1 / LOOKS) + 1
    for line in expected:
        assert re.search(line, verdict), verdict
    assert "most recent call first" in verdict
    assert "watch.py" in verdict


def leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


RUN = """
    import asyncio, functools, time
    from pathlib import Path
    from pipelinerl.runtime.process import end_stuck, crash_report
    from pipelinerl.runtime.watch import guarded
    from tests.sim import run as sim
    from orchestrator.stages.scoring import Scoring

    folder = Path(folder)
    settings = sim.config(pipeline={"stall_limit_s": 2.0})

    class Stuck(sim.Prompts):
        def next(self):
            if self.position[1] > 20:
                time.sleep(1000)
            return super().next()

    async def main():
        with guarded(guard_s, end=functools.partial(end_stuck, folder, "orchestrator")):
            await sim._run(settings, folder=folder, given=sim.Circumstances())

    if how == "a source that never returns":
        sim.Prompts = Stuck
    else:
        async def stand_still(stage):
            await asyncio.Event().wait()
        Scoring.run = stand_still
    with crash_report(folder, "orchestrator"):
        asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("how", "guard_s", "named"),
    [
        ("a stage that stands still", 20.0, [r"nothing moved for \d+ s", r"taken by scoring, the first rollout \d+/\d", "_verdict"]),
        ("a source that never returns", 2.0, [r"the event loop has not turned for \d+ s", "orchestrator/stages/prompts.py", "in next"]),
    ],
)
def test_a_process_that_stalls_ends_within_its_limit_with_exit_code_1_and_its_stacks(
    tmp_path: Path, how: str, guard_s: float, named: list[str]
):
    started = time.monotonic()
    ended = subprocess.run(program(RUN, folder=tmp_path, how=how, guard_s=guard_s), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1, ended.stderr
    assert 2.0 <= time.monotonic() - started < 30.0
    for line in named:
        assert re.search(line, ended.stderr), ended.stderr
    assert "Stalled: " in (tmp_path / "failures" / "orchestrator.json").read_text()


def guards() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "guard"]


def test_a_loop_that_turns_is_left_alone_and_the_guard_ends_with_its_block():
    limit_s = 0.4

    async def busy() -> tuple[list[str], float]:
        """The verdicts on a loop that works for longer than the limit, and the longest that it did not turn: the machine may pause."""
        verdicts: list[str] = []
        turned_at = [time.monotonic()]
        with guarded(limit_s, end=verdicts.append):
            while turned_at[-1] < turned_at[0] + 1.2 * limit_s:
                time.sleep(0.02)  # noqa: ASYNC251 work, but never for long
                await asyncio.sleep(0)
                turned_at.append(time.monotonic())
        return verdicts, max(after - before for before, after in itertools.pairwise(turned_at))

    for _ in range(20):
        verdicts, longest_s = asyncio.run(busy())
        assert not guards()
        if longest_s < limit_s / 2:
            break
    assert longest_s < limit_s / 2, "the machine paused in every attempt"
    assert verdicts == []


def test_a_loop_that_does_not_turn_is_noticed_once_with_its_stacks():
    verdicts: list[str] = []

    async def stuck() -> None:
        with guarded(0.2, end=verdicts.append):
            await asyncio.sleep(0)
            (guard,) = guards()
            guard.join(PATIENCE_S)  # the fault: the loop waits, until the guard looks no more

    asyncio.run(stuck())
    (verdict,) = verdicts
    assert re.match(r"the event loop has not turned for \d+ s: something in it waits or computes", verdict)
    assert "in stuck" in verdict

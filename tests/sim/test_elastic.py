"""Devices of a simulated run change roles by themselves, with the live stages, and no promise is broken meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.rules.roles import HOLD_WINDOWS
from pipelinerl.config import Config
from pipelinerl.runtime.trainer_ranks import Phase
from tests.sim import peers
from tests.sim.run import Beside, Cast, Simulated, config, run
from tests.sim.test_scaling import Machine
from tests.sim.trainer_group import Launcher, nobody

pytestmark = pytest.mark.slow


def settings(*, steps: int = 100, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "engine": {"silent_after_s": 30.0, "count": 3, "ready_deadline_s": 30.0, "max_running": 4},
        "trainer": {"steps": steps, "ready_deadline_s": 20.0, "silent_after_s": 6.0},
        "checkpoint": {"every": 5},
        "rollout": {"max_tokens": 1000},
        "batch": {"max_tokens": 1000, "groups_per_step": 4},
        "pipeline": {"elastic": True},
    }
    return config(**{name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree | sections})


GROWING = peers.World(step_s=0.012, token_s=2e-3, mean_tokens=10, length_factors=(*(1.0,) * 40, 12.0), context_s=3e-5)
"""Answers of ten tokens, then of 120. At first an engine writes 260 tokens per second and a rank trains 280, then 130 and 440."""
BALANCED = peers.World(step_s=0.02, token_s=2e-3, mean_tokens=10, context_s=1e-4)
"""Three engines write 420 tokens per second and two 280, a rank trains 280."""


async def with_a_launcher(given: Beside, **faults: Any) -> None:
    """Start whatever the orchestrator has engines and trainer ranks of."""
    async with begun(given, **faults) as (machine, _):
        await starts(machine)


@contextlib.asynccontextmanager
async def begun(given: Beside, **faults: Any) -> AsyncIterator[tuple[Machine, Launcher]]:
    machine, launcher = Machine(given), Launcher(given, **faults)
    task = asyncio.create_task(launcher.run())
    try:
        yield machine, launcher
    finally:
        task.cancel()


async def starts(machine: Machine) -> None:
    while True:
        await machine.answered()
        await asyncio.sleep(0.1)


def simulated(where: Config, folder: Path, *, world: peers.World, beside: Any = with_a_launcher) -> Simulated:
    return run(where, folder=folder, beside=beside, world=world, cast=Cast(trainer=nobody), limit_s=6000.0)


def decided(ended: Simulated, *words: str) -> list[dict[str, Any]]:
    """What was decided, but for windows in which roles stay, or what these words say."""
    lines = [line for line in ended.lines if line["kind"] == "roles"]
    return [line for line in lines if (line["word"] in words if words else line["word"] != "stays")]


def layouts(lines: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(line["word"], line["engines_then"], line["trainer_then"]) for line in lines]


def test_an_engine_becomes_a_trainer_rank_while_answers_are_short_and_writes_again_once_they_are_long(tmp_path: Path) -> None:
    ended = simulated(settings(steps=56), tmp_path, world=GROWING)
    assert ended.problems() == []
    assert layouts(decided(ended)) == [("begins", 2, 2), ("taken", 2, 2), ("begins", 3, 1), ("taken", 3, 1)]
    there, back = decided(ended, "begins")
    assert there["speed_now"] == pytest.approx(280, rel=0.1), "a rank"
    assert there["speed_then"] == pytest.approx(520, rel=0.1), "two engines"
    for line in (there, back):
        assert line["saved_s"] > 1.5 * line["cost_s"] > 0
    assert back["context"] > 3 * there["context"]
    assert back["switch_s"] != there["switch_s"], "the first one is a guess from the start, the second what the first has taken"
    for line in decided(ended, "stays"):
        assert line["pass_s"]["a"] == pytest.approx(0.012 * 1.1, rel=0.3), "engine 1 is a tenth slower than engine 0, and 2 than 1"
        assert line["num_steps"] >= 2
    assert len([line for line in ended.lines if line["kind"] == "step"]) == 56, "no step is trained again"
    assert not [line for line in ended.lines if line["kind"] == "violation"]
    assert ended.ending.rollouts.failed == 0


def test_the_same_load_takes_longer_where_roles_are_fixed(tmp_path: Path) -> None:
    short = dataclasses.replace(GROWING, length_factors=(1.0,))
    times = []
    for name, elastic in (("fixed", False), ("elastic", True)):
        (folder := tmp_path / name).mkdir()
        ended = simulated(settings(steps=60, pipeline={"elastic": elastic}), folder, world=short)
        assert ended.problems() == []
        assert bool(decided(ended, "begins")) is elastic
        times.append(ended.seconds)
    assert times[1] < 0.85 * times[0], "a change in the first quarter, and 1.8 times the speed from then on"


def test_devices_stay_what_they_are_where_engines_and_trainer_are_as_fast(tmp_path: Path) -> None:
    ended = simulated(settings(steps=40), tmp_path, world=BALANCED)
    assert ended.problems() == []
    assert decided(ended) == []
    assert len(decided(ended, "stays")) >= 5, "it has looked at every window"
    assert not [line for line in ended.lines if line["kind"] == "trainer_ranks" and line["epoch"]]


@pytest.mark.parametrize(
    ("fault", "why"), [("fails", "2 ranks have no room"), ("hangs", "waited 20 s for a trainer of 2 ranks to announce itself")]
)
def test_a_layout_that_does_not_start_is_left_alone_for_a_while_and_tried_again(tmp_path: Path, fault: str, why: str) -> None:
    short = dataclasses.replace(GROWING, length_factors=(1.0,))
    ended = simulated(settings(steps=100), tmp_path, world=short, beside=functools.partial(with_a_launcher, **{fault: (2,)}))
    assert ended.problems() == []
    lines = decided(ended)
    assert layouts(lines)[:3] == [("begins", 2, 2), ("taken back", 3, 1), ("begins", 2, 2)]
    assert lines[1]["reason"] == why
    assert lines[2]["step"] - lines[1]["step"] >= HOLD_WINDOWS * lines[0]["num_steps"]
    assert "taken" not in {line["word"] for line in lines}
    assert len([line for line in ended.lines if line["kind"] == "step"]) == 100


def test_an_order_by_hand_wins_over_a_change_that_is_under_way(tmp_path: Path) -> None:
    short = dataclasses.replace(GROWING, length_factors=(1.0,))

    async def beside(given: Beside) -> None:
        async with begun(given) as (machine, launcher), asyncio.TaskGroup() as group:
            group.create_task(starts(machine))
            while (record := given.folder.trainer()) is None or record.phase is not Phase.STARTING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            launcher.ask(engines=1)

    ended = simulated(settings(steps=80), tmp_path, world=short, beside=beside)
    assert ended.problems() == []
    lines = decided(ended)
    assert layouts(lines)[:2] == [("begins", 2, 2), ("by hand", 1, 2)]
    assert {line["engines_then"] + line["trainer_then"] for line in lines[1:]} == {3}, "a device was given away for good"


@pytest.mark.parametrize("seed", range(3))
def test_seeded_kills_while_devices_change_keep_every_promise(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    killed: list[str] = []

    async def beside(given: Beside) -> None:
        async with begun(given) as (machine, launcher), asyncio.TaskGroup() as group:
            group.create_task(starts(machine))
            while True:
                await asyncio.sleep(chance.expovariate(1 / 4.0))
                if machine.engines and chance.random() < 0.4:  # one that has joined is a spare
                    number = max(machine.engines)
                    await machine.kill(number)
                    machine.start(number)
                    killed.append("engine")
                else:
                    await launcher.kill()
                    killed.append("trainer")

    ended = simulated(settings(steps=50), tmp_path, world=dataclasses.replace(GROWING, length_factors=(*(1.0,) * 25, 6.0)), beside=beside)
    assert ended.problems() == []
    assert "trainer" in killed
    assert decided(ended, "begins")
    assert ended.ending.rollouts.failed == 0

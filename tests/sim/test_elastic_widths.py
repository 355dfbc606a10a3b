"""Engines of a simulated run get other ranks by the rule of elastic roles, with the live stages, and no promise is broken meanwhile.

Two engines of one rank share 16 rollouts; one of two ranks has all of them. Where a pass takes as long however many sequences it has, the
wide engine writes as much as both in each pass, and is quicker. Where a pass takes its time for the tokens that it reads, it reads those of
both, and two ranks are less than twice as quick.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import check_history
from pipelinerl.config import Config
from pipelinerl.runtime.membership import ScaleFolder, State
from tests.sim import peers
from tests.sim.run import Beside, Cast, Simulated, config, run
from tests.sim.test_elastic import decided
from tests.sim.test_elastic_faults import Killed, killed_after
from tests.sim.test_engine_widths import Launcher, check_whole
from tests.sim.trainer_group import Disk, nobody
from tests.sim.trainer_group import Launcher as TrainerLauncher

pytestmark = pytest.mark.slow

WIDE_PAYS = peers.World(step_s=0.05, mean_tokens=20, doubled=1.8)
"""Both write 320 tokens per second, 16 in each 50 ms, and the wide one as many in 33 ms, since each number is a tenth slower."""
GROWING = dataclasses.replace(WIDE_PAYS, doubled=1.5, context_s=6e-5, length_factors=(*(1.0,) * 30, 12.0))
"""With 30 tokens to a sequence the wide engine takes 63 ms for all 16, and a narrow one 68 for 8. From version 30 on, with 250, it takes
232 and a narrow one 179."""
MOST = 16
BEGAN, WIDE = (2, 1), (1, 2)
"""Engines, and ranks of each."""


def settings(*, steps: int = 40, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "engine": {"silent_after_s": 30.0, "count": 2, "ready_deadline_s": 20.0, "max_running": MOST},
        "trainer": {"steps": steps, "ready_deadline_s": 20.0},
        "checkpoint": {"every": 5},
        "rollout": {"max_tokens": 1000},
        "batch": {"max_tokens": 1100, "groups_per_step": 4},
        "pipeline": {"elastic": True, "elastic_tensor_parallel_sizes": [2], "max_running": MOST},
    }
    return config(**{name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree | sections})


def with_launcher(
    *, gpus: int = 4, disk: Disk | None = None, story: Any = None, **faults: Any
) -> Callable[[Beside], Coroutine[Any, Any, None]]:
    """Start whatever the orchestrator has engines and trainer ranks of."""

    async def beside(given: Beside) -> None:
        launcher, trainer = Launcher(given, gpus=gpus, **faults), TrainerLauncher(given, disk=disk or Disk())
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.run())
            group.create_task(launcher.run())
            if story is not None:
                group.create_task(story(launcher))

    return beside


def simulated(where: Config, folder: Path, *, world: peers.World = WIDE_PAYS, beside: Any = None, **how: Any) -> Simulated:
    cast = Cast(trainer=nobody)
    return run(where, folder=folder, beside=beside or with_launcher(), world=world, cast=cast, limit_s=6000.0, **how)


def changes(ended: Simulated) -> list[tuple[str, tuple[int, int]]]:
    return [(line["word"], (line["engines_then"], line["tensor_parallel_size_then"])) for line in decided(ended)]


@pytest.mark.parametrize("gpus", [2, 4])
def test_two_engines_become_one_of_two_ranks_where_that_is_faster_and_two_again_once_answers_are_long(tmp_path: Path, gpus: int) -> None:
    ended = simulated(settings(steps=70), tmp_path, world=GROWING, beside=with_launcher(gpus=gpus))
    check_whole(ended)
    assert changes(ended) == [("begins", WIDE), ("taken", WIDE), ("begins", BEGAN), ("taken", BEGAN)]
    there, back = decided(ended, "begins")
    assert there["speed_then"] / there["speed_now"] == pytest.approx(1.35, abs=0.1), "0.068 * 1.6 / (0.053 + 0.030), as none was seen"
    assert back["context"] > 4 * there["context"]
    assert {line["trainer_then"] for line in decided(ended)} == {1}
    assert ended.ending.rollouts.failed == 0
    after = [line for line in decided(ended, "stays") if line["tensor_parallel_size"] == 2]
    assert after, "a window of the wide engine"
    assert after[0]["pass_s"]["a"] == pytest.approx(0.05 * 1.2 / 1.5, rel=0.1), "its passes as they were, not as they were guessed"


def test_a_guess_that_was_wrong_costs_one_change_there_and_one_back(tmp_path: Path) -> None:
    ended = simulated(settings(steps=70), tmp_path, world=dataclasses.replace(WIDE_PAYS, doubled=0.7))
    check_whole(ended)
    assert changes(ended) == [("begins", WIDE), ("taken", WIDE), ("begins", BEGAN), ("taken", BEGAN)]
    _, back = decided(ended, "begins")
    last = [line for line in decided(ended, "stays") if line["step"] > back["step"]]
    assert len(last) >= 3, "it has looked again, and knows better"
    assert {line["tensor_parallel_size_then"] for line in last} == {1}


def test_engines_keep_their_ranks_where_no_other_size_is_named(tmp_path: Path) -> None:
    ended = simulated(settings(pipeline={"elastic_tensor_parallel_sizes": []}, engine={"count": 3}), tmp_path)
    check_whole(ended)
    assert {line["tensor_parallel_size_then"] for line in decided(ended, "stays", "begins")} == {1}


@pytest.mark.parametrize("faults", [{"fails": frozenset({2})}, {"hangs": frozenset({2})}], ids=["fails", "hangs"])
def test_a_wide_engine_that_does_not_come_is_taken_back_and_left_alone_for_a_while(tmp_path: Path, faults: dict[str, Any]) -> None:
    ended = simulated(settings(), tmp_path, beside=with_launcher(**faults))
    check_whole(ended)
    lines = decided(ended)
    assert changes(ended)[:2] == [("begins", WIDE), ("taken back", BEGAN)]
    assert "taken" not in {line["word"] for line in lines}
    assert ended.ending.rollouts.failed == 0


def test_ranks_that_are_asked_for_by_hand_hold_and_the_rule_plans_from_them(tmp_path: Path) -> None:
    async def story(launcher: Launcher) -> None:
        while launcher.beside.folder.members() is None or not launcher.there()[State.LIVE, 1]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        launcher.ask(engines=1, tensor_parallel_size=2)
        await launcher.settled(1, 2)

    ended = simulated(settings(steps=50), tmp_path, world=dataclasses.replace(WIDE_PAYS, start_s=10.0), beside=with_launcher(story=story))
    check_whole(ended)
    assert changes(ended)[0] == ("by hand", WIDE)
    later = [line for line in decided(ended, "stays", "begins") if line["tensor_parallel_size"] == 2]
    assert later, "one engine of two is a whole unit"
    assert later[0]["pass_s"]["a"] == pytest.approx(0.05 * 1.2 / 1.8, rel=0.05), "those that write on until it has come are others"


def test_ranks_for_which_there_are_no_numbers_are_never_ordered(tmp_path: Path) -> None:
    """A wide engine would be the third beside two, and there may be two."""
    ended = simulated(settings(engine={"max_count": 2}), tmp_path)
    check_whole(ended)
    assert decided(ended) == []
    assert {line["tensor_parallel_size_then"] for line in decided(ended, "stays")} == {1}


def test_ranks_are_ordered_beside_a_process_reward_model_which_stays_as_it_is(tmp_path: Path) -> None:
    where = settings(steps=30, prm={"path": "unused", "separator": "="}, algorithm={"name": "process_grpo"})
    ended = simulated(where, tmp_path)
    check_whole(ended)
    assert changes(ended)[:2] == [("begins", WIDE), ("taken", WIDE)]


@pytest.mark.parametrize("number", range(1, 7))
def test_whenever_the_orchestrator_is_killed_other_ranks_come_once_or_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It dies right after it has written so many files, the first of them the one that remembers a change."""
    disk = Disk()
    killed_after(monkeypatch, number)
    with pytest.RaisesGroup(Killed, flatten_subgroups=True):
        simulated(settings(), tmp_path, beside=with_launcher(disk=disk), is_recorded=True)
    before, members = ScaleFolder(tmp_path).roles(), ScaleFolder(tmp_path).members()
    assert before is not None
    assert members is not None
    assert before.passes[1].a > 0, "what passes of one rank take outlives the orchestrator"
    ended = simulated(settings(), tmp_path, beside=with_launcher(disk=disk), is_recorded=True)
    assert ended.ending.reason == "finished"
    with open_history(tmp_path) as history:
        assert check_history(history, with_checkpoints=False).problems == []
    words = [line["word"] for line in decided(ended)]
    assert ("taken back" in words) is (members.tensor_parallel_size == 1), "what engines were told of is carried out"
    assert "by hand" not in words
    last = ScaleFolder(tmp_path).members()
    assert last is not None
    assert (last.num_wanted, last.tensor_parallel_size) == WIDE
    assert last.before is None

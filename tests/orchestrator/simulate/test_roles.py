"""Simulated runs whose devices change roles: nothing is lost, whatever happens meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from orchestrator.rules.roles import Change, Roles, Window
from orchestrator.simulate.draws import fixed
from orchestrator.simulate.roles import Elastic
from orchestrator.simulate.run import Simulated, simulate
from orchestrator.simulate.world import Faults, World
from pipelinerl.errors import ConfigError
from tests.orchestrator.simulate.worlds import BUSY, config

GROWING = dataclasses.replace(
    BUSY,
    length_factors=(1.0, 8.0),
    engine=dataclasses.replace(BUSY.engine, kv_tokens=2500),
    trainer=dataclasses.replace(BUSY.trainer, token_s=2.5e-4),
    scoring=dataclasses.replace(BUSY.scoring, score_s=fixed(0.0), failed_fraction=0.0),
)
"""Training is the slower part at first, and writing once answers are eight times as long."""
RUN: dict[str, Any] = {
    "rollout": {"group_size": 4, "max_tokens": 600},
    "engine": {"kind": "fake", "count": 3, "max_running": 16},
    "batch": {"groups_per_step": 8, "max_tokens": 1000},
    "pipeline": {"max_staleness": 3},
    "trainer": {"steps": 24, "ranks": 3},
    "checkpoint": {"every": 5},
}
ELASTIC = Elastic(
    unit_devices=1, core_replicas=1, unit_replicas=1, width=1, engines={1: GROWING.engine}, slots={1: 16}, switch_s=0.3, away_s=0.02
)
_WIDE = dataclasses.replace(
    GROWING.engine, kv_tokens=7500, pass_s=tuple((num, seconds / 2) for num, seconds in GROWING.engine.pass_s), kv_token_s=5e-7
)
WIDER = dataclasses.replace(ELASTIC, unit_devices=2, core_replicas=3, engines={1: GROWING.engine, 2: _WIDE}, slots={1: 16, 2: 32})
"""An engine of two devices has three times the room and passes of half the time: it is the better one for long answers."""
FOUR = {"kind": "fake", "count": 4, "max_running": 16}


def run(elastic: Elastic | None, *, world: World = GROWING, faults: Faults | None = None, **sections: Any) -> Simulated:
    return simulate(config(**(RUN | sections)), world, elastic=elastic, faults=faults or Faults())


def assert_nothing_is_lost(ended: Simulated) -> None:
    counts = ended.rollouts
    assert counts.holds
    assert counts.in_flight == 0
    assert counts.trained + counts.stale + counts.failed + counts.cancelled == counts.admitted
    assert sum(ended.totals.step_samples) == counts.trained


def test_devices_follow_answers_that_grow_and_nothing_is_lost():
    longer = {"steps": 192, "ranks": 3}
    static, elastic = run(None, trainer=longer), run(ELASTIC, trainer=longer)
    assert_nothing_is_lost(elastic)
    assert elastic.totals.step_ends_s[-1] < 0.9 * static.totals.step_ends_s[-1]
    assert max(elastic.totals.ages) <= 3
    engines = [change.after.engines for change in elastic.role_changes]
    assert engines[-1] > min(engines), "engines, once answers are long"
    assert {change.after.num_units for change in elastic.role_changes} == {5}, "three engines, two replicas beside the core"


def test_the_same_seed_changes_the_same_devices():
    assert run(ELASTIC).role_changes == run(ELASTIC).role_changes


def test_engines_of_another_width_take_over():
    ended = run(WIDER, engine=FOUR)
    assert_nothing_is_lost(ended)
    assert ended.role_changes[-1].after.width == 2


@pytest.mark.parametrize("stuck_fraction", [0.3, 1.0])
def test_a_switch_that_never_ends_is_taken_back(stuck_fraction: float):
    ended = run(dataclasses.replace(ELASTIC, stuck_fraction=stuck_fraction))
    assert_nothing_is_lost(ended)
    late = [change for change in ended.role_changes if not change.saved_s]
    assert late, "none was late"
    for before, after in zip(ended.role_changes, ended.role_changes[1:], strict=False):
        if not after.saved_s:
            assert (after.before, after.after) == (before.after, before.before)


def test_engines_and_the_trainer_die_while_devices_change():
    ended = run(dataclasses.replace(ELASTIC, switch_s=1.0), faults=Faults(engine=6, trainer=3))
    assert_nothing_is_lost(ended)
    assert ended.role_changes


def test_scorers_are_a_role():
    """A process reward model that is slower than all engines gets another device."""
    world = dataclasses.replace(GROWING, scoring=dataclasses.replace(GROWING.scoring, prm_token_s=2e-3))
    ended = run(ELASTIC, world=world, prm={"path": "unused", "chunk_tokens": 16})
    assert_nothing_is_lost(ended)
    assert ended.role_changes[-1].after.scorers > 0


def test_devices_that_are_no_whole_units_are_refused():
    with pytest.raises(ConfigError, match="3 engines of 1 devices and 3 replicas, 1 of them the core, are no whole units of 2 devices"):
        run(dataclasses.replace(ELASTIC, unit_devices=2))


def test_a_window_tells_prompts_that_engines_compute_from_slow_passes(monkeypatch: pytest.MonkeyPatch):
    """Prompts grow eight times. Passes are as their profile says, so that nothing is slow, however long they take for prompts."""
    windows: list[Window] = []
    plan = Roles.plan

    def noted(roles: Roles, step: int, window: Window | None) -> Change | None:
        windows.extend([window] if window else [])
        return plan(roles, step, window)

    monkeypatch.setattr(Roles, "plan", noted)
    engine = dataclasses.replace(GROWING.engine, prefill_token_s=1e-3, kv_tokens=1e6)
    world = dataclasses.replace(GROWING, length_factors=(1.0,), prompt_factors=(1.0, 8.0), engine=engine, slowdowns={})
    run(dataclasses.replace(ELASTIC, engines={1: engine}, window_steps=4), world=world)  # so that the pass in which one ends counts little
    assert [window.slowness for window in windows] == pytest.approx([1.0] * len(windows), rel=0.05)
    assert max(window.prompt_tokens for window in windows) > 3 * windows[0].prompt_tokens > 0


def test_no_replica_trains_while_one_joins_and_the_rule_counts_that_and_its_next_window_does_not():
    slow = dataclasses.replace(BUSY, trainer=dataclasses.replace(BUSY.trainer, token_s=1e-3))
    steps_s: list[np.ndarray[Any, Any]] = []
    for away_s in (0.0, 2.0):
        ended = run(dataclasses.replace(ELASTIC, switch_s=2.0, away_s=away_s), world=slow, trainer={"steps": 24, "ranks": 1})
        (change,) = ended.role_changes
        assert change.after.trainers == 1
        assert change.cost_s == pytest.approx(away_s, abs=0.05)
        steps_s.append(np.diff(ended.totals.step_ends_s))
    longer_s = steps_s[1] - steps_s[0]
    (joined,) = np.flatnonzero(longer_s > 1.5)
    assert longer_s[joined] == pytest.approx(2.0, abs=0.1)
    assert not longer_s[:joined].any()


def test_a_change_that_is_over_before_the_next_boundary_is_in_no_window_either(monkeypatch: pytest.MonkeyPatch):
    planned: list[int] = []
    plan = Roles.plan

    def noted(roles: Roles, step: int, window: Window | None) -> Change | None:
        planned.append(step)
        return plan(roles, step, window)

    monkeypatch.setattr(Roles, "plan", noted)
    ended = run(dataclasses.replace(WIDER, switch_s=0.01), engine=FOUR)
    assert {change.after.trainers for change in ended.role_changes} == {0}, "engines alone: they need no boundary"
    gaps = [after - before for before, after in itertools.pairwise(planned)]
    assert [gap for gap in gaps if gap > 2] == [4] * len(ended.role_changes), "two steps until all is seen to be whole, two of a window"

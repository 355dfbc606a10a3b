"""Engines and trainer that take turns on the same devices, in simulated time."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from orchestrator.rules.phases import Phases
from orchestrator.simulate.draws import Distribution, fixed
from orchestrator.simulate.generation import Generation
from orchestrator.simulate.run import Simulated, simulate
from orchestrator.simulate.world import Faults, SyncWorld
from pipelinerl.errors import Stalled
from pipelinerl.observe.lines import read_journals
from pipelinerl.observe.report.diagnosis import diagnose
from pipelinerl.observe.report.reading import read_tables
from tests.orchestrator.simulate.worlds import BUSY, ON_PAPER, config

SYNC = SyncWorld(stage_s=fixed(0.5), pause_s=0.25, sleep_s=0.25)


def colocated(**sections: Any):
    return config(**{**sections, "pipeline": {"placement": "colocated", **sections.get("pipeline", {})}})


def test_phases_follow_each_other_on_paper():
    """Seconds:

    0      groups 0 and 1 go to engines 0 and 1: four passes
    4      both end, steps 0 and 1 are closed; engines sleep at 4.25, and the trainer has two steps of two seconds
    8.25   version 2 is there, which both engines hold at 9: group 2, of four passes, and again a nap
    13.25  the last step; at 15.25 its policy, which is held at 16
    """
    ended = simulate(colocated(), dataclasses.replace(ON_PAPER, sync=SYNC))
    assert ended.totals.step_ends_s == [pytest.approx(6.25), pytest.approx(8.25), pytest.approx(15.25)]
    assert ended.seconds == pytest.approx(16.0)
    assert ended.totals.ages == {0: 8 + 8, 1: 8}
    assert (ended.rollouts.admitted, ended.rollouts.trained) == (6, 6)


def test_nothing_is_slowed_down_by_who_works_in_another_phase():
    world = dataclasses.replace(ON_PAPER, sync=SYNC)
    alone, beside = (simulate(colocated(), dataclasses.replace(world, slowdowns=one)).seconds for one in ({}, {"engine/trainer": 2.0}))
    assert beside == alone


def test_the_live_rule_decides_the_phases(monkeypatch: pytest.MonkeyPatch):
    """Where it never gives the trainer the devices, the run stands still once both groups are written."""
    monkeypatch.setattr(Phases, "next_phase", lambda self, **facts: None)
    with pytest.raises(Stalled, match=r"nothing is left to happen at 4\.0 s"):
        simulate(colocated(), dataclasses.replace(ON_PAPER, sync=SYNC))


MANY: dict[str, Any] = {
    "rollout": {"group_size": 4, "max_tokens": 200},
    "engine": {"kind": "fake", "count": 2, "max_running": 16},
    "batch": {"groups_per_step": 8, "max_tokens": 600},
    "pipeline": {"max_staleness": 3},
    "trainer": {"steps": 25},
    "checkpoint": {"every": 10},
}
WORLD = dataclasses.replace(
    BUSY, sync=dataclasses.replace(SYNC, stage_s=fixed(0.01)), lengths=Distribution(kind="lognormal", mean=60.0, cv=0.8)
)


def lines_of(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [line for line in read_journals(folder) if line["kind"] in kinds]


def test_the_journal_of_a_run_in_turns_tells_of_phases_that_never_overlap(tmp_path: Path):
    ended = simulate(colocated(**MANY), WORLD, folder=tmp_path / "run")
    phases = lines_of(tmp_path / "run", "phase")
    assert [line["phase"] for line in phases] == ["training", "generation"] * (len(phases) // 2)
    spans = [line for line in lines_of(tmp_path / "run", "span") if line["name"] in ("forward", "forward_backward", "optimizer")]
    works = [[(one["start"], one["end"]) for one in spans if one["lane"].startswith(who)] for who in ("engine", "trainer")]
    assert all(works)
    overlaps = [min(a[1], b[1]) - max(a[0], b[0]) for a, b in itertools.product(*works)]
    assert max(overlaps) <= 1e-9
    assert sum(line["num_running"] for line in lines_of(tmp_path / "run", "asleep")) > 20, "sequences are carried over"
    assert sum(line["num_recomputed_tokens"] for line in lines_of(tmp_path / "run", "swap")) > 20
    found = diagnose(read_tables(tmp_path / "run"))
    assert found.engine_wait_fraction is not None
    assert found.trainer_wait_fraction is not None
    assert found.engine_wait_fraction + found.trainer_wait_fraction > 0.9
    check(ended)


def test_a_cache_that_is_kept_is_not_computed_again(tmp_path: Path):
    simulate(colocated(**{**MANY, "engine": {**MANY["engine"], "sleep_kv": "keep"}}), WORLD, folder=tmp_path / "run")
    assert not any(line["num_recomputed_tokens"] for line in lines_of(tmp_path / "run", "swap"))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["streaming", "sync"])
def test_whoever_dies_in_whichever_phase_the_run_ends_and_nothing_is_lost(seed: int, mode: str):
    faults = Faults(engine=6, trainer=4, scorer=1, link=1, lasts_s=2.0)
    settings = {**MANY, "pipeline": {"mode": mode} if mode == "sync" else MANY["pipeline"]}
    ended = simulate(colocated(**settings), WORLD, seed=seed, faults=faults)
    check(ended)


def check(ended: Simulated) -> None:
    counts = ended.rollouts
    assert counts.in_flight == 0
    others = counts.trained + counts.filtered + counts.stale + counts.failed + counts.cancelled
    assert counts.admitted == others
    assert len(ended.totals.step_ends_s) == 25


def mixed(**sections: Any):
    """Engine 0 takes turns with the trainer, engine 1 stands apart."""
    return colocated(**{**sections, "engine": {**sections.get("engine", {}), "apart": 1}})


def test_the_trainer_gives_its_devices_back_after_a_step_where_tokens_may_be_one_version_old_on_paper():
    """Seconds:

    0      groups 0 and 1 go to engines 0 and 1: four passes
    4      both end, steps 0 and 1 are closed; engine 0 sleeps at 4.25, and the trainer has one step of two seconds
    6.25   version 1, which both engines hold at 7: step 1 waits, since group 2 may be written now
    11     group 2 ends, and no step could follow it; engine 0 sleeps at 11.25, and the trainer has both steps
    15.25  version 3, which is held at 16
    """
    ended = simulate(mixed(), dataclasses.replace(ON_PAPER, sync=SYNC))
    assert ended.totals.step_ends_s == [pytest.approx(6.25), pytest.approx(13.25), pytest.approx(15.25)]
    assert ended.seconds == pytest.approx(16.0)


@pytest.mark.parametrize("mode", ["streaming", "sync"])
def test_engines_apart_work_in_training_phases_and_those_in_turns_do_not(tmp_path: Path, mode: str):
    sections = {**MANY, "pipeline": {"max_staleness": 3, "mode": mode}}
    ended = simulate(mixed(**sections), WORLD, folder=tmp_path / "run")
    phases = lines_of(tmp_path / "run", "phase")
    trained = [(one["t"], other["t"]) for one, other in itertools.pairwise(phases) if one["phase"] == "training"]
    passes = [span for span in lines_of(tmp_path / "run", "span") if span["name"] == "forward"]
    overlaps: dict[int, float] = {0: 0.0, 1: 0.0}
    for span in passes:
        engine_id = int(span["lane"].removeprefix("engine-"))
        overlaps[engine_id] += sum(max(0.0, min(span["end"], end) - max(span["start"], start)) for start, end in trained)
    swaps = lines_of(tmp_path / "run", "asleep")
    assert {line["engine_id"] for line in swaps} == {0}
    assert overlaps[0] < 0.1 * ended.seconds, "until a pass ends"
    assert (overlaps[1] > 0.2 * ended.seconds) is (mode == "streaming")
    check(ended)


def test_new_groups_go_to_engines_that_are_awake(monkeypatch: pytest.MonkeyPatch):
    sent = list[tuple[int, bool]]()
    send = Generation._send_group

    def seen(self: Generation, engine_id: int) -> None:
        sent.append((engine_id, bool(self.asleep)))
        send(self, engine_id)

    monkeypatch.setattr(Generation, "_send_group", seen)
    simulate(mixed(**MANY), WORLD)
    assert {engine_id for engine_id, while_asleep in sent if while_asleep} == {1}
    assert {engine_id for engine_id, while_asleep in sent if not while_asleep} == {0, 1}


@pytest.mark.parametrize("seed", range(4))
def test_whoever_dies_of_engines_in_turns_and_apart_the_run_ends_and_nothing_is_lost(seed: int):
    check(simulate(mixed(**MANY), WORLD, seed=seed, faults=Faults(engine=6, trainer=4, scorer=1, link=1, lasts_s=2.0)))

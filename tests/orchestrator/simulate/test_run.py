"""Whole simulated runs: one worked out on paper, the others held to conservation, to their seed and to the live rules."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from orchestrator.rules import admission as live_admission
from orchestrator.rules.batch import BatchCut
from orchestrator.simulate.draws import Distribution, fixed
from orchestrator.simulate.events import Events
from orchestrator.simulate.rollouts import Rollout
from orchestrator.simulate.run import Simulated, _Run, simulate
from orchestrator.simulate.scoring import Scoring
from orchestrator.simulate.summary import hangs_on, summary_of
from orchestrator.simulate.world import EngineWorld, Faults, ScoringWorld, SyncWorld, TrainerWorld, World
from pipelinerl.errors import Stalled
from pipelinerl.messages import Finish
from pipelinerl.observe.lines import read_journals
from pipelinerl.observe.report import write_report
from pipelinerl.observe.report.diagnosis import diagnose
from pipelinerl.observe.report.headline import headline
from pipelinerl.observe.report.reading import read_tables
from tests.orchestrator.simulate.worlds import BUSY, ON_PAPER, config
from tests.sim.run import config as live_config
from tests.sim.run import run as live_run

MANY: dict[str, Any] = {
    "rollout": {"group_size": 4, "max_tokens": 200},
    "engine": {"kind": "fake", "count": 3, "max_running": 16},
    "batch": {"groups_per_step": 8, "max_tokens": 600},
    "pipeline": {"max_staleness": 3},
    "trainer": {"steps": 25},
    "scorer": {"slots": 4},
    "checkpoint": {"every": 10},
}


def test_two_engines_three_groups_and_a_swap_on_paper():
    """Seconds:

    0     groups 0 and 1, as many as (K + 0 + 1) * B allows, go to engines 0 and 1: four passes
    4     both end. Step 0 trains until 6, version 1 is staged by 6.5 and held by 6.75: group 2 is admitted, to engine 0
    6     step 1 trains until 8, version 2 is staged at 8.5: engine 1 is idle and holds it at 8.75, engine 0 is within a pass until 8.75
    8.75  its pause, until 9; then two more passes
    11    group 2 ends, half of it of version 1. Step 2 trains until 13, its policy is held at 13.75
    """
    ended = simulate(config(), ON_PAPER)
    totals = ended.totals
    assert ended.seconds == pytest.approx(13.75)
    assert totals.step_ends_s == [pytest.approx(6.0), pytest.approx(8.0), pytest.approx(13.0)]
    assert totals.waits_s == [pytest.approx(4.0), pytest.approx(0.0), pytest.approx(3.0)]
    assert totals.ages == {0: 8 + 4, 1: 8 + 4}
    assert totals.gauges[-1][0] == pytest.approx(4 + 4 + 2 + 2), "seconds of passes"
    assert (ended.rollouts.admitted, ended.rollouts.trained) == (6, 6)
    found = summary_of(ended)
    assert found.tokens_per_s == pytest.approx(16 / 7), "of steps 1 and 2"
    assert found.trainer_idle_fraction == pytest.approx(3 / 7)


def test_a_synchronous_run_takes_turns_on_paper():
    """Every step: four passes, a row and the end of the step, then half a second until engines that are idle hold the policy, and a
    quarter for the swap.
    """
    ended = simulate(config(pipeline={"mode": "sync"}), ON_PAPER)
    assert ended.totals.step_ends_s == [pytest.approx(6.0 + 6.75 * step) for step in range(3)]
    assert set(ended.totals.ages) == {0}


def test_one_step_off_trains_what_the_version_before_wrote():
    ended = simulate(config(pipeline={"mode": "one_step_off"}, trainer={"steps": 4}), ON_PAPER)
    assert max(ended.totals.ages) == 1
    assert ended.totals.ages[0] == 8, "the first step alone"


@pytest.mark.parametrize("migration", [0, 4])
@pytest.mark.parametrize("mode", ["sync", "streaming", "turns"])
def test_sequences_that_move_lose_no_token_and_no_version_falls(monkeypatch: pytest.MonkeyPatch, mode: str, migration: int):
    finished: list[Rollout] = []
    take = Scoring.take
    monkeypatch.setattr(Scoring, "take", lambda scoring, rollout: (finished.append(rollout), take(scoring, rollout)))
    sections = MANY | {"pipeline": {"max_staleness": 3, "mode": mode.replace("turns", "streaming")}, "trainer": {"steps": 12}}
    if mode == "turns":
        sections["environment"] = {"function": "unused:environment"}
    engine = dataclasses.replace(BUSY.engine, kv_tokens=500)
    world = dataclasses.replace(BUSY, engine=engine, likeness=0.9, report_every_s=0.05)
    ended = simulate(config(**sections), world, migration=migration)
    assert broken(ended) == []
    assert ended.num_moved >= 5
    for rollout in finished:
        assert rollout.num_sampled == sum(num for _, num in rollout.runs)
        if mode != "turns" or (rollout.turn == 3 and rollout.finish is Finish.STOP):
            assert rollout.num_sampled == min(200, max(rollout.turn, int(rollout.draws.lengths[rollout.sibling])))
        versions = [version for version, _ in rollout.runs]
        assert versions == sorted(versions)


def test_sequences_move_where_only_the_growth_of_a_pass_is_known():
    """A fit may say that a pass without a sequence takes nothing; what a prompt costs is told in passes of one."""
    engine = dataclasses.replace(BUSY.engine, kv_tokens=500, pass_s=((0.0, 0.0), (16.0, 0.016)))
    world = dataclasses.replace(BUSY, engine=engine, likeness=0.9, report_every_s=0.05)
    sections = MANY | {"pipeline": {"mode": "sync"}, "trainer": {"steps": 4}}
    assert simulate(config(**sections), world, migration=4).num_moved > 0


def test_the_settings_have_sequences_move_as_the_argument_does():
    engine = dataclasses.replace(BUSY.engine, kv_tokens=500)
    world = dataclasses.replace(BUSY, engine=engine, likeness=0.9, report_every_s=0.05)

    def moved(migration: str, argument: int | None) -> int:
        sections = MANY | {"pipeline": {"mode": "sync", "migration": migration}, "trainer": {"steps": 4}}
        return simulate(config(**sections), world, migration=argument).num_moved

    assert moved("waiting", None) == moved("off", 0) > 0
    assert moved("off", None) == 0


def broken(ended: Simulated) -> list[str]:
    counts = ended.rollouts
    wrong = [] if counts.holds and not counts.in_flight else [str(counts)]
    samples = ended.config.batch.groups_per_step * ended.config.rollout.group_size
    wrong += [f"{num} samples" for num in ended.totals.step_samples if num > samples]
    if max(ended.totals.ages) > ended.config.pipeline.max_staleness:
        wrong.append(f"staleness {max(ended.totals.ages)}")
    return wrong


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dapo": {"algorithm": {"name": "dapo"}},
    "greedy": {"algorithm": {"name": "remax"}},
    "sync": {"pipeline": {"mode": "sync"}},
    "one_step_off": {"pipeline": {"mode": "one_step_off"}},
    "replicas": {"trainer": {"steps": 25, "ranks": 3}},
    "epochs": {"trainer": {"steps": 25, "epochs": 2}},
    "environment": {"environment": {"function": "unused:environment"}},
    "kv_staleness": {"weights": {"kv_max_staleness": 1}},
    "comparing": {"reward": [{"function": "unused:reward"}, {"function": "unused:compare", "per": "group"}]},
    "prm": {
        "prm": {"path": "unused", "early_stop": {"threshold": 0.5, "keep_probability": 0.3}},
        "algorithm": {"name": "rloo_early_stop"},
    },
    "dispatch": {"pipeline": {"max_staleness": 3, "dispatch": "longest_first", "routing": "least_loaded", "kv_admission": True}},
    "dispatch_sync": {"pipeline": {"mode": "sync", "dispatch": "longest_first"}},
    "cut": {"rollout": {"group_size": 4, "max_tokens": 200, "cut_after": 2}, "algorithm": {"name": "rloo_early_stop"}},
    "cut_and_dispatch": {
        "rollout": {"group_size": 4, "max_tokens": 200, "cut_after": 2},
        "algorithm": {"name": "rloo_early_stop"},
        "pipeline": {"max_staleness": 3, "dispatch": "longest_first"},
    },
    "little_room": {"pipeline": {"max_staleness": 3, "queue_bytes": 20_000}},
}


def test_a_process_reward_model_slows_engines_where_they_share_a_machine():
    sections = {**MANY, **CASES["prm"]}
    scoring = dataclasses.replace(BUSY.scoring, prm_batch_s=0.001, prm_token_s=1e-5)
    alone, beside = (dataclasses.replace(BUSY, scoring=scoring, slowdowns=one) for one in ({}, {"engine/prm": 2.0}))
    assert simulate(config(**sections), beside).seconds > 1.05 * simulate(config(**sections), alone).seconds


def test_a_process_reward_model_takes_its_time_for_each_step_and_steps_are_as_long_as_a_run_has_shown():
    sections = {**MANY, "prm": {"path": "unused", "chunk_tokens": 8}}

    def seconds(**scoring: float) -> float:
        return simulate(config(**sections), dataclasses.replace(BUSY, scoring=dataclasses.replace(BUSY.scoring, **scoring))).seconds

    usual, many, few = seconds(), seconds(prm_step_s=0.05), seconds(prm_step_s=0.05, prm_step_tokens=1000.0)
    assert many > 1.5 * few > 1.5 * usual, "of a rollout one step is left where steps are longer than all of it"


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost_and_nothing_is_too_old(case: str):
    sections = {**MANY}
    for name, values in CASES[case].items():
        sections[name] = values if isinstance(values, list) else {**MANY.get(name, {}), **values}
    world = BUSY
    if case == "prm":
        scoring = dataclasses.replace(BUSY.scoring, prm_batch_s=0.001, prm_token_s=1e-5, hopeless_fraction=0.4)
        world = dataclasses.replace(BUSY, scoring=scoring)
    ended = simulate(config(**sections), world)
    assert broken(ended) == []
    assert len(ended.totals.step_ends_s) == 25
    match case:
        case "dapo":
            assert ended.reasons["filtered: zero_variance"] > 0
        case "greedy":
            assert ended.reasons["filtered: greedy baseline"] > 0
        case "prm":
            assert ended.reasons["filtered: stopped early"] > 0
        case "plain":
            assert ended.num_evicted > 0
            assert ended.rollouts.failed > 0
        case _:
            pass


FAULTS = Faults(engine=3, trainer=2, scorer=1, link=1, lasts_s=2.0)


def test_faults_by_seed_lose_nothing_and_cost_time():
    quiet, ended = simulate(config(**MANY), BUSY), simulate(config(**MANY), BUSY, faults=FAULTS)
    assert broken(ended) == []
    assert len(ended.totals.step_ends_s) == 25
    assert ended.seconds > quiet.seconds + 3.0, "a trainer alone is away for as long"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_journals(folder) if line["kind"] != "run"]


def test_a_seed_repeats_a_run_exactly_and_another_does_not(tmp_path: Path):
    def journal(name: str, seed: int) -> str:
        simulate(config(**MANY), BUSY, seed=seed, faults=FAULTS, folder=tmp_path / name)
        return json.dumps(lines(tmp_path / name))

    first = journal("a", 5)
    assert journal("b", 5) == first
    assert journal("c", 6) != first


def test_the_live_rules_decide(monkeypatch: pytest.MonkeyPatch):
    """A rule that is broken breaks the simulated run in the same way."""
    usual = simulate(config(**MANY), BUSY)
    with monkeypatch.context() as patch:
        patch.setattr(live_admission.Admission, "limit", lambda self, version: 10**9)
        patch.setattr(BatchCut, "_is_stale", lambda self, siblings: False)
        assert max(simulate(config(**MANY), BUSY).totals.ages) > max(usual.totals.ages)
    with monkeypatch.context() as patch:
        patch.setattr(live_admission.Admission, "dropped", lambda self: None)
        with pytest.raises(Stalled):
            simulate(config(**MANY, algorithm={"name": "dapo"}), BUSY, limit_s=1e4)


def test_the_lines_of_a_live_run_have_the_fields_of_a_simulated_one(tmp_path: Path):
    live = live_run(live_config(trainer={"steps": 3}), folder=tmp_path / "live").lines
    simulate(config(**MANY), BUSY, folder=tmp_path / "simulated")
    mine = lines(tmp_path / "simulated")
    for kind in ("status", "step", "swap", "policy", "staged", "joined", "end"):
        first, other = ([line for line in journal if line["kind"] == kind][-1] for journal in (live, mine))
        missing = first.keys() - other.keys() - {"num_bytes", "publish_s"}
        assert missing <= {"repeated_fraction"}, kind
        if kind == "status":
            assert first["engines"][0].keys() == other["engines"][0].keys()


def test_report_and_its_diagnosis_read_a_simulated_run(tmp_path: Path):
    folder = tmp_path / "run"
    ended = simulate(config(**MANY), BUSY, folder=folder)
    tables = read_tables(folder)
    found, mine = headline(tables), summary_of(ended)
    assert found.trained_tokens_per_s == pytest.approx(mine.tokens_per_s)
    assert found.staleness_mean == pytest.approx(mine.staleness_mean)
    assert found.imbalance == 0
    assert diagnose(tables).limiter is not None
    assert "simulat" in write_report(folder).read_text() or folder.is_dir()


def test_figures_hang_on_what_moves_them():
    """Engines are the limit where a pass takes long, and the trainer where a token of training does."""

    def strongest(world: World) -> str:
        def run(world: World):
            return summary_of(simulate(config(**{**MANY, "trainer": {"steps": 6}}), world))

        return hangs_on(world, run(world), run=run)["tokens_per_s"][0]

    slow_trainer = dataclasses.replace(BUSY, trainer=dataclasses.replace(BUSY.trainer, token_s=1e-3), lengths=fixed(60.0))
    slow_engine = dataclasses.replace(
        BUSY, engine=dataclasses.replace(BUSY.engine, pass_s=((1, 0.2),), kv_tokens=math.inf), lengths=fixed(300.0)
    )
    assert strongest(slow_trainer) == "seconds of training"
    assert strongest(slow_engine) == "seconds of an engine's pass"


@pytest.mark.parametrize("pipeline", [{"max_staleness": 4}, {"mode": "sync"}], ids=["streaming", "sync"])
def test_a_simulated_run_comes_near_the_whole_orchestrator_on_a_simulated_clock(pipeline: dict[str, Any], tmp_path: Path):
    """The live stages, engine loops and messages at the same speeds, token by token (`tests.sim`), take as long and grow as old."""
    settings = live_config(trainer={"steps": 20}, engine={"count": 1, "max_running": 32}, scorer={"slots": 64}, pipeline=pipeline)
    live = live_run(settings, folder=tmp_path)
    steps = [line for line in live.lines if line["kind"] == "step"]
    tokens = sum(line["num_trained_tokens"] for line in steps)
    world = World(
        engine=EngineWorld(pass_s=((1, 0.01),)),
        sync=SyncWorld(stage_s=fixed(0.0525)),
        trainer=TrainerWorld(token_s=2e-5),
        scoring=ScoringWorld(score_s=Distribution(kind="uniform", low=0.01, high=0.03)),
        prompt_tokens=Distribution(kind="uniform", low=4, high=12),
        lengths=Distribution(kind="exponential", mean=24.5),
    )
    ended = simulate(settings, world)
    assert sum(ended.totals.step_tokens) / ended.totals.step_ends_s[-1] == pytest.approx(tokens / steps[-1]["elapsed_s"], rel=0.05)
    age = sum(line["staleness_mean"] * line["num_trained_tokens"] for line in steps) / tokens
    assert summary_of(ended).staleness_mean == pytest.approx(age, abs=0.15)


def test_weights_change_only_once_the_policy_before_is_published_on_paper():
    """Step 0 ends at 6, and its policy is written until 9: step 1 has its row by 7, and its end takes from 9 to 10."""
    world = dataclasses.replace(ON_PAPER, sync=dataclasses.replace(ON_PAPER.sync, publish_beside_s=3.0))
    assert simulate(config(), world).totals.step_ends_s[:2] == [pytest.approx(6.0), pytest.approx(10.0)]


def test_an_engine_without_a_sequence_stages_sooner_on_paper():
    """Both hold version 1 at 6.35, where group 2 is admitted, to engine 0.

    8.1   engine 1 has staged version 2; engine 0 has by 8.5, and takes it after its pass, at 9.35
    9.6   its pause is over: three tokens of group 2 are of version 1, the last one is of version 2
    10.6  group 2 ends. Step 2 ends at 12.6, and its policy is held at 12.95
    """
    world = dataclasses.replace(ON_PAPER, sync=dataclasses.replace(ON_PAPER.sync, idle_stage_s=fixed(0.1)))
    ended = simulate(config(), world)
    assert ended.seconds == pytest.approx(12.95)
    assert ended.totals.ages == {0: 8 + 2, 1: 8 + 6}


def test_groups_are_sent_one_after_another_on_paper():
    """The second group of a round is sent a quarter of a second after the first, so the batch is whole that much later."""
    settings = config(pipeline={"mode": "sync"}, batch={"groups_per_step": 2})
    assert simulate(settings, dataclasses.replace(ON_PAPER, admit_s=0.25)).totals.step_ends_s[0] == pytest.approx(6.25)


@pytest.mark.parametrize(("longest_s", "engines"), [(0.1, 2), (0.2, 1)], ids=["heard-together", "heard-of-afterwards"])
def test_the_first_engine_with_a_new_policy_gets_all_groups_that_may_be_sent_then(longest_s: float, engines: int):
    """Four groups a step, a quarter of a second each: who has the policy at the same moment is heard of with it, and nobody who has it a
    little later: live, 0 of 114 steps whose groups were sent at once were shared by both engines.
    """
    sync = dataclasses.replace(ON_PAPER.sync, stage_s=Distribution(kind="uniform", low=0.1, high=longest_s), pause_s=0.0)
    settings = config(batch={"groups_per_step": 4}, pipeline={"max_staleness": 0}, trainer={"steps": 4})
    run = _Run(settings, dataclasses.replace(ON_PAPER, sync=sync, admit_s=0.25), seed=0, faults=Faults(), events=Events(), journal=None)
    given: dict[int, set[int]] = {}
    score = run.generation.on_finished

    def give(one: Rollout) -> None:
        given.setdefault(one.group_id // 4, set()).add(one.engine_id)
        score(one)

    run.generation.on_finished = give
    run.run(limit_s=1e6)
    assert given[0] == {0, 1}, "both hold the first model from the beginning"
    assert [len(given[step]) for step in (1, 2, 3)] == [engines] * 3


def test_a_prompt_that_siblings_share_is_computed_once_on_paper():
    """A row of two siblings has 1 + 4 + 4 tokens to compute, at a second each: 4 s of passes, 9 of the row, 1 of the step's end."""
    world = dataclasses.replace(ON_PAPER, trainer=TrainerWorld(token_s=1.0, step_s=1.0))
    assert simulate(config(), world).totals.step_ends_s[0] == pytest.approx(14.0)


@pytest.mark.parametrize(
    ("settings", "expected_s"),
    [
        ({}, 9.5),
        ({"algorithm": {"name": "grpo_batch_std"}}, 9.5),
        ({"algorithm": {"name": "grpo", "overrides": {"batch": "whiten_sequences"}}}, 14.0),
        ({"algorithm": {"name": "rae"}}, 14.0),
        ({"trainer": {"parallel": {"pipeline": 2}, "ranks": 2}}, 14.0),
    ],
    ids=["grpo", "scaled over a step", "centred over a step", "baselines that a simulated group does not have", "pipeline"],
)
def test_siblings_that_are_all_right_take_a_forward_pass_alone_on_paper(settings: dict[str, Any], expected_s: float):
    """Half a second each for the 9 tokens of their row, where the method and the live trainer leave the backward pass out."""
    world = dataclasses.replace(ON_PAPER, reward_mean=1.0, trainer=TrainerWorld(token_s=1.0, step_s=1.0, forward_part=0.5))
    assert simulate(config(**settings), world).totals.step_ends_s[0] == pytest.approx(expected_s)


@pytest.mark.parametrize(("max_tokens", "expected"), [(4, 1.0), (3, 0.0)])
def test_what_ends_at_its_limit_is_right_as_often_as_is_said(max_tokens: int, expected: float, tmp_path: Path):
    world = dataclasses.replace(ON_PAPER, reward_mean=1.0, truncated_reward_mean=0.0)
    simulate(config(rollout={"group_size": 2, "max_tokens": max_tokens}), world, folder=tmp_path / "run")
    assert {line["reward_mean"] for line in lines(tmp_path / "run") if line["kind"] == "step"} == {expected}


def test_a_round_begins_when_the_last_engine_holds_the_newest_policy(tmp_path: Path):
    """Four passes, a row and the end of a step after that swap, and not after the first one."""
    sync = dataclasses.replace(ON_PAPER.sync, stage_s=Distribution(kind="uniform", low=0.1, high=3.0))
    settings = config(pipeline={"mode": "sync"}, trainer={"steps": 5})
    ended = simulate(settings, dataclasses.replace(ON_PAPER, sync=sync), folder=tmp_path / "run")
    swaps = [line for line in lines(tmp_path / "run") if line["kind"] == "swap"]
    for step in range(1, 5):
        last_s = max(line["t"] for line in swaps if line["version"] == step)
        assert ended.totals.step_ends_s[step] == pytest.approx(last_s + 4 + 1 + 1)


def test_what_an_engine_had_when_it_died_begins_anew_elsewhere():
    """It dies at 2.5 with two tokens of each rollout of group 0: engine 1 takes them between two passes, as the next attempt."""
    run = _Run(config(), ON_PAPER, seed=0, faults=Faults(), events=Events(), journal=None)
    given: list[tuple[str, int, int, float]] = []
    score = run.generation.on_finished

    def give(one: Rollout) -> None:
        given.append((one.name, one.attempt, one.num_sampled, one.finished_s))
        score(one)

    run.generation.on_finished = give
    run.events.at(2.5, lambda: run.injection.kill_engine(0))
    run.events.run(until=lambda: len(given) == 4, limit_s=100.0)
    assert given == [("1/0", 0, 4, 4.0), ("1/1", 0, 4, 4.0), ("0/0", 1, 4, 7.0), ("0/1", 1, 4, 7.0)]

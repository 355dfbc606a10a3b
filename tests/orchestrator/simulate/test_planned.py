"""A world from the plan's arithmetic, and what the command line is asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from orchestrator.simulate.__main__ import _faults, _world
from orchestrator.simulate.draws import Distribution
from orchestrator.simulate.planned import SETTABLE, changed, world_of_plan
from orchestrator.simulate.run import simulate
from orchestrator.simulate.sequence import interpolate
from orchestrator.simulate.summary import summary_of
from orchestrator.simulate.world import Faults, World
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from pipelinerl.planning.plan import make_plan
from tests.orchestrator.simulate.worlds import config

GIVEN = {"mean_tokens": 300.0, "prompt_tokens": 100.0}


def planned(**sections: object) -> Config:
    given = {
        "model": {"path": "Qwen/Qwen2.5-7B"},
        "rollout": {"group_size": 8, "max_tokens": 600},
        "engine": {"count": 2, "max_running": 64},
        "trainer": {"steps": 12, "ranks": 8, "parallel": {"shard": 8}},
        "batch": {"groups_per_step": 32, "max_tokens": 8192},
        "pipeline": {"max_staleness": 4},
    }
    return config(**{**given, **sections})


@pytest.fixture(scope="module")
def settings() -> Config:
    return planned()


@pytest.fixture(scope="module")
def world(settings: Config) -> World:
    return world_of_plan(settings, gpu="h100", given=GIVEN)


def test_a_pass_lasts_as_long_as_the_plan_says_with_its_sequences_and_their_caches(settings: Config, world: World):
    values = make_plan(settings, gpu="h100", num_gpus=None, given=GIVEN).placements["as configured"].values
    running, context = values["running"], values["decode_context"]
    assert running == 64
    mine = interpolate(world.engine.pass_s, running) + world.engine.kv_token_s * running * context
    assert mine == pytest.approx(values["pass_s"], rel=1e-6)
    assert world.engine.kv_tokens == pytest.approx(values["kv_tokens"])
    assert world.trainer.token_s * values["row_length"] == pytest.approx(values["row_s"])


def test_a_simulated_run_is_about_as_fast_as_its_plan(settings: Config, world: World):
    """Engines are the limit there, and full: what a closed form leaves out is the beginning, the packing and the tail."""
    values = make_plan(settings, gpu="h100", num_gpus=None, given=GIVEN).placements["as configured"].values
    found = summary_of(simulate(settings, world))
    assert values["speed_ratio"] < 1
    assert found.tokens_per_s == pytest.approx(values["run_rate"], rel=0.1)


def test_lengths_are_even_as_in_a_plan_until_a_spread_is_given(settings: Config):
    assert world_of_plan(settings, gpu="h100", given=GIVEN).lengths.kind == "uniform"
    spread = world_of_plan(settings, gpu="h100", given={**GIVEN, "length_cv": 1.2})
    assert spread.lengths == Distribution(kind="lognormal", mean=300.0, cv=1.2)


def test_blocks_of_the_kv_cache_are_those_of_the_engines_options():
    assert world_of_plan(planned(engine={"options": {"block_size": 32}}), gpu="h100", given=GIVEN).engine.block_tokens == 32
    assert world_of_plan(planned(), gpu="h100", given=GIVEN).engine.block_tokens == 16


def test_what_is_set_is_changed_and_says_so(world: World):
    given = dict.fromkeys(SETTABLE, 0.5) | {"reply_tokens": 9.0}
    other = changed(world, given)
    assert other.scoring.score_s.average == 0.5
    assert (other.scoring.reply_tokens, other.reward_mean, other.likeness) == (9, 0.5, 0.5)
    assert all(other.origins[name] == "--set" for name in SETTABLE)
    assert (other.truncated_reward_mean, other.trainer.forward_part) == (0.5, 0.5)
    assert other.engine == dataclasses.replace(world.engine, tokens_per_pass=0.5)


def test_faults_are_read_by_kind():
    assert _faults(["engine=2", "lasts_s=1.5"]) == Faults(engine=2, lasts_s=1.5)
    for setting, said in (
        ("disk=1", "expected one of engine, trainer, scorer, link"),
        ("engine=1.5", "whole number"),
        ("link=x", "no number"),
    ):
        with pytest.raises(ConfigError, match=said):
            _faults([setting])


def test_a_simulation_that_nothing_tells_speeds_of_is_refused(settings: Config, tmp_path: Path):
    for arguments, said in (
        ({}, "name a run to learn from"),
        ({"gpu": "h100", "given": ["meantokens=3"]}, "did you mean mean_tokens"),
        ({"gpu": "h100", "like": tmp_path}, "leave out --gpu"),
        ({"gpu": "h1000"}, "did you mean"),
        ({"gpu": "h100", "given": ["score_s=soon"]}, "no number"),
        ({"gpu": "h100", "given": ["forward_part=-0.1"]}, "--set forward_part=-0.1: expected a number from 0 to 1: what a token without"),
        ({"gpu": "h100", "given": ["truncated_reward_mean=50"]}, "a number from 0 to 1: the same of completions that end at their limit"),
        ({"gpu": "h100", "given": ["likeness=nan"]}, "a number from 0 to 1"),
        ({"gpu": "h100", "given": ["reply_s=-1"]}, "expected 0 or more: seconds of an environment's reply"),
        ({"gpu": "h100", "given": ["turns=inf"]}, "expected 1 or more"),
    ):
        with pytest.raises(ConfigError, match=said):
            _world(settings, **{"like": None, "gpu": None, "given": [], **arguments})  # pyright: ignore[reportArgumentType]

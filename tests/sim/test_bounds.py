"""Memory in whole simulated runs: every queue stays within its bytes, whoever fills it waits by name, and no bound is too small to run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.rules.validation.completions import Experts
from orchestrator.stages.environment import EnvironmentStage
from pipelinerl.config import Config, RewardSection
from pipelinerl.data.expert_routes import routes_of
from pipelinerl.messages import Completion, Prompt
from pipelinerl.runtime.stage import Channel
from tests.sim import peers
from tests.sim.chaos import Faults, survive
from tests.sim.memory import MemoryLink
from tests.sim.peers import World
from tests.sim.run import Cast, Prompts, Simulated, config, run

BOUND = 2000
"""Bytes: of a few trajectories, each of 13 a token and of 80 tokens at most."""
SLOW_TRAINER = World(token_s=5e-3)
NUM_LAYERS, TOP_K, NUM_EXPERTS = 48, 8, 128


@dataclasses.dataclass(slots=True)
class Fullest:
    """The most that a channel ever held."""

    num_bytes: int = 0
    """What was claimed included."""
    num_items: int = 0
    above: int = 0
    """Bytes in it, where that was more than its bound and more than one item."""


Levels = dict[str, Fullest]
UNITS = {"prompts", "policies", "starts"}
"""Channels that count items."""


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> Levels:
    """By channel; `between turns` is what replying holds."""
    found: Levels = {}
    put_now, ask = Channel.put_now, EnvironmentStage.ask

    def note(name: str, num_bytes: int, num_items: int, *, bound: int) -> None:
        level = found.setdefault(name, Fullest())
        level.num_bytes, level.num_items = max(level.num_bytes, num_bytes), max(level.num_items, num_items)
        if num_items > 1 and num_bytes > bound:
            level.above = max(level.above, num_bytes)

    def put(channel: Channel[Any], item: Any) -> None:
        put_now(channel, item)
        num_items = len(channel) + (channel.claimed_bytes > 0)
        note(channel.name, channel.num_bytes + channel.claimed_bytes, num_items, bound=channel.bound_bytes)

    def ask_noted(replying: EnvironmentStage, *arguments: Any, **options: Any) -> None:
        ask(replying, *arguments, **options)
        note("between turns", replying.num_bytes, replying.num_awaiting_reply, bound=BOUND)

    monkeypatch.setattr(Channel, "put_now", put)
    monkeypatch.setattr(EnvironmentStage, "ask", ask_noted)
    return found


def bounded(*, queue_bytes: int = BOUND, **sections: Any) -> Config:
    """Few rollouts in engines, many more that the staleness bound would let them write."""
    bounds = {"max_staleness": 8, "queue_bytes": queue_bytes}
    pipeline = bounds | sections.pop("pipeline", {})
    return config(**{"pipeline": pipeline, "engine": {"count": 1, "max_running": 6}, "trainer": {"steps": 6}} | sections)


def comparing(settings: Config) -> Config:
    rewards = tuple(
        RewardSection(function=f"unused:{name}", per=per)  # pyright: ignore[reportCallIssue]
        for name, per in (("reward", "sample"), ("rank", "group"))
    )
    return settings.model_copy(update={"reward": rewards})


PRM: dict[str, Any] = {"prm": {"path": "unused", "chunk_tokens": 3}}
EPISODES: dict[str, Any] = {"environment": {"function": "unused:reply", "max_turns": 4}}


def waited(simulated: Simulated) -> set[str]:
    """What any stage ever waited for, as `stage: what`."""
    return set([line for line in simulated.lines if line["kind"] == "status"][-1]["waited_s"])


def longest(settings: Config) -> int:
    """Bytes of the longest trajectory there can be: a prompt of 12 tokens and `rollout.max_tokens`."""
    return 13 * (12 + settings.rollout.max_tokens)


# --- each queue inside a stage -----------------------------------------------------------------------------------------------------


def test_engines_are_asked_for_no_more_while_their_answers_wait(tmp_path: Path, levels: Levels) -> None:
    """What they have comes still, so that much may stand above the bound, and no more: 160 rollouts would come otherwise."""
    settings = bounded()
    simulated = run(settings, folder=tmp_path, world=SLOW_TRAINER)
    assert simulated.problems() == []
    assert "generation: room in completions" in waited(simulated)
    asked = settings.max_running_rollouts - 1 + settings.rollout.group_size
    assert BOUND < levels["completions"].num_bytes < BOUND + asked * longest(settings)


def test_scorers_have_no_more_than_there_is_room_for_in_scores(tmp_path: Path, levels: Levels) -> None:
    simulated = run(bounded(), folder=tmp_path, world=SLOW_TRAINER)
    assert "scoring: room in scored" in waited(simulated)
    assert levels["scored"].above == 0
    assert levels["scored"].num_items > 1


def test_siblings_are_compared_as_there_is_room_in_group_scored(tmp_path: Path, levels: Levels) -> None:
    """Two groups of four fit, never three."""
    settings = bounded(queue_bytes=3 * BOUND)
    simulated = run(comparing(settings), folder=tmp_path, world=dataclasses.replace(SLOW_TRAINER, score_s=0.5))
    assert simulated.problems() == []
    assert "group_rewards: room in group_scored" in waited(simulated)
    assert levels["group_scored"].above == 0
    assert levels["group_scored"].num_items > 1


def test_rewards_wait_for_their_steps_as_there_is_room_in_prm_scored(tmp_path: Path, levels: Levels) -> None:
    simulated = run(bounded(**PRM), folder=tmp_path, world=dataclasses.replace(SLOW_TRAINER, prm_s=0.5))
    assert simulated.problems() == []
    assert "prm: room in prm_scored" in waited(simulated)
    assert levels["prm_scored"].above == 0
    assert levels["prm_scored"].num_items > 1


@pytest.mark.slow
def test_no_episode_begins_while_those_between_two_turns_take_too_much(tmp_path: Path, levels: Levels) -> None:
    """Those under way have their next turns all the same: no more of them than were in engines when the bound was reached."""
    settings = bounded(**EPISODES, scorer={"slots": 64})
    simulated = run(settings, folder=tmp_path, world=World(reply_s=2.0, mean_tokens=12))
    assert simulated.problems() == []
    assert "generation: room in turns" in waited(simulated)
    asked = settings.max_running_rollouts - 1 + settings.rollout.group_size
    assert BOUND < levels["between turns"].num_bytes < BOUND + asked * longest(settings)


# --- all of them -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["streaming", "one_step_off", "sync"])
@pytest.mark.parametrize("parts", [PRM, EPISODES], ids=["step scores and comparisons", "episodes and comparisons"])
def test_nothing_stands_still_where_every_item_is_larger_than_the_bound(
    tmp_path: Path, levels: Levels, parts: dict[str, dict[str, Any]], mode: str
) -> None:
    settings = comparing(bounded(**parts, queue_bytes=1, pipeline={"mode": mode}, trainer={"steps": 4}))
    simulated = run(settings, folder=tmp_path, world=World(score_s=0.05))
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    # One item at a time; siblings that were compared together are put together, and are one item by the bound.
    most = {"scored": 1, "prm_scored": 1, "group_scored": settings.rollout.group_size}
    assert {name for name, count in most.items() if name in levels and levels[name].num_items > count} == set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("parts", [PRM, EPISODES], ids=["step scores and comparisons", "episodes and comparisons"])
def test_tiny_bounds_lose_nothing_whoever_is_killed(tmp_path: Path, parts: dict[str, dict[str, Any]], seed: int) -> None:
    """Room that was kept for what a dead peer had is given back with its answer, or with what stands for it."""
    faults = Faults(seed=seed, engine_s=4.0, scorer_s=3.0, prm_s=4.0 if parts is PRM else 0.0, trainer_s=8.0, orchestrator_s=9.0)
    world = World(token_s=1e-3, bad_score_fraction=0.05, bad_reply_fraction=0.02)
    settings = comparing(bounded(**parts, queue_bytes=700, trainer={"steps": 12}))
    survived = survive(settings, folder=tmp_path, faults=faults, world=world)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert len(survived.kills) >= 3, survived.kills


NUM_PROMPT = 4


class ShortPrompts(Prompts):
    """Prompts of one length, so that an engine's answers tell how many rows their routes have."""

    def next(self) -> Prompt:
        prompt = super().next()
        return msgspec.structs.replace(prompt, token_ids=prompt.token_ids[:NUM_PROMPT])


async def mixture(link: MemoryLink, **options: Any) -> None:
    """An engine that tells where each token was sent."""
    send = link.send

    def told(message: Any) -> None:
        if isinstance(message, Completion):
            table = np.zeros((NUM_PROMPT + len(message.token_ids) - 1, NUM_LAYERS, TOP_K), np.uint8)
            message = msgspec.structs.replace(message, routes=routes_of(table))
        send(message)

    vars(link).update(send=told)
    await peers.engine(link, **options)


def test_routes_count_and_under_a_slow_trainer_no_more_of_them_are_held_than_the_bounds_say(tmp_path: Path, levels: Levels) -> None:
    """Of a mixture with 48 layers of 8 experts they are 30 times the rest."""
    bound = 100_000
    settings = bounded(queue_bytes=bound, model={"path": "unused", "replay_routing": True})
    simulated = run(
        settings,
        folder=tmp_path,
        world=SLOW_TRAINER,
        cast=Cast(engine=mixture),
        source=ShortPrompts(0),
        experts=Experts(num_layers=NUM_LAYERS, top_k=TOP_K, num_experts=NUM_EXPERTS),
    )
    assert simulated.problems() == []
    assert simulated.ending.rollouts.failed == 0
    assert {"generation: room in completions", "scoring: room in scored"} <= waited(simulated)
    longest_routed = NUM_LAYERS * TOP_K * (NUM_PROMPT + settings.rollout.max_tokens) + longest(settings)
    asked = settings.max_running_rollouts - 1 + settings.rollout.group_size
    assert levels.pop("completions").num_bytes < bound + asked * longest_routed
    assert {name: level.above for name, level in levels.items() if name not in UNITS} == dict.fromkeys(levels.keys() - UNITS, 0)

"""A reward model's processes as the orchestrator hears of them, by hand."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.peers.reward_model import RewardModel
from orchestrator.peers.scorers import CALLS_PER_SLOT, Scorer
from orchestrator.rules.membership import reward_memberships_of
from pipelinerl.config.file import parse
from pipelinerl.messages import RewardModelLoad, RewardProcess, ScorerLoad, ScorerReady
from pipelinerl.runtime.membership import ScaleRequest, State
from pipelinerl.runtime.stage import Signal

MODEL = "reward.0"


def model_of(*, processes: int) -> RewardModel:
    """A model that began with one process and was asked for so many by request 5."""
    config = parse({"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"model": "orm"}]}, origin="test")
    (membership,) = reward_memberships_of(config, earlier=None)
    if processes > 1:
        membership.scale(ScaleRequest(request_id=5, rewards={MODEL: processes}))
    return RewardModel(membership=membership, credits=Signal())


def loaded(brought_by: int, *, num_held: int = 0, is_closed: bool = False) -> RewardProcess:
    return RewardProcess(brought_by=str(brought_by), is_loaded=True, is_closed=is_closed, num_held=num_held)


def hear(model: RewardModel, *processes: RewardProcess, busy_s: float = 0.0) -> None:
    load = RewardModelLoad(processes=dict(enumerate(processes)), busy_s=busy_s)

    async def heard() -> None:
        model.heard(ScorerLoad(scorer_id=0, num_running=0, num_scored=0, busy_s=0.0, models={MODEL: load}))

    asyncio.run(heard())


def test_what_is_said_of_a_process_that_another_request_brought_is_old() -> None:
    model = model_of(processes=2)
    hear(model, loaded(0), loaded(4))
    assert (model.membership.state(1), model.find(1)) == (State.JOINING, None)
    hear(model, loaded(0), loaded(5))
    assert model.membership.state(1) is State.LIVE


def test_a_process_is_busy_until_its_scorer_has_closed_it_and_it_has_nothing() -> None:
    model = model_of(processes=1)
    for said, is_busy in ((loaded(0), True), (loaded(0, num_held=3, is_closed=True), True), (loaded(0, is_closed=True), False)):
        hear(model, said)
        (process,) = model
        assert process.is_busy is is_busy


def test_seconds_of_scorers_that_are_gone_count() -> None:
    model = model_of(processes=1)
    for busy_s, in_all in ((2.0, 2.0), (5.0, 5.0), (1.0, 6.0), (4.0, 9.0)):
        hear(model, loaded(0), busy_s=busy_s)
        assert model.busy_s() == pytest.approx(in_all)


def test_a_scorer_has_room_for_the_processes_that_have_joined() -> None:
    """It announced itself with one slot; two processes more have come since."""
    scorer = Scorer(peer="scorer-0", ready=ScorerReady(scorer_id=0, process_id=1, num_slots=1))
    assert scorer.room == CALLS_PER_SLOT
    load = RewardModelLoad(processes={number: loaded(0) for number in range(3)}, busy_s=0.0)
    scorer.load = ScorerLoad(scorer_id=0, num_running=0, num_scored=0, busy_s=0.0, models={MODEL: load})
    assert scorer.room == 3 * CALLS_PER_SLOT

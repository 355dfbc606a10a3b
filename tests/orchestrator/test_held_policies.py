"""HeldPolicies: what a script wants of the trainer between two steps is asked for when its version comes, and again of a new trainer."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.stages.alternation import Alternation
from orchestrator.stages.held_policies import HeldPolicies
from pipelinerl.messages import ComputeLogprobs, FromTrainer, LogprobModel, PolicyPublished, SaveCheckpoint, ToTrainer, TrainerReady
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch
from tests.orchestrator.test_weight_sync import received
from tests.sim.clock import simulate
from tests.sim.memory import MemoryHub

WANTED = ComputeLogprobs(request_id=7, model=LogprobModel.POLICY, rows=())


def policies(name: str) -> Channel[TrainerReady | PolicyPublished]:
    return Channel(name, giver="training", taker="weight_sync", watch=Watch(stall_limit_s=1000.0), bound_bytes=10)


@pytest.mark.parametrize("version", [0, 3])
def test_a_trainer_that_starts_again_is_asked_again_at_the_version_that_was_wanted(version: int) -> None:
    async def program() -> list[int]:
        hub = MemoryHub(accepts=FromTrainer)
        link = hub.connect("trainer-0", accepts=ToTrainer)
        trainer = Peers(hub, role="trainer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        held = HeldPolicies(policies=policies("policies"), published=policies("published"), trainer=trainer, num_replicas=1)
        held.publish(version)
        counts = []
        async with asyncio.TaskGroup() as group:
            task = group.create_task(held.run())
            for process_id in (1, 2):
                held.policies.put_now(TrainerReady(replica=0, num_replicas=1, process_id=process_id, version=0))
                for newer in range(1, version + 1):  # it trains its way up to there
                    held.policies.put_now(PolicyPublished(version=newer, buffer=f"b{newer}", digest="d", num_bytes=1, publish_s=0.1))
                await asyncio.sleep(0.01)
                if process_id == 1:
                    held.command(WANTED, version=version)
                counts.append(received(link).count(WANTED))
            held.answered()
            held.policies.put_now(TrainerReady(replica=0, num_replicas=1, process_id=3, version=0))
            await asyncio.sleep(0.01)
            counts.append(received(link).count(WANTED))
            task.cancel()
        return counts

    assert simulate(program()) == [1, 1, 0]


def test_a_trainer_that_shares_its_devices_computes_once_every_engine_sleeps_and_saves_at_any_time() -> None:
    async def program() -> list[int]:
        hub = MemoryHub(accepts=FromTrainer)
        link = hub.connect("trainer-0", accepts=ToTrainer)
        trainer = Peers(hub, role="trainer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        alternation = Alternation(engines=cast(Engines, ()))
        held = HeldPolicies(
            policies=policies("policies"), published=policies("published"), trainer=trainer, num_replicas=1, alternation=alternation
        )
        counts = []
        for command in (WANTED, SaveCheckpoint(version=0)):
            held.command(command, version=0)
            counts.append(received(link).count(command))
        held.command(WANTED, version=0)
        alternation._phases.next_phase(num_closed=0, published=0, is_pinned=False, computes=True)
        alternation.begin_computing()
        return [*counts, received(link).count(WANTED)]

    assert simulate(program()) == [0, 1, 1]

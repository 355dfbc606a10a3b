"""Generation: engines are asked for no more than there is room for, and for more as soon as there is."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.rules.admission import Admission, schedule_of
from orchestrator.rules.quarantine import Quarantine
from orchestrator.stages.generation import Generation
from orchestrator.stages.prompts import Drawn
from pipelinerl.config import Mode
from pipelinerl.messages import Completion, EngineReady, Finish, FromEngine, Generate, Sampling, ToEngine, Trajectory
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch
from tests.orchestrator import handmade
from tests.sim.clock import simulate
from tests.sim.memory import MemoryHub, MemoryLink


async def answer_all(link: MemoryLink) -> int:
    """Answer, one after another, whatever an engine is asked for; return how much that was."""
    num_answered = 0
    while True:
        await asyncio.sleep(0.01)
        message = link.receive(0)
        if message is None:
            return num_answered
        if isinstance(message, Generate):
            num_answered += 1
            columns = {"token_ids": np.array([7], np.int32), "logprobs": np.array([-0.5], np.float32), "versions": np.array([0], np.int32)}
            link.send(Completion(rollout_id=message.rollout_id, attempt=message.attempt, finish=Finish.STOP, **columns))


def test_a_completion_that_is_taken_on_lets_the_next_group_in_and_no_other_sign_is_needed() -> None:
    """One completion waits to be taken by scoring, one is on its way there, and one fills `completions`."""

    async def program() -> None:
        hub = MemoryHub(accepts=FromEngine)
        link = hub.connect("engine-0", accepts=ToEngine)
        peers = Peers(hub, role="engine", expected=1, ready_deadline_s=60.0, silent_after_s=600.0)
        watch, credits = Watch(stall_limit_s=600.0), Signal()
        prompts = Channel[Drawn]("prompts", giver="prompts", taker="generation", watch=watch, bound_bytes=64)
        trajectories = Channel[Trajectory]("trajectories", giver="generation", taker="scoring", watch=watch, bound_bytes=1)
        completions = Channel[Trajectory](
            "completions", giver="engines", taker="generation", watch=watch, bound_bytes=1, size=lambda item: item.num_bytes
        )
        with contextlib.closing(Ledger(None)) as ledger:
            generation = Generation(
                prompts=prompts,
                completions=completions,
                trajectories=trajectories,
                engines=Engines(peers, expected=1, watch=watch, credits=credits),
                admission=Admission(schedule=schedule_of(Mode.STREAMING, max_staleness=9), groups_per_step=9, num_steps=9, max_running=1),
                credits=credits,
                ledger=ledger,
                watch=watch,
                sampling=Sampling(max_tokens=1, temperature=1.0, stop_token_ids=()),
                group_size=1,
                quarantine=Quarantine({}),
            )
            for number in range(9):
                await prompts.put(Drawn(prompt=handmade.prompt(prompt_id=f"0:{number}"), position=(0, number)))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(peers.run()), group.create_task(generation.run())]
                link.send(EngineReady(engine_id=0, process_id=1, max_model_tokens=100, max_running=4, tensors=()))
                assert await answer_all(link) == 3
                assert ("generation", "room in completions") in [(wait.stage, wait.what) for wait in watch.waits()]
                for _ in range(3):
                    assert await trajectories.get() is not None
                    assert await answer_all(link) == 1
                for task in tasks:
                    task.cancel()

    simulate(program())

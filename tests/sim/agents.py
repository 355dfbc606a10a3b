"""A gateway and its agents as one coroutine on simulated time: they play the episodes that they are lent, give up, or vanish."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np

from pipelinerl.messages import (
    NO_NODE,
    AgentTurn,
    EpisodeEnded,
    EpisodeExtended,
    EpisodeFinished,
    EpisodeLent,
    EpisodeWanted,
    GatewayLoad,
    GatewayReady,
    Message,
    Posted,
    Stop,
    TurnSampled,
    TurnTokens,
    part_of,
)
from tests.sim import peers
from tests.sim.memory import MemoryLink

MAX_TURNS = 4
NUM_AGENTS = 24


async def gateway(link: MemoryLink, *, world: peers.World) -> None:
    """Serve until told to stop."""
    await asyncio.sleep(world.start_s)
    async with asyncio.TaskGroup() as group:
        await _Agents(link, world, group).run()


class _Agents:
    def __init__(self, link: MemoryLink, world: peers.World, group: asyncio.TaskGroup) -> None:
        self.link = link
        self.world = world
        self.group = group
        self.chance = random.Random(world.seed)
        self.ids = itertools.count()
        self.process_id = next(peers.process_ids)
        self.plays: dict[str, asyncio.Task[None]] = {}
        self.answers: dict[int, asyncio.Future[TurnSampled]] = {}

    async def run(self) -> None:
        loads = self.group.create_task(self._report())
        self.link.introduce(self._introduce)
        while not isinstance(message := await self.link.wait(), Stop):
            self._take(message)
        for task in (loads, *self.plays.values()):
            task.cancel()

    def _introduce(self, kept: Sequence[bytes]) -> Iterator[Message]:
        for task in self.plays.values():
            task.cancel()
        self.plays.clear()
        yield GatewayReady(process_id=self.process_id, address="http://simulated")
        for _ in range(NUM_AGENTS):
            yield EpisodeWanted(request_id=next(self.ids))

    async def _report(self) -> None:
        while True:
            self.link.send(GatewayLoad(num_open=len(self.plays)))
            await asyncio.sleep(1.0)

    def _take(self, message: Message) -> None:
        match message:
            case EpisodeLent():
                self.plays[message.lease] = self.group.create_task(self._play(message))
            case TurnSampled():
                if (answer := self.answers.pop(message.request_id, None)) is not None and not answer.done():
                    answer.set_result(message)
            case EpisodeEnded():
                if (task := self.plays.pop(message.lease, None)) is not None:
                    task.cancel()
                    self.link.send(EpisodeWanted(request_id=next(self.ids)))
            case _:
                assert isinstance(message, TurnTokens | EpisodeExtended), message

    async def _play(self, lent: EpisodeLent) -> None:
        if lent.models:
            await self._play_with_all(lent)
            return
        given, parent, after, num_beside = lent.prompt.token_ids, NO_NODE, np.zeros(0, np.int32), 0
        for _ in range(MAX_TURNS):
            if self.chance.random() < self.world.vanish_fraction:
                return  # until its deadline
            if self.chance.random() < self.world.give_up_fraction:
                self.link.send(EpisodeFinished(lease=lent.lease, error="simulated"))
                return
            await asyncio.sleep(self.world.think_s * (0.5 + self.chance.random()))
            if self.chance.random() < self.world.sub_agent_fraction:
                beside = await self._turn(lent, lent.prompt.token_ids[::-1], NO_NODE)
                num_beside += len(lent.prompt.token_ids) + len(beside.token_ids)
            turn = await self._turn(lent, given, parent)
            if turn.error:
                self.link.send(EpisodeFinished(lease=lent.lease, error=turn.error))
                return
            after = np.concatenate((after, turn.token_ids))
            said = peers.reply(after)
            if said is None:
                break
            given, parent = np.array(said, np.int32), turn.node
            if len(lent.prompt.token_ids) + num_beside + len(after) + len(given) + self.world.mean_tokens > lent.max_context_tokens:
                break
            after = np.concatenate((after, given))
        self.link.send(EpisodeFinished(lease=lent.lease, reward=float(after.sum() % 2)))

    async def _play_with_all(self, lent: EpisodeLent) -> None:
        """Speak with every policy in turns, with each in a conversation of its own."""
        open_ones = {model: (lent.prompt.token_ids, NO_NODE, np.zeros(0, np.int32)) for model in lent.models}
        sums = dict.fromkeys(lent.models, 0)
        for _ in range(MAX_TURNS):
            for model, (given, parent, after) in list(open_ones.items()):
                if self.chance.random() < self.world.vanish_fraction:
                    return
                if self.chance.random() < self.world.give_up_fraction:
                    self.link.send(EpisodeFinished(lease=lent.lease, error="simulated"))
                    return
                await asyncio.sleep(self.world.think_s * (0.5 + self.chance.random()))
                turn = await self._turn(lent, given, parent, model=model)
                if turn.error:
                    self.link.send(EpisodeFinished(lease=lent.lease, error=turn.error))
                    return
                after = np.concatenate((after, turn.token_ids))
                sums[model] = int(after.sum())
                del open_ones[model]
                if (said := peers.reply(after)) is not None:
                    reply = np.array(said, np.int32)
                    if len(lent.prompt.token_ids) + len(after) + len(reply) + self.world.mean_tokens <= lent.models[model]:
                        open_ones[model] = (reply, turn.node, np.concatenate((after, reply)))
        posted = tuple(Posted(model=model, reward=float(total % 2)) for model, total in sums.items())
        self.link.send(EpisodeFinished(lease=lent.lease, posted=posted))

    async def _turn(self, lent: EpisodeLent, given: np.ndarray, parent: int, *, model: str = "") -> TurnSampled:
        request_id = next(self.ids)
        answer = self.answers[request_id] = asyncio.get_running_loop().create_future()
        self.link.send(AgentTurn(lease=part_of(lent.lease, model), request_id=request_id, parent=parent, token_ids=given, max_tokens=48))
        return await answer

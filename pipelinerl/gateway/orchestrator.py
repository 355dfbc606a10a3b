"""The orchestrator as the gateway knows it: what is asked of it becomes something to await."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import os
from collections.abc import Sequence

import numpy as np

from pipelinerl.errors import PeerFull
from pipelinerl.gateway.episodes import Answer, Episode, Episodes
from pipelinerl.gateway.refusal import RequestRefused
from pipelinerl.messages import (
    AgentTurn,
    EpisodeEnded,
    EpisodeExtended,
    EpisodeFinished,
    EpisodeLent,
    EpisodeReturned,
    EpisodeUnwanted,
    EpisodeWanted,
    GatewayLoad,
    GatewayReady,
    LeaseEnd,
    Message,
    Posted,
    Stop,
    TurnSampled,
    TurnTokens,
)
from pipelinerl.transport.base import Link

DRAIN_EVERY_S = 0.2
"""Seconds between two looks at a quiet connection, which reminds of what was lost. Longer delays that; shorter wakes for nothing."""
LOAD_EVERY_S = 1.0
"""Seconds between two reports of the gauges, which are also the sign of life."""
FINISH_S = 30.0
"""Longest wait for the orchestrator to take an episode's end."""


class Orchestrator:
    """One connection, used by the tasks of one event loop.

    takes     EpisodeLent, TurnTokens, TurnSampled, EpisodeExtended, EpisodeEnded, Stop
    gives     GatewayReady, GatewayLoad, EpisodeWanted, EpisodeUnwanted, EpisodeReturned, AgentTurn, EpisodeFinished
    waits for the connection's descriptor; every call has a deadline of its own
    woken by  messages; a timer
    fails     never: what an orchestrator that ends was asked for is refused, and agents try again
    ends      on `Stop`: `stopped` is set
    """

    def __init__(self, link: Link, *, address: str, episodes: Episodes) -> None:
        self.stopped = asyncio.Event()
        self.counts: collections.Counter[str] = collections.Counter()
        """Gauges by the names of `GatewayLoad`."""
        self.episodes = episodes
        self._link = link
        self._address = address
        self._ids = itertools.count(1)
        self._agents: dict[int, asyncio.Future[Episode]] = {}
        """Agents that wait for an episode, by request."""
        self._answers: dict[int, Answer] = {}
        """Turns that were asked for and not answered, by request."""
        self._is_draining = False

    async def run(self) -> None:
        """Serve the connection until cancelled."""
        loop = asyncio.get_running_loop()
        self._link.introduce(self._introduce)
        loop.add_reader(self._link.fileno(), self._drain)
        next_load = loop.time()
        try:
            while True:
                self._drain()
                if loop.time() >= next_load:
                    next_load = loop.time() + LOAD_EVERY_S
                    with contextlib.suppress(RequestRefused):  # full: the next one will say the same
                        self._send(self._load())
                await asyncio.sleep(DRAIN_EVERY_S)
        finally:
            loop.remove_reader(self._link.fileno())

    async def next_episode(self, *, timeout_s: float) -> Episode | None:
        """Wait for an episode; None where none was there in time. A cancelled call leaves its place to others."""
        request_id = next(self._ids)
        future = self._agents[request_id] = asyncio.get_running_loop().create_future()
        self._send(EpisodeWanted(request_id=request_id))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it came in the very moment
                self.give_back(future.result())
            raise
        finally:
            del self._agents[request_id]
            if not future.done() or future.cancelled():
                self._send(EpisodeUnwanted(request_id=request_id))

    def give_back(self, episode: Episode) -> None:
        """Give an episode back that no agent has taken."""
        self._send(EpisodeReturned(lease=episode.lease))

    def ask(
        self, episode: Episode, *, parent: int, token_ids: Sequence[int], max_tokens: int, stop: tuple[str, ...] = (), chunk_tokens: int = 0
    ) -> Answer:
        """Ask for a turn; the answer comes in its own time, and is refused where the attempt ends before."""
        request_id = next(self._ids)
        answer = self._answers[request_id] = Answer(asyncio.get_running_loop().create_future())
        answer.done.add_done_callback(lambda _: self._answers.pop(request_id, None))
        episode.num_asked += 1
        self._send(
            AgentTurn(
                lease=episode.lease,
                request_id=request_id,
                parent=parent,
                token_ids=np.array(token_ids, np.int32),
                max_tokens=max_tokens,
                stop=stop,
                chunk_tokens=chunk_tokens,
            )
        )
        return answer

    async def finish(self, episode: Episode, *, error: str = "") -> LeaseEnd:
        """End an episode, with the rewards that were posted; return how it ended: another end may have come before this one."""
        self._send(
            EpisodeFinished(
                lease=episode.lease,
                reward=episode.reward,
                nodes=tuple(episode.turn_rewards),
                rewards=tuple(episode.turn_rewards.values()),
                error=error,
                posted=tuple(
                    Posted(
                        model=name,
                        reward=episode.reward if part.reward is None else part.reward,
                        nodes=tuple(part.turn_rewards),
                        rewards=tuple(part.turn_rewards.values()),
                    )
                    for name, part in episode.parts.items()
                ),
            )
        )
        try:
            async with asyncio.timeout(FINISH_S):
                await episode.over.wait()
        except TimeoutError:
            words = f"waited {FINISH_S:g} s for the orchestrator to take the end of episode {episode.episode_id}; say it again"
            raise RequestRefused(503, words, code="orchestrator_silent") from None
        assert episode.end is not None, "`over` is set with it"
        return episode.end

    # --- messages ---

    def _introduce(self, kept: Sequence[bytes]) -> list[Message]:
        """Begin anew: leases of an orchestrator before this one are over, and agents wait on."""
        self.episodes.close_all("the orchestrator was started again")
        ready = GatewayReady(process_id=os.getpid(), address=self._address)
        return [ready, *(EpisodeWanted(request_id=number) for number, future in self._agents.items() if not future.done())]

    def _send(self, *messages: Message) -> None:
        try:
            self._link.send(*messages)
        except PeerFull:
            raise RequestRefused(503, "the orchestrator takes nothing; try again", code="orchestrator_silent", retry_after_s=5) from None
        if not self._is_draining:  # sending may use up the signal of what has arrived
            self._is_draining = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        self._is_draining = False
        while (message := self._link.receive(0)) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case EpisodeLent():
                self._on_lent(message)
            case TurnTokens():
                if (answer := self._answers.get(message.request_id)) is not None and message.start == len(answer.told):
                    answer.told += message.token_ids.tolist()
                    answer.news.set()
            case TurnSampled():
                self._on_sampled(message)
            case EpisodeExtended():
                self.episodes.extend(message.lease, by_s=message.by_s)
            case EpisodeEnded():
                self.episodes.close(message.lease, message.end, message.reason)
            case Stop():
                self.episodes.close_all(f"the run has ended: {message.reason}")
                self.stopped.set()
            case _:
                raise TypeError(f"a gateway does not take {type(message).__name__}")

    def _on_lent(self, lent: EpisodeLent) -> None:
        episode = self.episodes.open(lent)
        future = self._agents.get(lent.request_id)
        if future is None or future.done():
            self.give_back(episode)
        else:
            future.set_result(episode)

    def _on_sampled(self, turn: TurnSampled) -> None:
        answer = self._answers.get(turn.request_id)
        if answer is None or answer.done.done():
            return
        if turn.error:
            refusal = RequestRefused(503, f"the turn was not sampled: {turn.error}", code="not_sampled", retry_after_s=1)
            answer.done.set_exception(refusal)
            answer.done.exception()  # whoever waited may be gone
        else:
            answer.done.set_result(turn)
            self.counts["num_turns"] += 1
        answer.news.set()

    def _load(self) -> GatewayLoad:
        return GatewayLoad(num_open=len(self.episodes), num_agents_waiting=len(self._agents), **self.counts)

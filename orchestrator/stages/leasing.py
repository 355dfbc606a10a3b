"""This stage stands beside generation, in runs with a gateway: it lends rollouts to agents outside of the run.

An agent has a lease: one attempt of a rollout, until a deadline. Its tokens are kept here, as engines sampled them (`agent_turns`), so a
gateway that is killed costs the attempts that it had lent, and nothing else: the next attempts are lent again, and what an old lease still
says is refused.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.engines import Engines
from orchestrator.peers.gateway import Gateway
from orchestrator.rollouts.lent import trajectory_of
from orchestrator.rollouts.rollout import Rollout
from orchestrator.rules.validation.violations import shorten
from orchestrator.stages.agent_turns import AgentTurns, Played
from orchestrator.stages.alternation import Alternation
from pipelinerl.config import GatewaySection
from pipelinerl.data.episode_graph import EpisodeGraph
from pipelinerl.errors import PeerSilent
from pipelinerl.messages import (
    AgentTurn,
    EpisodeEnded,
    EpisodeExtended,
    EpisodeFinished,
    EpisodeLent,
    EpisodeReturned,
    EpisodeUnwanted,
    EpisodeWanted,
    LeaseEnd,
    Trajectory,
)
from pipelinerl.runtime.watch import Watch

LOOK_EVERY_S = 1.0
"""Seconds between two looks whether agents come. Longer notices late that none does; shorter wakes for nothing."""
MAX_ENDED = 1 << 12
"""Ended leases that are remembered, so that `finish` said twice is answered twice."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Lease:
    played: Played
    then: Callable[[Trajectory], None]
    deadline: asyncio.TimerHandle
    trained_s: float
    """Seconds of training phases before it, and of those by which its deadline was put off."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Leasing:
    """The stage that lends rollouts. At most `max_episodes` are lent; those that wait for an agent count as generating, so admission bounds
    them (`rules.admission`).

    takes     Rollout, from generation; EpisodeWanted, AgentTurn, EpisodeFinished, from the gateway; Completion, from engines
    gives     EpisodeLent, TurnTokens, TurnSampled, EpisodeExtended, EpisodeEnded, to the gateway; Generate, to engines; Trajectory, to
              generation
    waits for an agent; an engine that may go on with a turn; an agent's next word, up to its deadline
    woken by  the gateway, engines, deadlines
    fails     PeerSilent, where no agent asks for an episode within `agents_deadline_s`
    ends      cancelled, when the run ends
    """

    name = "leasing"
    gateway: Gateway
    engines: Engines
    turns: AgentTurns
    ledger: Ledger
    watch: Watch
    section: GatewaySection
    alternation: Alternation = dataclasses.field(default_factory=Alternation)
    """The phases of engines and trainer: a deadline stands still while engines sleep."""
    new_lease_id: Callable[[], str] = lambda: secrets.token_hex(8)
    num_expired: int = 0
    num_given_up: int = 0
    num_lent: int = 0
    _offered: collections.deque[tuple[Rollout, Callable[[Trajectory], None]]] = dataclasses.field(default_factory=collections.deque)
    _agents: dict[int, None] = dataclasses.field(default_factory=dict)
    """The requests of agents that wait, in order."""
    _leases: dict[str, _Lease] = dataclasses.field(default_factory=dict)
    _ended: dict[str, EpisodeEnded] = dataclasses.field(default_factory=dict)
    _num_unfinished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Attempts that agents gave up or did not finish, by rollout."""
    _last_agent_at: float | None = None

    def __post_init__(self) -> None:
        gateway = self.gateway
        gateway.on_began_anew(self._on_began_anew)
        gateway.on(EpisodeWanted, self._on_wanted)
        gateway.on(EpisodeUnwanted, lambda said: self._agents.pop(said.request_id, None))
        gateway.on(EpisodeReturned, self._on_returned)
        gateway.on(AgentTurn, self._on_turn)
        gateway.on(EpisodeFinished, self._on_finished)
        self.watch.explain(self._owed)

    async def run(self) -> None:
        self._last_agent_at = _now_s()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._oversee())
            group.create_task(self._follow_engines())

    @property
    def num_out(self) -> int:
        """Rollouts that agents have, or could have."""
        return len(self._offered) + len(self._leases)

    def gauges(self) -> dict[str, Any]:
        load = self.gateway.load
        own = {name: getattr(self, name) for name in ("num_lent", "num_expired", "num_given_up")}
        own |= {"num_discarded_tokens": self.turns.num_discarded_tokens, "num_offered": len(self._offered)}
        return (msgspec.structs.asdict(load) if load else {}) | own | {"num_open": len(self._leases)}

    def offer(self, rollout: Rollout, *, then: Callable[[Trajectory], None]) -> None:
        """Lend a rollout to the next agent that asks. `then` is called once, with the trajectory of the attempt that was finished."""
        self._offered.append((rollout, then))
        self._lend()

    # --- leases ---

    def _lend(self) -> None:
        while self._offered and self._agents and len(self._leases) < self.section.max_episodes:
            request_id = next(iter(self._agents))
            del self._agents[request_id]
            rollout, then = self._offered.popleft()
            lease_id = self.new_lease_id()
            deadline = asyncio.get_running_loop().call_later(self.section.deadline_s, self._expire, lease_id)
            played = Played(lease_id=lease_id, rollout=rollout)
            lease = _Lease(played=played, then=then, deadline=deadline, trained_s=self.alternation.trained_s)
            self._leases[lease_id] = lease
            self.ledger.issue(rollout.rollout_id, attempt=rollout.attempt, engine_id=None, version=rollout.version, now_s=_now_s())
            self.num_lent += 1
            self.watch.moved()
            lent = EpisodeLent(
                request_id=request_id,
                lease=lease_id,
                rollout_id=rollout.rollout_id,
                attempt=rollout.attempt,
                prompt=rollout.prompt,
                deadline_s=self.section.deadline_s,
                max_context_tokens=self.turns.max_context_tokens,
            )
            if not self.gateway.send(lent):
                self._take_back(lease, LeaseEnd.LOST, "the gateway cannot be reached")
                return

    def _on_wanted(self, wanted: EpisodeWanted) -> None:
        self._last_agent_at = _now_s()
        self._agents[wanted.request_id] = None
        self._lend()

    def _on_began_anew(self) -> None:
        """Take everything back: the gateway is another, or its agents were told of another orchestrator's leases."""
        self._agents.clear()
        for lease in list(self._leases.values()):
            self._take_back(lease, LeaseEnd.LOST, "the gateway was started again")

    def _on_returned(self, said: EpisodeReturned) -> None:
        if (lease := self._leases.get(said.lease)) is not None:
            self._take_back(lease, LeaseEnd.LOST, "its agent was gone before it came")

    def _expire(self, lease_id: str) -> None:
        if (lease := self._leases.get(lease_id)) is not None:
            if (slept_s := self.alternation.trained_s - lease.trained_s) > 0.0:
                lease.trained_s += slept_s
                lease.deadline = asyncio.get_running_loop().call_later(slept_s, self._expire, lease_id)
                self.gateway.send(EpisodeExtended(lease=lease_id, by_s=slept_s))
                return
            self.num_expired += 1
            self._give_up(lease, LeaseEnd.DEADLINE, f"not finished within gateway.deadline_s = {self.section.deadline_s:g} s")

    def _on_finished(self, said: EpisodeFinished) -> None:
        lease = self._leases.get(said.lease)
        if lease is None:
            self.gateway.send(self._ended.get(said.lease) or _unknown(said.lease))
            return
        if said.error:
            self.num_given_up += 1
            self._give_up(lease, LeaseEnd.FAILED, f"agent: {shorten(said.error)}")
            return
        graph = lease.played.graph
        for node, reward in zip(said.nodes, said.rewards, strict=True):
            if not 0 <= node < len(graph.nodes) or not graph.nodes[node].is_sampled:
                self._give_up(lease, LeaseEnd.FAILED, f"a reward for node {node}, which is no turn of this episode")
                return
            graph = graph.with_reward(node, reward)
        reward = said.reward if said.reward is not None or not said.rewards else float(sum(said.rewards))
        self._end(lease, LeaseEnd.FINISHED, "")
        del self._num_unfinished[lease.played.rollout.rollout_id]
        self._pass_on(lease, graph=graph, reward=reward)

    def _give_up(self, lease: _Lease, end: LeaseEnd, reason: str) -> None:
        """End an attempt that its agent did not finish: the next one is lent, or the rollout has failed."""
        name = lease.played.rollout.rollout_id
        self._num_unfinished[name] += 1
        if self._num_unfinished[name] < self.section.max_attempts:
            self._take_back(lease, end, reason)
            return
        del self._num_unfinished[name]
        self._end(lease, end, reason)
        self._pass_on(lease, graph=lease.played.graph, reward=None, error=f"{self.section.max_attempts} attempts, the last: {reason}")

    def _take_back(self, lease: _Lease, end: LeaseEnd, reason: str) -> None:
        """End an attempt, and offer the next one before any other rollout: its group waits for it."""
        self._end(lease, end, reason)
        self.turns.discard(lease.played)
        rollout = lease.played.rollout
        self.ledger.lose(rollout.rollout_id, attempt=rollout.attempt, engine_id=None, reason=f"{end}: {reason}", now_s=_now_s())
        self._offered.appendleft((dataclasses.replace(rollout.next_attempt(), reason=reason), lease.then))
        self._lend()

    def _end(self, lease: _Lease, end: LeaseEnd, reason: str) -> None:
        lease_id = lease.played.lease_id
        del self._leases[lease_id]
        lease.deadline.cancel()
        self.turns.end(lease.played)
        self._ended[lease_id] = ended = EpisodeEnded(lease=lease_id, end=end, reason=reason)
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self.gateway.send(ended)

    def _pass_on(self, lease: _Lease, *, graph: EpisodeGraph, reward: float | None, error: str = "") -> None:
        played = lease.played
        trajectory = trajectory_of(
            played.rollout, graph, reward=reward, error=error, engine_id=played.engine_id, finish=played.finish, finished_at=_now_s()
        )
        lease.then(trajectory)
        self._lend()

    def _on_turn(self, asked: AgentTurn) -> None:
        if (lease := self._leases.get(asked.lease)) is not None:
            self.turns.take(asked, lease.played)
        else:
            self.gateway.send(self._ended.get(asked.lease) or _unknown(asked.lease))

    # --- waiting ---

    async def _follow_engines(self) -> None:
        while True:
            await self.engines.changed.wait()
            self.turns.ask_again()

    async def _oversee(self) -> None:
        """See that agents come at all. While one has the floor, until its deadline, the run does not stand still."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.turns.ask_again()
            if self._leases and not len(self.turns):
                self.watch.moved()
            if self._leases or self._agents:
                self._last_agent_at = _now_s()
            elif self._offered:
                self._await_agents(silent_s=_now_s() - (self._last_agent_at or 0.0))

    def _await_agents(self, *, silent_s: float) -> None:
        if silent_s > self.section.agents_deadline_s:
            raise PeerSilent(
                f"waited {self.section.agents_deadline_s:g} s for an agent to ask for an episode at {self.gateway.address}/episodes/next:"
                " none came. Start one (docs/agents.md), or raise gateway.agents_deadline_s"
            )
        self.watch.moved()

    def _owed(self) -> str | None:
        """Name what is awaited, for the report of a stall."""
        if (owed := self.turns.owed()) is not None:
            return owed
        return f"{len(self._offered)} rollouts wait for an agent to ask for them" if self._offered else None


def _unknown(lease: str) -> EpisodeEnded:
    return EpisodeEnded(lease=lease, end=LeaseEnd.LOST, reason="nobody has this lease")


def _now_s() -> float:
    return asyncio.get_running_loop().time()

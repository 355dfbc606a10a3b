"""This stage stands beside generation, in runs with a gateway: it lends rollouts to agents outside of the run.

An agent has a lease: one attempt of a rollout, until a deadline. Its tokens are kept here, as engines sampled them (`agent_turns`), so a
gateway that is killed costs the attempts that it had lent, and nothing else: the next attempts are lent again, and what an old lease still
says is refused.

In a run of several policies an episode is a rollout of each that is trained, all of one prompt, and lent once each has offered its own: the
agent names the policy that is to sample a turn. Such rollouts are lent, attempted, finished and given up together.
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
from orchestrator.peers.gateway import Gateway
from orchestrator.rollouts.lent import trajectory_of
from orchestrator.rollouts.rollout import Rollout
from orchestrator.rules.validation.violations import shorten
from orchestrator.stages.agent_turns import AgentTurns, Played
from orchestrator.stages.alternation import Alternation
from pipelinerl.config import GatewaySection
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
    part_of,
)
from pipelinerl.runtime.watch import Watch

LOOK_EVERY_S = 1.0
"""Seconds between two looks whether agents come. Longer notices late that none does; shorter wakes for nothing."""
MAX_ENDED = 1 << 12
"""Ended leases that are remembered, so that `finish` said twice is answered twice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A policy that agents play with."""

    turns: AgentTurns
    watch: Watch
    ledger: Ledger | None
    """The ledger of its rollouts; None for one that is frozen, whose turns are in no rollout."""


_Offer = dict[str, tuple[Rollout, Callable[[Trajectory], None]]]
"""The rollouts of an episode by policy, each with what takes the trajectory of the attempt that was finished."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Lease:
    lease_id: str
    offer: _Offer
    parts: dict[str, Played]
    """By policy."""
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
    seats: dict[str, Seat]
    """By policy; of one policy alone by no name."""
    watch: Watch
    section: GatewaySection
    alternation: Alternation = dataclasses.field(default_factory=Alternation)
    """The phases of engines and trainer: a deadline stands still while engines sleep."""
    new_lease_id: Callable[[], str] = lambda: secrets.token_hex(8)
    num_expired: int = 0
    num_given_up: int = 0
    num_lent: int = 0
    _offered: collections.deque[_Offer] = dataclasses.field(default_factory=collections.deque)
    _partial: dict[tuple[str, int], list[_Offer]] = dataclasses.field(default_factory=dict)
    """Those that are not offered by every policy, by prompt and sibling."""
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
            for seat in self.seats.values():
                group.create_task(self._follow_engines(seat.turns))

    @property
    def num_out(self) -> int:
        """Rollouts that agents have, or could have."""
        return sum(map(len, self._partial.values())) + len(self._offered) + len(self._leases)

    def gauges(self) -> dict[str, Any]:
        load = self.gateway.load
        own = {name: getattr(self, name) for name in ("num_lent", "num_expired", "num_given_up")}
        num_discarded = sum(seat.turns.num_discarded_tokens for seat in self.seats.values())
        own |= {"num_discarded_tokens": num_discarded, "num_offered": len(self._offered)}
        return (msgspec.structs.asdict(load) if load else {}) | own | {"num_open": len(self._leases)}

    def offer(self, rollout: Rollout, *, then: Callable[[Trajectory], None], policy: str = "") -> None:
        """Lend a rollout to the next agent that asks, once each policy has offered one of the same prompt. `then` is called once, with the
        trajectory of the attempt that was finished.
        """
        key = (rollout.prompt.prompt_id, rollout.sibling)
        partial = self._partial.setdefault(key, [])
        offer = next((one for one in partial if policy not in one), None)
        if offer is None:
            partial.append(offer := {})
        offer[policy] = (rollout, then)
        if offer.keys() == {name for name, seat in self.seats.items() if seat.ledger is not None}:
            partial.remove(offer)
            self._offered.append(offer)
            self._lend()
        if not partial:
            del self._partial[key]

    # --- leases ---

    def _lend(self) -> None:
        while self._offered and self._agents and len(self._leases) < self.section.max_episodes:
            request_id = next(iter(self._agents))
            del self._agents[request_id]
            offer, lease_id = self._offered.popleft(), self.new_lease_id()
            deadline = asyncio.get_running_loop().call_later(self.section.deadline_s, self._expire, lease_id)
            rollout, _ = next(iter(offer.values()))
            parts = {
                name: Played(lease_id=part_of(lease_id, name), rollout=offer[name][0] if name in offer else _of_frozen(rollout))
                for name in self.seats
            }
            trained_s = self.alternation.trained_s
            lease = _Lease(lease_id=lease_id, offer=offer, parts=parts, deadline=deadline, trained_s=trained_s)
            self._leases[lease_id] = lease
            for name, (one, _) in offer.items():
                ledger = self._ledger(name)
                ledger.issue(one.rollout_id, attempt=one.attempt, engine_id=None, version=one.version, now_s=_now_s())
            self.num_lent += 1
            self._moved()
            lent = EpisodeLent(
                request_id=request_id,
                lease=lease_id,
                rollout_id=rollout.rollout_id,
                attempt=rollout.attempt,
                prompt=rollout.prompt,
                deadline_s=self.section.deadline_s,
                max_context_tokens=min(seat.turns.max_context_tokens for seat in self.seats.values()),
                models={name: seat.turns.max_context_tokens for name, seat in self.seats.items() if name},
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
        posted = {one.model: one for one in said.posted} or {"": said}
        rewards: dict[str, float | None] = {}
        for name, played in lease.parts.items():
            if (own := posted.get(name)) is None:
                continue
            for node, reward in zip(own.nodes, own.rewards, strict=True):
                if not 0 <= node < len(played.graph.nodes) or not played.graph.nodes[node].is_sampled:
                    self._give_up(lease, LeaseEnd.FAILED, f"a reward for node {node}, which is no turn of this episode")
                    return
                played.graph = played.graph.with_reward(node, reward)
            rewards[name] = own.reward if own.reward is not None or not own.rewards else float(sum(own.rewards))
        self._end(lease, LeaseEnd.FINISHED, "")
        del self._num_unfinished[_name_of(lease.offer)]
        self._pass_on(lease, rewards=rewards)

    def _give_up(self, lease: _Lease, end: LeaseEnd, reason: str) -> None:
        """End an attempt that its agent did not finish: the next one is lent, or the rollout has failed."""
        name = _name_of(lease.offer)
        self._num_unfinished[name] += 1
        if self._num_unfinished[name] < self.section.max_attempts:
            self._take_back(lease, end, reason)
            return
        del self._num_unfinished[name]
        self._end(lease, end, reason)
        self._pass_on(lease, rewards={}, error=f"{self.section.max_attempts} attempts, the last: {reason}")

    def _take_back(self, lease: _Lease, end: LeaseEnd, reason: str) -> None:
        """End an attempt, and offer the next one before any other rollout: its group waits for it."""
        self._end(lease, end, reason)
        for name, played in lease.parts.items():
            self.seats[name].turns.discard(played)
        for name, (rollout, _) in lease.offer.items():
            words = f"{end}: {reason}"
            self._ledger(name).lose(rollout.rollout_id, attempt=rollout.attempt, engine_id=None, reason=words, now_s=_now_s())
        again = {name: (dataclasses.replace(rollout.next_attempt(), reason=reason), then) for name, (rollout, then) in lease.offer.items()}
        self._offered.appendleft(again)
        self._lend()

    def _end(self, lease: _Lease, end: LeaseEnd, reason: str) -> None:
        lease_id = lease.lease_id
        del self._leases[lease_id]
        lease.deadline.cancel()
        for name, played in lease.parts.items():
            self.seats[name].turns.end(played)
        self._ended[lease_id] = ended = EpisodeEnded(lease=lease_id, end=end, reason=reason)
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self.gateway.send(ended)

    def _pass_on(self, lease: _Lease, *, rewards: dict[str, float | None], error: str = "") -> None:
        for name, (rollout, then) in lease.offer.items():
            played = lease.parts[name]
            facts = {"engine_id": played.engine_id, "finish": played.finish, "episode": lease.lease_id if name else ""}
            then(trajectory_of(rollout, played.graph, reward=rewards.get(name), error=error, finished_at=_now_s(), **facts))
        self._lend()

    def _on_turn(self, asked: AgentTurn) -> None:
        lease_id, _, policy = asked.lease.partition(".")
        lease = self._leases.get(lease_id)
        if lease is not None and policy in lease.parts:
            self.seats[policy].turns.take(asked, lease.parts[policy])
        else:
            self.gateway.send(self._ended.get(lease_id) or _unknown(lease_id))

    def _ledger(self, policy: str) -> Ledger:
        ledger = self.seats[policy].ledger
        assert ledger is not None, "a policy that offers rollouts has a ledger"
        return ledger

    def _moved(self) -> None:
        for seat in self.seats.values():
            seat.watch.moved()

    # --- waiting ---

    async def _follow_engines(self, turns: AgentTurns) -> None:
        while True:
            await turns.engines.changed.wait()
            turns.ask_again()

    async def _oversee(self) -> None:
        """See that agents come at all. While one has the floor, until its deadline, the run does not stand still."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for seat in self.seats.values():
                seat.turns.ask_again()
            if self._leases and not any(len(seat.turns) for seat in self.seats.values()):
                self._moved()
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
        self._moved()

    def _owed(self) -> str | None:
        """Name what is awaited, for the report of a stall."""
        if (owed := next(filter(None, (seat.turns.owed() for seat in self.seats.values())), None)) is not None:
            return owed
        if not self._offered and self._partial:
            (prompt_id, sibling), (offer, *_) = next(iter(self._partial.items()))
            missing = ", ".join(name for name, seat in self.seats.items() if seat.ledger is not None and name not in offer)
            return (
                f"sibling {sibling} of {', '.join(offer)} about prompt {prompt_id} waits for {missing} to sample the same prompt as often"
            )
        return f"{len(self._offered)} rollouts wait for an agent to ask for them" if self._offered else None


@dataclasses.dataclass(slots=True, kw_only=True)
class Table:
    """Where the policies of a run meet: the stage that lends for all of them."""

    leasing: Leasing | None = None
    """None until the first policy has begun it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """A policy's way to the stage that lends its rollouts."""

    leasing: Leasing
    policy: str = ""
    """Its name among several."""
    stage: Leasing | None
    """The stage where this policy's run has it; None where another's has."""

    @property
    def num_out(self) -> int:
        return self.leasing.num_out

    def gauges(self) -> dict[str, Any]:
        return self.leasing.gauges()

    def offer(self, rollout: Rollout, *, then: Callable[[Trajectory], None]) -> None:
        """See `Leasing.offer`."""
        self.leasing.offer(rollout, then=then, policy=self.policy)


def _name_of(offer: _Offer) -> str:
    return next(rollout.rollout_id for rollout, _ in offer.values())


def _of_frozen(rollout: Rollout) -> Rollout:
    """Return what stands for a rollout of a frozen policy, which has one version."""
    return dataclasses.replace(rollout, version=0, is_greedy=False)


def _unknown(lease: str) -> EpisodeEnded:
    return EpisodeEnded(lease=lease, end=LeaseEnd.LOST, reason="nobody has this lease")


def _now_s() -> float:
    return asyncio.get_running_loop().time()

"""Membership decides which engines a live run has: which ids join, which leave, and which losses it lives with.

A run that is asked for more engines first keeps those that were about to leave, then takes the lowest free ids; asked for fewer, it gives
up those that have not come yet, then the highest ids, which came last. Engines that it began with are awaited, as everything waits for
them at the start: where one dies, another process takes its place, or the run ends. Those that have joined since, and those that another
job started, are spares: the run goes on without one that is lost, and takes it back while it has fewer engines than were asked for.

Engines of another width (`tensor_parallel_size`) take the place of all that there are, as `rules.engine_widths` says.

The same holds of the process reward model's engines, apart from the others, and of the processes of each reward model: a run that has one
keeps one at least.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pipelinerl.config import Config
from pipelinerl.config.scaling import why_fixed
from pipelinerl.runtime.membership import FIRST_PRM, EnginesBefore, Kind, Member, Members, ScaleRequest, StartedBy, State, reward_kind

PRESENT = (State.JOINING, State.LIVE)
"""The states of engines that count towards the number that was asked for."""


def membership_of(
    config: Config, *, earlier: Members | None, takes_all: bool = False, why_not_width: Callable[[int], str | None] = lambda size: None
) -> Membership:
    """Return the engines of a run, with what an earlier orchestrator of it has written; the others: see `Membership`."""
    engine, why = config.engine, why_fixed(config.pipeline, config.weights, config.tinker)
    found = Membership(
        count=engine.count,
        num_here=engine.num_here,
        most=engine.most,
        why_fixed=why,
        takes_all=takes_all,
        tensor_parallel_size=engine.tensor_parallel_size,
        why_not_width=why_not_width,
    )
    if earlier is not None:
        found.restore(earlier)
    return found


def prm_membership_of(config: Config, *, earlier: Members | None, takes_all: bool = False) -> Membership:
    """Return the engines of a run's process reward model, by their numbers among the scorers; see `membership_of`."""
    prm, why = config.prm, why_fixed(config.pipeline, config.weights, config.tinker)
    found = Membership(kind=Kind.PRM, first=FIRST_PRM, count=prm.count, most=prm.most, why_fixed=why, takes_all=takes_all)
    if earlier is not None:
        found.restore(earlier)
    return found


def reward_memberships_of(config: Config, *, earlier: Members | None, takes_all: bool = False) -> tuple[Membership, ...]:
    """Return the processes of each of a run's reward models; see `membership_of`."""
    why = why_fixed(config.pipeline, config.weights, config.tinker)
    found = {
        kind: Membership(kind=kind, count=reward.concurrency or 1, most=reward.most, why_fixed=why, takes_all=takes_all)
        for index, reward in enumerate(config.reward)
        if reward.model is not None
        for kind in [reward_kind(index)]
    }
    for kind, membership in found.items():
        if (record := earlier and earlier.of(kind)) is not None:
            membership.restore(record)
    return tuple(found.values())


class Membership:
    """The engines of one run, of one kind, by id. Every change is news until it is taken."""

    def __init__(
        self,
        *,
        count: int,
        kind: str = Kind.ENGINES,
        first: int = 0,
        num_here: int | None = None,
        most: int | None = None,
        why_fixed: str | None = None,
        takes_all: bool = False,
        tensor_parallel_size: int | None = None,
        why_not_width: Callable[[int], str | None] = lambda size: None,
    ) -> None:
        """The run begins with `count` engines, numbered from `first` on, of which the first `num_here` are started with it, and may come to
        have `most`.

        `why_fixed` says why no engine may join or leave; None where they may. `takes_all`: whoever comes is one, as where a recorded run is
        repeated. `tensor_parallel_size` is the one that they begin with, None of a kind that keeps its own; `why_not_width` says why none
        of another could serve the run.
        """
        self.kind = kind
        self._configured = self.tensor_parallel_size = tensor_parallel_size
        self.before: EnginesBefore | None = None
        """What the run goes back to where no engine of this width comes to serve; None where one has, or nothing is to go back to."""
        self.drain_s = ScaleRequest(request_id=0).drain_s
        """What engines of another width are given once they are to leave."""
        self._why_not_width = why_not_width
        self._first, self._takes_all = first, takes_all
        num_here = count if num_here is None else num_here
        self._count = count
        self._most = count if most is None else most
        self._why_fixed = why_fixed
        self._request_id = 0
        self._refused = ""
        self.num_wanted = count
        self.num_given_up = 0
        """Of these, lost engines that the run does without until they come again: no other one takes their place."""
        self._members = {
            number: Member(
                engine_id=number,
                state=State.JOINING,
                started_by=StartedBy.RUN if number < first + num_here else StartedBy.JOB,
                tensor_parallel_size=tensor_parallel_size,
            )
            for number in range(first, first + count)
        }
        self._news: dict[int, Member] = {}
        self.goes_on = False
        """An earlier orchestrator of the run had other engines join or leave, or might have."""

    def restore(self, earlier: Members) -> None:
        """Take over what an earlier orchestrator of the run has written, unless the settings name another number since.

        Everybody has to announce themselves anew; who was leaving has left, and its rollouts are asked of others.
        """
        self._request_id, self._refused = earlier.request_id, earlier.refused
        if earlier.count != self._count or earlier.configured not in (None, self._configured):
            return
        for one in earlier.members:
            begins_anew = one.state in PRESENT or (one.state is State.LOST and one.started_by is StartedBy.RUN)
            state = State.JOINING if begins_anew else State.LEFT if one.state is State.DRAINING else one.state
            size = one.tensor_parallel_size or self._configured
            self._put(msgspec.structs.replace(one, state=state, reason="" if begins_anew else one.reason, tensor_parallel_size=size))
        self.tensor_parallel_size = earlier.tensor_parallel_size or self._configured
        self.before, self.drain_s = earlier.before, earlier.drain_s
        self.num_wanted, self.num_given_up, self.goes_on = earlier.num_wanted, earlier.num_given_up, True
        self._fill_places()

    # --- what is known ---

    @property
    def names(self) -> range:
        """The ids that engines of this run may have."""
        return range(self._first, self._first + self._most)

    def find(self, engine_id: int) -> Member | None:
        """Return what is known of an engine; None where the run never had it."""
        return self._members.get(engine_id)

    def state(self, engine_id: int) -> State | None:
        """Return the state of an engine; None where the run never had it."""
        member = self._members.get(engine_id)
        return None if member is None else member.state

    def present(self) -> set[int]:
        """Return the ids that serve, or are to serve."""
        return {number for number, member in self._members.items() if member.state in PRESENT}

    def of_width(self) -> set[int]:
        """Return the ids that serve, or are to serve, with the `tensor_parallel_size` that was asked for last."""
        return {number for number in self.present() if self._members[number].tensor_parallel_size == self.tensor_parallel_size}

    def of_another_width(self) -> set[int]:
        """Return the ids that serve until engines of the width that was asked for do."""
        return self.present() - self.of_width()

    def awaited(self) -> set[int]:
        """Return the ids without which the run does not begin, and whose place somebody takes: those that it began with."""
        return {number for number in self.present() if not self._members[number].request_id}

    def is_draining(self) -> bool:
        """Return whether an engine that is to leave has not left yet."""
        return any(member.state is State.DRAINING for member in self._members.values())

    def missing(self) -> list[Member]:
        """Return the engines that are not yet what was asked for: they join or leave, or were lost and have left a place that counts."""
        is_short = len(self.present()) < self.num_wanted - self.num_given_up
        awaited = (State.JOINING, State.DRAINING, *((State.LOST,) if is_short else ()))
        return [self._members[number] for number in sorted(self._members) if self._members[number].state in awaited]

    def num_serving(self) -> int:
        """The number of engines that admission counts with: spares count once they are live."""
        return len(self.awaited() | {number for number, member in self._members.items() if member.state is State.LIVE}) or 1

    def may_be_lost(self, engine_id: int) -> bool:
        """Return whether the run goes on without this engine: it is a spare, and another one is live."""
        member = self._members.get(engine_id)
        others = any(one.state is State.LIVE for number, one in self._members.items() if number != engine_id)
        return member is not None and others and bool(member.request_id or member.started_by is StartedBy.JOB)

    def may_join(self, engine_id: int) -> bool:
        """Return whether an engine that announces itself is one of the run's; one that was lost is, while engines are too few."""
        state = self.state(engine_id)
        is_spare = engine_id in self._members and self._members[engine_id].tensor_parallel_size == self.tensor_parallel_size
        return self._takes_all or state in PRESENT or (state is State.LOST and is_spare and len(self.of_width()) < self.num_wanted)

    def is_meant(self, engine_id: int, *, request_id: int, size: int | None = None) -> bool:
        """Return whether an engine that announces itself is the one that is known by its number, and no other that had it before: the same
        request brought it, with this `tensor_parallel_size`."""
        member = self._members.get(engine_id)
        if self._takes_all or member is None:
            return True
        is_same = size is None or member.tensor_parallel_size in (None, size)
        return member.request_id == request_id and is_same

    def why_not(self, wanted: int | None, *, size: int | None = None) -> str | None:
        """Say why the run cannot have so many engines, of another `tensor_parallel_size`; None where it can."""
        if self._why_fixed is not None:
            return self._why_fixed
        if wanted is not None and not 1 <= wanted <= self._most:
            keys: dict[str, str] = {Kind.ENGINES: "engine.max_count", Kind.PRM: "prm.count"}
            key = keys.get(self.kind, f"{self.kind}.concurrency")
            more = f"More need a run that was started, or resumed, with a larger {key}"
            return f"{self.kind}={wanted}: expected 1 to {self._most} ({key}). {more}"
        if size is None or size == self.tensor_parallel_size:
            return None
        if (why := self._why_not_width(size)) is not None:
            return f"tensor_parallel_size={size}: {why}"
        there = (*PRESENT, State.DRAINING)
        staying = sum(one.state in there and one.tensor_parallel_size != size for one in self._members.values())
        coming = wanted or self.num_wanted
        if staying + coming > self._most:
            return (
                f"tensor_parallel_size={size}: engines that come need numbers of their own until the others have left, {coming} beside"
                f" {staying}, and there are {self._most} (engine.max_count). Ask for fewer engines, or have some leave first"
            )
        return None

    # --- what happens ---

    def joined(self, engine_id: int) -> None:
        """Note that an engine has announced itself."""
        self._members.setdefault(engine_id, Member(engine_id=engine_id, state=State.JOINING, started_by=StartedBy.JOB))
        self._move(engine_id, State.LIVE)
        self._fill_places()

    def ended(self, engine_id: int) -> None:
        """Note that an engine's process has ended: another one is to follow, unless it was about to leave."""
        if self.state(engine_id) is State.LIVE:
            self._move(engine_id, State.JOINING)
        elif self.state(engine_id) is State.DRAINING:
            self._move(engine_id, State.LEFT, "it ended before it had answered all that it had")

    def lost(self, engine_id: int, reason: str) -> None:
        """Note that an engine will not serve any more, and nobody asked it to leave."""
        if self.state(engine_id) in PRESENT:
            self._move(engine_id, State.LOST, reason)
        elif self.state(engine_id) is State.DRAINING:
            self._move(engine_id, State.LEFT, reason)

    def is_last(self, engine_id: int) -> bool:
        """Return whether an engine that is lost leaves nobody: no other one, none that comes again, and nothing to go back to."""
        is_lost = self.state(engine_id) is State.LOST and self._members[engine_id].started_by is not StartedBy.JOB
        return is_lost and not self.present() and self.before is None

    def left(self, engine_id: int, reason: str) -> None:
        """Note that an engine that was to leave is gone."""
        self._move(engine_id, State.LEFT, reason)

    def absent(self) -> list[Member]:
        """Return the spares that are missing; none where an engine leaves, or one is missing that the run awaits."""
        missing = self.missing()
        is_spare = [one.state is State.LOST or (one.state is State.JOINING and one.engine_id not in self.awaited()) for one in missing]
        return missing if all(is_spare) else []

    def give_up_absent(self, reason: str) -> None:
        """Do without the spares that are missing until they come again. Who asks for a number of engines after that has others take their
        places."""
        for member in self.absent():
            self._move(member.engine_id, State.LOST, reason)
        self.num_given_up = max(0, self.num_wanted - len(self.present()))

    def scale(self, request: ScaleRequest, *, refused: str | None = None, keeps_places: bool = False) -> list[int]:
        """Carry out a request, or refuse it, for a reason of its own or the one that is given: return the live engines that are to leave
        now. A request that was answered changes nothing. With `keeps_places` engines that were given up count as if they were there."""
        if request.request_id <= self._request_id:
            return []
        size = request.tensor_parallel_size if self.kind is Kind.ENGINES else None
        wanted = self.num_wanted if request.number_of(self.kind) is None and size is not None else request.number_of(self.kind)
        self._request_id, self._refused = request.request_id, refused or self.why_not(wanted, size=size) or ""
        if self._refused or wanted is None:
            return []
        if size is not None and size != self.tensor_parallel_size:
            self._begin_width(size, request)
        self.num_wanted, self.num_given_up = wanted, self.num_given_up if keeps_places else 0
        missing = wanted - self.num_given_up - len(self.of_width())
        for number in self._to_join()[: max(0, missing)]:
            is_kept = self.state(number) is State.DRAINING
            known = self._members.get(number)
            origin = (
                known
                if is_kept and known
                else Member(
                    engine_id=number,
                    state=State.JOINING,
                    started_by=request.started_by,
                    request_id=request.request_id,
                    tensor_parallel_size=self.tensor_parallel_size,
                )
            )
            self._put(msgspec.structs.replace(origin, state=State.LIVE if is_kept else State.JOINING, reason=""))
        return self.have_leave(self.leaving_order(self.of_width())[: max(0, -missing)], f"{self.kind}={wanted} was asked for")

    def have_leave(self, numbers: list[int], reason: str) -> list[int]:
        """Have engines leave, at once where they have not come; return those that drain."""
        for number in numbers:
            self._move(number, State.DRAINING if self.state(number) is State.LIVE else State.LEFT, reason)
        return [number for number in numbers if self.state(number) is State.DRAINING]

    def leaving_order(self, numbers: set[int]) -> list[int]:
        """Return these engines in the order in which they would leave."""
        return sorted(numbers, key=lambda number: (self.state(number) is State.LIVE, -number))

    def _begin_width(self, size: int, request: ScaleRequest) -> None:
        """Await engines of another width. Those of the one before that have not come are not awaited any more."""
        has_served = any(self.state(number) is State.LIVE for number in self.of_width())
        before = self.before
        if self.tensor_parallel_size is not None and (has_served or before is None):
            before = EnginesBefore(num_wanted=self.num_wanted, tensor_parallel_size=self.tensor_parallel_size)
        self.before = None if before is None or before.tensor_parallel_size == size else before
        self.tensor_parallel_size, self.drain_s = size, request.drain_s
        absent = [number for number in self.of_another_width() if self.state(number) is State.JOINING]
        self.have_leave(absent, f"tensor_parallel_size={size} was asked for")

    # --- what is told ---

    def record(self) -> Members:
        """Return what everybody is told, and what an orchestrator that follows takes over."""
        return Members(
            members=tuple(self._members[number] for number in sorted(self._members)),
            num_wanted=self.num_wanted,
            num_given_up=self.num_given_up,
            count=self._count,
            tensor_parallel_size=self.tensor_parallel_size,
            configured=self._configured,
            before=self.before,
            drain_s=self.drain_s,
            request_id=self._request_id,
            refused=self._refused,
        )

    def take_news(self) -> list[Member]:
        """Return the engines that have changed since the last call, each as it is now."""
        news, self._news = self._news, {}
        return [news[number] for number in sorted(news)]

    def _to_join(self) -> list[int]:
        """The ids that may come, first those that need not come anew; one that was lost may still be somewhere, so it is the last."""
        order = {State.DRAINING: 0, None: 1, State.LEFT: 1, State.LOST: 2}
        others = {one.engine_id for one in self._members.values() if one.tensor_parallel_size != self.tensor_parallel_size}
        free = [
            number
            for number in self.names
            if self.state(number) in order and not (self.state(number) is State.DRAINING and number in others)
        ]
        return sorted(free, key=lambda number: (order[self.state(number)], number))

    def _fill_places(self) -> None:
        """Count no more places of lost engines than are left."""
        self.num_given_up = max(0, min(self.num_given_up, self.num_wanted - len(self.present())))

    def _move(self, engine_id: int, state: State, reason: str = "") -> None:
        member = self._members[engine_id]
        if member.state is not state:
            self._put(msgspec.structs.replace(member, state=state, reason=reason))

    def _put(self, member: Member) -> None:
        self._members[member.engine_id] = self._news[member.engine_id] = member

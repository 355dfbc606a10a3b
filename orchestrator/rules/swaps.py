"""This rule decides which engine stages which policy, which engines take new work, and which buffers no engine reads any more.

Every engine moves at its own pace: it has at most one order open, and when that ends it gets the newest policy there is, whatever was
published in between. So an engine reads at most two buffers, the one it serves from and the one it was told to fetch, and every other
buffer but the newest can be handed back at once.

Where some engines take turns with the trainer and others have devices of their own, a policy lies twice: where it is trained, for the
former, and in a copy, for the latter. Each is handed back by those that read it.

An engine whose swap fails or is late is fenced: it ends its running sequences under its old version, takes no new ones, and is refilled
with the newest policy until it holds one. More than `MAX_REFILLS` refusals in a row of the *same* policy end the refilling; the next policy
is a new chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

MAX_REFILLS = 2
"""Times an engine is told again to fetch a policy that it refused. A larger value helps against faults that pass slowly, and repeats
errors.
"""
MAX_UNORDERED = 8
"""Policies that one process may refuse although this orchestrator never told it to fetch them: an earlier orchestrator did, or an earlier
trainer, whose buffers are gone with it. A larger value only lets a dishonest one fill the journal.
"""

Age = tuple[int, int]
"""The pair (rollback epoch, version), which orders policies. A rollback begins a rollback epoch, so ages never fall."""
NOTHING: Age = (-1, -1)
"""Held by an engine that is asleep: any policy is newer, also the one that it had."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A published policy."""

    age: Age
    buffer: str
    digest: str
    copy: str = ""
    """Its buffer for engines that have devices of their own, where others take turns with the trainer; empty where all read `buffer`."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Swap:
    """The state of one engine's swaps."""

    held: Age = (0, 0)
    """The policy that the engine samples under."""
    ordered: Age | None = None
    """The policy that it was told to fetch and has neither committed nor refused."""
    fault: str = ""
    """The reason why it is fenced, in the engine's own words; empty while it takes new work."""
    num_refusals: int = 0
    """Refusals of the newest policy, in a row."""
    needs_whole: bool = False
    """True after it refused a policy, until it takes one: changes might not fit over what it holds."""
    is_late: bool = False
    """True where its open order has lasted too long."""
    num_unordered: int = 0
    """Policies that it refused although it was not told to fetch them."""
    staged: Age | None = None
    """The last policy that it said it has staged."""
    is_pinned: bool = False
    """True while it keeps the policy it holds, for an evaluation, and is told of no other."""

    @property
    def is_hopeless(self) -> bool:
        """True where it is fenced and no open order could change that; only another policy, or a late answer, can."""
        return bool(self.fault) and (self.is_late or self.num_refusals > MAX_REFILLS)


class Swaps:
    """Every engine's place in the sequence of policies. Messages may repeat and come in any order."""

    def __init__(self, *, reads_copies: Callable[[int], bool] = lambda engine_id: False) -> None:
        """`reads_copies` says whether an engine fetches the copies of policies."""
        self._reads_copies = reads_copies
        self.newest: Policy | None = None
        self.rollback_epoch = 0
        """The newest rollback epoch that a trainer or an engine has named; it outlives the trainer that began it."""
        self._swaps: dict[int, Swap] = {}
        self._buffers: dict[Age, str] = {}
        """Buffers not handed back."""
        self._copies: dict[Age, str] = {}
        """Those of copies."""
        self._announced: set[Age] = set()
        """Policies whose buffers are known, or were handed back."""

    def __getitem__(self, engine_id: int) -> Swap:
        return self._swaps.setdefault(engine_id, Swap())

    def left(self, engine_id: int) -> None:
        """Forget an engine that is lost, and reads nothing any more."""
        self._swaps.pop(engine_id, None)

    def forget_buffers(self) -> None:
        """Forget the buffers of a trainer that is gone: no order can be fulfilled, and refusals may have been due to its end."""
        self.newest = None
        self._buffers.clear()
        self._copies.clear()
        self._announced.clear()
        for swap in self._swaps.values():
            swap.ordered, swap.is_late, swap.fault, swap.num_refusals = None, False, "", 0

    def published(self, policy: Policy) -> None:
        """Note a policy.

        To an orchestrator that takes another's place a trainer may tell of older ones after a new one: these have buffers, too.
        """
        if policy.age in self._announced:
            return
        self._announced.add(policy.age)
        self._buffers[policy.age] = policy.buffer
        if policy.copy:
            self._copies[policy.age] = policy.copy
        if self.newest is not None and policy.age < self.newest.age:
            return
        self.newest, self.rollback_epoch = policy, max(self.rollback_epoch, policy.age[0])
        for swap in self._swaps.values():
            swap.num_refusals = 0

    def joined(self, engine_id: int, held: Age = (0, 0)) -> None:
        """Note that an engine announces itself. No order to it is known, whatever an earlier engine or orchestrator did."""
        self._swaps[engine_id] = Swap(held=held)
        self.rollback_epoch = max(self.rollback_epoch, held[0])

    def next_order(self, engine_id: int) -> Policy | None:
        """Return the policy that the engine is to fetch now; None while it has an order, is pinned, holds the newest, or refused it too
        often.
        """
        swap = self[engine_id]
        if (
            self.newest is None
            or (swap.is_pinned and swap.held != NOTHING)
            or swap.ordered is not None
            or swap.held >= self.newest.age
            or swap.num_refusals > MAX_REFILLS
        ):
            return None
        swap.ordered = self.newest.age
        return self.newest

    def buffer_of(self, policy: Policy, engine_id: int) -> str:
        """Return the buffer from which an engine fetches a policy."""
        return policy.copy if self._reads_copies(engine_id) else policy.buffer

    def pin(self, engine_id: int, *, is_pinned: bool) -> None:
        """Have an engine keep what it holds once its open order has ended, or have it follow new policies again."""
        self[engine_id].is_pinned = is_pinned

    def fell_asleep(self, engine_id: int) -> None:
        """Note that an engine has given its policy away. Its order has ended, one way or the other."""
        swap = self[engine_id]
        swap.held, swap.ordered, swap.is_late = NOTHING, None, False

    def is_asleep(self, engine_id: int) -> bool:
        """Return whether an engine holds no policy."""
        return self[engine_id].held == NOTHING

    def not_sent(self, engine_id: int) -> None:
        """Note that the order could not be sent; the next policy, or the engine that takes its place, is a new chance."""
        self[engine_id].ordered = None

    def staged(self, engine_id: int, age: Age) -> bool:
        """Note that the engine has staged the policy of this age; return False where that was known."""
        swap = self[engine_id]
        was_known, swap.staged = swap.staged == age, age
        return not was_known

    def committed(self, engine_id: int, age: Age) -> bool:
        """Note that the engine samples under the policy of this age; return False where that was known."""
        swap = self[engine_id]
        is_old = swap.held == NOTHING and swap.ordered is None  # said before it fell asleep
        self._end_order(swap, age)
        if age <= swap.held or is_old:
            return False
        swap.held, swap.fault, swap.num_refusals, swap.needs_whole = age, "", 0, False
        return True

    def may_refuse(self, engine_id: int, age: Age) -> bool:
        """Return whether the engine was told to fetch the policy of this age, or has not yet refused too many that it was not told of."""
        swap = self[engine_id]
        swap.num_unordered += swap.ordered is None or swap.ordered > age
        return swap.num_unordered <= MAX_UNORDERED

    def refused(self, engine_id: int, age: Age, error: str) -> bool:
        """Fence an engine that could not take a policy; return False where it has moved past that policy."""
        swap = self[engine_id]
        self._end_order(swap, age)
        if age <= swap.held:
            return False
        swap.fault, swap.needs_whole = f"refused policy {age[1]}: {error}", True
        if self.newest is not None and age == self.newest.age:
            swap.num_refusals += 1
        return True

    def late(self, engine_id: int, age: Age, reason: str) -> bool:
        """Fence an engine that has had the order for this age too long; its order stays open. Return False where the order has ended
        since.
        """
        swap = self[engine_id]
        if swap.ordered != age:
            return False
        swap.fault, swap.is_late = reason, True
        return True

    def held_by_all(self) -> int | None:
        """Return the oldest version that any engine samples under; None where one needs a whole policy, or is of an earlier rollback
        epoch.
        """
        if any(swap.needs_whole or swap.held[0] != self.rollback_epoch for swap in self._swaps.values()):
            return None
        return min((swap.held[1] for swap in self._swaps.values()), default=None)

    def take_free_buffers(self) -> list[str]:
        """Return the buffers that no engine reads or will be told to read, oldest first, each once."""
        return [*self._take_free(self._buffers, of_copies=False), *self._take_free(self._copies, of_copies=True)]

    def _take_free(self, buffers: dict[Age, str], *, of_copies: bool) -> list[str]:
        readers = [swap for engine_id, swap in self._swaps.items() if self._reads_copies(engine_id) is of_copies]
        used = {swap.held for swap in readers} | {swap.ordered for swap in readers}
        if self.newest is not None:
            used.add(self.newest.age)
        names = {buffers[age] for age in used if age in buffers}  # one buffer may hold every policy in turn
        old = [buffers.pop(age) for age in sorted(buffers) if age not in used]
        return [name for name in dict.fromkeys(old) if name not in names]

    def _end_order(self, swap: Swap, age: Age) -> None:
        if swap.ordered is not None and swap.ordered <= age:
            swap.ordered, swap.is_late = None, False

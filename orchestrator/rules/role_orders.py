"""RoleOrders turns what `rules.roles` plans into orders for a live run, and follows each until it is over, taken back or overruled.

A layout counts units, orders count engines, trainer ranks and engines or processes of the model that scores, as `pipelinerl scale` does. So
an order by hand is seen by its numbers: they are others than this rule's. It wins, whatever is under way: who gives it may know what no
measurement says. After `HOLD_WINDOWS` windows the rule plans from what was asked for, which is its pool from then on.

One order changes who has which devices, or the ranks of each engine (`tensor_parallel_size`), never both, as `pipelinerl scale` refuses
both at once. What engines of ranks that the run has not had would do is a guess from those that it has; once it has had them, what they
did is remembered, so that a guess which was wrong costs one change there and one back.

Engines that are lost and given up (`rules.membership`) count in orders, since their places stay open, and not in layouts: the rule shares
what there is.

What has to outlive the orchestrator is its `record`. Who follows goes on with the change under way: by what the run was asked for it is
carried out, was taken back meanwhile, or has still to begin, which counts as taken back. It gets its deadline anew.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

import msgspec

from orchestrator.rules.pass_profile import PassSeconds
from orchestrator.rules.roles import Change, EngineProfile, Layout, Roles, Window
from orchestrator.rules.switch_seconds import SwitchSeconds
from pipelinerl.config.scaling import Units
from pipelinerl.runtime.elastic_roles import EnginePasses, RoleChange, RolesRecord

FIRST_WINDOW = "how contexts drift shows with the next window"
"""Why a layout that would pay is not ordered."""


class Word(enum.StrEnum):
    """What a decision says."""

    STAYS = "stays"
    """No other layout pays, or only one window was seen so far."""
    BEGINS = "begins"
    """Another layout is ordered."""
    TAKEN = "taken"
    """Everybody has taken up their role."""
    LATE = "late"
    """It has not ended in time: the layout before is ordered again."""
    TAKEN_BACK = "taken back"
    """Whoever carries it out has gone back to the layout before, or has refused it."""
    BY_HAND = "by hand"
    """Somebody has asked for another layout."""
    LOST = "lost"
    """Engines are given up until they come again: the others are shared without them."""
    AGAIN = "again"
    """Fewer are given up than before: they have come again, or others are to take their places."""


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """What `pipelinerl scale` would ask for."""

    engines: int
    trainer: int
    """Ranks."""
    scorers: int = 0
    """Engines, or processes, of the model that scores; 0 where none change."""
    tensor_parallel_size: int = 1
    """Of each engine."""
    scored_by: str = ""
    """That model: `prm`, or the key of a reward model's section; see `Units`."""

    def __str__(self) -> str:
        size = f" tensor_parallel_size={self.tensor_parallel_size}" if self.tensor_parallel_size > 1 else ""
        return f"engines={self.engines}{size} trainer={self.trainer}" + (f" {self.scored_by}={self.scorers}" if self.scorers else "")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its numbers, in this order."""
        return self.engines, self.trainer, self.scorers, self.tensor_parallel_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A live run at one moment."""

    wanted: Orders
    """What it was asked for last."""
    num_given_up: int = 0
    """Of these, engines that are lost and given up."""
    is_settled: bool
    """The trainer does not change its ranks."""
    is_away: bool
    """No trainer is there, as another one starts."""
    is_whole: bool
    """It is settled, and every engine and replica that was asked for is there, but for those given up, and no other."""
    is_short: bool = False
    """Nobody is missing but engines that are lost."""
    step: int
    """Steps that were trained; those that are trained again count once."""
    now_s: float
    reason: str = ""
    """Why the last order was refused, or given up; empty where it was not."""
    given_up: str = ""
    """Which engines were given up, and why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided; `orders` are to be carried out."""

    word: Word
    now: Orders
    then: Orders
    orders: Orders | None = None
    reason: str = ""


class RoleOrders:
    """The orders of one run."""

    def __init__(
        self, roles: Roles, units: Units, *, wanted: Orders, sizes: Sequence[int] = (), num_given_up: int = 0, now_s: float = 0.0
    ) -> None:
        """`wanted` is what the run was asked for when this orchestrator began, with engines that are given up; `sizes` are each
        `tensor_parallel_size` that the rule may order, besides the present one.
        """
        self.roles, self.seconds = roles, SwitchSeconds()
        self._units, self._num_given_up, self._sizes = units, num_given_up, sorted({wanted.tensor_parallel_size, *sizes})
        self._ordered = self._before = wanted
        self._has_units = self._layout_of(wanted) is not None
        self._began_s = now_s
        self._may_be = roles.pool.may_be
        self._passes: dict[int, EnginePasses] = {}
        """Of engines of each width that the run has had."""

    @property
    def may_plan(self) -> bool:
        """True where no change is under way, and what was asked for are whole units."""
        return not self.is_changing and self._has_units

    @property
    def is_changing(self) -> bool:
        """True until everybody has taken up the role that was ordered, or the change was given up."""
        return self.roles.change is not None

    @property
    def record(self) -> RolesRecord:
        """What an orchestrator that follows has to know."""
        roles, seconds, change = self.roles, self.seconds, self.roles.change
        return RolesRecord(
            ordered=self._ordered.numbers,
            epoch=roles.epoch,
            next_plan=roles.next_plan,
            num_failed=roles.num_failed,
            change=change
            and RoleChange(
                before=self._before.numbers,
                saved_s=change.saved_s,
                cost_s=change.cost_s,
                deadline_s=change.deadline_s,
            ),
            first_s=seconds.first_s,
            num_switches=seconds.num,
            switches_s=seconds.switches_s,
            num_trainer_switches=seconds.num_of_trainer,
            away_s=seconds.all_away_s,
            replicas=roles.replicas.worth,
            replicas_context=roles.replicas.context,
            passes={width: msgspec.structs.replace(one, slowness=roles.slowness.get(width)) for width, one in self._passes.items()},
        )

    def restore(self, earlier: RolesRecord) -> None:
        """Go on from what an earlier orchestrator has left."""
        self.seconds = SwitchSeconds(
            first_s=earlier.first_s,
            num=earlier.num_switches,
            switches_s=earlier.switches_s,
            num_of_trainer=earlier.num_trainer_switches,
            away_s=earlier.away_s,
        )
        self._passes = dict(earlier.passes)
        self.roles.replicas.worth, self.roles.replicas.context = dict(earlier.replicas), earlier.replicas_context
        self.roles.slowness = {width: one.slowness for width, one in self._passes.items() if one.slowness is not None}
        change = earlier.change
        self._before = self._ordered = self._orders_of(earlier.ordered)
        if change is not None:
            self._before = self._orders_of(change.before)
        layout, after = self._layout_of(self._before), self._layout_of(self._ordered)
        self._has_units = layout is not None
        if layout is None:
            return
        under_way = None
        if change is not None and after is not None:
            said = {"saved_s": change.saved_s, "cost_s": change.cost_s, "deadline_s": change.deadline_s}
            under_way = Change(epoch=earlier.epoch, before=layout, after=after, **said)
        self.roles.restore(layout, under_way, epoch=earlier.epoch, next_plan=earlier.next_plan, num_failed=earlier.num_failed)

    def orders(self, layout: Layout) -> Orders:
        """Return the orders that make a layout."""
        found = orders_of(layout, self._units)
        return dataclasses.replace(found, engines=found.engines + self._num_given_up)

    def follow(self, seen: Seen) -> Decision | None:
        """Return what has become of the change under way, or that somebody else has given an order; None where there is no news."""
        change = self.roles.change
        if change is None:
            return self._taken_over(seen, Word.BY_HAND) if seen.wanted != self._ordered else self._counted(seen)
        self.seconds.trainer_is(is_away=seen.is_away, now_s=seen.now_s)
        if seen.wanted != self._ordered:
            is_back = seen.wanted == self._before
            return self._taken_over(seen, Word.TAKEN_BACK if is_back else Word.BY_HAND) if seen.is_settled else None
        adds_engines = change.after.engines > change.before.engines  # else a lost one is none of this change
        if seen.is_whole or (seen.is_short and seen.is_settled and not adds_engines):
            return self._done(change, seen)
        is_late = seen.is_settled and seen.now_s - self._began_s > change.deadline_s  # a trainer that changes has deadlines of its own
        return self._late(change, seen) if is_late else None

    @property
    def engines_of_unit(self) -> int:
        """Engines that a unit holds now."""
        return self._units.engines(self._size(self.roles.layout))

    def plan(self, seen: Seen, window: Window, passes: Mapping[int, EnginePasses], *, slots: int) -> Decision | None:
        """Return what a window that has ended says; None where nothing is to be planned. `passes` are those of engines of each width that
        were seen, the present one among them, and every engine decodes `slots` sequences at once.
        """
        if not self.may_plan or not self.roles.is_due(seen.step):
            return None
        self._passes |= passes
        self.roles.pool = dataclasses.replace(
            self.roles.pool,
            profiles={size * self._units.stages: self._profile(size * self._units.stages, slots) for size in self._sizes},
            switch_s=self.seconds.switch_s,
            away_s=self.seconds.away_s,
            may_be=lambda layout: self._is_one_order(layout) and self._may_be(layout),
        )
        change = self.roles.plan(seen.step, window)
        if change is not None:
            return self._begin(change, self.orders(change.after), seen, Word.BEGINS)
        assert self.roles.weighed is not None, "it was due, and there was a window"
        reason = FIRST_WINDOW if self.roles.weighed.pays and self.roles.is_first_window else ""
        return Decision(word=Word.STAYS, now=self._ordered, then=self.orders(self.roles.weighed.then), reason=reason)

    def _profile(self, width: int, slots: int) -> EngineProfile:
        """Return what engines of so many ranks do; where the run has had none, a guess from those that it has."""
        present = self.roles.layout.width
        seen, is_guess = self._passes.get(width) or self._passes[present], width not in self._passes
        passes_s, times = PassSeconds(a=seen.a, b=seen.b, c=seen.c), width / present if is_guess else 1.0
        return EngineProfile(pass_s=passes_s.over(times), slots=slots, room=math.inf if seen.room is None else seen.room * times)

    def _is_one_order(self, layout: Layout) -> bool:
        now = self.roles.layout
        has_other_roles = (layout.trainers, layout.scorers) != (now.trainers, now.scorers)
        return layout.width == now.width or not (has_other_roles or self._num_given_up)

    def _size(self, layout: Layout) -> int:
        return layout.width // self._units.stages

    def _orders_of(self, numbers: tuple[int, ...]) -> Orders:
        engines, trainer, scorers, *size = numbers  # earlier releases had no rule that changes it
        return Orders(engines, trainer, scorers, *(size or [self._ordered.tensor_parallel_size]), scored_by=self._units.scored_by)

    def _begin(self, change: Change, orders: Orders, seen: Seen, word: Word) -> Decision:
        now = self._before = self._ordered
        self._ordered, self._began_s = orders, seen.now_s
        self.seconds.began(seen.now_s)
        return Decision(word=word, now=now, then=orders, orders=orders)

    def _done(self, change: Change, seen: Seen) -> Decision:
        self.roles.done(change.epoch)
        self.seconds.ended(seen.now_s, of_trainer=change.after.trainers != change.before.trainers)
        return Decision(word=Word.TAKEN, now=self._before, then=self._ordered)

    def _late(self, change: Change, seen: Seen) -> Decision:
        if change.is_back or (back := self.roles.late(change.epoch, seen.step)) is None:
            return self._taken_over(seen, Word.LATE)  # there is nothing else to go back to
        return self._begin(back, self._before, seen, Word.LATE)

    def _taken_over(self, seen: Seen, word: Word) -> Decision:
        now, self._ordered = self._ordered, seen.wanted
        layout, why_not = self._shared(seen)
        self.roles.settle(layout, seen.step, has_failed=word is not Word.BY_HAND)
        reasons = {Word.TAKEN_BACK: seen.reason, Word.LATE: "nor has the change back, and there is nothing else to go back to"}
        return Decision(word=word, now=now, then=seen.wanted, reason=why_not or reasons.get(word, ""))

    def _counted(self, seen: Seen) -> Decision | None:
        """Share what there is anew, where more engines are given up than before, or fewer."""
        before = self._num_given_up
        if seen.num_given_up == before:
            return None
        layout, why_not = self._shared(seen)
        self.roles.share(layout)
        is_lost = seen.num_given_up > before
        reason = " ".join(filter(None, (seen.given_up if is_lost else "", why_not)))
        return Decision(word=Word.LOST if is_lost else Word.AGAIN, now=seen.wanted, then=seen.wanted, reason=reason)

    def _shared(self, seen: Seen) -> tuple[Layout, str]:
        """Return the layout that there is now; where that is of no whole units, the one before, and why nothing is planned."""
        self._num_given_up = seen.num_given_up
        layout = self._layout_of(seen.wanted)
        self._has_units = layout is not None
        there = dataclasses.replace(seen.wanted, engines=seen.wanted.engines - seen.num_given_up)
        why_not = f"{there} are no whole units of {self._units.devices} devices: nothing is planned until they are"
        return (self.roles.layout, why_not) if layout is None else (layout, "")

    def _layout_of(self, orders: Orders) -> Layout | None:
        there = dataclasses.replace(orders, engines=orders.engines - self._num_given_up)
        return layout_of(there, self._units)


def orders_of(layout: Layout, units: Units) -> Orders:
    """Return the orders that make a layout."""
    scorers = units.core_scorers + layout.scorers * units.scorers
    size = layout.width // units.stages
    ranks = units.core_ranks + layout.trainers * units.devices
    return Orders(layout.engines * units.engines(size), ranks, scorers, size, scored_by=units.scored_by)


def layout_of(orders: Orders, units: Units) -> Layout | None:
    """Return the layout that orders make; None where they are no whole units."""
    width = orders.tensor_parallel_size * units.stages
    further, scorers = orders.trainer - units.core_ranks, orders.scorers - units.core_scorers
    if min(orders.engines, width) < 1 or min(further, scorers) < 0 or units.devices % width:
        return None
    if orders.engines * width % units.devices or further % units.devices or (units.scorers and scorers % units.scorers):
        return None
    return Layout(
        engines=orders.engines * width // units.devices,
        width=width,
        trainers=further // units.devices,
        scorers=scorers // units.scorers if units.scorers else 0,
    )

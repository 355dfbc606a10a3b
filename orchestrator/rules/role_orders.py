"""RoleOrders turns what `rules.roles` plans into orders for a live run, and follows each until it is over, taken back or overruled.

A layout counts units, orders count engines, trainer ranks and engines of the process reward model, as `pipelinerl scale` does. So an order
by hand is seen by its numbers: they are others than this rule's. It wins, whatever is under way: who gives it may know what no
measurement says. After `HOLD_WINDOWS` windows the rule plans from what was asked for, which is its pool from then on.
"""

from __future__ import annotations

import dataclasses
import enum

from orchestrator.rules.pass_profile import PassSeconds
from orchestrator.rules.roles import Change, EngineProfile, Layout, Roles, Window
from orchestrator.rules.switch_seconds import SwitchSeconds
from pipelinerl.config.scaling import Units


class Word(enum.StrEnum):
    """What a decision says."""

    STAYS = "stays"
    """No other layout pays."""
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


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """What `pipelinerl scale` would ask for."""

    engines: int
    trainer: int
    """Ranks."""
    prm: int = 0
    """Engines of the process reward model; 0 where none change."""

    def __str__(self) -> str:
        return f"engines={self.engines} trainer={self.trainer}" + (f" prm={self.prm}" if self.prm else "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A live run at one moment."""

    wanted: Orders
    """What it was asked for last."""
    is_settled: bool
    """The trainer does not change its ranks."""
    is_away: bool
    """No trainer is there, as another one starts."""
    is_whole: bool
    """It is settled, and every engine and replica that was asked for is there."""
    step: int
    """The newest policy."""
    now_s: float
    reason: str = ""
    """Why the last order was refused, or given up; empty where it was not."""


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

    def __init__(self, roles: Roles, units: Units, *, wanted: Orders) -> None:
        """`wanted` is what the run was asked for when this orchestrator began."""
        self.roles, self.seconds = roles, SwitchSeconds()
        self._units, self._ordered = units, wanted
        self._has_units = layout_of(wanted, units, width=roles.layout.width) is not None
        self._began_s = 0.0

    @property
    def may_plan(self) -> bool:
        """True where no change is under way, and what was asked for are whole units."""
        return self.roles.change is None and self._has_units

    def orders(self, layout: Layout) -> Orders:
        """Return the orders that make a layout."""
        return orders_of(layout, self._units)

    def follow(self, seen: Seen) -> Decision | None:
        """Return what has become of the change under way, or that somebody else has given an order; None where there is no news."""
        change = self.roles.change
        if change is None:
            return self._taken_over(seen, Word.BY_HAND) if seen.wanted != self._ordered else None
        self.seconds.trainer_is(is_away=seen.is_away, now_s=seen.now_s)
        if seen.wanted != self._ordered:
            is_back = seen.wanted == self.orders(change.before)
            return self._taken_over(seen, Word.TAKEN_BACK if is_back else Word.BY_HAND) if seen.is_settled else None
        if seen.is_whole:
            return self._done(change, seen)
        is_late = seen.is_settled and seen.now_s - self._began_s > change.deadline_s  # a trainer that changes has deadlines of its own
        return self._late(change, seen) if is_late else None

    def plan(self, seen: Seen, window: Window, passes_s: PassSeconds, *, slots: int, room: float) -> Decision | None:
        """Return what a window that has ended says; None where nothing is to be planned."""
        if not self.may_plan or not self.roles.is_due(seen.step):
            return None
        width = self.roles.layout.width
        profile = EngineProfile(pass_s=passes_s, slots=slots, room=room)
        seconds = {"switch_s": self.seconds.switch_s, "away_s": self.seconds.away_s}
        self.roles.pool = dataclasses.replace(self.roles.pool, profiles={width: profile}, **seconds)
        change = self.roles.plan(seen.step, window)
        if change is not None:
            return self._begin(change, seen, Word.BEGINS)
        assert self.roles.weighed is not None, "it was due, and there was a window"
        return Decision(word=Word.STAYS, now=self._ordered, then=self.orders(self.roles.weighed.then))

    def _begin(self, change: Change, seen: Seen, word: Word) -> Decision:
        now, self._ordered, self._began_s = self._ordered, self.orders(change.after), seen.now_s
        self.seconds.began(seen.now_s)
        return Decision(word=word, now=now, then=self._ordered, orders=self._ordered)

    def _done(self, change: Change, seen: Seen) -> Decision:
        self.roles.done(change.epoch)
        self.seconds.ended(seen.now_s)
        return Decision(word=Word.TAKEN, now=self.orders(change.before), then=self._ordered)

    def _late(self, change: Change, seen: Seen) -> Decision:
        if change.is_back or (back := self.roles.late(change.epoch, seen.step)) is None:
            return self._taken_over(seen, Word.LATE)  # there is nothing else to go back to
        return self._begin(back, seen, Word.LATE)

    def _taken_over(self, seen: Seen, word: Word) -> Decision:
        now, self._ordered = self._ordered, seen.wanted
        layout = layout_of(seen.wanted, self._units, width=self.roles.layout.width)
        self._has_units = layout is not None
        reason = seen.reason if word is Word.TAKEN_BACK else ""
        if layout is None:
            reason = f"{seen.wanted} are no whole units of {self._units.devices} devices: nothing is planned until they are"
        self.roles.settle(layout or self.roles.layout, seen.step)
        return Decision(word=word, now=now, then=seen.wanted, reason=reason)


def orders_of(layout: Layout, units: Units) -> Orders:
    """Return the orders that make a layout."""
    prm = units.core_prms + layout.scorers * units.prms
    return Orders(layout.engines * units.engines, units.core_ranks + layout.trainers * units.devices, prm)


def layout_of(orders: Orders, units: Units, *, width: int) -> Layout | None:
    """Return the layout that orders make; None where they are no whole units."""
    further, scorers = orders.trainer - units.core_ranks, orders.prm - units.core_prms
    if orders.engines % units.engines or min(further, scorers) < 0 or further % units.devices or (units.prms and scorers % units.prms):
        return None
    return Layout(
        engines=orders.engines // units.engines,
        width=width,
        trainers=further // units.devices,
        scorers=scorers // units.prms if units.prms else 0,
    )

"""Roles decides what the devices of an elastic pool do until the next plan: write, train beside the core, or score.

The core group of trainer replicas never changes. Beside it a run has a pool of units, a node each, say; every unit holds engines of some
width (the devices of one engine), further replicas of the trainer, or scorers (a process reward model, a reward model).

There are two time scales, as in OrchestrRL (arXiv 2601.01209) and Libra (arXiv 2606.03077). This rule is the slow one: once a window of
steps it plans from the rates of the last window. The fast one is `rules.migration.relieve`, which moves single sequences between engines.

The speed of a layout is that of its slowest part, in sampled tokens per second:

    R = engines * n / (pass(n, context) + n * prompts) / slowness    n = the sequences for which an engine has slots, room and work
    T = (core + further replicas) * rate of a replica while it works
    S = (core + further scorers) * rate of a scorer while it works, where devices score

`prompts` are the seconds that an engine computes prompts for each token that it samples, where its profile says what a prompt's token
takes. R is not what engines have written: while the trainer is slower, admission holds them back, and they look as fast as it is. So R
follows from a profile of a pass and from `slowness`, how much longer than that passes took. Where only the trainer has waited, what was
written is all that engines can, unevenness and tails included: they, and narrower ones, are taken to be that much slower from then on.
The rate of a replica is for what is being written: the rows that it trains are older, and may be of another load. Replicas are taken for
proportional until the run has seen that they are not (`rules.replica_worth`).

Units change only at a swap boundary, and only where the `HORIZON` windows to come save more than the change costs:

    sum over windows of (tokens / speed now - tokens / speed then) > (1 + MARGIN) * cost
    cost = away_s + (switch_s - away_s) * (1 - speed meanwhile / speed now) + KV caches computed anew

Contexts drift from window to window (`rules.drift`), so what is faster now may be slower soon: nothing changes before a second window has
shown how. `away_s` are the seconds in which nothing is trained, where the core starts again with every change of the replicas beside it, as
it does in a live run; else 0.

Each change has an epoch. It is over when every unit says so; after its deadline the layout before it is taken up again, and the rule plans
nothing for `HOLD_WINDOWS`. The same holds where whoever carries it out has taken it back, and where a person has asked for a layout of
their own, which the rule then plans from. Each change that fails right after another one doubles this rest, up to `MAX_REST` times: a
layout that never starts costs two restarts with every try. Without a measurement it plans nothing at all.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from orchestrator.rules.drift import Drift
from orchestrator.rules.replica_worth import ReplicaWorth

MARGIN = 0.5
"""Part of a change's cost that it has to save beyond it. A larger value follows drifts later; a smaller one changes to and fro on noise."""
HORIZON = 4
"""Windows for which a layout is expected to be the better one. A larger value pays for dearer changes, and trusts drifts to go on."""
LEAST_WAIT = 0.1
"""Part of the time for which the trainer has waited, and engines have not, where these are taken for the slower part."""
LEAST_GAIN = 0.05
"""Part by which the other layout has to be faster, whatever it costs: rates of a window are no surer than that."""
HOLD_WINDOWS = 2
"""Windows without a plan after a change that did not end in time. 0 would try the same one again at once."""
MAX_REST = 64
"""Times by which a rest may become longer: with `HOLD_WINDOWS`, 128 windows. A larger value finds out later that a cause is gone."""
WINDOW_SWITCHES = 2.0
"""Seconds of a window over those of a change. With 2, a change that stops everything has to save a fifth of the time to pay within
`HORIZON`. A larger value follows drifts later; a smaller one lets hardly any change pay."""
PATIENCE = 3.0
"""Times its expected seconds that a change may take."""


class Role(enum.StrEnum):
    """What a unit does."""

    ENGINE = "engine"
    TRAINER = "trainer"
    SCORER = "scorer"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many units have each role."""

    engines: int
    width: int
    """Devices of one engine."""
    trainers: int = 0
    scorers: int = 0

    def __str__(self) -> str:
        parts = [f"{self.engines} units of engines of {self.width}", f"{self.trainers} training", f"{self.scorers} scoring"]
        return ", ".join(part for part in parts if not part.startswith("0 "))

    @property
    def num_units(self) -> int:
        return self.engines + self.trainers + self.scorers

    def common(self, other: Layout) -> Layout:
        """Return the units that would do the same in both; engines of another width are others."""
        return Layout(
            engines=min(self.engines, other.engines) if self.width == other.width else 0,
            width=self.width,
            trainers=min(self.trainers, other.trainers),
            scorers=min(self.scorers, other.scorers),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """An engine of one width."""

    pass_s: Callable[[float, float], float]
    """Seconds of a pass for so many sequences, each with so many tokens."""
    slots: float
    room: float
    """Tokens that its KV cache holds."""
    prompt_token_s: float = 0.0
    """Seconds for each token of a prompt that it computes; 0 where they are in `pass_s`."""

    def rate(self, *, context: float, most: float, prompt_tokens: float = 0.0) -> float:
        """Return the tokens per second of one engine that has work for at most `most` sequences, and computes so many tokens of prompts
        for each that it samples.
        """
        num = max(1.0, min(self.slots, self.room / max(1.0, context), most))
        return num / (self.pass_s(num, context) + num * prompt_tokens * self.prompt_token_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What may change, and what does not."""

    unit_devices: int
    unit_replicas: float
    """Replicas of the trainer that a unit holds; 0 where it cannot train."""
    core_replicas: float
    core_scorers: float = 0.0
    """Scorers that the run always has, in units."""
    profiles: Mapping[int, EngineProfile]
    """Of engines, by width."""
    most_running: float
    """Sequences that the staleness bound admits to all engines."""
    switch_s: float
    """Seconds from the end of one role until a unit has taken up another: processes, weights, groups."""
    away_s: float = 0.0
    """Seconds in which the core does not train, where replicas join or leave it; more than `switch_s` where other changes are shorter."""
    least_deadline_s: float = 0.0
    """Seconds that a change may take in any case: whoever carries it out has deadlines of their own."""
    last_step: float = math.inf
    """The step with which the run ends, and with it what a change saves."""
    may_be: Callable[[Layout], bool] = lambda layout: True
    """Returns whether the run could have this layout."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the last window has shown."""

    tokens: float
    """Sampled tokens of the steps of a window."""
    num_steps: int
    """How many these are."""
    context: float
    """Mean tokens of a sequence while it is written, its prompt among them."""
    slowness: float
    """Seconds of the engines' passes over those of their profile."""
    prompt_tokens: float = 0.0
    """Tokens of prompts that engines compute for each that they sample."""
    replica_rate: float
    """Sampled tokens per second that a replica trains while it works."""
    row_rate: float = 0.0
    """Tokens of rows per second of the same; 0 where nobody says."""
    written_rate: float = 0.0
    """Sampled tokens per second that all engines have written."""
    trainer_wait: float = 0.0
    """Part of the time in which the trainer waited for rows."""
    held_back: float = 0.0
    """Part of the time in which the staleness bound held engines back: they were ahead, or waited for the last of a step."""
    scorer_rate: float | None = None
    """Sampled tokens per second that a unit scores while it works; None where no device scores."""
    scored_most: float | None = None
    """Sampled tokens per second that scorers which never change can score; None where there are none."""
    held_tokens: float = 0.0
    """Tokens in the KV caches of one unit."""
    recompute_s: float = 0.0
    """Seconds in which one engine computes a token of a cache anew."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """What a window has said for and against the best of the other layouts; where that is the present one, for nothing."""

    now: Layout
    then: Layout
    speed_now: float
    """Sampled tokens per second."""
    speed_then: float
    saved_s: float
    """Seconds that `HORIZON` windows save, or as many as the run has left."""
    cost_s: float

    @property
    def pays(self) -> bool:
        """True where the other layout is to be taken up."""
        is_faster = self.then != self.now and self.speed_then >= (1 + LEAST_GAIN) * self.speed_now
        return is_faster and self.saved_s > (1 + MARGIN) * self.cost_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the layout."""

    epoch: int
    before: Layout
    after: Layout
    saved_s: float
    cost_s: float
    deadline_s: float
    """Seconds that it may take."""

    @property
    def is_back(self) -> bool:
        """True where it takes up again what an earlier one had left."""
        return not self.saved_s


class Roles:
    """The layout of the pool, and the change that is under way."""

    def __init__(self, pool: Pool, layout: Layout, *, window_steps: int) -> None:
        """`layout` is the one that the run begins with; windows have `window_steps` steps at least."""
        self.pool, self.layout = pool, layout
        """The pool may be exchanged for what is known of it by now."""
        self.epoch = 0
        self.change: Change | None = None
        """The change under way."""
        self.weighed: Weighed | None = None
        """What the last window has said; None before the first."""
        self.num_failed = 0
        """Changes in a row that were given up or taken back."""
        self.next_plan = window_steps
        """The first step after which it plans."""
        self._least_steps = self._window_steps = window_steps
        self.drift, self.replicas = Drift(), ReplicaWorth()
        """Of contexts, whatever the layout is, and of the trainer's."""
        self.slowness: dict[int, float] = {}
        """By the width of engines, as last seen."""

    @property
    def is_first_window(self) -> bool:
        """Return whether the last window was the first one, so that nobody knows how contexts drift: no change begins with it."""
        return not self.drift.is_known

    def is_due(self, step: int) -> bool:
        """Return whether a window ends with the policy of this step."""
        return self.change is None and step >= self.next_plan

    def plan(self, step: int, window: Window | None) -> Change | None:
        """Return the change that begins at this swap boundary; None where the layout stays."""
        if not self.is_due(step) or window is None:
            return None
        self.next_plan, self._window_steps = step + self._least_steps, window.num_steps
        self._note_slowness(window)
        self.replicas.note(self.layout.trainers, window.row_rate, context=window.context)
        contexts = self.drift.contexts(window.context, number=HORIZON)
        horizon = min(HORIZON, max(1e-9, (self.pool.last_step - step) / window.num_steps))
        weighed = self.weighed = self._weigh([dataclasses.replace(window, context=context) for context in contexts], horizon=horizon)
        if not weighed.pays or self.is_first_window or step >= self.pool.last_step:
            return None
        step_s = window.tokens / window.num_steps / weighed.speed_now
        return self._begin(weighed.then, saved_s=weighed.saved_s, cost_s=weighed.cost_s, step_s=step_s)

    def done(self, epoch: int) -> None:
        """Note that every unit has taken up its role. A change that was given up meanwhile is another epoch's."""
        if self.change is not None and self.change.epoch == epoch:
            self.num_failed = self.num_failed if self.change.is_back else 0
            self.layout, self.change = self.change.after, None

    def late(self, epoch: int, step: int) -> Change | None:
        """Give a change up whose deadline has passed: return the one that takes it back; None where it is over."""
        late = self.change
        if late is None or late.epoch != epoch:
            return None
        self.layout = late.after
        self._rest(step, has_failed=True)
        return self._begin(late.before, saved_s=0.0, cost_s=late.cost_s, step_s=late.deadline_s / PATIENCE)

    def settle(self, layout: Layout, step: int, *, has_failed: bool = False) -> None:
        """Take up a layout that is not this rule's choice: one that was taken back by whoever carries changes out, or a person's."""
        self.layout, self.change = layout, None
        self._rest(step, has_failed=has_failed)

    def restore(self, layout: Layout, change: Change | None, *, epoch: int, next_plan: int, num_failed: int) -> None:
        """Go on where the rule of an earlier process was: with this layout, or under way from it."""
        self.layout, self.change, self.epoch, self.next_plan, self.num_failed = layout, change, epoch, next_plan, num_failed

    def share(self, layout: Layout) -> None:
        """Take up a layout with other units than before: some are lost, or have come again. Nothing rests for that."""
        self.layout = layout

    def _rest(self, step: int, *, has_failed: bool) -> None:
        self.num_failed = self.num_failed + 1 if has_failed else 0
        times = min(MAX_REST, 2 ** max(0, self.num_failed - 1))
        self.next_plan = step + times * HOLD_WINDOWS * self._window_steps

    def _weigh(self, windows: Sequence[Window], *, horizon: float) -> Weighed:
        """Compare the present layout with the one that is fastest in the windows to come, of those that the run could have; of two that
        are as fast, the one that keeps most units. The run ends after `horizon` windows, or goes on.
        """
        weights, now = [min(1.0, horizon - number) for number in range(math.ceil(horizon))], windows[0]

        @functools.cache
        def spent_s(layout: Layout) -> float:
            return sum(weight * now.tokens / self._speed(layout, window) for weight, window in zip(weights, windows, strict=False))

        layouts = sorted(self._layouts(now), key=lambda layout: (spent_s(layout), -layout.common(self.layout).num_units))
        then = next(layout for layout in layouts if layout == self.layout or self.pool.may_be(layout))
        speed_now, speed_then = (horizon * now.tokens / spent_s(layout) for layout in (self.layout, then))
        saved_s = spent_s(self.layout) - spent_s(then)
        return Weighed(
            now=self.layout, then=then, speed_now=speed_now, speed_then=speed_then, saved_s=saved_s, cost_s=self._cost_s(then, now)
        )

    def _note_slowness(self, window: Window) -> None:
        slowness = window.slowness
        if window.trainer_wait > LEAST_WAIT > window.held_back and window.written_rate > 0:
            alone = dataclasses.replace(window, slowness=1.0, replica_rate=math.inf, scorer_rate=None, scored_most=None)
            slowness = max(slowness, speed(self.layout, self.pool, alone) / window.written_rate)
        self.slowness[self.layout.width] = slowness

    def _speed(self, layout: Layout, window: Window) -> float:
        slowness, present = self.slowness.get(layout.width, window.slowness), self.layout.width
        if layout.width < present:  # narrower engines have fewer sequences each, so they are no more even
            slowness = max(slowness, self.slowness[present])
        rate = window.replica_rate * self.replicas.over(layout.trainers, self.layout.trainers, context=window.context)
        return speed(layout, self.pool, dataclasses.replace(window, slowness=slowness, replica_rate=rate))

    def _begin(self, after: Layout, *, saved_s: float, cost_s: float, step_s: float) -> Change:
        self.epoch += 1
        deadline_s = max(self.pool.least_deadline_s, PATIENCE * (self.pool.switch_s + step_s))  # replicas leave at the end of a step
        self.change = Change(epoch=self.epoch, before=self.layout, after=after, saved_s=saved_s, cost_s=cost_s, deadline_s=deadline_s)
        return self.change

    def _layouts(self, window: Window) -> Iterator[Layout]:
        """Every layout of the pool with an engine."""
        units, pool = self.layout.num_units, self.pool
        for width in pool.profiles:
            for scorers in range(units if window.scorer_rate is not None else 1):
                for trainers in range(units - scorers if pool.unit_replicas else 1):
                    yield Layout(engines=units - scorers - trainers, width=width, trainers=trainers, scorers=scorers)

    def _cost_s(self, after: Layout, window: Window) -> float:
        """Return the seconds of the present layout that a change to another one costs."""
        stays = self.layout.common(after)
        num_leaving, num_staying = self.layout.engines - stays.engines, num_engines(stays, self.pool)
        meanwhile = self._speed(stays, window) / self._speed(self.layout, window)
        computed_s = num_leaving * window.held_tokens * window.recompute_s / max(1, num_staying or num_engines(after, self.pool))
        away_s = self.pool.away_s if after.trainers != self.layout.trainers else 0.0
        return away_s + max(0.0, self.pool.switch_s - away_s) * (1 - min(1.0, meanwhile)) + computed_s


def num_engines(layout: Layout, pool: Pool) -> int:
    """Return the engines of a layout."""
    return layout.engines * (pool.unit_devices // layout.width)


def speed(layout: Layout, pool: Pool, window: Window) -> float:
    """Return the sampled tokens per second of a layout: those of its slowest part."""
    num = num_engines(layout, pool)
    parts = [(pool.core_replicas + layout.trainers * pool.unit_replicas) * window.replica_rate]
    if num:
        profile, most = pool.profiles[layout.width], pool.most_running / num
        rate = profile.rate(context=window.context, most=most, prompt_tokens=window.prompt_tokens)
        parts.append(num * rate / window.slowness)
    else:
        parts.append(0.0)
    if window.scorer_rate is not None:
        parts.append((pool.core_scorers + layout.scorers) * window.scorer_rate)
    if window.scored_most is not None:
        parts.append(window.scored_most)
    return max(1e-9, min(parts))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit as it is."""

    unit_id: int
    role: Role
    width: int = 0
    """Of its engines; 0 in another role."""
    held_tokens: float = 0.0
    """Tokens in its KV caches."""


def assign(units: Sequence[Unit], after: Layout) -> dict[int, tuple[Role, int]]:
    """Return the role and the width that each unit which changes takes up: those stay that lose most by it."""
    missing = {(Role.ENGINE, after.width): after.engines, (Role.TRAINER, 0): after.trainers, (Role.SCORER, 0): after.scorers}
    changing: list[Unit] = []
    for unit in sorted(units, key=lambda unit: (-unit.held_tokens, unit.unit_id)):
        if missing.get((unit.role, unit.width), 0):
            missing[unit.role, unit.width] -= 1
        else:
            changing.append(unit)
    wanted = [key for key, count in missing.items() for _ in range(count)]
    return {unit.unit_id: key for unit, key in zip(changing, wanted, strict=True)}

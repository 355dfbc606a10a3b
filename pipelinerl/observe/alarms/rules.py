"""Rules over the figures of steps and evaluations; a plain class without a clock.

Every rule speaks of means over `WINDOW` steps, but for an engine that stands out, which one step shows. One that must tell
change from noise compares two windows by their standard errors.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from pipelinerl.config.alarm_names import AlarmName
from pipelinerl.observe.alarms.names import ALARMS
from pipelinerl.observe.fold.rows import Alarm, EvaluationRow, StepRow

WINDOW = 10
"""Steps of a mean. Fewer takes noise for news; more notices later."""
LOOKBACK = 100
"""Steps back that a drift is measured from."""
FLAT_AFTER = 50
"""Steps after which a reward that has not moved is told. Warm-up takes some tens."""
SOLVED = 0.9
"""Part of `algorithm.correct_reward` from which on little is left to learn: low entropy and equal rewards are then a success."""
ERRORS = 3.0
"""Standard errors beyond which two means differ."""
TRUNCATED, NO_SIGNAL, STALE = 0.5, 0.8, 0.25
"""Parts of one from which on they are told: samples cut off, groups without a gradient, groups dropped for their age."""
LEAST_ENTROPY = 0.05
"""Part of the entropy at the start."""
LEAST_ESS = 0.5
"""Effective sample size, part of one: below it less than half of what is trained counts."""
DRIFT = 2.0
"""Factor by which samples are longer or shorter than `LOOKBACK` steps ago."""
REPEATED, REPEATED_MORE = 0.3, 0.2
"""Part of one of all 4-grams that a sample has said before, and by how much that exceeds the run's start."""
MOVED = 0.05
"""Part of `algorithm.correct_reward`: a change of reward that is worth a word."""
FALLEN = 0.2
"""Part of itself that a component must lose to be told."""
MISMATCH = 1 / 3
"""Part of `trainer.max_mismatch_kl`, at which the run ends."""
_OFF_POLICY = "the effective sample size is {:.2f}: less than half of what is trained counts"


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """The figures of a step that the rules look at; None: not recorded."""

    step: int
    figures: Mapping[str, float | None]
    components: Mapping[str, float]


class Alarms:
    """Takes the journal's lines of steps and evaluations in their order, and says which alarms they raise and end."""

    def __init__(self, *, correct_reward: float = 1.0, max_mismatch_kl: float = 0.03) -> None:
        """`correct_reward`: of a completion that is right, the scale of every reward; both as configured."""
        self.active: dict[AlarmName, Alarm] = {}
        self.raised: list[Alarm] = []
        """Every alarm that was ever raised, in order."""
        self._scale = abs(correct_reward) or 1.0
        self._solved = SOLVED * correct_reward
        self._max_kl = max_mismatch_kl
        self._first: list[_Step] = []
        """The run's first steps, at most `WINDOW`."""
        self._steps: collections.deque[_Step] = collections.deque(maxlen=LOOKBACK + WINDOW)
        self._quiet: collections.Counter[AlarmName] = collections.Counter()
        """Steps since an active alarm's rule held last."""
        self._best: tuple[int, float, float] | None = None
        """(version, held-out reward, training reward then) of the best evaluation so far."""

    def take_step(self, row: StepRow) -> list[Alarm]:
        """Take a step; return what it raised and ended."""
        step = _step_of(row)
        while self._steps and self._steps[-1].step >= step.step:
            self._steps.pop()  # done again after a resume
        self._steps.append(step)
        if len(self._first) < WINDOW:
            self._first.append(step)
        of_engines = self._judge(AlarmName.ENGINE_MISMATCH, (step.step, "; ".join(row.engine_mismatch)) if row.engine_mismatch else None)
        if len(self._steps) < WINDOW:
            return of_engines
        return of_engines + [alarm for name, rule in self._rules() for alarm in self._judge(name, rule())]

    def take_evaluation(self, row: EvaluationRow) -> list[Alarm]:
        """Take an evaluation: held-out that falls from its best while the training reward has risen since."""
        held_out, version, num = row.reward_mean, row.version, row.num_prompts
        trained = _mean(self._recent(), "reward")
        if held_out is None or version is None or trained is None:
            return []
        if self._best is None or held_out >= self._best[1]:
            self._best = int(version), held_out, trained
            is_held_out = (alarm := self.active.get(AlarmName.REWARD_HACKING)) is not None and "held-out" in alarm.figure
            return [self._end(AlarmName.REWARD_HACKING)] if is_held_out else []
        of_version, best, then = self._best
        part = min(1.0, max(0.0, best / self._scale))
        noise = ERRORS * self._scale * math.sqrt(2 * part * (1 - part) / num) if num else 0.0
        if best - held_out < max(MOVED * self._scale, noise) or trained - then < MOVED * self._scale:
            return []
        rose = f"training reward rose from {then:.3g} to {trained:.3g}"
        figure = f"held-out fell from {best:.3g} to {held_out:.3g} since version {of_version}, {rose}"
        return self._raise(AlarmName.REWARD_HACKING, began=of_version, figure=figure)

    def _rules(self) -> tuple[tuple[AlarmName, Callable[[], tuple[int, str] | None]], ...]:
        """Each rule gives (step where it began, figure) where it holds."""
        return (
            (AlarmName.TRUNCATION, lambda: self._above("truncated", TRUNCATED, "{:.0%} of samples are cut off at rollout.max_tokens")),
            (AlarmName.NO_SIGNAL, self._no_signal),
            (AlarmName.ENTROPY_COLLAPSE, self._entropy),
            (AlarmName.REWARD_HACKING, self._component_falls),
            (AlarmName.LENGTH_DRIFT, self._length),
            (AlarmName.REPETITION, self._repetition),
            (AlarmName.OFF_POLICY, lambda: self._level("ess", lambda ess: ess < LEAST_ESS, _OFF_POLICY)),
            (AlarmName.MISMATCH, lambda: self._kl("mismatch", MISMATCH * self._max_kl, "engine and trainer differ by a KL of")),
            (AlarmName.STALE_KV, lambda: self._kl("stale_kv", self._max_kl, "what is sampled over an older KV cache differs by a KL of")),
            (AlarmName.STALE, lambda: self._above("stale", STALE, "{:.0%} of groups are dropped for their age")),
            (AlarmName.FLAT_REWARD, self._flat),
        )

    def _judge(self, name: AlarmName, verdict: tuple[int, str] | None) -> list[Alarm]:
        if verdict is not None:
            self._quiet[name] = 0
            return [] if name in self.active else self._raise(name, began=verdict[0], figure=verdict[1])
        alarm = self.active.get(name)
        if alarm is None or "held-out" in alarm.figure:  # an evaluation's alarm is ended by an evaluation
            return []
        self._quiet[name] += 1
        return [self._end(name)] if self._quiet[name] >= WINDOW else []

    def _raise(self, name: AlarmName, *, began: int, figure: str) -> list[Alarm]:
        if name in self.active:
            return []
        self.active[name] = alarm = Alarm(name=name, began=began, step=self._steps[-1].step, figure=figure, change=ALARMS[name].change)
        self.raised.append(alarm)
        return [alarm]

    def _end(self, name: AlarmName) -> Alarm:
        return dataclasses.replace(self.active.pop(name), step=self._steps[-1].step, is_over=True)

    def _recent(self) -> list[_Step]:
        return list(self._steps)[-WINDOW:]

    def _before(self) -> list[_Step]:
        """The window `LOOKBACK` steps ago, or the run's first."""
        return list(self._steps)[:WINDOW]

    @property
    def _is_solved(self) -> bool:
        reward = _mean(self._recent(), "reward")
        return reward is not None and reward >= self._solved

    def _above(self, name: str, bound: float, words: str) -> tuple[int, str] | None:
        return self._level(name, lambda value: value >= bound, words)

    def _level(self, name: str, is_beyond: Callable[[float], bool], words: str) -> tuple[int, str] | None:
        """A mean beyond a bound, which `words` tell.

        It began with the first step of the window that was beyond it, or of those just before that were, too.
        """
        mean = _mean(self._recent(), name)
        if mean is None or not is_beyond(mean):
            return None
        beyond = [step.step for step in self._recent() if (value := step.figures[name]) is not None and is_beyond(value)]
        began = beyond[0] if beyond else self._recent()[0].step
        for step in reversed(self._steps):
            value = step.figures[name]
            if step.step < began and value is not None:
                if not is_beyond(value):
                    break
                began = step.step
        return began, words.format(mean)

    def _no_signal(self) -> tuple[int, str] | None:
        return (
            None if self._is_solved else self._above("no_signal", NO_SIGNAL, "{:.0%} of groups have equal rewards: their gradient is zero")
        )

    def _entropy(self) -> tuple[int, str] | None:
        first = _mean(self._first, "entropy")
        if first is None or self._is_solved or len(self._steps) < 2 * WINDOW:
            return None
        reward = _mean(self._recent(), "reward")
        at = "" if reward is None else f", at a reward of {reward:.3g}"
        return self._level("entropy", lambda now: now < LEAST_ENTROPY * first, f"entropy fell from {first:.3g} to {{:.3g}} nats{at}")

    def _kl(self, name: str, bound: float, words: str) -> tuple[int, str] | None:
        return self._level(name, lambda kl: kl > bound, f"{words} {{:.2g}} (trainer.max_mismatch_kl = {self._max_kl:g})")

    def _repetition(self) -> tuple[int, str] | None:
        first = _mean(self._first, "repeated") or 0.0
        return self._above("repeated", min(2 * REPEATED, max(REPEATED, first + REPEATED_MORE)), "{:.0%} of 4-grams repeat the same sample")

    def _length(self) -> tuple[int, str] | None:
        before, recent = self._before(), self._recent()
        then, now = _mean(before, "length"), _mean(recent, "length")
        if not then or not now or recent[0].step <= before[-1].step or 1 / DRIFT < now / then < DRIFT:
            return None
        rewards = _mean(before, "reward"), _mean(recent, "reward")
        if rewards[0] is None or rewards[1] is None or rewards[1] - rewards[0] >= MOVED * self._scale:
            return None
        figure = f"samples went from {then:.0f} to {now:.0f} tokens while the reward went from {rewards[0]:.3g} to {rewards[1]:.3g}"
        return before[-1].step, figure

    def _component_falls(self) -> tuple[int, str] | None:
        before, recent = self._before(), self._recent()
        rise = _Change.of(before, recent, lambda step: step.figures["reward"])
        if recent[0].step <= before[-1].step or rise is None or rise.size < MOVED * self._scale or rise.is_noise:
            return None
        for name in recent[-1].components:
            change = _Change.of(before, recent, lambda step, name=name: step.components.get(name), least=WINDOW // 2)
            if change is not None and change.size < -FALLEN * max(abs(change.then), abs(change.now)) and not change.is_noise:
                return before[-1].step, f"{name} fell from {change.then:.3g} to {change.now:.3g} while the reward rose"
        return None

    def _flat(self) -> tuple[int, str] | None:
        first, last = self._first[0].step, self._steps[-1].step
        if self._is_solved or last - first < FLAT_AFTER:
            return None
        change = _Change.of(self._first, self._recent(), lambda step: step.figures["reward"], least=WINDOW // 2)
        if change is None or abs(change.size) >= MOVED / 2 * self._scale or not change.is_noise:
            return None
        return first, f"the reward was {change.then:.3g} at the start and is {change.now:.3g} after {last - first + 1} steps"


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """A mean in two windows of steps."""

    then: float
    now: float
    error: float
    """Standard error of their difference."""

    @classmethod
    def of(
        cls, before: Sequence[_Step], recent: Sequence[_Step], value_of: Callable[[_Step], float | None], *, least: int = 1
    ) -> _Change | None:
        """None where one of them holds fewer than `least` values."""
        means, variance = [], 0.0
        for steps in (before, recent):
            values = [value for step in steps if (value := value_of(step)) is not None]
            if len(values) < least:
                return None
            means.append(mean := sum(values) / len(values))
            variance += sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1) / len(values)
        return cls(then=means[0], now=means[1], error=math.sqrt(variance))

    @property
    def size(self) -> float:
        return self.now - self.then

    @property
    def is_noise(self) -> bool:
        return abs(self.size) <= ERRORS * self.error


def _step_of(row: StepRow) -> _Step:
    groups, flat, filtered = row.num_groups, row.zero_variance_fraction, row.filtered_groups or 0.0
    return _Step(
        step=row.step,
        figures={
            "reward": row.reward_mean,
            "length": row.length_mean,
            "truncated": row.truncated_fraction,
            "repeated": row.repeated_fraction,
            "no_signal": flat if flat is None or not groups else (flat * groups + filtered) / (groups + filtered),
            "stale": None if row.stale_groups is None or not groups else row.stale_groups / (row.stale_groups + groups),
            "entropy": row.trainer.get("entropy"),
            "ess": row.trainer.get("ess_fraction"),
            "mismatch": row.trainer.get("mismatch_kl_on_policy"),
            "stale_kv": row.trainer.get("mismatch_kl_stale_kv"),
        },
        components=row.components,
    )


def _mean(steps: Iterable[_Step], name: str) -> float | None:
    known = [value for step in steps if (value := step.figures[name]) is not None]
    return sum(known) / len(known) if known else None

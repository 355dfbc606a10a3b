"""RoleWindow measures what `rules.roles` plans from, in a live run: how fast engines and trainer were, and which of them has waited.

A window begins at a swap boundary with a layout that is whole, and ends at a later one. It counts what has happened since: the engines' own
reports, each step as the trainer has timed it, and the sampled tokens, trained tokens and waits that the orchestrator counts anyway.

Figures that stop, or cannot be, end a window without a result: an engine that was not heard of for `SILENT_S` may have stood still, and one
that tells of more seconds than have passed has had its clock put forward. What such a window said would be acted upon for four more. Nor
does a window end while somebody is late: it waits for another boundary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from orchestrator.rules.pass_profile import PassProfile, PassSeconds
from orchestrator.rules.roles import Window
from pipelinerl.messages import EngineLoad
from pipelinerl.runtime.elastic_roles import EnginePasses

SILENT_S = 5.0
"""Seconds without a report of an engine, which sends one each second, or a sign of the trainer, which gives one every two, from which on a
window says nothing. A smaller value gives windows up for a long pass or swap; a larger one takes who stands still for who is slow."""
LATE_S = 2.5
"""The same while no window ends yet: so much of it may be missing unnoticed. It has to be longer than the two seconds between two signs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the orchestrator has counted at one moment; all of it grows."""

    now_s: float
    sampled: float
    """Tokens that all engines have sampled, those that are gone included."""
    trained: float
    """Sampled tokens that were trained."""
    held_s: float
    """Seconds in which generation waited for anything but a free engine slot."""
    scored_s: float | None = None
    """Seconds in which the model that scores has scored, summed over its engines or processes; None where none of them change."""
    others_s: tuple[float, ...] = ()
    """The same of each model that scores and does not change."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Engine:
    """What an engine has reported since the window began."""

    last: EngineLoad
    last_s: float
    passes: int = 0
    tokens: int = 0
    context: int = 0
    seconds: float = 0.0
    """With a sequence: what lies between two passes counts, too."""


class RoleWindow:
    """One window after the other, of one run; the profiles of a pass, one for each width of engines, are fitted to all of them."""

    def __init__(self, *, slots: int, least_steps: int = 1) -> None:
        """Engines decode `slots` sequences at once; a window has `least_steps` steps at least."""
        self.profiles: dict[int, PassProfile] = {}
        """By the ranks of an engine."""
        self.slots, self._least_steps = slots, least_steps
        self.began: Counts | None = None
        """What was counted when the window began; None where none has."""
        self._engines: dict[int, _Engine] = {}
        self._num_steps = 0
        self._working_s = self._replica_s = 0.0
        self._num_row_tokens = self._num_completed = self._num_sampled = 0
        """Tokens of rows that were trained, of rollouts that were completed, and of these the sampled ones."""
        self._trained_s = -math.inf
        """When the last step was heard of."""

    def begin(self, counts: Counts) -> None:
        """Begin a window."""
        self.began, self._num_steps, self._working_s, self._replica_s = counts, 0, 0.0, 0.0
        self._num_row_tokens = self._num_completed = self._num_sampled = 0
        for engine_id, engine in self._engines.items():
            self._engines[engine_id] = _Engine(last=engine.last, last_s=engine.last_s)

    def stop(self) -> None:
        """Give the window up: the layout is not whole any more, or figures are missing."""
        self.began = None

    def reported(self, load: EngineLoad, *, width: int, now_s: float) -> None:
        """Take a report of an engine of so many ranks. One that has started again begins to count anew."""
        engine = self._engines.get(load.engine_id)
        if engine is None or load.num_steps < engine.last.num_steps or load.idle_s < engine.last.idle_s:
            self._engines[load.engine_id] = _Engine(last=load, last_s=now_s)
            return
        before, elapsed_s = engine.last, now_s - engine.last_s
        if elapsed_s > SILENT_S or not can_have_passed(load.busy_s - before.busy_s, elapsed_s=elapsed_s):
            self._engines[load.engine_id] = _Engine(last=load, last_s=now_s)
            self.stop()
            return
        self.profiles.setdefault(width, PassProfile()).reported(before, load)
        engine.passes += load.num_steps - before.num_steps
        engine.tokens += load.num_tokens - before.num_tokens
        engine.context += load.num_context_tokens - before.num_context_tokens
        engine.seconds += max(0.0, elapsed_s - (load.idle_s - before.idle_s))
        engine.last, engine.last_s = load, now_s

    def lost(self, engine_id: int) -> None:
        """Note that an engine is gone."""
        self._engines.pop(engine_id, None)
        self.stop()

    def silence_s(self, engine_ids: Iterable[int], *, now_s: float) -> float:
        """Return for how long the most silent of these engines has not reported; infinite where one never has."""
        engines = map(self._engines.get, engine_ids)
        return max((math.inf if engine is None else now_s - engine.last_s for engine in engines), default=math.inf)

    def completed(self, *, num_tokens: int, num_sampled: int) -> None:
        """Note a rollout that is written: all its tokens, and those that engines have sampled."""
        self._num_completed += num_tokens
        self._num_sampled += num_sampled

    def trained(self, *, num_tokens: int, working_s: float, num_replicas: float, now_s: float) -> None:
        """Note a step of rollouts of so many tokens, for which each of so many replicas has worked, its waits for rows left out."""
        elapsed_s, self._trained_s = now_s - self._trained_s, now_s
        if not can_have_passed(working_s, elapsed_s=elapsed_s):
            self.stop()
            return
        self._num_steps += 1
        self._num_row_tokens += num_tokens
        self._working_s += working_s
        self._replica_s += working_s * num_replicas

    def seconds(self, now_s: float) -> float:
        """Return how long the window has lasted."""
        return 0.0 if self.began is None else now_s - self.began.now_s

    def passes(self) -> dict[int, EnginePasses]:
        """Return what is known of the passes of engines, by their ranks."""
        fitted = {width: (profile, profile.fit()) for width, profile in self.profiles.items()}
        return {
            width: EnginePasses(a=found.a, b=found.b, c=found.c, room=None if math.isinf(profile.room) else profile.room)
            for width, (profile, found) in fitted.items()
            if found is not None
        }

    def window(
        self, counts: Counts, *, width: int, engines_of_unit: int, scorers_of_unit: int = 0, others: Sequence[int] = ()
    ) -> tuple[Window, PassSeconds] | None:
        """Return what the window has shown, and the passes of engines, which have `width` ranks each; None where too little has happened in
        it. `others` are the engines or processes of each model that scores and does not change.
        """
        profile, began = self.profiles.get(width), self.began
        passes_s = profile and profile.fit()
        engines = [engine for engine in self._engines.values() if engine.passes]
        passes, tokens, context = (sum(getattr(one, name) for one in engines) for name in ("passes", "tokens", "context"))
        if began is None or passes_s is None or self._num_steps < self._least_steps:
            return None
        if not (tokens and context and self._replica_s > 0 and self._num_row_tokens and counts.trained > began.trained):
            return None
        scored_s = None if counts.scored_s is None or began.scored_s is None else counts.scored_s - began.scored_s
        if scorers_of_unit and not scored_s:
            return None
        sampled, trained = counts.sampled - began.sampled, counts.trained - began.trained
        part = self._num_sampled / self._num_completed if self._num_sampled else trained / self._num_row_tokens
        others_s = [after_s - before_s for before_s, after_s in zip(began.others_s, counts.others_s, strict=True)]
        scored_most = [number * sampled / seconds for number, seconds in zip(others, others_s, strict=True) if seconds > 0]
        elapsed_s = counts.now_s - began.now_s
        expected_s = passes_s.a * passes + passes_s.b * tokens + passes_s.c * context
        window = Window(
            tokens=trained,
            num_steps=self._num_steps,
            context=context / tokens,
            slowness=sum(engine.seconds for engine in engines) / expected_s,
            replica_rate=self._num_row_tokens * part / self._replica_s,
            row_rate=self._num_row_tokens / self._replica_s,
            written_rate=sampled / elapsed_s,
            trainer_wait=max(0.0, 1 - self._working_s / elapsed_s),
            held_back=min(1.0, (counts.held_s - began.held_s) / elapsed_s),
            scorer_rate=scorers_of_unit * sampled / scored_s if scored_s else None,
            scored_most=min(scored_most, default=None),
            held_tokens=engines_of_unit * context / passes,
            recompute_s=passes_s.b,  # a token that is computed anew costs what one more in a pass does
        )
        return window, passes_s


def can_have_passed(seconds: float, *, elapsed_s: float) -> bool:
    """Return whether a process may have been busy for so many seconds meanwhile; what it sends may come a little late."""
    return 0 <= seconds <= elapsed_s + SILENT_S

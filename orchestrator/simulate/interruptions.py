"""What the trainer's work is interrupted by, where orchestrator, scorers and rewards share its core: each answer (a score, or an
environment's reply), and each time that they wake up, for completions or for answers, however many come at once.

On two cores, engines on one and all else on the other, an answer took 0.5 ms and a waking 1.1: a trainer whose caches others use meanwhile
was held up by 0.9 ms for a score where a pass ended several rollouts and they were scored together, by 1.6 where rewards slept and came one
by one, and by 2.3 where rollouts ended one by one, too. Steps beside engines at work lasted 1.1 to 1.3 times as long for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from orchestrator.rules.pass_profile import Numbers
from orchestrator.simulate.events import Act
from orchestrator.simulate.generation import Generation
from orchestrator.simulate.scoring import Scoring
from orchestrator.simulate.trainer import Trainer
from orchestrator.simulate.world import TrainerWorld

ONE_WAKING_S = 1e-3
"""What comes so many seconds after the one before is taken care of in the same waking."""


def wakings(*times: Sequence[float]) -> Numbers:
    """Return the moments, in order, at which somebody woke up for what came at `times`, each kind of which wakes up another."""
    found: list[float] = []
    for each in times:
        moments = np.sort(np.array(each, np.float64))
        found += moments[np.diff(moments, prepend=-math.inf) > ONE_WAKING_S].tolist()
    return np.sort(np.array(found))


def interrupt(trainer: Trainer, world: TrainerWorld, *, generation: Generation, scoring: Scoring) -> None:
    """Have what `generation` and `scoring` hear take from the trainer's work."""
    if not world.answer_s and not world.wake_s:
        return
    completed, answered = (_Interruption(trainer, each_s=each_s, wake_s=world.wake_s) for each_s in (0.0, world.answer_s))
    generation.on_finished = _after(completed, generation.on_finished)
    scoring.on_scored = _after(answered, scoring.on_scored)
    if generation.replies is not None:
        generation.replies.on_done = answered


class _Interruption:
    """Called whenever one kind of news comes."""

    def __init__(self, trainer: Trainer, *, each_s: float, wake_s: float) -> None:
        self._trainer, self._each_s, self._wake_s = trainer, each_s, wake_s
        self._last_s = -math.inf

    def __call__(self) -> None:
        now_s = self._trainer.now_s
        is_waking, self._last_s = now_s - self._last_s > ONE_WAKING_S, now_s
        self._trainer.hold_up(self._each_s + (self._wake_s if is_waking else 0.0))


_What = TypeVar("_What")


def _after(first: Act, act: Callable[[_What], None]) -> Callable[[_What], None]:
    def both(what: _What) -> None:
        first()
        act(what)

    return both

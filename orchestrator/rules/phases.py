"""This rule decides who has the devices that engines and trainer share, and says when the trainer may begin.

    train      while a step is closed that the newest policy does not hold, nobody has published since the trainer started, or a script
               has the trainer compute something else
    generate   otherwise

The rule needs no memory: steps closed are in the ledger, and the newest policy is the one that the present trainer has published. So it
says the same after any process was killed, and a trainer that goes back to a checkpoint has them until it is where the ledger is.

The training phase begins in two halves. Engines are told to sleep when it does, and rows are given to the trainer once every engine there
is sleeps: then nobody reads the weights that it changes in place. When the newest policy holds every closed step, the engines are told to
fetch that one, which wakes them. In between, no engine is told of any policy.

An engine that an evaluation keeps at its policy is not sent to sleep: the training phase begins once it is free again.

All of this is about engines that take turns. Where others have devices of their own, these close steps while the trainer has its turn, and
could keep it for ever: sequences that sleep would grow too old to train, the longest ones first. With bound K, tokens of version v fit into
step v + K at the latest. So a training phase that began under policy v ends with the first policy that comes once v + K steps are closed,
as step v + K is then the next. The phase after that begins when another step is closed. Where none can be, before another policy comes,
nobody who sleeps has a sequence (`rules.admission` counts it), and the trainer goes on.
"""

from __future__ import annotations

import enum

from pipelinerl.config import Config, Mode


class Phase(enum.StrEnum):
    """Who has the devices."""

    GENERATION = "generation"
    """Engines have the devices."""
    TRAINING = "training"
    """The trainer has them, or waits for the last engine to fall asleep."""


def sleep_bound(config: Config) -> int | None:
    """Return the bound K on training phases, 1 at least, where some engines stand apart; else None."""
    bound = config.pipeline.max_staleness if config.pipeline.mode is Mode.STREAMING else 0
    return max(1, bound) if config.is_mixed else None


class Phases:
    """The phase of a run, and the engines that are awake among those that take turns. Messages may repeat and come in any order."""

    def __init__(self, *, bound: int | None = None) -> None:
        """`bound`: K, in a run with engines apart; None: a training phase lasts until all closed steps are trained."""
        self.phase = Phase.GENERATION
        self._bound = bound
        self._first: int | None = None
        """The policy under which the training phase began; None before one is published."""
        self._published: int | None = None
        """The newest policy that is known here."""
        self._woken_with: tuple[int, int | None] | None = None
        """The (steps closed, policy published) with which engines were given the devices; None where they began with them."""
        self._awake: set[int] = set()

    def next_phase(
        self, *, num_closed: int, published: int | None, is_pinned: bool, computes: bool = False, num_closable: int | None = None
    ) -> Phase | None:
        """Change the phase where it is due, and return the new one; None where it stays.

        `num_closed` steps have all their rows; `published` is the newest policy of the trainer there is, None before it has published any;
        `is_pinned` says that an engine that is awake has to keep its policy; `computes` that the trainer is to compute something else than
        a step. `num_closable` steps can be closed before another policy is published, by the staleness bound.
        """
        is_news, self._published = published != self._published, published
        can_close = num_closable is None or num_closed < num_closable
        if self.phase is Phase.TRAINING and (None in (self._first, published) or not can_close):
            self._first = published  # the first of a trainer that starts; or engines could do nothing with a turn
        may_train = published != num_closed and not self._is_generations_turn(num_closed, published, is_news=is_news)
        wanted = Phase.TRAINING if computes or may_train else Phase.GENERATION
        if wanted is self.phase or (wanted is Phase.TRAINING and is_pinned):
            return None
        self.phase, self._first, self._woken_with = wanted, published, (num_closed, published)
        return wanted

    def _is_generations_turn(self, num_closed: int, published: int | None, *, is_news: bool) -> bool:
        """Return whether engines have the devices although a closed step could be trained: a policy that is news may end a training
        phase, since the trainer has no row of the next step yet.
        """
        if self._bound is None or published is None:
            return False
        if self.phase is Phase.TRAINING:
            return is_news and self._first is not None and published > self._first and num_closed - self._first >= self._bound
        return self._woken_with == (num_closed, published)

    @property
    def may_train(self) -> bool:
        """True where the trainer may change the weights: it has the devices, and no engine is awake."""
        return self.phase is Phase.TRAINING and not self._awake

    def has_turn(self, step: int) -> bool:
        """Return whether a step may be trained: a trainer asks for the next one before its policy, which may end the phase, is known. One
        that starts has the phase for a step at least.
        """
        return self._bound is None or self._published is None or step <= self._published

    def woke(self, engine_id: int) -> None:
        """Note that an engine is told of a policy, which will wake it, or announces itself."""
        self._awake.add(engine_id)

    def fell_asleep(self, engine_id: int) -> None:
        """Note that an engine sleeps, or is lost: it reads nothing."""
        self._awake.discard(engine_id)

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
could keep it for ever: sequences that sleep would grow too old to train, the longest ones first. So a training phase then ends after
`most_steps` steps, and the next one begins when engines have closed another step, or can close none before another policy comes. With
bound K that is K steps, 1 at least: no sequence sleeps through more policies than a token may be old.
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


def most_steps(config: Config) -> int | None:
    """Return the steps of one training phase while others wait: K, 1 at least, where some engines stand apart; else None, for all."""
    bound = {Mode.STREAMING: config.pipeline.max_staleness}.get(config.pipeline.mode, 0)
    return max(1, bound) if config.is_mixed else None


class Phases:
    """The phase of a run, and the engines that are awake among those that take turns. Messages may repeat and come in any order."""

    def __init__(self, *, most_steps: int | None = None) -> None:
        """`most_steps`: steps of one training phase while others wait, in a run with engines apart; None: all that are closed."""
        self.phase = Phase.GENERATION
        self._most_steps = most_steps
        self._first: int | None = None
        """The policy from which `most_steps` are counted; None before one is published."""
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
        can_close = num_closable is None or num_closed < num_closable
        if self.phase is Phase.TRAINING and (self._first is None or not can_close):
            self._first = published  # engines could do nothing with a turn
        may_train = published != num_closed and not (can_close and self._is_generations_turn(num_closed, published))
        wanted = Phase.TRAINING if computes or may_train else Phase.GENERATION
        if wanted is self.phase or (wanted is Phase.TRAINING and is_pinned):
            return None
        self.phase, self._first, self._woken_with = wanted, published, (num_closed, published)
        return wanted

    def _is_generations_turn(self, num_closed: int, published: int | None) -> bool:
        """Return whether engines have the devices although a closed step could be trained."""
        if self._most_steps is None or published is None:
            return False
        if self.phase is Phase.TRAINING:
            return self._first is not None and published - self._first >= self._most_steps
        return self._woken_with == (num_closed, published)

    @property
    def may_train(self) -> bool:
        """True where the trainer may change the weights: it has the devices, and no engine is awake."""
        return self.phase is Phase.TRAINING and not self._awake

    def has_turn(self, step: int) -> bool:
        """Return whether a step is one of the training phase there is: a trainer asks for the next before its policy is known."""
        return self._most_steps is None or self._first is None or step < self._first + self._most_steps

    def woke(self, engine_id: int) -> None:
        """Note that an engine has committed a policy, or announces itself."""
        self._awake.add(engine_id)

    def fell_asleep(self, engine_id: int) -> None:
        """Note that an engine sleeps, or is lost: it reads nothing."""
        self._awake.discard(engine_id)

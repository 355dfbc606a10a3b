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
"""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """Who has the devices."""

    GENERATION = "generation"
    """Engines have the devices."""
    TRAINING = "training"
    """The trainer has them, or waits for the last engine to fall asleep."""


class Phases:
    """The phase of a run, and the engines that are asleep. Messages may repeat and come in any order."""

    def __init__(self) -> None:
        self.phase = Phase.GENERATION
        self._awake: set[int] = set()

    def next_phase(self, *, num_closed: int, published: int | None, is_pinned: bool, computes: bool = False) -> Phase | None:
        """Change the phase where it is due, and return the new one; None where it stays.

        `num_closed` steps have all their rows; `published` is the newest policy of the trainer there is, None before it has published any;
        `is_pinned` says that an engine that is awake has to keep its policy; `computes` that the trainer is to compute something else than
        a step.
        """
        wanted = Phase.GENERATION if published == num_closed and not computes else Phase.TRAINING
        if wanted is self.phase or (wanted is Phase.TRAINING and is_pinned):
            return None
        self.phase = wanted
        return wanted

    @property
    def may_train(self) -> bool:
        """True where the trainer may change the weights: it has the devices, and no engine is awake."""
        return self.phase is Phase.TRAINING and not self._awake

    def woke(self, engine_id: int) -> None:
        """Note that an engine has committed a policy, or announces itself."""
        self._awake.add(engine_id)

    def fell_asleep(self, engine_id: int) -> None:
        """Note that an engine sleeps, or is lost: it reads nothing."""
        self._awake.discard(engine_id)

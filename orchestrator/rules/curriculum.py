"""The curriculum draws prompts that teach something now: those whose siblings disagree, by the measurements so far. The others rest.

A prompt rests when its siblings were nearly all correct, or nearly all wrong, when it was last sampled: one epoch the first time, then two,
then four, at most `MAX_REST`. As soon as it is in the band again it is drawn in every epoch. So easy prompts leave as the policy learns,
hard ones are tried again at growing distances, and none is ever lost: whatever was measured, each prompt is drawn at least once in
`MAX_REST` + 1 epochs.

Related: sampling by 1 - success rate (Kimi k1.5, arXiv 2501.12599), which weighs a prompt. Here a prompt is drawn or passed over, so that
the position in the source remains two numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

MAX_REST = 8
"""The longest rest, in epochs. A longer one saves more sampling on prompts that are always right or always wrong, and notices a change
later.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The rest of one prompt: the epochs in which it is passed over."""

    length: int
    """Epochs passed over."""
    measured_in: int
    """Epoch in which the prompt was measured."""

    @property
    def until(self) -> int:
        """The first epoch in which the prompt is drawn again."""
        return self.measured_in + 1 + self.length


def success_of(rewards: Iterable[float | None], *, correct_reward: float) -> float | None:
    """Return the part of the scored siblings with at least `correct_reward`; None where none was scored."""
    known = [reward for reward in rewards if reward is not None]
    return sum(reward >= correct_reward for reward in known) / len(known) if known else None


def epoch_and_number(prompt_id: str) -> tuple[int, int]:
    """Split the id of a prompt: `3:17` is number 17 of its source, drawn in epoch 3."""
    epoch, _, number = prompt_id.partition(":")
    return int(epoch), int(number)


class Curriculum:
    """The prompts that rest. Its answers follow from the order of the measurements alone."""

    def __init__(self, *, low: float, high: float) -> None:
        """A success rate strictly between `low` and `high` teaches something."""
        self._low = low
        self._high = high
        self.resting: dict[int, Rest] = {}
        """The rests, by the prompt's number in its source; an earlier process of the run may have left some."""

    def measured(self, number: int, *, epoch: int, success: float) -> None:
        """Note which part of a prompt's scored siblings was correct; the prompt was drawn in `epoch`. A measurement of an overtaken epoch
        is dropped.
        """
        before = self.resting.get(number)
        if before is not None and epoch < before.measured_in:
            return
        if self._low < success < self._high:
            self.resting.pop(number, None)
        elif before is None or epoch > before.measured_in:
            self.resting[number] = Rest(length=1 if before is None else min(2 * before.length, MAX_REST), measured_in=epoch)

    def draws(self, number: int, *, epoch: int) -> bool:
        """Return whether the prompt is to be sampled in `epoch`; otherwise it is passed over."""
        rest = self.resting.get(number)
        return rest is None or epoch <= rest.measured_in or epoch >= rest.until

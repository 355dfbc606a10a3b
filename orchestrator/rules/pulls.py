"""Pulls knows which rows the trainer's replicas have asked for and were not given, and of which steps they were given any."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.messages import TakeMicroBatch


class Pulls:
    """The unanswered pulls of one trainer: asking again changes nothing. While it `is_held`, no row is given of a step that has none given
    yet, so that the trainer comes to stand between two steps.
    """

    def __init__(self, *, newest_given: int = -1) -> None:
        """`newest_given`: the newest step of which the trainer may have anything. Too high a number only makes a hold longer."""
        self.is_held = False
        self.newest_given = newest_given
        self._waiting: dict[tuple[int, int, int], TakeMicroBatch] = {}
        """By replica, step and index."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first_replica(self) -> int:
        """The replica that has waited for longest."""
        return next(iter(self._waiting))[0]

    def num_asked(self, pull: TakeMicroBatch) -> int:
        """Return the rows that a replica has asked for beside this one; 0 where it asks again."""
        return sum(replica == pull.replica for replica, _, _ in self._waiting) if _key(pull) not in self._waiting else 0

    def add(self, pull: TakeMicroBatch) -> None:
        self._waiting[_key(pull)] = pull

    def answerable(self) -> Iterator[TakeMicroBatch]:
        """Yield those that may be answered now; `answered` may be called meanwhile."""
        for pull in list(self._waiting.values()):
            if not self.is_held or pull.step <= self.newest_given:
                yield pull

    def answered(self, pull: TakeMicroBatch) -> None:
        """Note that a row, or the end of its step, was given."""
        del self._waiting[_key(pull)]
        self.newest_given = max(self.newest_given, pull.step)

    def forget(self) -> None:
        """Note that another process takes the trainer's place, which was given nothing."""
        self._waiting.clear()
        self.newest_given = -1


def _key(pull: TakeMicroBatch) -> tuple[int, int, int]:
    return pull.replica, pull.step, pull.index

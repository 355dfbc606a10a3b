"""TrainerChange decides how a live run's trainer gets or gives back ranks, and what it falls back to.

A change is a planned restart between two steps, in two phases. While the trainer saves, nothing is given up: a change that does not come
further is dropped, and the trainer goes on. Once it has saved, another one is started in the new layout; where that does not announce
itself, the layout before is started again from the same checkpoint, as a change of its own with a later epoch. Where not even that one
starts, the run cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from orchestrator.rules.membership import Membership
from pipelinerl.runtime.trainer_ranks import Phase, TrainerRanks


class TrainerChange:
    """The trainer's ranks, and the change that is under way."""

    def __init__(
        self,
        *,
        ranks: int,
        most: int,
        per_replica: int,
        why_not_ranks: Callable[[int], str | None] = lambda ranks: None,
        earlier: TrainerRanks | None = None,
    ) -> None:
        """The settings say `ranks`, and keys are made for a trainer of `most`; `per_replica` of them work on a row together.

        `why_not_ranks` says why the settings, with another number of ranks, make no trainer. `earlier` is what an orchestrator before this
        one has written. A trainer that had not saved then goes on as it is; one that was awaited still is.
        """
        self._most, self._per_replica, self._why_not_ranks = most, per_replica, why_not_ranks
        self.record = TrainerRanks(ranks=ranks, wanted=ranks, before=ranks, configured=ranks)
        if earlier is not None:
            self._restore(earlier)

    @property
    def num_replicas(self) -> int:
        """Replicas of a trainer that is started now."""
        return self.record.ranks // self._per_replica

    def replicas(self) -> Membership:
        """Return the replicas that the trainer may come to have, of which those of now are awaited; none where another trainer is starting:
        who awaits that one knows what to fall back to."""
        awaited = 0 if self.record.phase is Phase.STARTING else self.num_replicas
        return Membership(count=awaited, most=max(self.num_replicas, self._most // self._per_replica))

    def why_not(self, ranks: int) -> str | None:
        """Say why the trainer cannot be asked for so many ranks now; None where it can."""
        if self.record.phase is not Phase.SETTLED:
            return f"trainer={ranks}: the trainer changes to {self.record.wanted} ranks; ask again once it has"
        if not 1 <= ranks <= self._most:
            return (
                f"trainer={ranks}: expected 1 to {self._most} (trainer.max_ranks). More need a run that was started, or resumed, with a"
                " larger trainer.max_ranks"
            )
        why = self._why_not_ranks(ranks)
        return None if why is None else f"trainer={ranks}: {why}"

    def begin(self, ranks: int, *, engines_before: Mapping[str, int] | None = None) -> None:
        """Have the trainer save, to go on with so many ranks; where it is given up, so many engines of each kind are to be there again."""
        assert self.record.phase is Phase.SETTLED, "one change at a time"
        begins = {"phase": Phase.SAVING, "epoch": self.record.epoch + 1, "is_back": False, "reason": ""}
        self._put(wanted=ranks, before=self.record.ranks, engines_before=dict(engines_before or {}), **begins)

    def saved(self) -> None:
        """Note that the trainer has saved: from now on one of the ranks that were asked for is to be started."""
        self._put(ranks=self.record.wanted, phase=Phase.STARTING)

    def done(self) -> None:
        """Note that every replica of the trainer that was awaited has announced itself."""
        self._put(phase=Phase.SETTLED, engines_before=self.record.engines_before if self.record.is_back else {})

    def keep_engines(self, kinds: Collection[str]) -> bool:
        """Note that engines of some kinds stay as they are, whatever becomes of the change; return whether that is news."""
        before = self.record.engines_before
        left = {kind: number for kind, number in before.items() if kind not in kinds}
        self._put(engines_before=left)
        return left != before

    @property
    def engines_back(self) -> Mapping[str, int]:
        """The engines of each kind that the run is to have again, as a change was given up; none where none was, or somebody has asked for
        another number since."""
        return self.record.engines_before if self.record.phase is Phase.SETTLED else {}

    def give_up(self, reason: str) -> bool:
        """Go back to the ranks before; return False where that is what does not start."""
        if self.record.phase is Phase.SAVING:
            self._put(wanted=self.record.ranks, phase=Phase.SETTLED, reason=reason)
            return True
        if self.record.is_back:
            return False
        before = self.record.before
        self._put(ranks=before, wanted=before, before=self.record.ranks, epoch=self.record.epoch + 1, is_back=True, reason=reason)
        return True

    def _restore(self, earlier: TrainerRanks) -> None:
        if earlier.configured != self.record.configured:
            self._put(epoch=earlier.epoch)
            return
        self.record = earlier
        if earlier.phase is Phase.SAVING:
            self.give_up("another orchestrator took the place of the one that had asked the trainer to save; ask again")

    def _put(self, **changed: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changed)

"""The cut of a scripted run, which carries out what a script has decided (`rules.script`)."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.rules.batch import Siblings, Verdict
from orchestrator.rules.script_decisions import Decision
from pipelinerl.messages import Group, Sample


class ScriptCut:
    """The cut of a scripted run: a step is what the script trains at once. Decisions are made by `ScriptBook`, and carried out here."""

    is_full = False
    """A step is closed by whoever decides, see `stages.script`."""
    is_holding = False

    def __init__(self, *, first_step: int = 0) -> None:
        self.step = first_step
        self._decisions: dict[int, Decision] = {}
        self._num_tokens = 0
        self._num_samples = 0

    def decide(self, decision: Decision) -> None:
        """Say what becomes of a group that is going to be taken."""
        self._decisions[decision.group.group_id] = decision

    def restore(self, samples: Sequence[Sample], *, num_groups: int, groups: Sequence[Siblings], num_stopped: int = 0) -> None:
        """Take over what an earlier process of the run has assigned to the step being filled."""
        self._num_samples = len(samples) + num_stopped
        self._num_tokens = sum(sample.trajectory.num_trained_tokens for sample in samples)

    def take(self, group: Group) -> Verdict:
        """Carry out what was decided about a group."""
        decision = self._decisions.pop(group.group_id)
        samples = decision.samples
        num_stopped = sum(one.step is not None for one in decision.ended)  # they were started, so sums are divided by them, too
        self._num_samples += len(samples) + num_stopped
        self._num_tokens += sum(sample.trajectory.num_trained_tokens for sample in samples)
        return Verdict(
            group=group,
            step=self.step,
            samples=samples,
            delivered=samples,
            ended=decision.ended,
            is_assigned=bool(samples) or num_stopped > 0,
            is_filtered=decision.is_filtered,
        )

    def close(self) -> tuple[int, int]:
        """Begin the next step; return (tokens with a loss, samples) of the one that is closed."""
        counts = (self._num_tokens, self._num_samples)
        self.step, self._num_tokens, self._num_samples = self.step + 1, 0, 0
        return counts

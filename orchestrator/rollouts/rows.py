"""The items that batching gives to the trainer: rows of packed samples, and the end of each step."""

from __future__ import annotations

import dataclasses

from pipelinerl.messages import Sample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Samples that go through the trainer together, laid end to end."""

    step: int
    samples: tuple[Sample, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its token columns: 17 for each token, and those of the routes of a mixture."""
        routes = [sample.trajectory.routes for sample in self.samples]
        num_routes = sum(each.experts.nbytes for each in routes if each is not None)
        return 17 * sum(sample.trajectory.num_tokens for sample in self.samples) + num_routes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The end of a step: it has all its rows."""

    step: int
    num_tokens: int
    num_samples: int
    commit: str = ""
    """The ledger's commit, which holds every row of the step."""

    num_bytes = 0

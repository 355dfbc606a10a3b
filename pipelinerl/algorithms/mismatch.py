"""The engine whose log-probabilities differ from the trainer's: it forges plausible ones, or computes something else.

Each engine is compared with the others of the same step, over all its trained tokens: a run far off policy may have none that the version
being trained sampled, and staleness moves all engines alike. Shared by the orchestrator, which names the engine in that step, and the
trainer, whose `MismatchError` does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pipelinerl.messages import EngineMismatch

FACTOR = 10.0
"""An engine with this many times the others' KL stands out. Smaller would name one that is a version behind the others, larger would let
one forge that is just under the limit of a run far off policy."""
MIN_TOKENS = 32
"""Fewest tokens of an engine to be judged by: the KL of a single token is anything."""


class MismatchRule:
    """Says which engine stands out in a step. `limit` is `trainer.max_mismatch_kl`: less than that is no fault, whoever has it."""

    def __init__(self, *, limit: float) -> None:
        self._limit = limit

    def stands_out(self, engines: Sequence[EngineMismatch]) -> list[EngineMismatch]:
        """Engines over the limit, and over `FACTOR` times the median of the others, which several that forge do not move."""
        present = [engine for engine in engines if engine.num_tokens]
        return [engine for engine in present if self._is_out(engine, [other for other in present if other is not engine])]

    def words(self, engines: Sequence[EngineMismatch]) -> list[str]:
        """A sentence for each engine that stands out."""
        found = self.stands_out(engines)
        others = _pooled([engine for engine in engines if engine not in found])
        return [
            f"engine {engine.engine_id}'s log-probabilities differ: KL {_pooled([engine]):.2g} over {engine.num_sequences} sequences"
            f" (others {others:.2g}, trainer.max_mismatch_kl = {self._limit:g})"
            for engine in found
        ]

    def _is_out(self, engine: EngineMismatch, others: Sequence[EngineMismatch]) -> bool:
        if not others or engine.num_tokens < MIN_TOKENS:
            return False
        return _pooled([engine]) > max(self._limit, FACTOR * statistics.median_low(_pooled([other]) for other in others))


def _pooled(engines: Sequence[EngineMismatch]) -> float:
    """Mean KL per token, in nats; 0.0 without a token, infinite where it is no number."""
    num_tokens = sum(engine.num_tokens for engine in engines)
    mean = sum(engine.kl_sum for engine in engines) / num_tokens if num_tokens else 0.0
    return math.inf if math.isnan(mean) else mean

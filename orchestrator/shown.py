"""A few samples of what was trained, in the journal, so that a person can read what the policy writes.

Of a step the best, the worst and the longest sample are shown, at most every `EVERY_S` seconds, cut to `MAX_TOKENS`: a journal of days
grows by less than 20 MB a day. Token ids are written and decoded where they are shown: nothing here loads a tokenizer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from pipelinerl.messages import Sample, TraceScores, Trajectory
from pipelinerl.metrics import Journal

EVERY_S = 10.0
"""Between two steps that are shown. Less fills the journal; more shows too little of a run of minutes."""
MAX_TOKENS = 1024
MAX_PROMPT_CHARACTERS = 4000
_NO_TRACES: Mapping[str, TraceScores] = {}


class Shown:
    """Writes the `sample` lines."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._due_s = -math.inf

    def trained(self, step: int, samples: list[Sample], *, now_s: float, traces: Mapping[str, TraceScores] = _NO_TRACES) -> None:
        """A step was trained on these samples: show some, if it is time to; `traces`: step scores by rollout, where there are any."""
        if not samples or now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        for sample in worth_showing(samples):
            self._journal.write("sample", step=step, **_fields(sample, traces.get(sample.trajectory.rollout_id)))


def worth_showing(samples: list[Sample]) -> list[Sample]:
    """The best, the worst and the longest, each once; of equals the first."""
    picked = (
        max(samples, key=lambda sample: sample.reward),
        min(samples, key=lambda sample: sample.reward),
        max(samples, key=lambda sample: sample.trajectory.num_trained_tokens),
    )
    return list({sample.trajectory.rollout_id: sample for sample in picked}.values())


def _fields(sample: Sample, trace: TraceScores | None) -> dict[str, object]:
    trajectory = sample.trajectory
    start = len(trajectory.prompt.token_ids)
    end = start + MAX_TOKENS
    trained = sample.advantages[trajectory.trains]
    return {
        "rollout_id": trajectory.rollout_id,
        "prompt": trajectory.prompt.text[:MAX_PROMPT_CHARACTERS],
        "token_ids": trajectory.token_ids[start:end].tolist(),
        "versions": _runs(trajectory, start, end),
        "steps": [] if trace is None else [[int(at), float(score)] for at, score in zip(trace.ends, trace.scores, strict=True)],
        "num_tokens": trajectory.num_tokens - start,
        "reward": sample.reward,
        "advantage": float(trained.mean()) if len(trained) else 0.0,
        "finish": str(trajectory.finish),
    }


def _runs(trajectory: Trajectory, start: int, end: int) -> list[list[int]]:
    """[version, number of tokens] of each run of tokens that one version sampled."""
    return [[version, len(list(run))] for version, run in itertools.groupby(trajectory.versions[start:end].tolist())]

"""A few samples of what became of rollouts, in the journal, so that a person can read what the policy writes, and what failed.

Of a step the best, the worst and the longest sample are shown, at most every `EVERY_S` seconds; of what ended otherwise one for each
reason, as often. All are cut to `MAX_TOKENS`. Token ids are written and decoded where they are shown: nothing here loads a tokenizer.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.rules.batch import Ended
from pipelinerl.messages import Sample, ScoredTrajectory, TerminalStatus, Trajectory
from pipelinerl.observe.journal import Journal

EVERY_S = 10.0
"""Seconds between two steps that are shown. A smaller value fills the journal; a larger one shows too little of a run of minutes."""
MAX_TOKENS = 1024
MAX_PROMPT_CHARACTERS = 4000
MAX_REASONS = 16
"""Reasons of which samples are shown: there are few. Without a bound, a reason with a number in it would fill the journal."""
MAX_COLUMNS = 16
"""Columns of the prompt's row that are shown: more than any expected answer needs."""
MAX_COLUMN_CHARACTERS = 500
"""A row may hold all tests of a program; its beginning tells which row it is."""
MAX_ERROR_CHARACTERS = 1000
_NO_MEMBERS: Mapping[str, ScoredTrajectory] = {}


class SampleLog:
    """The log that writes the `sample` lines."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._due_s = -math.inf
        self._reasons_due_s: dict[str, float] = {}
        """The second from which on another sample is shown, by status and reason."""

    def trained(self, step: int, samples: list[Sample], *, now_s: float, members: Mapping[str, ScoredTrajectory] = _NO_MEMBERS) -> None:
        """Show some of the samples that a step was trained on, if it is time to; `members` holds their scores, by rollout."""
        if not samples or now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        for sample in worth_showing(samples):
            trajectory = sample.trajectory
            trained = sample.advantages[trajectory.loss_mask]
            advantage = float(trained.mean()) if len(trained) else 0.0
            said = {} if (member := members.get(trajectory.rollout_id)) is None else _said(member)
            fields = {**_fields(trajectory), **said, "reward": sample.reward, "advantage": advantage}
            self._journal.write("sample", step=step, status=str(TerminalStatus.TRAINED), **fields)

    def ended(self, ended: Sequence[Ended], *, step: int, now_s: float) -> None:
        """Show one rollout of each reason among those that will not be trained, if it is time to; `step` was being filled."""
        for one in ended:
            key = f"{one.status}: {one.reason}"
            due_s = self._reasons_due_s.get(key)
            if now_s < due_s if due_s is not None else len(self._reasons_due_s) >= MAX_REASONS:
                continue
            self._reasons_due_s[key] = now_s + EVERY_S
            fields = {**_fields(one.scored.trajectory), **_said(one.scored)}
            self._journal.write("sample", step=step, status=str(one.status), reason=one.reason, **fields)


def worth_showing(samples: list[Sample]) -> list[Sample]:
    """Return the best, the worst and the longest sample, each once; of equals the first."""
    picked = (
        max(samples, key=lambda sample: sample.reward),
        min(samples, key=lambda sample: sample.reward),
        max(samples, key=lambda sample: sample.trajectory.num_trained_tokens),
    )
    return list({sample.trajectory.rollout_id: sample for sample in picked}.values())


def _fields(trajectory: Trajectory) -> dict[str, object]:
    """Return the prompt and the completion."""
    start = len(trajectory.prompt.token_ids)
    end = start + MAX_TOKENS
    return {
        "rollout_id": trajectory.rollout_id,
        "prompt": trajectory.prompt.text[:MAX_PROMPT_CHARACTERS],
        "columns": {name[:100]: _text(value) for name, value in itertools.islice(trajectory.prompt.columns.items(), MAX_COLUMNS)},
        "token_ids": trajectory.token_ids[start:end].tolist(),
        "versions": _runs(trajectory, start, end),
        "num_tokens": trajectory.num_tokens - start,
        "finish": str(trajectory.finish),
    }


def _said(member: ScoredTrajectory) -> dict[str, object]:
    """Return the scores."""
    trace, score = member.steps, member.score
    return {
        "reward": score.reward,
        "components": dict(score.components),
        "step_scores": [] if trace is None else [[int(at), float(score)] for at, score in zip(trace.ends, trace.scores, strict=True)],
        "error": (score.error or member.trajectory.error)[:MAX_ERROR_CHARACTERS],
    }


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_COLUMN_CHARACTERS else f"{text[:MAX_COLUMN_CHARACTERS]} …"


def _runs(trajectory: Trajectory, start: int, end: int) -> list[list[int]]:
    """Return [version, number of tokens] of each run of tokens that one version sampled."""
    return [[version, len(list(run))] for version, run in itertools.groupby(trajectory.versions[start:end].tolist())]

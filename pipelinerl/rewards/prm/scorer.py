"""Scores the steps of traces that are still being written, with a process reward model, at about one prefill per trace.

Every time a step is complete, the trace so far is asked for again, and the engine's prefix cache spares what it has seen: with blocks of
`b` tokens a new step costs its own tokens and fewer than `b` more. A token-wise pooling engine with a prefix cache returns rows for the
tokens it computed only, those at the end: row i belongs to token `num_tokens - num_rows + i`. A step whose row did not come, because its
tag was cached, is asked for once more past the cache; that is counted, like every token computed.

Conventions differ between models and are data here (`Convention`): what stands after a step, and how its row becomes a score.
Nothing here imports vLLM: `prm_vllm` does, and the tests also drive this with an engine made by hand.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipelinerl.messages import Outcome
from pipelinerl.rewards.prm.steps import Splitter, Step

Rows = npt.NDArray[np.float32]


class Reading(enum.StrEnum):
    """How the row at a step's tag becomes its score."""

    SOFTMAX = "softmax"
    """The probability of column `good` among the columns `good` and `bad`."""
    SIGMOID = "sigmoid"
    """The logistic function of column `good`."""
    RAW = "raw"
    """Column `good` as it is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """How one family of process reward models is asked."""

    tag: str
    """Text after every step; its last token's row is the step's."""
    reading: Reading
    good: int
    """Column of a good step: a class, or a vocabulary id where the model is a language model."""
    bad: int = 0
    """Column of a bad one, for softmax."""

    def read(self, row: Rows) -> float:
        """The score of one step. Raises `ValueError` where the row does not have such columns or is not finite."""
        if max(self.good, self.bad) >= len(row) or not np.isfinite(row[[self.good, self.bad]]).all():
            raise ValueError(f"the model's row of {len(row)} values has no finite columns {self.good} and {self.bad}")
        value = float(row[self.good])
        if self.reading is Reading.RAW:
            return value
        if self.reading is Reading.SOFTMAX:
            value -= float(row[self.bad])
        return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


CONVENTIONS = {
    "qwen2.5-math-prm": Convention(tag="<extra_0>", reading=Reading.SOFTMAX, good=1, bad=0),
    "math-shepherd": Convention(tag=" ки", reading=Reading.SOFTMAX, good=648, bad=387),
    "token-classification": Convention(tag="", reading=Reading.SOFTMAX, good=1, bad=0),
    "sigmoid-head": Convention(tag="", reading=Reading.SIGMOID, good=0),
}
"""By the name a config uses; further ones are made from a tag and two columns."""


class PrmEngine(Protocol):
    """A token-wise pooling engine."""

    max_tokens: int
    """Longest trace, tags included, that it takes."""

    def encode(self, text: str) -> list[int]:
        """The model's own tokens, without any it would add around a whole text."""
        ...

    def rows(self, requests: Sequence[Sequence[int]], *, salt: str, reads_cache: bool) -> list[Rows]:
        """[tokens computed, columns] raw values of each request, for its last tokens: batched, all at once.

        `salt` keeps apart what different weights computed: the name and version of the model.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepScore:
    """What the model says of one step. It is joined with the trajectory by (rollout, attempt, step), never by order of arrival."""

    rollout_id: str
    attempt: int
    step: int
    end: int
    """Position of the step's last token among the policy's."""
    outcome: Outcome
    score: float | None
    """None unless `outcome` is `OK`."""
    prm_version: str
    error: str = ""


@dataclasses.dataclass(slots=True)
class Cost:
    """What scoring has cost, in tokens of the process reward model."""

    num_computed: int = 0
    num_asked: int = 0
    """Tokens of all requests: what it would have cost without a cache."""
    num_requests: int = 0
    num_asked_again: int = 0
    """Requests past the cache, because a tag's row was missing."""


class Trace:
    """One growing trace: the policy's tokens go in, the steps that became complete wait in `pending` with the tokens to ask for."""

    def __init__(
        self,
        rollout_id: str,
        attempt: int,
        *,
        prompt: str,
        splitter: Splitter,
        convention: Convention,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.rollout_id = rollout_id
        self.attempt = attempt
        self.prompt = prompt
        self.texts: list[str] = []
        """Of its complete steps."""
        self.token_ids: list[int] = encode(prompt)
        """The model's tokens up to and with the last tag."""
        self.pending: list[tuple[Step, int]] = []
        """Steps without a score, and the position of their tag among `token_ids`."""
        self.num_told = 0
        """Steps whose scores were handed on."""
        self._splitter = splitter
        self._tag = convention.tag
        self._encode = encode

    def feed(self, token_ids: Sequence[int], *, is_last: bool) -> None:
        """Take a chunk of the policy's tokens."""
        steps = self._splitter.feed(token_ids)
        for step in [*steps, *self._splitter.finish()] if is_last else steps:
            self.texts.append(step.text)
            self.token_ids += self._encode(step.text + self._tag)
            self.pending.append((step, len(self.token_ids) - 1))


class StepScorer(Protocol):
    """Scores the steps of growing traces, under one version of a model."""

    cost: Cost
    version: str

    def begin(self, rollout_id: str, attempt: int, *, prompt: str, splitter: Splitter) -> Trace:
        """A trace to feed, and to have scored from time to time."""
        ...

    def score(self, traces: Sequence[Trace]) -> list[StepScore]:
        """The scores of every pending step of these traces; they are pending no more."""
        ...


class PrmScorer:
    """A `StepScorer` around a pooling engine: what is pending of many traces is one batch."""

    def __init__(self, engine: PrmEngine, *, convention: Convention, version: str) -> None:
        self.cost = Cost()
        self.version = version
        self._engine = engine
        self._convention = convention

    def begin(self, rollout_id: str, attempt: int, *, prompt: str, splitter: Splitter) -> Trace:
        """See `StepScorer`."""
        return Trace(rollout_id, attempt, prompt=prompt, splitter=splitter, convention=self._convention, encode=self._engine.encode)

    def score(self, traces: Sequence[Trace]) -> list[StepScore]:
        """The scores of every pending step of these traces; they are pending no more."""
        asked = [trace for trace in traces if self._last_tag(trace) is not None]
        known = self._ask(asked, reads_cache=True)
        missing = [trace for trace in asked if any((id(trace), tag) not in known for _, tag in self._that_fit(trace))]
        if missing:
            self.cost.num_asked_again += len(missing)
            known |= self._ask(missing, reads_cache=False)
        found: list[StepScore] = []
        for trace in traces:
            found += [self._scored(trace, step, tag, known.get((id(trace), tag))) for step, tag in trace.pending]
            trace.pending.clear()
        return found

    def _ask(self, traces: Sequence[Trace], *, reads_cache: bool) -> dict[tuple[int, int], Rows]:
        """Rows by trace and position, for the tags that are pending and came."""
        if not traces:
            return {}
        requests = [trace.token_ids[: (self._last_tag(trace) or 0) + 1] for trace in traces]
        answers = self._engine.rows(requests, salt=self.version, reads_cache=reads_cache)
        known: dict[tuple[int, int], Rows] = {}
        for trace, request, rows in zip(traces, requests, answers, strict=True):
            self.cost.num_requests += 1
            self.cost.num_asked += len(request)
            self.cost.num_computed += len(rows)
            offset = len(request) - len(rows)
            known |= {(id(trace), tag): rows[tag - offset] for _, tag in self._that_fit(trace) if tag >= offset}
        return known

    def _that_fit(self, trace: Trace) -> list[tuple[Step, int]]:
        return [(step, tag) for step, tag in trace.pending if tag < self._engine.max_tokens]

    def _last_tag(self, trace: Trace) -> int | None:
        """Position of the last pending tag that the model takes; None where there is none."""
        return max((tag for _, tag in self._that_fit(trace)), default=None)

    def _scored(self, trace: Trace, step: Step, tag: int, row: Rows | None) -> StepScore:
        if tag >= self._engine.max_tokens:
            error = f"the trace up to this step has {tag + 1} tokens, the process reward model takes {self._engine.max_tokens}"
            return self._answer(trace, step, Outcome.INVALID, error=error)
        if row is None:
            return self._answer(trace, step, Outcome.ERROR, error="the engine returned no row for the step's tag")
        try:
            return self._answer(trace, step, Outcome.OK, score=self._convention.read(row))
        except ValueError as error:
            return self._answer(trace, step, Outcome.INVALID, error=str(error))

    def _answer(self, trace: Trace, step: Step, outcome: Outcome, *, score: float | None = None, error: str = "") -> StepScore:
        return StepScore(
            rollout_id=trace.rollout_id,
            attempt=trace.attempt,
            step=step.index,
            end=step.end,
            outcome=outcome,
            score=score,
            prm_version=self.version,
            error=error,
        )

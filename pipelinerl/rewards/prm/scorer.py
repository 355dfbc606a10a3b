"""Scores the steps of traces that are still being written, with a process reward model, at about one prefill per trace.

Whenever a step is complete, the whole trace so far is requested again, and the engine's prefix cache saves the part that it has seen: with
blocks of `b` tokens, a new step costs its own tokens and fewer than `b` more. A token-wise pooling engine with a prefix cache returns rows
only for the tokens that it computed, those at the end: row i belongs to token `num_tokens - num_rows + i`. A step whose row is missing,
because its tag was cached, is requested once more without the cache; those tokens are counted, too.

Conventions differ between models and are data here (`Convention`): the text that stands after a step, and the rule that makes a score of
its row. Nothing here imports vLLM: `pipelinerl.rewards.pooling` does, and the tests also run this with an engine made by hand.
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
from pipelinerl.rewards.prm.steps import Splitter, Step, TurnSplitter

Rows = npt.NDArray[np.float32]


class Reading(enum.StrEnum):
    """The rule that makes a score of the row at a step's tag."""

    SOFTMAX = "softmax"
    """The probability of column `good` among the columns `good` and `bad`."""
    SIGMOID = "sigmoid"
    """The logistic function of column `good`."""
    RAW = "raw"
    """The value of column `good` itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """The convention by which one family of process reward models marks steps and gives their scores."""

    tag: str
    """Text after every step; the row of its last token is the step's row."""
    reading: Reading
    good: int
    """Column of a good step: a class, or a vocabulary id where the model is a language model."""
    bad: int = 0
    """Column of a bad step, for `SOFTMAX`."""

    def read(self, row: Rows) -> float:
        """Return the score of one step. Raises `ValueError` where the row does not have these columns or is not finite."""
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
"""Conventions by the name that a config uses; a config may state another tag."""


class PrmEngine(Protocol):
    """A token-wise pooling engine."""

    max_tokens: int
    """Maximum length of a trace that it takes, including tags."""

    def encode(self, text: str) -> list[int]:
        """Return the model's own tokens of a text, without any that it would add around a whole text."""
        ...

    def rows(self, requests: Sequence[Sequence[int]], *, salt: str, reads_cache: bool) -> list[Rows]:
        """Return [tokens computed, columns] raw values for each request, which belong to its last tokens. All requests are one batch.

        `salt`, the name and version of the model, keeps cache entries of different weights apart.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepScore:
    """The model's score for one step. It is joined with the trajectory by (rollout, attempt, step), never by order of arrival."""

    trace: Trace
    step: Step
    outcome: Outcome = Outcome.OK
    score: float | None = None
    """None unless `outcome` is `OK`."""
    error: str = ""


@dataclasses.dataclass(slots=True)
class Cost:
    """The cost of scoring so far, in tokens of the process reward model."""

    num_computed: int = 0
    """Number of tokens that the model computed."""
    num_asked: int = 0
    """Number of tokens of all requests, which is the cost without a cache."""
    num_requests: int = 0
    num_asked_again: int = 0
    """Number of requests without the cache, because a tag's row was missing."""


class Trace:
    """One growing trace: it takes the policy's tokens, and keeps the steps that became complete in `pending` until they are scored."""

    def __init__(
        self,
        rollout_id: str,
        attempt: int,
        *,
        prompt: str,
        splitter: Splitter | TurnSplitter,
        convention: Convention,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.rollout_id = rollout_id
        self.attempt = attempt
        self.prompt = prompt
        self.texts: list[str] = []
        """Texts of its complete steps."""
        self.token_ids: list[int] = encode(prompt)
        """The model's tokens up to and including the last tag."""
        self.pending: list[tuple[Step, int]] = []
        """Steps without a score, each with the position of its tag among `token_ids`."""
        self.num_taken = 0
        """Number of the policy's tokens taken."""
        self.num_told = 0
        """Number of steps whose scores were sent."""
        self._splitter = splitter
        self._tag = convention.tag
        self._encode = encode

    def feed(self, token_ids: Sequence[int], *, is_last: bool) -> None:
        """Take a chunk of the policy's tokens."""
        self.num_taken += len(token_ids)
        steps = self._splitter.feed(token_ids)
        for step in [*steps, *self._splitter.finish()] if is_last else steps:
            self.texts.append(step.text)
            self.token_ids += self._encode(step.text + self._tag)
            self.pending.append((step, len(self.token_ids) - 1))


class StepScorer(Protocol):
    """Scores the steps of growing traces, under one version of a model."""

    cost: Cost
    version: str

    def begin(self, rollout_id: str, attempt: int, *, prompt: str, splitter: Splitter | TurnSplitter) -> Trace:
        """Return a new trace, to be fed with tokens and scored from time to time."""
        ...

    def score(self, traces: Sequence[Trace]) -> list[StepScore]:
        """Score every pending step of these traces; afterwards none is pending."""
        ...


class PrmScorer:
    """A `StepScorer` around a pooling engine: the pending steps of many traces are one batch."""

    def __init__(self, engine: PrmEngine, *, convention: Convention, version: str) -> None:
        self.cost = Cost()
        self.version = version
        self._engine = engine
        self._convention = convention

    def begin(self, rollout_id: str, attempt: int, *, prompt: str, splitter: Splitter | TurnSplitter) -> Trace:
        """See `StepScorer`."""
        return Trace(rollout_id, attempt, prompt=prompt, splitter=splitter, convention=self._convention, encode=self._engine.encode)

    def score(self, traces: Sequence[Trace]) -> list[StepScore]:
        """Score every pending step of these traces; afterwards none is pending."""
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
        """Return rows by trace and position, for the pending tags whose rows the engine returned."""
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
        """Return the position of the last pending tag that the model takes; None where there is none."""
        return max((tag for _, tag in self._that_fit(trace)), default=None)

    def _scored(self, trace: Trace, step: Step, tag: int, row: Rows | None) -> StepScore:
        if tag >= self._engine.max_tokens:
            error = f"the trace up to this step has {tag + 1} tokens, the process reward model takes {self._engine.max_tokens}"
            return StepScore(trace=trace, step=step, outcome=Outcome.INVALID, error=error)
        if row is None:
            return StepScore(trace=trace, step=step, outcome=Outcome.ERROR, error="the engine returned no row for the step's tag")
        try:
            return StepScore(trace=trace, step=step, score=self._convention.read(row))
        except ValueError as error:
            return StepScore(trace=trace, step=step, outcome=Outcome.INVALID, error=str(error))

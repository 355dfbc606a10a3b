"""The main loop of a process reward model's process: it takes tokens of growing traces, and gives scores of the steps they complete."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
import numpy as np

from pipelinerl.config import PrmSection
from pipelinerl.messages import Cancel, Failed, FunctionKind, Message, Outcome, PrmLoad, PrmReady, StepsScored, Stop, TraceTokens
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.failures import Failures
from pipelinerl.rewards.prm.scorer import CONVENTIONS, Convention, StepScore, StepScorer, Trace
from pipelinerl.rewards.prm.steps import splitter_of
from pipelinerl.runtime.function_errors import FunctionError
from pipelinerl.transport.base import Link

LOAD_EVERY_S = 1.0
"""Seconds between two `PrmLoad`, which are its sign of life."""
SILENT_S = 30.0
"""Silence of the orchestrator after which it looks whether it is still one of the run's. Longer leaves a device in the hands of one that is
not.
"""


def convention_of(section: PrmSection) -> Convention:
    """Return the convention that the config names, with the config's own tag where it states one."""
    convention = CONVENTIONS[section.convention]
    return convention if section.tag is None else dataclasses.replace(convention, tag=section.tag)


class PrmServer:
    """One process reward model.

    takes       `TraceTokens`, `Cancel`, `Stop` from the orchestrator
    gives       `PrmReady` to each; `StepsScored` for all tokens it takes; `FunctionFailed` for each cause of traces it could not score;
                `PrmLoad` every second
    waits for   the link; while the model computes, what arrives there waits, and then goes through it as one batch
    woken by    messages
    fails       whatever the model raises ends it; a trace it cannot take is an outcome
    ends        on `Stop`
    """

    def __init__(
        self,
        scorer: StepScorer,
        section: PrmSection,
        *,
        decode: Callable[[list[int]], str],
        link: Link,
        journal: Journal,
        prm_id: int,
        request_id: int = 0,
        is_awaited: Callable[[], bool] = lambda: True,
        limit: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Take `decode` of the policy's tokenizer, and `limit()`, which is entered around every batch and ends this process when the batch
        takes too long. `request_id`: see `PrmReady`. Where the orchestrator is silent, and `is_awaited()` is false, the run has gone on
        without this process, and nobody will tell it so.
        """
        self._section = section
        self._scorer = scorer
        self._decode = decode
        self._link = link
        self._journal = journal
        self._prm_id = prm_id
        self._request_id = request_id
        self._is_awaited = is_awaited
        self._limit = limit
        self._traces: dict[str, Trace] = {}
        self._touched: dict[str, bool] = {}
        """Traces with new tokens since the last batch, by rollout; true where the trace is complete."""
        self._failures = Failures()
        self._num_steps = self._num_batches = 0
        self._total_taken = 0
        self._busy_s = 0.0
        self._is_stopped = False
        self._next_load_at = time.monotonic()

    def run(self) -> None:
        """Serve until `Stop`. Any error is reported to the orchestrator before it ends this process."""
        try:
            self._link.introduce(self._introduce)
            while not self._is_stopped and (self._link.silent_s < SILENT_S or self._is_awaited()):
                self._turn()
            self._write_load(self._load())  # what was done since the last gauges, which nobody waits for
        except Exception as error:  # the peer is told what ends this process; the error is then raised as it is
            self._link.send(Failed(error=f"{type(error).__name__}: {error}"))
            raise

    def _introduce(self, kept: Sequence[bytes]) -> list[Message]:
        """Drop all traces and introduce this process: a new orchestrator sends again what it wants scored, and traces of the dead one must
        not be answered.
        """
        for rollout_id in list(self._traces):
            self._drop(rollout_id)
        self._failures.report_again()
        return [PrmReady(prm_id=self._prm_id, process_id=os.getpid(), version=self._scorer.version, request_id=self._request_id)]

    def _turn(self) -> None:
        message = self._link.receive(max(0.0, self._next_load_at - time.monotonic()))
        while message is not None and not self._is_stopped:
            self._on_message(message)
            message = self._link.receive(0.0)
        if self._touched:
            self._score()
        self._link.send(*self._failures.news(num_calls={self._scorer.version: self._num_steps}))
        if time.monotonic() >= self._next_load_at:
            self._report()

    def _on_message(self, message: Message) -> None:
        match message:
            case TraceTokens():
                self._feed(message)
            case Cancel():
                trace = self._traces.get(message.rollout_id)
                if trace is not None and trace.attempt <= message.attempt:
                    self._drop(message.rollout_id)
            case Stop():
                self._is_stopped = True

    def _feed(self, tokens: TraceTokens) -> None:
        if tokens.prompt_token_ids is not None:
            self._begin(tokens)
        trace = self._traces.get(tokens.rollout_id)
        if trace is None or trace.attempt != tokens.attempt:
            return  # withdrawn meanwhile
        trace.feed(tokens.token_ids.tolist(), is_last=tokens.is_last)
        self._total_taken += len(tokens.token_ids)
        self._touched[tokens.rollout_id] = tokens.is_last

    def _begin(self, tokens: TraceTokens) -> None:
        assert tokens.prompt_token_ids is not None
        section, turn_ends = self._section, None if tokens.turn_ends is None else tokens.turn_ends.tolist()
        splitter = splitter_of(self._decode, turn_ends=turn_ends, max_steps=section.max_steps, separator=section.separator)
        prompt = self._decode(tokens.prompt_token_ids.tolist())
        self._traces[tokens.rollout_id] = self._scorer.begin(tokens.rollout_id, tokens.attempt, prompt=prompt, splitter=splitter)

    def _score(self) -> None:
        touched, self._touched = self._touched, {}
        started, started_at = time.monotonic(), time.time()
        with self._limit():
            found = self._scorer.score([self._traces[rollout_id] for rollout_id in touched])
        self._busy_s += time.monotonic() - started
        if found:
            self._num_batches += 1
            self._journal.span(f"scorer-{self._prm_id}", "score", start=started_at, end=time.time(), count=len(found))
        self._num_steps += len(found)
        scores: dict[str, list[StepScore]] = {rollout_id: [] for rollout_id in touched}
        for one in found:
            scores[one.trace.rollout_id].append(one)
        self._link.send(*(self._answer(rollout_id, scores[rollout_id], is_last=is_last) for rollout_id, is_last in touched.items()))
        for rollout_id, is_last in touched.items():
            if is_last:
                self._drop(rollout_id)

    def _answer(self, rollout_id: str, found: list[StepScore], *, is_last: bool) -> StepsScored:
        good = [one for one in found if one.outcome is Outcome.OK]
        bad = next((one for one in found if one.outcome is not Outcome.OK), None)
        if bad is not None:
            error = FunctionError(cause=bad.error)
            self._failures.note(self._scorer.version, error, kind=FunctionKind.PRM, outcome=bad.outcome, rollout_id=rollout_id)
        trace = self._traces[rollout_id]
        first, trace.num_told = trace.num_told, trace.num_told + len(good)
        return StepsScored(
            rollout_id=rollout_id,
            attempt=trace.attempt,
            num_taken=trace.num_taken,
            first=first,
            ends=np.array([one.step.end for one in good], np.int32),
            scores=np.array([one.score for one in good], np.float32),
            is_last=is_last,
            version=self._scorer.version,
            outcome=bad.outcome if bad else Outcome.OK,
            error=bad.error if bad else "",
        )

    def _drop(self, rollout_id: str) -> None:
        del self._traces[rollout_id]
        self._touched.pop(rollout_id, None)

    def _report(self) -> None:
        self._next_load_at = time.monotonic() + LOAD_EVERY_S
        self._write_load(load := self._load())
        self._link.send(load)

    def _load(self) -> PrmLoad:
        cost = self._scorer.cost
        return PrmLoad(
            prm_id=self._prm_id,
            num_traces=len(self._traces),
            num_steps=self._num_steps,
            num_trace_tokens=self._total_taken,
            num_computed=cost.num_computed,
            num_uncached_tokens=cost.num_asked,
            busy_s=self._busy_s,
            num_batches=self._num_batches,
        )

    def _write_load(self, load: PrmLoad) -> None:
        self._journal.write("load", **msgspec.structs.asdict(load))

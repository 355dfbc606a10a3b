"""An outcome reward model: a sequence classifier with one logit, which is the reward of a completion.

The policy's tokens are decoded, and the text is made into tokens again by the reward model's own tokenizer, in the form that its training
had (`reward.format`): the prompt's messages and the completion as the assistant's, by its own chat template, or the bare text of both. The
policy's rows keep the engine's own ids. The reward is the raw logit of the last token, as transformers' `ForSequenceClassification` gives.

It runs as a pool of its own in the scorer: a process that is killed at its deadline and started again, and batches of whatever waits. Text
that is too long for the model, or a logit that is not finite, is `invalid`; nothing here becomes 0.0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipelinerl.engine.environment import set_environment
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Outcome, ScorerTask
from pipelinerl.rewards.calls import Call, CallResult, Component, RewardModel
from pipelinerl.rewards.reward_model.folder import problem_of, problem_of_tokenizer
from pipelinerl.runtime.function_errors import FunctionError, error_of


class Classifier(Protocol):
    """An engine that gives the logits of a sequence's last token."""

    tokenizer: Any
    max_tokens: int

    def rows(self, requests: Sequence[Sequence[int]], *, salt: str) -> list[npt.NDArray[np.float32]]:
        """Return the [columns] raw values of each request."""
        ...


def load_reward_model(component: Component, *, decode: Callable[[list[int]], str]) -> RewardModelRunner:
    """Load a reward model. `decode` is the policy's. Raises `ConfigError` where it is none, or vLLM cannot serve it."""
    assert component.model is not None
    if problem := problem_of(Path(component.model.path)):
        raise ConfigError(f"reward {component.name}: {problem}")
    set_environment()
    from pipelinerl.rewards.pooling import PoolingModel

    model = component.model
    engine = PoolingModel(Path(model.path), task="classify", dtype=model.dtype, max_tokens=model.max_tokens, options=component.options)
    return RewardModelRunner(component.name, engine, model=model, decode=decode)


class RewardModelRunner:
    """Scores batches of completions."""

    def __init__(self, name: str, engine: Classifier, *, model: RewardModel, decode: Callable[[list[int]], str]) -> None:
        if problem := problem_of_tokenizer(Path(model.path), engine.tokenizer, form=model.format):
            raise ConfigError(f"reward {name}: {problem}")
        self._name = name
        self._engine = engine
        self._model = model
        self._decode = decode

    def run(self, calls: Sequence[Call]) -> Iterator[CallResult]:
        """Score the completions of these calls as one batch. Raises what the engine raises over several: each is then asked about alone."""
        started_at, begin = time.time(), time.perf_counter()
        texts = [self._read(call.task) for call in calls]
        asked = [one for one in texts if isinstance(one, list)]
        found: Sequence[float | FunctionError]
        outcome = Outcome.INVALID
        try:
            rows = iter(self._engine.rows(asked, salt=self._model.path) if asked else [])
            found = [one if isinstance(one, FunctionError) else _logit(next(rows)) for one in texts]
        except Exception as error:  # the boundary to the engine: over one call alone, whatever it raises is that call's outcome
            if len(calls) > 1:
                raise
            found, outcome = [error_of(error)], Outcome.ERROR
        took_s = time.perf_counter() - begin
        for index, (call, one) in enumerate(zip(calls, found, strict=True)):
            is_failure = isinstance(one, FunctionError)
            yield CallResult(
                call_id=call.call_id,
                outcome=outcome if is_failure else Outcome.OK,
                components=() if is_failure else ({self._name: one},),
                error=f"{self._name}: {one.cause}" if is_failure else "",
                failed=self._name if is_failure else "",
                failure=one if is_failure else None,
                started_at=started_at + index * took_s / len(calls),
                duration_s=took_s / len(calls),  # its share of the batch: durations add up to the time that the model was busy
                durations_s={self._name: took_s},
            )

    def _read(self, task: ScorerTask) -> list[int] | FunctionError:
        """Return what the model reads of a task; why it cannot, where it cannot."""
        try:
            token_ids = self.token_ids(task)
        except Exception as error:  # a chat template raises whatever it likes about messages that it refuses
            return error_of(error)
        if len(token_ids) > self._engine.max_tokens:
            cause = f"prompt and completion are {len(token_ids)} of its own tokens, and it takes {self._engine.max_tokens}"
            return FunctionError(cause=cause)
        return token_ids

    def token_ids(self, task: ScorerTask) -> list[int]:
        """Return what the model reads of a task with one completion, in its own tokens."""
        (token_ids,) = task.completions
        completion = self._decode(token_ids.tolist())
        if self._model.format == "text":
            return self._engine.tokenizer.encode(task.prompt.text + completion)
        asked: list[Mapping[str, Any]] = list(task.prompt.chat) or [{"role": "user", "content": task.prompt.text}]
        text = self._engine.tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": completion}], tokenize=False)
        return self._engine.tokenizer.encode(text, add_special_tokens=False)


def _logit(row: npt.NDArray[np.float32]) -> float | FunctionError:
    if row.shape != (1,):
        return FunctionError(cause=f"its head gave {row.size} numbers, expected one")
    return float(row[0]) if np.isfinite(row[0]) else FunctionError(cause=f"its logit is {row[0]}, expected a finite number")

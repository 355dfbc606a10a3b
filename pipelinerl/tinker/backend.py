"""The seam between Tinker's API and what computes."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from pipelinerl.errors import PipelineError
from pipelinerl.messages import CloseModel, Completion, Generate, TrainingAnswer, TrainingRequest


class Refusal(PipelineError):
    """A request is not carried out. `is_asker_wrong`: the same one would be refused again."""

    def __init__(self, words: str, *, is_asker_wrong: bool) -> None:
        super().__init__(words)
        self.is_asker_wrong = is_asker_wrong


class TrainerLost(Refusal):
    """The trainer was lost before it answered. What stands in the ledger is handed to the next one."""

    def __init__(self) -> None:
        super().__init__("the trainer was lost before it answered; try again", is_asker_wrong=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a client samples from: a model as it goes, a model as it was saved, or, of neither, what all models begin with."""

    model_id: str = ""
    folder: str = ""
    """Of a saved model; empty for a model as it goes."""
    num_steps: int = 0
    """Optimizer steps of a saved model before it was saved."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a version is."""

    model_id: str
    """Empty for what all models begin with."""
    num_steps: int
    """Optimizer steps of the model behind it."""


class Backend(Protocol):
    """Engines and a trainer."""

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus completion."""
        ...

    @property
    def publications(self) -> Mapping[int, Publication]:
        """By version."""
        ...

    @property
    def num_steps(self) -> collections.Counter[str]:
        """Optimizer steps of each model that the trainer was asked for; who asks counts them."""
        ...

    def train(self, request: TrainingRequest | CloseModel) -> asyncio.Future[TrainingAnswer]:
        """Have the trainer carry out a request, after all those asked for before it; its `request_id` is given here. The answer may be
        `RequestFailed`. Fails with `TrainerLost`, or where it takes no more with `Refusal`."""
        ...

    def publish(self, weights: Weights) -> asyncio.Future[int]:
        """Bring a model, as it is once all that was asked of the trainer is done, to the engines; its version. Fails with `Refusal`,
        `TrainerLost` among these."""
        ...

    async def sample(self, weights: Weights, requests: Sequence[Generate]) -> Sequence[Completion]:
        """Sample under these weights, which are brought to the engines where they are not there. Raises `Refusal`."""
        ...

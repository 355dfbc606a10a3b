"""Engines and a trainer as `pipelinerl.tinker` sees them: its `Backend`."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

import msgspec

from orchestrator.peers.asking import answer_of
from orchestrator.peers.engines import Engine, Engines
from orchestrator.rules.residency import Use
from orchestrator.rules.validation.violations import Violation
from orchestrator.serving.publications import Publications
from orchestrator.serving.trainer import Trainer
from pipelinerl.messages import (
    CloseModel,
    Completion,
    Finish,
    Generate,
    TrainingAnswer,
    TrainingRequest,
)
from pipelinerl.tinker.backend import Publication, Refusal, Weights

MAX_ATTEMPTS = 5
"""Times that a sequence is asked for: again where its engine is lost, or holds its weights no more. More only repeats what fails."""
_T = TypeVar("_T")


class ServingBackend:
    """See `pipelinerl.tinker.backend.Backend`."""

    def __init__(
        self, *, engines: Engines, trainer: Trainer, published: Publications, num_steps: collections.Counter[str], pins: bool
    ) -> None:
        """`pins`: engines hold several versions side by side, and are told which one to sample under."""
        self._engines = engines
        self._trainer = trainer
        self._published = published
        self._num_steps = num_steps
        self._pins = pins
        self._max_context_tokens = 0
        """As the engine said that joined last; all have the same settings. So it is known while none is there, too."""
        engines.on_joined(self._on_joined)
        self._tasks: set[asyncio.Future[int]] = set()

    def _on_joined(self, engine: Engine) -> None:
        self._max_context_tokens = engine.ready.max_model_tokens

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @property
    def publications(self) -> Mapping[int, Publication]:
        return self._published.publications

    @property
    def num_steps(self) -> collections.Counter[str]:
        return self._num_steps

    def train(self, request: TrainingRequest | CloseModel) -> asyncio.Future[TrainingAnswer]:
        return self._trainer.ask(request)

    def publish(self, weights: Weights) -> asyncio.Future[int]:
        task = asyncio.ensure_future(self._published.publish(weights))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def sample(self, weights: Weights, requests: Sequence[Generate]) -> Sequence[Completion]:
        found: dict[str, Completion] = {}
        for attempt in range(MAX_ATTEMPTS):
            open_requests = [request for request in requests if request.rollout_id not in found]
            use = await self._published.begin(weights)
            try:
                done = await self._asked(open_requests, attempt=attempt, use=use)
            finally:
                self._published.end(use)
            for completion in done:
                if completion is not None and completion.finish is not Finish.NOT_HELD:
                    found[completion.rollout_id] = completion
                elif completion is not None:
                    self._published.lost(use.version)
            if len(found) == len(requests):
                return [found[request.rollout_id] for request in requests]
        raise Refusal(f"not sampled: engines were lost {MAX_ATTEMPTS} times over", is_asker_wrong=False)

    async def _asked(self, requests: Sequence[Generate], *, attempt: int, use: Use[Weights]) -> list[Completion | None]:
        """Ask engines; None for a sequence whose engine was lost. What is asked when this is cancelled is withdrawn."""
        version = use.version if self._pins else None
        asked = [msgspec.structs.replace(request, attempt=attempt, version=version) for request in requests]
        try:
            return list(await _all([answer_of(self._engines, request, refused=_refusal) for request in asked]))
        except asyncio.CancelledError:
            for request in asked:
                if self._engines.requests.owes(request.rollout_id, attempt):
                    self._engines.requests.withdraw(request.rollout_id, attempt)
            raise


async def _all(tasks: Sequence[Awaitable[_T]]) -> Sequence[_T]:
    return await asyncio.gather(*tasks)


def _refusal(engine_id: int, violation: Violation) -> Refusal:
    return Refusal(f"engine-{engine_id} gave an impossible answer: {violation.words}", is_asker_wrong=False)

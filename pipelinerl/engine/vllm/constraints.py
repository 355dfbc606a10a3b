"""Constraints on turns (`rollout.structured_outputs`), tried when an engine starts: one that its tokens cannot meet is found then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelinerl.engine.base import Engine
from pipelinerl.errors import ConfigError, EngineError
from pipelinerl.messages import Finish, Generate, Sampling


def constraint_options(constraints: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Options of vLLM: constraints are made of the tokens' texts, and a pass needs what the one before has sampled."""
    return {"skip_tokenizer_init": False, "async_scheduling": False} if constraints else {}


def prove_constraints(engine: Engine, constraints: Sequence[dict[str, Any]]) -> None:
    """Sample one token under each. Raises `ConfigError` where vLLM refuses one."""
    for constraint in filter(None, constraints):
        sampling = Sampling(max_tokens=1, structured_outputs=(constraint,))
        try:
            engine.submit(Generate(rollout_id="probe", attempt=0, token_ids=np.zeros(1, np.int32), sampling=sampling), version=0)
            finishes: list[Finish] = []
            while not finishes:
                finishes = [finish for sampled in engine.step() for finish in sampled.finishes.values()]
            if Finish.ERROR in finishes:
                raise EngineError("vLLM ended it with an error, which stands above in this log")
        except EngineError as error:
            raise ConfigError(f"rollout.structured_outputs: {constraint}: {error}") from error

"""Measures a run of TRL from outside its user's script: rewards, lengths, and what each step's seconds were spent on."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from trl import GRPOTrainer

from scripts.bench.beside.steps import Steps, settings

_steps = Steps(Path(settings()["journal"]))
_spent = {"generation": 0.0, "rewards": 0.0}


def task_of(told: dict[str, Any]) -> Any:
    return importlib.import_module(told["task"])


def watched(reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """The same reward function, whose results are noted."""

    @functools.wraps(reward)
    def noted(**words: Any) -> list[float]:
        began = time.perf_counter()
        rewards = reward(**words)
        _steps.sampled(rewards, [len(ids) for ids in words["completion_ids"]])
        _spent["rewards"] += time.perf_counter() - began
        return rewards

    return noted


class Watched(transformers.TrainerCallback):
    """Writes a line once a step's policy is there."""

    def __init__(self) -> None:
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        whole = time.perf_counter() - self._began
        _steps.trained({**_spent, "training and the rest": whole - sum(_spent.values())})
        _spent.update(dict.fromkeys(_spent, 0.0))


def _timed(generate: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **words: Any) -> Any:
        began = time.perf_counter()
        try:
            return generate(*arguments, **words)
        finally:
            _spent["generation"] += time.perf_counter() - began

    return timed


GRPOTrainer._generate = _timed(GRPOTrainer._generate)

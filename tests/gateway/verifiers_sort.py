"""The demo's task as a plain taskset of verifiers 0.4: one turn, a reward of its own, played by verifiers' `SingleAgentEnv`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

from pipelinerl.demo import sort_digits


class SortData(vf.TaskData):
    answer: str


class SortTask(vf.Task[SortData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def sorted_digits(self, trace: Any) -> float:
        return sort_digits.reward(prompt="", completion=trace.last_reply, answer=self.data.answer)


class SortTaskset(vf.Taskset[SortTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Any]:
        for row in sort_digits.train_prompts():
            yield SortTask(SortData(**row))


__all__ = ["SortTaskset"]

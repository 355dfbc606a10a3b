"""Stage 1: prompts are drawn from their source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from orchestrator.rules.curriculum import Rest
from pipelinerl.messages import Prompt
from pipelinerl.runtime.stage import Channel


class Source(Protocol):
    """A source of prompts; it is endless, epoch after epoch."""

    @property
    def position(self) -> tuple[int, int]:
        """The pair (epoch, row) of the next draw; a source set to a recorded position goes on as the recorded one would have."""
        ...

    @position.setter
    def position(self, position: tuple[int, int]) -> None: ...

    @property
    def resting(self) -> dict[int, Rest]:
        """The prompts that are passed over for some epochs, by number; those of an earlier process of the run are added here."""
        ...

    def measured(self, prompt_id: str, *, success: float) -> None:
        """Note which part of a prompt's scored siblings was correct: where `data.difficulty` is set, that decides what is drawn."""
        ...

    def next(self) -> Prompt:
        """Return the next prompt. Raises `DataError`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A prompt, and the position of its source after it, from which a resumed run goes on once the prompt is admitted."""

    prompt: Prompt
    position: tuple[int, int]
    num_siblings: int | None = None
    """Rollouts to sample, without a greedy one; None: as many as `rollout.group_size` says."""
    then: Callable[[int | None], None] = lambda group_id: None
    """Called with the id of the group that is admitted for it; with None where the prompt is quarantined, and passed over."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Prompts:
    """The stage that draws prompts ahead of generation.

    takes     rows of the prompt source
    gives     Drawn, to generation
    waits for room in its channel
    woken by  generation taking a prompt
    fails     DataError, on a malformed or empty source
    ends      cancelled, when the run ends
    """

    name = "prompts"
    source: Source
    prompts: Channel[Drawn]

    async def run(self) -> None:
        while True:
            prompt = self.source.next()
            await self.prompts.put(Drawn(prompt=prompt, position=self.source.position))

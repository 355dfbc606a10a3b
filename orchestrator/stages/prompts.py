"""Stage 1: draws prompts from their source."""

from __future__ import annotations

from typing import Protocol

from pipelinerl.messages import Prompt
from pipelinerl.stages import Channel


class Source(Protocol):
    """Where prompts come from; endless, epoch after epoch."""

    def next(self) -> Prompt:
        """The next prompt. Raises `DataError`."""
        ...


class Prompts:
    """Draws prompts ahead of dispatch.

    takes     rows of the prompt source
    gives     Prompt, to dispatch
    waits for room in its channel
    woken by  dispatch taking a prompt
    fails     DataError, on a malformed or empty source
    ends      when the run does
    """

    name = "prompts"

    def __init__(self, source: Source, *, prompts: Channel[Prompt]) -> None:
        self._source = source
        self._prompts = prompts

    async def run(self) -> None:
        while True:
            await self._prompts.put(self._source.next())

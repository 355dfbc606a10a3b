"""A turn in parts, as it is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from pipelinerl.gateway.episodes import Answer, Episode
from pipelinerl.gateway.refusal import RequestRefused
from pipelinerl.gateway.turns import Asked, Spoken, Turns
from pipelinerl.messages import TurnSampled


async def parts(answer: Answer, asked: Asked, *, turns: Turns, episode: Episode) -> AsyncIterator[str | tuple[TurnSampled, Spoken]]:
    """Yield the turn's text in parts, and at the end the turn itself.

    What may be the beginning of a tool call, or of a stop string, is held back until it is known. Together the parts are the text that the
    turn has without streaming, but for blanks around a tool call.
    """
    read, shown = turns.reader(asked), ""
    while not answer.done.done():
        text = read(answer.told)
        if len(text) > len(shown):
            yield text[len(shown) :]
            shown = text
        await _news(answer, episode)
    turn = answer.done.result()
    spoken = turns.spoken(turn, asked, lease=episode.lease)
    alike = next((one for one in (shown, shown.lstrip(), shown.strip()) if spoken.text.startswith(one)), spoken.text)
    if rest := spoken.text[len(alike) :]:
        yield rest
    yield turn, spoken


async def whole(answer: Answer, *, episode: Episode) -> TurnSampled:
    """Wait for a turn. Raises `RequestRefused` where it is not sampled, or its attempt ends."""
    while not answer.done.done():
        await _news(answer, episode)
    return answer.done.result()


async def _news(answer: Answer, episode: Episode) -> None:
    """Wait until there is more of a turn. The orchestrator ends the attempt at its deadline; a little later nobody answers any more."""
    answer.news.clear()
    try:
        async with asyncio.timeout(episode.left_s() + 10.0):
            await answer.news.wait()
    except TimeoutError:
        raise RequestRefused(504, "the orchestrator has not answered before the attempt's deadline", code="deadline") from None


def event(data: Any, *, name: str = "") -> bytes:
    """Return a server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + msgspec.json.encode(data) + b"\n\n"

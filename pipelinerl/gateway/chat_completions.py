"""OpenAI's chat completions: what is asked, and the answers, whole or in parts.

Beside OpenAI's own fields an answer holds vLLM's `prompt_token_ids` and `token_ids`, with `return_token_ids`, and `policy_versions`: the
versions of the weights that sampled it (with ids: of each token), and `engine_s`, for how long the engine had the turn.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pipelinerl.gateway import fields
from pipelinerl.gateway.episodes import Answer, Episode
from pipelinerl.gateway.fields import Body
from pipelinerl.gateway.refusal import RequestRefused
from pipelinerl.gateway.streaming import event, parts, whole
from pipelinerl.gateway.turns import Asked, Spoken, Turns
from pipelinerl.messages import Finish, TurnSampled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an answer is to look like."""

    model: str
    has_logprobs: bool
    has_token_ids: bool
    has_usage: bool


def read(body: Body, *, max_tokens: int, max_messages: int) -> tuple[Asked, Wanted]:
    """Read a request. `max_tokens` is the run's longest turn. Raises `RequestRefused`."""
    fields.refuse_what_changes_sampling(body)
    is_streamed = fields.flag(body, "stream")
    num_answers = fields.number(body, "n", default=1, most=fields.MAX_ANSWERS)
    if is_streamed and num_answers > 1:
        raise fields.wrong("n is more than 1, and stream is true: one answer can be streamed", param="n")
    options = body.get("stream_options")
    asked = Asked(
        messages=fields.messages(body, most=max_messages),
        tools=fields.tools(body),
        max_tokens=fields.number(body, "max_completion_tokens", "max_tokens", default=max_tokens, most=max_tokens),
        stop=fields.stops(body),
        num_answers=num_answers,
        is_streamed=is_streamed,
    )
    return asked, Wanted(
        model=fields.text(body, "model", default="policy"),
        has_logprobs=fields.flag(body, "logprobs"),
        has_token_ids=fields.flag(body, "return_token_ids"),
        has_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
    )


async def answer(answers: Sequence[Answer], asked: Asked, wanted: Wanted, *, turns: Turns, episode: Episode) -> dict[str, Any]:
    """Return the whole answer. Raises `RequestRefused` where a turn is not sampled."""
    sampled = [await whole(one, episode=episode) for one in answers]
    choices = [_choice(number, turn, asked, wanted, turns=turns, episode=episode) for number, turn in enumerate(sampled)]
    said = _frame(episode, sampled[0], wanted, kind="chat.completion") | {"choices": choices, "usage": usage_of(sampled, episode=episode)}
    if wanted.has_token_ids:
        said["prompt_token_ids"] = prompt_ids(episode, sampled[0])
    return said


async def stream(one: Answer, asked: Asked, wanted: Wanted, *, turns: Turns, episode: Episode) -> AsyncIterator[bytes]:
    """Yield the answer in server-sent events; one that fails under way ends with an error, as OpenAI's does."""
    frame = {"id": f"chatcmpl-{episode.lease}-{id(one):x}", "object": "chat.completion.chunk", "created": _now(), "model": wanted.model}

    def chunk(delta: dict[str, Any], finish: str | None = None, **further: Any) -> bytes:
        return event(frame | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish} | further]})

    try:
        yield chunk({"role": "assistant", "content": ""})
        async for part in parts(one, asked, turns=turns, episode=episode):
            if isinstance(part, str):
                yield chunk({"content": part})
                continue
            turn, spoken = part
            if calls := spoken.message().get("tool_calls"):
                yield chunk({"tool_calls": [{"index": number} | call for number, call in enumerate(calls)]})
            yield chunk({}, _finish(turn, spoken), **_further(turn, wanted, turns=turns))
            if wanted.has_usage:
                yield event(frame | {"choices": [], "usage": usage_of([turn], episode=episode)})
        yield b"data: [DONE]\n\n"
    except RequestRefused as refusal:
        yield event(refusal.body())


def prompt_ids(episode: Episode, turn: TurnSampled) -> list[int]:
    """Return the tokens that a turn was sampled behind."""
    node = episode.nodes.get(turn.node)
    return [] if node is None else episode.prompt_of(node)


def usage_of(sampled: Sequence[TurnSampled], *, episode: Episode) -> dict[str, Any]:
    """Return the tokens of a request and its answers."""
    nodes = [episode.nodes.get(turn.node) for turn in sampled]
    num_sampled = sum(len(turn.token_ids) for turn in sampled)
    num_prompt = max((node.num_prompt for node in nodes if node is not None), default=0)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def _choice(number: int, turn: TurnSampled, asked: Asked, wanted: Wanted, *, turns: Turns, episode: Episode) -> dict[str, Any]:
    spoken = turns.spoken(turn, asked, lease=episode.lease)
    said = {"index": number, "message": spoken.message() | {"refusal": None}, "logprobs": None, "finish_reason": _finish(turn, spoken)}
    return said | _further(turn, wanted, turns=turns)


def _further(turn: TurnSampled, wanted: Wanted, *, turns: Turns) -> dict[str, Any]:
    found: dict[str, Any] = {"policy_versions": sorted(set(turn.versions.tolist())), "engine_s": turn.engine_s}
    if wanted.has_logprobs:
        found["logprobs"] = {"content": logprobs_of(turn, turns=turns), "refusal": None}
    if wanted.has_token_ids:
        found["token_ids"] = turn.token_ids.tolist()
        found["policy_versions"] = turn.versions.tolist()
    return found


def logprobs_of(turn: TurnSampled, *, turns: Turns) -> list[dict[str, Any]]:
    """Return the log-probability of each sampled token; engines tell no others, so `top_logprobs` is empty."""
    found = []
    for token_id, logprob in zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True):
        text = turns.decode([token_id])
        found.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return found


def _finish(turn: TurnSampled, spoken: Spoken) -> str:
    return "length" if turn.finish is Finish.LENGTH else "tool_calls" if spoken.calls else "stop"


def _frame(episode: Episode, turn: TurnSampled, wanted: Wanted, *, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{episode.lease}-{turn.node}", "object": kind, "created": _now(), "model": wanted.model}


def _now() -> int:
    return int(time.time())

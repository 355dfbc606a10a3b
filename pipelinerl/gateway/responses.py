"""OpenAI's Responses API over the same turns: items in, items out, whole or as its named events.

A conversation is a list of items: messages, calls of functions and their outputs, reasoning (which is passed over). With
`previous_response_id` a request says only what is new; the rest is remembered with the episode.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from pipelinerl.gateway import fields
from pipelinerl.gateway.episodes import Answer, Episode
from pipelinerl.gateway.fields import Body
from pipelinerl.gateway.refusal import RequestRefused, wrong
from pipelinerl.gateway.streaming import event, parts, whole
from pipelinerl.gateway.turns import Asked, Spoken, Turns
from pipelinerl.messages import Finish, TurnSampled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an answer repeats of its request."""

    model: str
    instructions: str | None
    tools: list[Any]
    previous: str | None


def read(body: Body, *, remembered: Mapping[str, list[dict[str, Any]]], max_tokens: int, max_messages: int) -> tuple[Asked, Wanted]:
    """Read a request; `remembered` are conversations by the response that ended them. Raises `RequestRefused`."""
    shape = body.get("text")
    format_ = shape.get("format") if isinstance(shape, Mapping) else None
    fields.refuse_what_changes_sampling({**body, "response_format": format_})
    previous = fields.text(body, "previous_response_id") or None
    if previous is not None and previous not in remembered:
        raise wrong(f"previous_response_id {previous!r} is no response of this attempt", param="previous_response_id")
    instructions = fields.text(body, "instructions") or None
    before = [one for one in remembered.get(previous or "", []) if one["role"] not in ("system", "developer") or instructions is None]
    messages = [*([{"role": "system", "content": instructions}] if instructions else []), *before, *_messages(body.get("input"))]
    asked = Asked(
        messages=fields.messages({"input": messages}, most=max_messages, name="input"),
        tools=[_chat_tool(tool) for tool in fields.tools(body) if tool.get("type") == "function"],
        max_tokens=fields.number(body, "max_output_tokens", default=max_tokens, most=max_tokens),
        is_streamed=fields.flag(body, "stream"),
    )
    tools = body.get("tools")
    return asked, Wanted(
        model=fields.text(body, "model", default="policy"),
        instructions=instructions,
        tools=tools if isinstance(tools, list) else [],
        previous=previous,
    )


async def answer(one: Answer, asked: Asked, wanted: Wanted, *, turns: Turns, episode: Episode) -> dict[str, Any]:
    """Return the whole answer. Raises `RequestRefused` where the turn is not sampled."""
    turn = await whole(one, episode=episode)
    return response_of(turn, turns.spoken(turn, asked, lease=episode.lease), wanted, episode=episode)


async def stream(one: Answer, asked: Asked, wanted: Wanted, *, turns: Turns, episode: Episode, remember: Any) -> AsyncIterator[bytes]:
    """Yield the answer in server-sent events, each with its number; `remember` is told of the response at the end."""
    number = -1
    name = f"resp_{episode.lease}_{id(one):x}"
    begun = _frame(name, wanted, status="in_progress", output=[], usage=None)

    def say(kind: str, **data: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number} | data, name=kind)

    item_id, is_open, text = f"msg_{name}", False, ""
    place: dict[str, Any] = {"item_id": item_id, "output_index": 0, "content_index": 0}
    try:
        yield say("response.created", response=begun)
        yield say("response.in_progress", response=begun)
        async for part in parts(one, asked, turns=turns, episode=episode):
            if isinstance(part, str):
                if not is_open:
                    is_open = True
                    yield say("response.output_item.added", output_index=0, item=_message(item_id, None))
                    yield say("response.content_part.added", **place, part=_text(""))
                text += part
                yield say("response.output_text.delta", **place, delta=part, logprobs=[])
                continue
            turn, spoken = part
            done = response_of(turn, spoken, wanted, episode=episode, name=name)
            if is_open:
                yield say("response.output_text.done", **place, text=text, logprobs=[])
                yield say("response.content_part.done", **place, part=_text(text))
                yield say("response.output_item.done", output_index=0, item=_message(item_id, text))
            for index, item in enumerate((item for item in done["output"] if item["type"] == "function_call"), start=int(is_open)):
                call = {"item_id": item["id"], "output_index": index}
                yield say("response.output_item.added", output_index=index, item=item | {"arguments": "", "status": "in_progress"})
                yield say("response.function_call_arguments.delta", **call, delta=item["arguments"])
                yield say("response.function_call_arguments.done", **call, name=item["name"], arguments=item["arguments"])
                yield say("response.output_item.done", output_index=index, item=item)
            remember(done)
            kind = "response.incomplete" if done["status"] == "incomplete" else "response.completed"
            yield say(kind, response=done)
    except RequestRefused as refusal:
        error = refusal.body()["error"]
        failed = begun | {"status": "failed", "error": {"code": "server_error", "message": error["message"]}}
        yield say("response.failed", response=failed)


def response_of(turn: TurnSampled, spoken: Spoken, wanted: Wanted, *, episode: Episode, name: str = "") -> dict[str, Any]:
    """Return a turn as a response: a message, where it says something, and the calls of functions."""
    name = name or f"resp_{episode.lease}_{turn.node}"
    is_message = bool(spoken.text) or not spoken.calls
    output: list[dict[str, Any]] = [_message(f"msg_{name}", spoken.text)] if is_message else []
    for call_id, call in zip(spoken.call_ids, spoken.calls, strict=True):
        said = {"call_id": call_id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        output.append({"type": "function_call", "id": f"fc_{call_id}"} | said)
    node = episode.nodes.get(turn.node)
    num_input = 0 if node is None else node.num_prompt
    usage = {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(turn.token_ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + len(turn.token_ids),
    }
    is_cut = turn.finish is Finish.LENGTH
    frame = _frame(name, wanted, status="incomplete" if is_cut else "completed", output=output, usage=usage)
    return frame | {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else frame


def _messages(found: Any) -> list[dict[str, Any]]:
    """Return the items of a request as chat messages; consecutive calls of functions are one message of the assistant."""
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list):
        raise wrong(f"input is {str(found)[:80]!r}, expected a text or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(found):
        if not isinstance(item, dict):
            raise wrong(f"input[{place}] is {str(item)[:80]!r}, expected an item", param="input")
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", []), call]}
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                output = item.get("output")
                content = output if isinstance(output, str | list) else msgspec.json.encode(output).decode()
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "reasoning":
                continue
            case other:
                raise wrong(f"input[{place}].type is {str(other)[:80]!r}, expected a message, function_call or its output", param="input")
    return messages


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name)}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(item_id: str, text: str | None) -> dict[str, Any]:
    """Return a message item; without a text, one that has only begun."""
    content, status = ([], "in_progress") if text is None else ([_text(text)], "completed")
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def _frame(name: str, wanted: Wanted, *, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": wanted.instructions,
        "max_output_tokens": None,
        "metadata": {},
        "model": wanted.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": wanted.previous,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": wanted.tools,
        "top_p": 1.0,
        "usage": usage,
    }

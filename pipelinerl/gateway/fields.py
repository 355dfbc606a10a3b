"""The fields of a request's JSON, each read with its type and bounds, and refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl.gateway.refusal import wrong

Body = Mapping[str, Any]
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 4096
MAX_TOOLS = 256
MAX_ANSWERS = 16
ROLES = ("system", "developer", "user", "assistant", "tool")


def number(body: Body, *names: str, default: int, least: int = 1, most: int) -> int:
    """Return the first of these fields that is there and not null, as an integer within bounds; more than `most` counts as `most`."""
    for name in names:
        if (value := body.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise wrong(f"{name} is {value!r}, expected an integer from {least}", param=name)
            return min(value, most)
    return default


def flag(body: Body, name: str) -> bool:
    """Return a field that is true or false; false where it is not there."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise wrong(f"{name} is {value!r}, expected true or false", param=name)
    return bool(value)


def text(body: Body, name: str, *, default: str = "") -> str:
    """Return a text; `default` where it is not there."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong(f"{name} is {str(value)[:80]!r}, expected a text", param=name)
    return value


def stops(body: Body) -> tuple[str, ...]:
    """Return the texts that end a turn."""
    value = body.get("stop")
    found = [] if value is None else [value] if isinstance(value, str) else value
    is_wrong = not isinstance(found, list) or len(found) > MAX_STOPS
    if is_wrong or not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in found):
        raise wrong(f"stop is {str(value)[:80]!r}, expected a text or up to {MAX_STOPS} of them, none empty", param="stop")
    return tuple(found)


def messages(body: Body, *, most: int, name: str = "messages") -> list[dict[str, Any]]:
    """Return the messages of a conversation, each with a role that there is."""
    found = body.get(name)
    if not isinstance(found, list) or not found:
        raise wrong(f"{name} is {str(found)[:80]!r}, expected a list with a message at least", param=name)
    if len(found) > most:
        raise wrong(f"{name} has {len(found)} messages, expected at most {most} (gateway.max_messages)", param=name)
    for place, message in enumerate(found):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            said = message.get("role") if isinstance(message, dict) else message
            raise wrong(f"{name}[{place}].role is {str(said)[:80]!r}, expected one of {', '.join(ROLES)}", param=name)
        if not isinstance(message.get("tool_calls"), list | None):
            raise wrong(f"{name}[{place}].tool_calls is no list", param=name)
    return found


def tools(body: Body) -> list[dict[str, Any]]:
    """Return the tools of a chat request, none where the client forbids their use."""
    found = body.get("tools") or []
    if not isinstance(found, list) or len(found) > MAX_TOOLS or not all(isinstance(one, dict) for one in found):
        raise wrong(f"tools is {str(found)[:80]!r}, expected a list of up to {MAX_TOOLS} objects", param="tools")
    choice = body.get("tool_choice")
    if choice == "none":
        return []
    if choice not in (None, "auto"):
        raise wrong(f"tool_choice is {str(choice)[:80]!r}, and the model is not forced: expected auto or none", param="tool_choice")
    return found


def refuse_what_changes_sampling(body: Body) -> None:
    """Refuse what would draw tokens from another distribution than the one that is trained. Temperature and top_p are the run's, whatever
    is asked for."""
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "min_p", "repetition_penalty"):
        if body.get(name) not in (None, 0, 0.0, {}, 1.0 if name == "repetition_penalty" else None):
            raise wrong(f"{name} would sample from another distribution than the one that is trained; leave it out", param=name)
    shape = body.get("response_format")
    if isinstance(shape, dict) and shape.get("type", "text") != "text":
        raise wrong("response_format is not supported: the model writes what it writes, and learns from it", param="response_format")


def integers(body: Body, name: str, *, most: int, below: int) -> Sequence[int]:
    """Return a list of token ids, each under `below`."""
    found = body.get(name)
    is_list = isinstance(found, list) and 0 < len(found) <= most
    if not is_list or not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < below for one in found or ()):
        raise wrong(f"{name} is {str(found)[:80]!r}, expected 1 to {most} token ids from 0 to {below - 1}", param=name)
    return found or []

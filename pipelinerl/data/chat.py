"""Chat messages as tokens, each message once: the chat template writes a conversation's first prompt, and from then on only what stands
behind the ids that were sampled.

    prompt(messages)                 what the template makes of a whole conversation
    continuation(messages, ...)      what it writes between a sampled turn and the next: the end of the turn, `messages`, the next opening

A conversation that goes on is therefore its own ids, to the token, and never text that was tokenised again: a tokenizer may cut the same
text otherwise than the model wrote it. Where the template cannot say what stands behind a turn, `continuation` returns None, and the caller
renders the whole anew: a new branch, which is counted as drift.

Messages are those of the OpenAI chat API; environments with state and the gateway share this module.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pipelinerl.errors import DataError

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The template of a model that has none: what the messages say, end to end."""
_TURN = "\u2402turn\u2403"
"""Stands for a sampled turn in a rendering; control pictures, which no template writes by itself."""

Message = Mapping[str, Any]


class ChatTemplate:
    """The model's own chat template with its tokenizer. Rendering is deterministic, so that equal messages have equal tokens."""

    def __init__(self, tokenizer: Any, *, options: Mapping[str, Any] | None = None, ends: Collection[int] = ()) -> None:
        """Take a `tokenizer` as `load_tokenizer` gives it, further arguments of the template (`data.chat_template_kwargs`), and the tokens
        that end a turn (`pipelinerl.data.stop_tokens`)."""
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._ends = frozenset(ends) | frozenset(tokenizer.all_special_ids)
        self.is_plain = tokenizer.chat_template is None
        """The model has no chat template: messages stand end to end, as they are."""

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the tokens of a whole conversation, with the opening of the model's turn. Raises `DataError` where the template refuses
        it."""
        return self._encode(self._render(messages, tools=tools))

    def continuation(
        self, messages: Sequence[Message], *, sampled: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int] | None:
        """Return the tokens between a turn of the ids `sampled` and the next turn, which answers `messages`; None where the template cannot
        say.

        The template writes them behind a turn that stands for the sampled one, so the cost is that of `messages`, whatever came before.
        """
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _TURN}]
        try:
            text = self._render([*before, *messages], tools=tools)
        except DataError:  # it refuses messages without those that they answer
            return None
        if text.count(_TURN) != 1:
            return None
        behind = text.partition(_TURN)[2]
        if len(sampled) and sampled[-1] in self._ends:  # the model has written the end of its turn itself
            behind = behind.removeprefix(self._tokenizer.decode([sampled[-1]], skip_special_tokens=False))
        return self._encode(behind)

    def _render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]]) -> str:
        further: dict[str, Any] = self._options | ({"tools": list(tools)} if tools else {})
        if self.is_plain:
            further["chat_template"] = PLAIN
        try:
            messages = [_for_template(message) for message in messages]
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **further))
        except Exception as error:  # a template raises whatever it likes for messages it does not take
            raise DataError(f"the model's chat template does not take these messages: {type(error).__name__}: {error}") from None

    def _encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the tokenizers library raises plain `Exception` for a character outside a closed vocabulary
            raise DataError(f"the model's tokenizer does not take this text: {error}") from None


def text_of(content: Any) -> str:
    """Return what a message says: text, or the text of its parts one after the other. Raises `DataError` for a part that is none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise DataError(f"a message's content is {str(content)[:80]!r}, expected text, or parts that each have a text")


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message as templates read it: text as one string, and the arguments of tool calls as objects, not as their JSON."""
    plain: dict[str, Any] = {name: value for name, value in message.items() if value is not None}
    plain["content"] = text_of(message.get("content"))
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [dict(call) | {"function": _function(call.get("function", {}))} for call in calls]
    return plain


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # malformed as the model wrote it: the template writes it back
            arguments = json.loads(arguments or "{}")
    return dict(function) | {"arguments": arguments}

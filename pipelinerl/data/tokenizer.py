"""The model folder's own tokenizer, and the one rule by which it makes tokens of text.

`TextEncoder` is that rule: RL, evaluation, supervised fine-tuning and environments' replies all go through it, so none of them shows the
model a text in other tokens than the others do. Nothing here needs torch where the folder allows it.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config import DataSection
from pipelinerl.data.images import ImageProcessor, num_images
from pipelinerl.data.tool_calls import ToolCallParser
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import Images
from pipelinerl.runtime.import_cache import remember_transformers

_NO_ROW: Mapping[str, Any] = types.MappingProxyType({})


def load_tokenizer(folder: Path) -> Any:
    """Return a Hugging Face tokenizer with its chat template.

    `AutoTokenizer` reads every tokenizer but imports torch: 5.4 s of CPU and 335 MB, against 1.2 s and 65 MB for the class that reads
    `tokenizer.json`, which encodes and decodes alike. So it serves only folders without that file. Raises `ConfigError`.
    """
    if not folder.is_dir():
        raise ConfigError(f"model.path: no folder at {folder} (looked from {Path.cwd()}); name a Hugging Face model folder")
    remember_transformers()
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as TokenizerClass
    else:
        from transformers import AutoTokenizer as TokenizerClass
    try:
        tokenizer = TokenizerClass.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain `Exception` for a damaged file
        raise ConfigError(f"model.path: the tokenizer of {folder} cannot be loaded: {error}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without any of its files
        raise ConfigError(f"model.path: {folder} has no tokenizer: save the model's own there (tokenizer.json, tokenizer_config.json)")
    return tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options by which prompts become chats, and chats are read: keys of the section `data` by the same names."""

    chat: bool = False
    system_prompt: str | None = None
    tools: str | Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tool_call_parser: str | None = None

    @classmethod
    def of(cls, section: DataSection) -> ChatOptions:
        """Return the options of a run."""
        return cls(**{field.name: getattr(section, field.name) for field in dataclasses.fields(cls)})

    @property
    def makes_chats(self) -> bool:
        """Plain text, too, becomes a chat: there is something that only a chat template can place."""
        return self.chat or self.system_prompt is not None or self.tools is not None or bool(self.chat_template_kwargs)


class TextEncoder:
    """Turns text into tokens, for all of a run that does so.

    - A prompt of plain text begins with what the tokenizer puts before a text (a BOS, or nothing), once, also where the text brings it.
      What a tokenizer would put behind it (an EOS, a separator) is left out: the completion follows.
    - A prompt of chat messages is what the chat template writes, to the token: a BOS is in it where the template writes one.
    - What follows a prompt (a demonstration's completion, an environment's reply) gets nothing added.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        options: ChatOptions | None = None,
        opens_turn: bool = True,
        image_processor: Callable[[], ImageProcessor] | None = None,
    ) -> None:
        """Take a `tokenizer` as `load_tokenizer` gives it. Without `opens_turn`, a chat ends behind its last message: what an environment
        says first follows. `image_processor` is called when the first image comes; None where none may come.
        """
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        self._opens_turn = opens_turn
        self._options = options or ChatOptions()
        self._prefix: list[int] | None = None

    def prompt(self, value: str | Sequence[Mapping[str, Any]], row: Mapping[str, Any] = _NO_ROW) -> list[int]:
        """Return the tokens of a row's prompt. Raises whatever a chat template raises for messages it refuses."""
        return self.token_ids(self.text(value, row), is_chat=self.is_chat(value))

    def is_chat(self, value: str | Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the chat template writes this prompt."""
        return self._options.makes_chats or not isinstance(value, str)

    def text(self, value: str | Sequence[Mapping[str, Any]], row: Mapping[str, Any] = _NO_ROW, *, images: Images = ()) -> str:
        """Return the prompt as the model sees it: its text, or what the chat template makes of messages. Raises as `prompt`.

        `images` are those of the messages, in order.
        """
        if num_images(value) > len(images):
            raise DataError("the messages have an image, and here they may have none: rows of [data], [evaluation] and [sft] may")
        if images:
            assert self._image_processor is not None, "who reads images has a processor for them"
            processor = self._image_processor()
            return processor.expand(self._rendered(value, row), images)
        return self._rendered(value, row)

    def _rendered(self, value: str | Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> str:
        if not self.is_chat(value):
            return str(value)
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
        system = self._options.system_prompt
        if system is not None and messages and messages[0].get("role") not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
        further = dict(self._options.chat_template_kwargs)
        if (tools := self.tools(row)) is not None:
            further["tools"] = tools
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=self._opens_turn, **further))

    def tools(self, row: Mapping[str, Any] = _NO_ROW) -> list[Any] | None:
        """Return the tools of a row: those of the settings, or of its own column, where that holds some."""
        tools = self._options.tools
        if isinstance(tools, str):
            tools = row.get(tools)
            tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
        return list(tools) if tools else None

    def token_ids(self, text: str, *, is_chat: bool) -> list[int]:
        """Return the tokens of a prompt whose `text` is known."""
        token_ids = self.continuation(text)
        prefix = [] if is_chat else self._prefix_before(text, token_ids)
        begins_with_it = token_ids[: len(prefix)] == prefix
        return token_ids if begins_with_it else [*prefix, *token_ids]

    def continuation(self, text: str) -> list[int]:
        """Return the tokens of a text that stands behind others. Markers in it, as of a chat template, are the tokens they stand for."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _prefix_before(self, text: str, token_ids: list[int]) -> list[int]:
        """Return the tokens that the tokenizer puts before a text, found once: its own whole encoding, up to where `token_ids` begin."""
        if self._prefix is None and token_ids:
            whole = self._tokenizer.encode(text, add_special_tokens=True)
            num_added = len(whole) - len(token_ids)
            starts = (start for start in range(num_added, -1, -1) if whole[start : start + len(token_ids)] == token_ids)
            self._prefix = whole[: next(starts, 0)]
        return self._prefix or []


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """A tokenizer's two ways, for text that stands after a prompt."""

    decode: Callable[[list[int]], str]
    """See `decoder`."""
    encode: Callable[[str], list[int]]
    """See `TextEncoder.continuation`."""
    tokenizer: Any = None
    """The tokenizer itself, for chat templates."""
    ends: frozenset[int] = frozenset()
    """See `decoder`."""
    calls: ToolCallParser | None = None
    """What reads tool calls: `data.tool_call_parser`; None for JSON between `<tool_call>` and `</tool_call>`."""


def codec_of(tokenizer: Any, *, ends: Collection[int] = ()) -> Codec:
    """Return both directions; `tokenizer` is what `load_tokenizer` gives, `ends` as in `decoder`."""
    return Codec(decoder(tokenizer, ends=ends), TextEncoder(tokenizer).continuation, tokenizer, frozenset(ends))


def decoder(tokenizer: Any, *, ends: Collection[int] = ()) -> Callable[[list[int]], str]:
    """Make a function that turns a completion's tokens into the text that is scored: without special tokens, and without `ends`.

    `ends` are the model's own stop tokens (`pipelinerl.data.stop_tokens`), which not every tokenizer calls special.
    """
    dropped = frozenset(ends) - frozenset(tokenizer.all_special_ids)
    if not dropped:
        return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
    return lambda token_ids: tokenizer.decode([one for one in token_ids if one not in dropped], skip_special_tokens=True)

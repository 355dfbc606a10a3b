"""Stop strings: finds a text in what is being sampled, token by token, without ever making tokens of text.

vLLM's own detokeniser is off, because its output processing is: the loop asks here instead. The sequence ends with the token that completes
a stop string. It stays in the completion, and so does whatever else that token says: the tokens are those that were sampled, each with its
log-probability, and none is cut in two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.engine.base import Sampled
from pipelinerl.errors import ConfigError, EngineError
from pipelinerl.messages import Generate

Finder = Callable[[Sequence[int], Sequence[str]], "StopStrings"]
"""Makes the `StopStrings` of a request from its prompt's tokens and its strings."""


def finder_of(folder: Path) -> Finder:
    """Make a finder with the tokenizer of a model folder. Raises `ConfigError`."""
    backend = getattr(load_tokenizer(folder), "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(f"rollout.stop: the tokenizer of {folder} cannot decode token by token: a tokenizer.json is needed")
    return lambda prompt, stop: StopStrings(backend, prompt=prompt, stop=stop)


def found_in(request: Generate, finder: Finder) -> StopStrings:
    """Return the stop strings of a request; what another engine has sampled of it counts, the prompt does not."""
    token_ids, num_given = request.token_ids.tolist(), len(request.token_ids) - request.num_written
    stop_strings = finder(token_ids[:num_given], request.sampling.stop)
    stop_strings.end_in(token_ids[num_given:])
    return stop_strings


class RunningStops:
    """The stop strings of the sequences that an engine runs."""

    def __init__(self, finder: Finder | None) -> None:
        """Without a `finder`, requests with stop strings are refused."""
        self._finder = finder
        self._found: dict[str, StopStrings] = {}
        """Of those whose requests name any."""

    def open(self, request: Generate) -> None:
        """Begin with a sequence. Raises `EngineError` where it has stop strings that nobody can find."""
        if not request.sampling.stop:
            return
        if self._finder is None:
            raise EngineError("the request has stop strings, and this engine has no tokenizer to find them with")
        self._found[request.rollout_id] = found_in(request, self._finder)

    def close(self, rollout_id: str) -> None:
        """Forget a sequence."""
        self._found.pop(rollout_id, None)

    def ended(self, sampled: Sampled) -> list[str]:
        """Return the sequences in which a token completed a stop string: it is their last."""
        if not self._found:
            return []
        pairs = zip(sampled.rollout_ids, sampled.token_ids.tolist(), strict=True)
        return [name for name, token_id in pairs if name in self._found and self._found[name].end_in([token_id]) is not None]


class StopStrings:
    """Finds the stop strings of one sequence."""

    def __init__(self, tokenizer: Tokenizer, *, prompt: Sequence[int], stop: Sequence[str]) -> None:
        """Text of the prompt never counts; its tokens are there because some tokenizers write a first token differently."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep = max(map(len, self._stop)) - 1
        """Characters that may be the beginning of a stop string."""
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=False)
        self._tail = ""

    def end_in(self, token_ids: Sequence[int]) -> int | None:
        """The number of these, sampled next, that belong to the sequence, where a stop string is complete in them; None where none is."""
        for number, token_id in enumerate(token_ids, 1):
            text = self._tail + self._text(token_id)
            if any(one in text for one in self._stop):
                return number
            self._tail = text[-self._keep :] if self._keep else ""
        return None

    def _text(self, token_id: int) -> str:
        """The text that a token adds; empty while it is part of a character whose other bytes are to come."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # the stream raises a plain one where bytes that are no text change what stood before them
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._tokenizer, token_id) or ""

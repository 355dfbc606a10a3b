"""The tokens that end a completion: what tokenizer, chat template, config.json and generation_config.json say, held against each other.

An engine is told all of them with every request, in training and in evaluations alike; fine-tuning teaches one of them, and what is
exported names them in its generation_config.json. An engine that goes by config.json alone samples through the end that the tokenizer
and the chat template write, and every completion is as long as it may be.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.errors import ConfigError

TOKENIZER, TEMPLATE, CONFIG, GENERATION, SETTINGS = (
    "tokenizer",
    "chat template",
    "config.json",
    "generation_config.json",
    "rollout.stop_token_ids",
)
_QUESTION, _ANSWER = "question-7391", "answer-7391"
"""Texts that no chat template writes by itself, so that what stands behind the second one is the template's own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopToken:
    """A token that ends a completion."""

    token_id: int
    text: str
    """The token as the tokenizer writes it; empty where it has no such token."""
    origins: tuple[str, ...]
    """Files that name it."""

    def __str__(self) -> str:
        return f"{self.token_id} {self.text!r} ({', '.join(self.origins)})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopTokens:
    """All tokens that end a model's completions."""

    tokens: tuple[StopToken, ...]
    """By rising id."""
    end_of_text: int | None
    """The tokenizer's EOS: what ends a completion of plain text."""
    end_of_turn: int | None
    """The token that the chat template writes behind an assistant's words; None without a template, or where it writes none of its own."""
    warnings: tuple[str, ...]
    """Disagreements between the origins, for a person."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)

    @property
    def of_model(self) -> tuple[int, ...]:
        """The stop tokens that the model's own files name: they are no part of a completion's text."""
        return tuple(token.token_id for token in self.tokens if token.origins != (SETTINGS,))

    def __str__(self) -> str:
        return f"stop tokens: {'; '.join(map(str, self.tokens)) or 'none'}"


def stop_tokens_of(folder: Path, *, tokenizer: Any = None, extra: Sequence[int] = ()) -> StopTokens:
    """Return the stop tokens of a model folder, and `extra` ones (`rollout.stop_token_ids`); `tokenizer` is the folder's, if it is loaded.

    Raises `ConfigError` for a token that the model does not have, and for one that config.json names, that neither tokenizer nor template
    do, and that is ordinary text: completions would end in the middle of a word. Naming it in `extra` says that it is meant.
    generation_config.json may name such tokens: what this project exports does, where `extra` had them.
    """
    tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
    config = _read(folder / "config.json")
    end_of_turn, complaint = _end_of_turn(tokenizer)
    named: dict[str, list[int]] = {
        TOKENIZER: _listed(tokenizer.eos_token_id),
        TEMPLATE: _listed(end_of_turn),
        CONFIG: _listed(config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))),
        GENERATION: _listed(_read(folder / "generation_config.json").get("eos_token_id")),
        SETTINGS: list(extra),
    }
    ids = sorted({token_id for listed in named.values() for token_id in listed})
    tokens = tuple(
        StopToken(token_id=one, text=_text(tokenizer, one), origins=tuple(origin for origin in named if one in named[origin]))
        for one in ids
    )
    num_tokens = max(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0, len(tokenizer))
    if problems := [*_refused(tokens, tokenizer, num_tokens=num_tokens)]:
        raise ConfigError("\n".join(f"model.path: {folder}: {problem}" for problem in problems))
    warnings = [*complaint, *_disagreements(tokens)]
    return StopTokens(tokens=tokens, end_of_text=tokenizer.eos_token_id, end_of_turn=end_of_turn, warnings=tuple(warnings))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}


def _listed(value: Any) -> list[int]:
    """Return the ids of an id, a list of them or None: Hugging Face's files have each."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _end_of_turn(tokenizer: Any) -> tuple[int | None, list[str]]:
    """Return the first marker that the chat template writes behind an assistant's answer, and what is wrong with it, if anything."""
    if not tokenizer.chat_template:
        return None, []
    chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        _, found, behind = str(tokenizer.apply_chat_template(chat, tokenize=False)).rpartition(_ANSWER)
    except Exception as error:  # a model's chat template is a program of its own
        return None, [f"the chat template refuses an assistant's turn, so how it ends one is not known: {type(error).__name__}: {error}"]
    if not found:
        return None, ["the chat template does not write what an assistant said, so how it ends a turn is not known"]
    markers = _markers(tokenizer)
    return next((one for one in tokenizer.encode(behind, add_special_tokens=False) if one in markers), None), []


def _markers(tokenizer: Any) -> set[int]:
    """Return the tokens that stand for no ordinary text."""
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def _text(tokenizer: Any, token_id: int) -> str:
    return tokenizer.decode([token_id]) if 0 <= token_id < len(tokenizer) else ""


def _refused(tokens: Sequence[StopToken], tokenizer: Any, *, num_tokens: int) -> Iterator[str]:
    markers = _markers(tokenizer)
    for token in tokens:
        where = " and ".join(token.origins)
        if not 0 <= token.token_id < num_tokens:
            yield f"{where} names {token.token_id} as a stop token, and the model has the tokens 0 to {num_tokens - 1}. Correct it there."
        elif CONFIG in token.origins and {*token.origins} <= {CONFIG, GENERATION} and token.text and token.token_id not in markers:
            yield (
                f"{where} names {token.token_id} as the end of sequence, which is the text {token.text!r} for this tokenizer, whose own is"
                f" {tokenizer.eos_token!r} ({tokenizer.eos_token_id}): completions would end in the middle of a text. Correct eos_token_id"
                f" there, or set rollout.stop_token_ids = [{token.token_id}] if it is meant."
            )


def _disagreements(tokens: Sequence[StopToken]) -> Iterator[str]:
    """Say which ends the model writes that its files, by which others serve it, do not name."""
    if not tokens:
        yield "nothing names a stop token: every completion will be as long as rollout.max_tokens allows. Set rollout.stop_token_ids."
    by_files = [token for token in tokens if {CONFIG, GENERATION} & {*token.origins}]
    for token in tokens:
        if {TOKENIZER, TEMPLATE} & {*token.origins} and token not in by_files:
            others = "; ".join(map(str, by_files)) or "no end of sequence"
            yield (
                f"stop tokens disagree: {token} is not named by config.json or generation_config.json, which name {others}."
                " All of them end completions here, and are in the generation_config.json of what is exported."
            )

"""What every message is, and what several parts of the pipeline say or mean: names, texts, token columns, prompts, outcomes.

Legend for shapes, in all modules: `P` prompt tokens, `T` sampled tokens, `L` tokens of a whole trajectory, `R` tokens of a packed row, `N`
samples.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
UInt8 = npt.NDArray[np.uint8]

MAX_DEPTH = 32
"""Lists and objects within one another in a prompt's columns. Deeper ones could exhaust the stack of whoever walks them."""
Id = Annotated[str, msgspec.Meta(max_length=512)]
"""A name or a digest."""
Text = Annotated[str, msgspec.Meta(max_length=16 << 20)]
"""Prompts, and words for a person."""
Figures = Annotated[dict[Id, float], msgspec.Meta(max_length=4096)]
"""Values by name."""


class Outcome(enum.StrEnum):
    """How a score ended. Only `OK` trains; the others are counted by reason and never become 0.0."""

    OK = "ok"
    """Every reward function returned finite numbers."""
    TIMEOUT = "timeout"
    """A reward function did not return within its deadline; its process was killed."""
    ERROR = "error"
    """A reward function raised, or its process died."""
    INVALID = "invalid"
    """A reward function returned something that is not a finite number (None, NaN, a wrong length)."""
    STOPPED = "stopped"
    """It was stopped early, by a coin (`EarlyStopDecision`): there is nothing to score. Its siblings count what was predicted of it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What crosses a process or a stage."""


def check_lengths(owner: Message, *names: str) -> None:
    """Raise `ValueError` naming the columns of `owner` whose lengths differ from the first's."""
    if len({len(getattr(owner, name)) for name in names}) > 1:
        lengths = {name: len(getattr(owner, name)) for name in names}
        raise ValueError(f"{type(owner).__name__}: columns differ in length: {lengths}; expected one length")


def check_depth(prompt: Prompt) -> None:
    """Raise `ValueError` for columns or chat messages that are nested deeper than `MAX_DEPTH`."""
    level: list[Any] = [*prompt.columns.values(), *prompt.chat]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level if isinstance(value, dict | list | tuple) for inner in _inside(value)]
        if not level:
            return
    raise ValueError(f"Prompt {prompt.prompt_id}: its columns are nested deeper than {MAX_DEPTH} levels")


def _inside(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


class Prompt(Message, frozen=True):
    """A task to sample from."""

    prompt_id: Id
    """Stable identity in its source, `<epoch>:<row>`."""
    text: Text
    """What the model sees, before tokenisation, chat template applied."""
    token_ids: Int32
    """[P] int32."""
    columns: dict[str, Any] = {}
    """The source row's other columns, plain JSON values, handed to reward functions by name."""
    chat: tuple[dict[str, Any], ...] = ()
    """The row's chat messages, before the template made `text` of them; empty where it holds text. For reward functions that know chats."""

    def __post_init__(self) -> None:
        check_depth(self)


class Starting(Message, frozen=True):
    """A process takes over the name of one that ended, and announces itself once it has loaded; what the other was asked for is lost."""

    process_id: int


class Alive(Message, frozen=True):
    """A sign of life from a peer that has nothing else to say."""

    busy_with: Text = ""
    """What it is doing, for the message of a deadline that runs out."""


class Stop(Message, frozen=True):
    """Tell a peer to save what is its to save, and end."""

    reason: Text


class Failed(Message, frozen=True):
    """A peer's last words: the error that ends it."""

    error: Text


class Unread(Message, frozen=True):
    """Stands in the orchestrator for bytes of a peer that are none of its messages; no peer can send it."""

    reason: Id
    """Under which the transport counted them."""
    words: Text
    rollout_id: Id = ""
    """What they would have been about, as far as they tell: an attempt that nobody will answer any more. Empty: they do not tell."""
    attempt: int = 0
    turn: int = 0
    request_id: int | None = None
    """Of a scorer's answer."""

"""The base class of all messages, and the types that several conversations share: names, texts, token columns, prompts, outcomes.

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
"""Maximum nesting of lists and objects in a prompt's columns. Deeper ones could exhaust the stack of the code that walks them."""
UNSAMPLED = -1
"""Version of a token that no policy sampled: prompt tokens, tool output, padding."""
Id = Annotated[str, msgspec.Meta(max_length=512)]
"""A name or a digest."""
Text = Annotated[str, msgspec.Meta(max_length=16 << 20)]
"""A prompt, or a text for a person to read."""
MAX_IMAGES = 8
"""Images of one prompt. A larger number makes vLLM plan its memory for more of them."""
MAX_IMAGE_BYTES = 2 << 20
"""Bytes of the image files of one prompt together, so that a packed row of 30 prompts still fits one message."""
Images = Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=MAX_IMAGE_BYTES)], ...], msgspec.Meta(max_length=1 << 16)]
"""Image files (PNG, JPEG and others that Pillow reads), byte for byte as they were."""
MAX_REWARD = 1e12
"""Largest size of a reward. Larger ones leave the range of float32 when a loss or a gradient's norm squares what is made of them, and the
trainer would end over rows that one agent, or one reward function, has spoilt."""
Figures = Annotated[dict[Id, float], msgspec.Meta(max_length=4096)]
"""Numbers by name."""


def is_reward(value: float) -> bool:
    """Return whether a number can be a reward: not NaN, and at most `MAX_REWARD` in size."""
    return abs(value) <= MAX_REWARD


class Outcome(enum.StrEnum):
    """The way a score ended. Only `OK` trains; the others are counted by reason and never become 0.0."""

    OK = "ok"
    """Every reward function returned finite numbers."""
    TIMEOUT = "timeout"
    """A reward function did not return within its deadline; its process was killed."""
    ERROR = "error"
    """A reward function raised, or its process died."""
    INVALID = "invalid"
    """A reward function returned something that is not a finite number (None, NaN, a wrong length)."""
    STOPPED = "stopped"
    """The rollout was stopped early by a random draw (`EarlyStopDecision`), so there is nothing to score. The baseline of its siblings uses
    the reward that was predicted for it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The base class of every value that crosses a process or a stage."""


def check_lengths(owner: Message, *names: str) -> None:
    """Raise `ValueError`, naming these columns of `owner` and their lengths, unless all have one length."""
    if len({len(getattr(owner, name)) for name in names}) > 1:
        lengths = {name: len(getattr(owner, name)) for name in names}
        raise ValueError(f"{type(owner).__name__}: columns differ in length: {lengths}; expected one length")


class Nodes(Message, frozen=True):
    """The shape of episodes that branch: their tokens stand node after node, each once, and a node continues the context of its parent.

    Legend: `M` nodes.
    """

    parents: Int32
    """[M] int32, index of an earlier node, -1 for one that continues nothing."""
    lengths: Int32
    """[M] int32, tokens of each node, at least one."""

    def __post_init__(self) -> None:
        check_lengths(self, "parents", "lengths")
        is_earlier = (self.parents >= -1) & (self.parents < np.arange(len(self.parents)))
        if not is_earlier.all() or (self.lengths < 1).any():
            raise ValueError(
                f"Nodes: parents {self.parents.tolist()} of {self.lengths.tolist()} tokens, expected earlier nodes or -1, and no empty one"
            )

    def check(self, versions: Int32, sampled: Mask, *, owner: str) -> None:
        """Raise `ValueError` unless each node of `owner` is sampled whole or given whole, and versions fall along no path.

        `versions` and `sampled` are columns of all its tokens: the version of each, and whether a policy sampled it.
        """
        if int(self.lengths.sum()) != len(versions):
            raise ValueError(f"{owner}: nodes of {self.lengths.tolist()} tokens, expected {len(versions)}")
        ends = np.cumsum(self.lengths).tolist()
        newest: list[int] = []
        for parent, start, end in zip(self.parents.tolist(), [0, *ends[:-1]], ends, strict=True):
            own, mask = versions[start:end], sampled[start:end]
            before = newest[parent] if parent >= 0 else UNSAMPLED
            if mask.any() and (not mask.all() or (np.diff(own, prepend=before) < 0).any()):
                raise ValueError(
                    f"{owner}: node {len(newest)} has versions {own.tolist()} after {before}, expected a node that is sampled whole, under"
                    " versions that do not fall along its path"
                )
            newest.append(int(own[-1]) if mask.any() else before)


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
    """The text that the model sees, before tokenisation, with the chat template applied."""
    token_ids: Int32
    """[P] int32."""
    columns: dict[str, Any] = {}
    """The source row's other columns, as plain JSON values; they are handed to reward functions by name."""
    chat: tuple[dict[str, Any], ...] = ()
    """The messages of which the chat template made `text`, for rewards that take chats; empty where no template did. Text of a row that
    becomes a chat (`data.chat`) is one message of the user."""
    images: Images = ()
    """Its images, in the order in which they stand in `chat`; `token_ids` has their placeholders."""

    def __post_init__(self) -> None:
        check_depth(self)


class Starting(Message, frozen=True):
    """A process takes over the name of one that ended, and announces itself once it has loaded; requests to the old process are lost."""

    process_id: int


class Alive(Message, frozen=True):
    """A sign of life from a peer that has nothing else to say."""

    busy_with: Text = ""
    """The peer's present work, for the error message of a deadline that runs out."""


class Stop(Message, frozen=True):
    """Tell a peer to save its state, if it has any to save, and end."""

    reason: Text


class Failed(Message, frozen=True):
    """A peer's last message: the error that ends it."""

    error: Text


class Unread(Message, frozen=True):
    """A placeholder, inside the orchestrator, for bytes from a peer that are not one of its messages. No peer can send it."""

    reason: Id
    """The reason under which the transport counted these bytes."""
    words: Text
    rollout_id: Id = ""
    """The rollout that the bytes belong to, as far as they can be read: nobody will answer this attempt any more. Empty where they do not
    say."""
    attempt: int = 0
    turn: int = 0
    request_id: int | None = None
    """The request that these bytes were to answer, where they come from a scorer."""

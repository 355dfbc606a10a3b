"""What an environment with state is given and gives, and adapters for those of other people, one file each.

    class Game:
        tools = ()                                     # optional: JSON schemas of functions that the model may call
        package = "game_engine"                        # optional: a module that is imported as the class is loaded, not with this file
        def reset(self, **columns) -> str | list[dict] | None: ...
        def step(self, message: Said) -> Step | tuple[observation, reward, done]: ...
        def close(self) -> None: ...                   # optional

Each may be `async`. `pipelinerl.rewards.stateful` holds such an object in a process of its own while its episode lasts.

Nothing here imports anything but Python: this file and the adapters also run under another interpreter (`environment.python`), beside
packages that exclude ours.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool that the model calls."""

    name: str
    arguments: dict[str, Any]


class Said(str):
    """What the model said in its turn: its text, and, where the environment offers tools, the calls in it."""

    tool_calls: tuple[ToolCall, ...] = ()
    """In order; they are not in the text. Empty where it called none, and where no tools are offered."""

    @classmethod
    def of(cls, text: str, *, tool_calls: tuple[ToolCall, ...] = ()) -> Said:
        """Make one of a text and the calls that were found in it."""
        said = cls(text)
        said.tool_calls = tool_calls
        return said


@dataclasses.dataclass(frozen=True)
class Step:
    """What an environment answers to a turn; a tuple of the first three does as well."""

    observation: str | list[dict[str, Any]] | None
    """What the model sees next: text, or chat messages with roles; None only where the episode is over."""
    reward: float = 0.0
    """The environment's own reward of the turn, a finite number."""
    done: bool = False
    """True where the episode is over."""
    state: str | None = None
    """Name of the state that this leaves: siblings' turns that answer equal states are compared (`gigpo`). None: the observation."""


def import_package(cls: Any) -> None:
    """Import the module that a class names as its `package`, if any.

    It is done as the class is loaded, for which there is more time than for a call: a large package takes seconds in each of many
    processes, and one that is killed at a call's deadline would begin anew. Raises what the import raises.
    """
    if (package := getattr(cls, "package", None)) is not None:
        importlib.import_module(package)


def answers(calls: tuple[ToolCall, ...], result: Callable[[ToolCall], Any]) -> list[dict[str, Any]]:
    """Return the chat messages that answer tool calls; `result` gives what answers one."""
    return [{"role": "tool", "name": call.name, "content": str(result(call))} for call in calls]

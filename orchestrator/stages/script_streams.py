"""The streams that a script has of a policy: what is asked for has to be read, and what nobody reads is an error of its next call."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.stages.script_waits import ScriptWaits
from orchestrator.stages.streams import Intake, Room
from pipelinerl.errors import RolloutsUnread


@dataclasses.dataclass(slots=True, kw_only=True)
class ScriptStreams:
    """Knows the streams that are not over."""

    waits: ScriptWaits
    _intakes: list[Intake[Any]] = dataclasses.field(default_factory=list)
    """Those that are not over, and some that are."""
    _abandoned: list[Intake[Any]] = dataclasses.field(default_factory=list)
    _num_calls: int = 0
    _loop: asyncio.AbstractEventLoop | None = None

    def __post_init__(self) -> None:
        self.waits.check_streams = self._check

    def begin(self, what: str, *, call: int = 0, room: Room, num_bytes: Callable[[Any], int]) -> Intake[Any]:
        """Return the end of a new stream at which its results arrive; `call` is its number in the record."""
        self._loop = asyncio.get_running_loop()
        self._num_calls += 1
        intake: Intake[Any] = Intake(what=f"call {self._num_calls}, {what}", call=call, room=room, num_bytes=num_bytes)
        if not self._num_calls % 64:
            self._intakes = [one for one in self._intakes if not one.is_over]
        self._intakes.append(intake)
        return intake

    def abandon(self, intake: Intake[Any]) -> None:
        """Hear that the script has let go of a stream before its end."""
        intake.abandon()
        self._abandoned.append(intake)
        if self._loop is not None and not self._loop.is_closed():  # a stream may be let go of in any thread
            self._loop.call_soon_threadsafe(self.waits.changed.set_all)

    def check_all_read(self) -> None:
        """Raise `RolloutsUnread` where something that was asked for was not read."""
        self.waits.check()
        if unread := [intake for intake in self._intakes if not intake.is_over]:
            raise RolloutsUnread(f"{_words(unread)}: the script ends, and nobody can read it any more. Read every stream to its end")

    def check_room(self, what: str, rooms: Sequence[Room], *, reader: asyncio.Task[Any] | None) -> None:
        """Raise `RolloutsUnread` where the task that waits for `what` is the one that should have read what fills a room."""
        if (full := next((room for room in rooms if room.is_full), None)) is None:
            return
        if unread := [one for one in self._intakes if one.ready and one.room is full and one.reader is reader]:
            raise RolloutsUnread(
                f"{what}: {full.what} and not read fill their room ({full.bound_bytes} bytes, pipeline.queue_bytes), and the task"
                f" that waits here is the one that reads them: {_words(unread)}. Read those first, or in a task of their own"
            )

    def _check(self) -> None:
        if self._abandoned:
            abandoned, self._abandoned = self._abandoned, []
            self._intakes = [intake for intake in self._intakes if not intake.is_abandoned]
            raise RolloutsUnread(f"{_words(abandoned)}: the stream was let go of before its end. Read it to the end, or ask for less")


def _words(intakes: Sequence[Intake[Any]]) -> str:
    return "; ".join(f"{intake.what}: {intake.num_left or 'some'} results not read" for intake in intakes)

"""Trainer state that is sent again to a restarted orchestrator: whatever the one before was told, in few messages.

No socket, no thread, no torch. The trainer's connection records here what it sends and receives.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pipelinerl.messages import (
    CheckpointFailed,
    CheckpointSaved,
    Message,
    MicroBatch,
    PolicyPublished,
    StepClosed,
    StepDone,
    TrainerReady,
    TrainingEnded,
    WeightBufferReleased,
)


class TrainerSession:
    """The trainer's state, as far as it was sent."""

    def __init__(self, ready: TrainerReady) -> None:
        saved = ready.version if ready.saved is None else ready.saved
        self._ready = msgspec.structs.replace(ready, saved=saved, saved_commit=ready.saved_commit or ready.commit)
        self._commits: dict[int, str] = {}
        """Ledger commits of steps that are closed and not done."""
        self._failed: CheckpointFailed | None = None
        """The last failure, where no checkpoint was written since."""
        self._published: dict[str, PolicyPublished] = {}
        """Policies that may be fetched, by the buffer that is handed back, in the order of their publication."""
        self._ended: TrainingEnded | None = None
        """Once it trains no further."""

    def record_sent(self, message: Message) -> None:
        """Record a message that is being sent."""
        replace = msgspec.structs.replace
        match message:
            case StepDone():
                self._ready = replace(self._ready, version=message.step + 1, commit=self._commits.pop(message.step, ""))
            case PolicyPublished():
                self._published[message.copy or message.buffer] = message
            case CheckpointSaved():
                saved = {"saved": message.version, "saved_commit": message.commit, "oldest": message.oldest}
                damaged = tuple(one for one in self._ready.damaged if one.version > message.version)
                self._ready, self._failed = replace(self._ready, **saved, damaged=damaged), None
            case CheckpointFailed():
                self._failed = message
            case TrainingEnded():
                self._ended = message

    def record_received(self, message: Message | None) -> None:
        """Record a message that has come."""
        match message:
            case MicroBatch() | StepClosed():  # an answer: the suspects are booked
                self._ready = msgspec.structs.replace(self._ready, suspects=())
                if isinstance(message, StepClosed):
                    self._commits[message.step] = message.commit
            case WeightBufferReleased():
                self._published.pop(message.buffer, None)

    def introduction(self) -> Iterator[Message]:
        """Give the messages that come first."""
        yield self._ready
        if self._failed is not None:
            yield self._failed
        if self._ended is not None:
            yield self._ended

    def published(self) -> list[PolicyPublished]:
        """Give what follows once the layout is fixed again: every policy that may be fetched."""
        return list(self._published.values())

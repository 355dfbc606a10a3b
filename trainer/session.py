"""What an orchestrator must know of this trainer that takes the place of one that died: whatever that one was told, in few words.

No socket, no thread, no torch. Whoever speaks for a trainer notes here what it says and hears.
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
    """Where a trainer stands, as far as it was said."""

    def __init__(self, ready: TrainerReady) -> None:
        saved = ready.version if ready.saved is None else ready.saved
        self._ready = msgspec.structs.replace(ready, saved=saved, saved_commit=ready.saved_commit or ready.commit)
        self._commits: dict[int, str] = {}
        """Of steps that are sealed and not done."""
        self._failed: CheckpointFailed | None = None
        """Where no checkpoint was written since."""
        self._published: dict[str, PolicyPublished] = {}
        """By buffer: policies that may be fetched; the order is that of their publication."""
        self._ended: TrainingEnded | None = None
        """Once it trains no further."""

    def record_sent(self, message: Message) -> None:
        """Note what is being sent."""
        replace = msgspec.structs.replace
        match message:
            case StepDone():
                self._ready = replace(self._ready, version=message.step + 1, commit=self._commits.pop(message.step, ""))
            case PolicyPublished():
                self._published[message.buffer] = message
            case CheckpointSaved():
                saved = {"saved": message.version, "saved_commit": message.commit, "oldest": message.oldest}
                damaged = tuple(one for one in self._ready.damaged if one.version > message.version)
                self._ready, self._failed = replace(self._ready, **saved, damaged=damaged), None
            case CheckpointFailed():
                self._failed = message
            case TrainingEnded():
                self._ended = message

    def record_received(self, message: Message | None) -> None:
        """Note what has come."""
        match message:
            case MicroBatch() | StepClosed():  # an answer: the suspects are booked
                self._ready = msgspec.structs.replace(self._ready, suspects=())
                if isinstance(message, StepClosed):
                    self._commits[message.step] = message.commit
            case WeightBufferReleased():
                self._published.pop(message.buffer, None)

    def introduction(self) -> Iterator[Message]:
        """What comes first."""
        yield self._ready
        if self._failed is not None:
            yield self._failed
        if self._ended is not None:
            yield self._ended

    def published(self) -> list[PolicyPublished]:
        """What follows once the layout was fixed, again: every policy that may be fetched."""
        return list(self._published.values())

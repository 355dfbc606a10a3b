"""EngineWidths decides how engines of another width (`tensor_parallel_size`) take the place of those that a live run has.

They come first, and the others leave once all that are awaited serve. Where the others have the GPUs that one of them needs, as many of
these leave before. Nothing is given up for a width that does not start: where none of it comes to serve, the run has the engines of before
again. What the run was asked for, and what it goes back to, is the membership's, which an orchestrator that follows takes over.
"""

from __future__ import annotations

import dataclasses

from orchestrator.rules.membership import Membership
from pipelinerl.runtime.membership import ScaleRequest, StartedBy, State


@dataclasses.dataclass(slots=True)
class EngineWidths:
    """The changes of width of one run's engines."""

    membership: Membership
    _has_room: set[int] = dataclasses.field(default_factory=set, init=False)
    """Those for which others were told to leave."""

    @property
    def is_changing(self) -> bool:
        """True until every engine that serves, or is to serve, has the width that was asked for."""
        return self.membership.before is not None or bool(self.membership.of_another_width())

    @property
    def has_failed(self) -> bool:
        """True where none of the engines whose width was asked for is left to come, and those of before are to serve again."""
        return self.membership.before is not None and not self.membership.of_width()

    @property
    def reason(self) -> str:
        """Why engines of another width leave."""
        return f"tensor_parallel_size={self.membership.tensor_parallel_size} was asked for"

    def awaited(self) -> set[int]:
        """Return the ids of those that the launcher is to start in place of engines of another width, and that have not come."""
        if self.membership.before is None:
            return set()
        members = (self.membership.find(number) for number in self.membership.of_width())
        return {one.engine_id for one in members if one and (one.state, one.started_by) == (State.JOINING, StartedBy.LAUNCHER)}

    def replace(self) -> list[int]:
        """Return the live engines of another width that are to leave now: all, once every engine whose width was asked for serves."""
        membership = self.membership
        if {membership.state(number) for number in membership.of_width()} != {State.LIVE}:
            return []
        membership.before = None
        self._has_room.clear()
        return membership.have_leave(membership.leaving_order(membership.of_another_width()), self.reason)

    def make_room(self, engine_id: int) -> list[int]:
        """Return the live engines of another width that are to leave now, so that this one finds GPUs: as many as have those of it. The
        last that serves waits for those that have found theirs."""
        membership = self.membership
        if membership.state(engine_id) is not State.JOINING or membership.is_draining():
            return []
        if engine_id not in membership.of_width():  # it is about to leave itself
            return membership.have_leave([engine_id], self.reason)
        leaving, missing = [], membership.tensor_parallel_size or 1
        for number in membership.leaving_order(membership.of_another_width()):
            other = membership.find(number)
            if missing > 0 and other is not None:
                leaving.append(number)
                missing -= other.tensor_parallel_size or 1
        is_coming = any(membership.state(number) is State.JOINING for number in self._has_room - {engine_id})
        if is_coming and not any(membership.state(number) is State.LIVE for number in membership.present() - set(leaving)):
            return []
        self._has_room.add(engine_id)
        return membership.have_leave(leaving, self.reason)

    def go_back(self) -> ScaleRequest:
        """Return the request that brings the engines of before again; after it there is nothing else to go back to."""
        before, record = self.membership.before, self.membership.record()
        assert before is not None, "it has failed"
        return ScaleRequest(
            request_id=record.request_id + 1,
            engines=before.num_wanted,
            tensor_parallel_size=before.tensor_parallel_size,
            drain_s=record.drain_s,
        )

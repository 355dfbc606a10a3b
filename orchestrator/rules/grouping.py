"""Siblings arrive one by one, in any order, and become a group the moment the last is scored."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipelinerl.messages import Group, ScoredTrajectory


class Grouping:
    """The collection of scored siblings. A second result for the same sibling is fenced: the first one counts."""

    def __init__(
        self, *, group_size: int, sizes: Mapping[int, int] | None = None, first_group_id: int = 0, still_open: Collection[int] = ()
    ) -> None:
        """Let only `still_open` of the groups below `first_group_id` complete: an earlier process of the run admitted those.

        `sizes` has the groups of another size than `group_size`; it may change meanwhile.
        """
        self.num_fenced = 0
        self._group_size = group_size
        self._sizes = {} if sizes is None else sizes
        self._open: dict[int, dict[int, ScoredTrajectory]] = {}
        self._all_closed_below = min(still_open, default=first_group_id)
        self._closed = set(range(self._all_closed_below, first_group_id)) - set(still_open)
        """Complete groups from `_all_closed_below` on; all groups below it are complete."""

    @property
    def num_open(self) -> int:
        """The number of groups with some but not all siblings scored."""
        return len(self._open)

    def add(self, scored: ScoredTrajectory) -> Group | None:
        """Add a sibling; return its group when it was the last one missing."""
        trajectory = scored.trajectory
        if trajectory.group_id < self._all_closed_below or trajectory.group_id in self._closed:
            self.num_fenced += 1
            return None
        members = self._open.setdefault(trajectory.group_id, {})
        if trajectory.sibling in members:
            self.num_fenced += 1
            return None
        members[trajectory.sibling] = scored
        if len(members) < self._sizes.get(trajectory.group_id, self._group_size):
            return None
        del self._open[trajectory.group_id]
        self._note_closed(trajectory.group_id)
        return Group(group_id=trajectory.group_id, members=tuple(members[sibling] for sibling in sorted(members)))

    def _note_closed(self, group_id: int) -> None:
        """Note that a group is complete. Group ids count up from 0, so the set holds only groups that overtook an older one."""
        self._closed.add(group_id)
        while self._all_closed_below in self._closed:
            self._closed.remove(self._all_closed_below)
            self._all_closed_below += 1

"""The journal's lines about engines that join and leave, as typed rows."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """An engine that has joined, is to leave, has left or was lost."""

    t: float = 0.0
    """Unix seconds; 0 in gauges."""
    engine_id: int
    of: str = "engines"
    """engines, prm, the process reward model's, or a reward model's key, such as `reward.1`, for its processes."""
    state: str = ""
    """joining, live, draining, left or lost."""
    reason: str = ""

    @property
    def name(self) -> str:
        """Say which engine, or process, it is."""
        what = {"engines": "engine", "prm": "PRM engine"}.get(self.of, f"{self.of} process")
        return f"{what} {self.engine_id}"

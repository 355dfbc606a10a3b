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
    """engines, or prm, the process reward model's."""
    state: str = ""
    """joining, live, draining, left or lost."""
    reason: str = ""

    @property
    def name(self) -> str:
        """Say which engine it is."""
        return f"PRM engine {self.engine_id}" if self.of == "prm" else f"engine {self.engine_id}"

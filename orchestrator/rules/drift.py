"""Drift foretells how long sequences will be in the windows to come, from how they have grown from window to window.

What has grown twice in a row is expected to go on growing, each window by the smaller of the two factors; what shrinks likewise. A jump is
no drift: the load has become another one, and nothing says that it goes on so.
"""

from __future__ import annotations

SHIFT = 1.5
"""Factor from one window to the next from which on it is a jump. A larger value takes more of it for a drift that goes on."""


class Drift:
    """The mean context of one window after the other."""

    def __init__(self) -> None:
        self.is_known = False
        """True once two windows have ended."""
        self._context: float | None = None
        """Of the last window."""
        self._factor = 1.0
        """From the one before it to the last."""

    def contexts(self, context: float, *, number: int) -> list[float]:
        """Take the context of a window that has ended, in tokens; return those of the next `number` windows."""
        self.is_known = self._context is not None
        last, self._factor, self._context = self._factor, context / (self._context or context), context
        smaller = min(last, self._factor) if self._factor > 1 else max(last, self._factor)
        goes_on = (smaller - 1) * (self._factor - 1) > 0 and all(1 / SHIFT < factor < SHIFT for factor in (last, self._factor))
        return [context * (smaller if goes_on else 1.0) ** window for window in range(1, number + 1)]

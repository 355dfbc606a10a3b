"""Which of an engine's sequences wait for room, and since when.

A sequence that came a moment ago is in the engine's queue until the next forward pass, and one whose prompt is computed in parts gets no
token for a while. So a sequence counts once two reports in a row, a second apart, found it in the queue with as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping


class Waits:
    """The sequences that the report before found waiting."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[str, tuple[int, float]] = {}
        """The tokens that each had, and when it was first found waiting with those."""

    def report(self, waiting: Collection[str], written: Mapping[str, int]) -> dict[str, float]:
        """Return the seconds for which sequences have waited, by name, of those that the report before found waiting, too.

        `waiting` is what is in no pass now; `written` are the tokens that each sequence of the engine has.
        """
        now_s, before = self._clock(), self._since
        self._since = {}
        for name in waiting:
            known = before.get(name)
            self._since[name] = known if known is not None and known[0] == written[name] else (written[name], now_s)
        return {name: now_s - since_s for name, (_, since_s) in self._since.items() if since_s < now_s}

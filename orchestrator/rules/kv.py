"""How many versions may a running sequence's KV cache lag behind its engine's policy before a swap recomputes it?

A cache that is kept was computed in part by older policies: tokens are then sampled from a mixture, whose distance from the policy the
trainer measures, as the mean KL over tokens of the very version being trained whose sequences lived through a swap. With a bound on it, the
span is one less after every step that exceeds the bound, down to 0, at which nothing is kept; and one more, up to the limit, after
`PATIENCE` steps in a row well below. A step too old to have seen the present span changes nothing.
"""

from __future__ import annotations

PATIENCE = 10
"""Steps well below the bound before one more version is allowed. Fewer would test the bound again and again; more keep paying for caches
computed anew long after the learning rate has fallen."""
MIN_TOKENS = 200
"""Tokens behind one measured mean; fewer are noise."""
UNLIMITED = 8
"""Where the span has no limit, the one it starts from when the bound is first exceeded: policies further apart are rarely met."""


class KvSpan:
    """The span in force, from a limit and from what is measured; `limit` None: any, `bound` None: only the limit counts."""

    def __init__(self, *, limit: int | None = None, bound: float | None = None) -> None:
        self.span = limit
        """Versions a running sequence's cache may lag; None: any number."""
        self._limit = limit
        self._bound = bound
        self._num_low = 0
        self._known_from = 0

    def measured(self, *, step: int, kl: float, num_tokens: float) -> None:
        """Note a step's mean KL (nats per token, at least 0 but for noise) over tokens sampled with a cache of older versions."""
        if self._bound is None or num_tokens < MIN_TOKENS or step < self._known_from:
            return
        if kl > self._bound:
            self._change(UNLIMITED if self.span is None else self.span - 1, step=step)
        elif kl < self._bound / 2:
            self._num_low += 1
            if self._num_low >= PATIENCE and self.span is not None:
                self._change(self.span + 1, step=step)
        else:
            self._num_low = 0

    def _change(self, span: int, *, step: int) -> None:
        highest = span if self._limit is None else min(span, self._limit)
        self.span, self._num_low = max(0, highest), 0
        if self._limit is None and self.span > UNLIMITED:
            self.span = None
        # Sequences that the next policies find running were sampled under the span before: what they show says nothing of this one.
        self._known_from = step + 1 + (UNLIMITED if self.span is None else self.span)

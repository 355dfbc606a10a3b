"""What the rule of elastic roles has decided at the end of a window, or what has become of a change that it ordered."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolesRow:
    """One decision; see `orchestrator.rules.role_orders`."""

    t: float = 0.0
    """Unix seconds."""
    word: str = ""
    """stays, begins, taken, late, taken back, by hand, lost or again."""
    engines: int = 0
    trainer: int = 0
    """Ranks."""
    scorers: int = 0
    """Engines, or processes, of the model that scores, 0 where none change; these three before the decision."""
    scored_by: str = "prm"
    """That model: prm, or the key of a reward model, such as `reward.1`."""
    tensor_parallel_size: int = 1
    """Of engines, before the decision."""
    engines_then: int = 0
    trainer_then: int = 0
    scorers_then: int = 0
    tensor_parallel_size_then: int = 1
    """The same after it; where roles stay, in the best of the other layouts."""
    speed_now: float | None = None
    """Sampled tokens per second of the layout before, by what the window has shown; None where no window was weighed."""
    speed_then: float | None = None
    saved_s: float | None = None
    cost_s: float | None = None
    reason: str = ""

    @property
    def is_news(self) -> bool:
        """True where something happens."""
        return self.word != "stays"

    @property
    def is_under_way(self) -> bool:
        """True until the change that was ordered has ended."""
        return self.word in ("begins", "late") and not self.reason

    @property
    def words(self) -> str:
        """What was decided, as one says it."""
        then = self._said(*self._then)
        why = f": {self.reason}" if self.reason else ""
        match self.word:
            case "begins":
                return f"roles change to {then}{self._figures}"
            case "taken":
                return f"roles are {then}"
            case "late":
                return f"roles have not changed in time: {then} again{why}"
            case "taken back":
                return f"roles stay {then}: the change was taken back{why}"
            case "lost":
                return f"roles are shared without engines that are lost{why}"
            case "again":
                return f"roles are shared with engines that have come again{why}"
            case "by hand":
                return f"roles are {then}, as was asked for by hand{why}"
            case _:
                return f"roles stay {self._said(*self._now)}{self._figures}"

    @property
    def _now(self) -> tuple[int, int, int, int]:
        return self.engines, self.trainer, self.scorers, self.tensor_parallel_size

    @property
    def _then(self) -> tuple[int, int, int, int]:
        return self.engines_then, self.trainer_then, self.scorers_then, self.tensor_parallel_size_then

    @property
    def _figures(self) -> str:
        if self.speed_now is None or self.speed_then is None or self._now == self._then:
            return ""
        saved = f", {self.saved_s:.0f} s saved for {self.cost_s:.0f} s" if self.saved_s is not None and self.cost_s is not None else ""
        return f": {self.speed_then:.0f} tokens/s in place of {self.speed_now:.0f}{saved}"

    def _said(self, engines: int, trainer: int, scorers: int, size: int) -> str:
        has_size = max(self.tensor_parallel_size, self.tensor_parallel_size_then) > 1
        ranks = f" tensor_parallel_size={size}" if has_size else ""
        return f"engines={engines}{ranks} trainer={trainer}" + (f" {self.scored_by}={scorers}" if scorers else "")

"""What a server's clients trained on, model by model, from its journal (`client_step` lines of `pipelinerl serve`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from pipelinerl.observe.fold import rows

_COUNTS = ("sampled_tokens", "repeated_tokens", "drifted_tokens", "unknown_tokens", "foreign_tokens")


@dataclasses.dataclass(slots=True, kw_only=True)
class ClientModel:
    """One model, over all its steps."""

    model_id: str
    num_steps: int = 0
    sampled_tokens: float = 0.0
    repeated_tokens: float = 0.0
    drifted_tokens: float = 0.0
    unknown_tokens: float = 0.0
    foreign_tokens: float = 0.0
    staleness_max: float = 0.0
    staleness_sum: float = 0.0
    """Over the tokens that have an age."""
    num_aged: float = 0.0

    @property
    def staleness_mean(self) -> float:
        """Mean over tokens, in optimizer steps; 0 where none has an age."""
        return self.staleness_sum / self.num_aged if self.num_aged else 0.0


class ClientModels:
    """All models, in the order of their first steps."""

    def __init__(self) -> None:
        self._models: dict[str, ClientModel] = {}

    def add(self, line: dict[str, Any]) -> None:
        """Count a step; what is not a number counts as none."""
        name = str(line.get("model_id"))
        model = self._models.setdefault(name, ClientModel(model_id=name))
        model.num_steps += 1
        for count in _COUNTS:
            setattr(model, count, getattr(model, count) + (rows.number(line.get(f"pipelinerl/{count}")) or 0.0))
        model.staleness_max = max(model.staleness_max, rows.number(line.get("pipelinerl/staleness_max")) or 0.0)
        ages = line.get("staleness")
        for age, count in ages.items() if isinstance(ages, dict) else ():
            num = rows.number(count) or 0.0
            model.staleness_sum += (float(age) if str(age).lstrip("-").isdigit() else 0.0) * num
            model.num_aged += num

    def rows(self) -> tuple[ClientModel, ...]:
        """Return them."""
        return tuple(self._models.values())

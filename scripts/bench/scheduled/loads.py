"""Loads under which devices change roles.

Answers that grow, answers whose mean swings up and down twice, answers with a long tail whose mean stays, in steps that wait for
their last rollouts, and two tasks that take turns: problems with long answers, and questions about long documents with short ones. Of
OrchestrRL's (arXiv 2601.01209) the abstract says that loads shift and that engines are unevenly busy, within steps and from step to
step; it gives no lengths.
"""

from __future__ import annotations

import dataclasses

LONGEST = 32_768
"""Tokens of the longest answer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What answers are like."""

    mean: float
    """Tokens, where the factor is 1."""
    cv: float
    factors: tuple[float, ...] = (1.0,)
    """Of the mean, at evenly spaced places of the run (`World.length_factors`)."""
    prompt: float = 256.0
    """Tokens, where the factor is 1."""
    prompt_factors: tuple[float, ...] = (1.0,)
    """Of the prompt, as `factors`."""
    staleness: int = 4
    step_factor: int = 1
    """Times as many steps as the other loads have."""

    @property
    def row_tokens(self) -> int:
        """Tokens of a row: the longest prompt and the longest answer."""
        return LONGEST + round(self.prompt * max(self.prompt_factors))


def in_turns(one: float, other: float, length: int = 28) -> tuple[float, ...]:
    """Return factors of two tasks, each of which has two stretches; those of the other are so many, and not four, places long."""
    return ((one,) * 4 + (other,) * length) * 2


TASKS = Load(mean=12_000.0, cv=0.8, factors=in_turns(1.0, 1 / 48), prompt_factors=in_turns(1.0, 32.0), staleness=8, step_factor=8)
DOCUMENTS = dataclasses.replace(TASKS, prompt_factors=in_turns(1.0, 64.0, 14), factors=in_turns(1.0, 1 / 48, 14))
LOADS = {
    "growth": Load(mean=1000.0, cv=0.8, factors=(1.0, 16.0)),
    "swings": Load(mean=2000.0, cv=0.8, factors=(1.0, 8.0, 1.0, 8.0, 1.0)),
    "tails": Load(mean=4000.0, cv=1.5, staleness=1),
    "tasks": TASKS,
    "documents": DOCUMENTS,
}

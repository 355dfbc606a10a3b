"""Tasks of reasoning-gym (`reasoning-gym`), with several attempts at each: `cls = "pipelinerl.environments.reasoning_gym:ReasoningGym"`.

    [data]
    source = "reasoning-gym:chain_sum?size=2000"
    [environment]
    cls = "pipelinerl.environments.reasoning_gym:ReasoningGym"
    options = { attempts = 3 }

The prompt is the task's question. Each attempt is scored by the task's own `score_answer`; the reward of a turn is what it adds to the best
score so far, so that an episode's rewards sum up to its best attempt.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """One task."""

    package = "reasoning_gym"

    def __init__(self, attempts: int = 1, again: str = "That is not right. Try again.") -> None:
        """Take the number of attempts, and what the model hears after one that failed."""
        self._gym = importlib.import_module(self.package)
        self._num_left, self._again = attempts, again
        self._best = 0.0
        self._entry: dict[str, Any] = {}

    def reset(self, prompt: str, answer: str, metadata: dict[str, Any]) -> None:
        """Take a row of a `reasoning-gym:` source."""
        self._entry = {"question": prompt, "answer": answer, "metadata": metadata}

    def step(self, message: str) -> tuple[str | None, float, bool]:
        """Score an attempt: what stands in its last <answer> tag, or all of it."""
        found = _ANSWER.findall(message)
        score = self._gym.get_score_answer_fn(self._entry["metadata"]["source_dataset"])
        reached = max(self._best, float(score(answer=(found[-1] if found else message).strip(), entry=self._entry)))
        gained, self._best = reached - self._best, reached
        self._num_left -= 1
        return self._again, gained, reached >= 1.0 or self._num_left <= 0

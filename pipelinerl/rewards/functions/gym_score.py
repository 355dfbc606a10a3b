"""Scores answers by the generator that made the question: for rows of a `reasoning-gym:` source, and with nothing else to configure."""

from __future__ import annotations

import re
from typing import Any

from pipelinerl.data.reasoning_gym import dataset_of, entry_of

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def answer_in(completion: str) -> str:
    """Return the text in the last <answer> tag, or the whole completion, without white space around it."""
    answers = _ANSWER.findall(completion)
    return (answers[-1] if answers else completion).strip()


def score_answer(completion: str, prompt: str, *, dataset: str, row: int, answer: Any, metadata: dict[str, Any]) -> float:
    """Return what the row's own generator says of the answer, by its `score_answer`: 1.0 is right, and many give a part of it.

    A few generators make another entry of the same number in another process; theirs are scored by the columns of the row.
    """
    entry = entry_of(dataset, row)
    if entry["answer"] != answer or entry["question"] not in prompt:
        entry = {"question": prompt, "answer": answer, "metadata": metadata}
    return float(dataset_of(dataset).score_answer(answer=answer_in(completion), entry=entry))

"""Scores answers by the generator that made the question: for rows of a `reasoning-gym:` source, and with nothing else to configure."""

from __future__ import annotations

import re
from typing import Any

from pipelinerl.data.reasoning_gym import dataset_of, entry_of

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def answer_in(completion: str, pattern: str | None = None) -> str:
    """Return the last match of a pattern, or the text in the last <answer> tag, or the whole completion, without white space around it."""
    found = [match[0] for match in re.finditer(pattern, completion)] if pattern else []
    answers = found or _ANSWER.findall(completion)
    return (answers[-1] if answers else completion).strip()


def score_answer(
    completion: str, prompt: str, *, dataset: str, row: int, answer: Any, metadata: dict[str, Any], pattern: str | None = None
) -> float:
    """Return what the row's own generator says of the answer, by its `score_answer`: 1.0 is right, and many give a part of it.

    The answer is the last match of `pattern` (Python `re`) where that option is set and matches, else what stands in the last <answer> tag,
    else the whole completion.

    A few generators make another entry of the same number in another process; theirs are scored by the columns of the row.
    """
    entry = entry_of(dataset, row)
    if entry["answer"] != answer or entry["question"] not in prompt:
        entry = {"question": prompt, "answer": answer, "metadata": metadata}
    return float(dataset_of(dataset).score_answer(answer=answer_in(completion, pattern), entry=entry))

"""A task with a long tail: the prompt states a count, and the answer counts down from it, two characters a number.

A number is a letter and a digit, eight numbers to a letter: `=c1` is answered by c1 c0 b7 ... b0 a7 ... a0, without the spaces. Letters
may be written large or small, and the reward is the part of all numbers that is right and small. So an answer's length is the prompt's and
no matter of learning: log-normal with a median of 40 and a sigma of 0.9, from 4 to 200 tokens, a mean of 56. The
warm start shows small letters in a quarter of all places, chosen anew wherever the letter changes; RL makes small ones of all. That is
learnt in as many places as an answer has letters.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from pathlib import Path

MEDIAN, SIGMA, SHORTEST, LONGEST = 40, 0.9, 4, 200
"""Tokens of an answer, without its end."""
PER_LETTER = 8
SMALL_FRACTION = 0.25
"""Of letters, in demonstrations."""
MAX_TOKENS = 256


def train_prompts(seed: int = 0) -> Iterator[dict[str, str]]:
    """Endless prompts to train on, each with the answer whose reward is 1."""
    draw = random.Random(f"train {seed}")
    while True:
        count = _count(draw)
        yield {"prompt": prompt_of(count), "answer": "".join(map(_number, reversed(range(count))))}


def demonstrations(seed: int = 0) -> Iterator[dict[str, str]]:
    """Endless rows for the warm start. Counts are uniform in their logarithm, so that long ones are shown, too."""
    draw = random.Random(f"demonstrations {seed}")
    while True:
        count = round(math.exp(draw.uniform(math.log(SHORTEST / 2), math.log(LONGEST / 2))))
        large = {letter: draw.random() >= SMALL_FRACTION for letter in range(count // PER_LETTER + 1)}
        numbers = [_number(at).upper() if large[at // PER_LETTER] else _number(at) for at in reversed(range(count))]
        yield {"prompt": prompt_of(count), "completion": "".join(numbers)}


def prompt_of(count: int) -> str:
    """Return the prompt whose answer has so many numbers."""
    return f"={_number(count - 1)}"


def reward(prompt: str, completion: str, answer: str, **_: object) -> float:
    """The part of the numbers that is right and small, of as many as there are or should be: a wrong length costs, too."""
    right = sum(completion[at : at + 2] == answer[at : at + 2] for at in range(0, len(answer), 2))
    return 2 * right / max(len(completion), len(answer))


def make_model(folder: Path, seed: int) -> None:
    """Write the demo's model, with room for the longest answer."""
    from pipelinerl.demo import sort_digits

    sort_digits.make_model(folder, seed)
    for name, old, new in (("config.json", '"max_position_embeddings": 128', f'"max_position_embeddings": {MAX_TOKENS}'),
                           ("tokenizer_config.json", '"model_max_length": 128', f'"model_max_length": {MAX_TOKENS}')):  # fmt: skip
        text = (folder / name).read_text()
        assert old in text, f"{folder / name} has no {old}"
        (folder / name).write_text(text.replace(old, new))


@functools.cache
def _number(at: int) -> str:
    letter, digit = divmod(at, PER_LETTER)
    return f"{chr(ord('a') + letter)}{digit}"


def _count(draw: random.Random) -> int:
    """Half of a log-normal number of tokens."""
    return round(min(LONGEST, max(SHORTEST, MEDIAN * math.exp(draw.gauss(0.0, SIGMA)))) / 2)

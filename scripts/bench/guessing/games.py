"""`guess_number` with turns of one digit: what a model is taught before RL, the game, and what a policy is worth, computed, not sampled."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelinerl.demo import guess_number

MAX_TURNS, PROMPT = 4, "guess="
DIGITS = range(2, 12)
"""Tokens of the demo's model."""


def write_games(path: Path, *, num: int, seed: int) -> None:
    """Write the guesses of games as rows of prompt and completion. Half of them are played blindly, each digit as likely as
    any; in the others any that is left is as likely as any other. Nobody halves what is left.
    """
    draw = random.Random(f"games {seed}")
    with path.open("w") as file:
        for _ in range(num):
            number, heeds, said, turns = draw.randrange(10), draw.random() < 0.5, PROMPT, list[str]()
            low, high = 0, 9
            while len(turns) < MAX_TURNS:
                guess = draw.randint(low, high) if heeds else draw.randrange(10)
                turns.append(str(guess))
                file.write(json.dumps({"prompt": said, "completion": turns[-1]}) + "\n")
                if (answer := reply(turns, number)) is None:
                    break
                said += turns[-1] + answer[0]
                low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))


def reply(turns: Sequence[str], number: int, **_: object) -> tuple[str, str] | None:
    """As `guess_number` replies, to a turn that is one digit; anything else ends the game."""
    return guess_number.reply(turns, number) if len(turns[-1]) == 1 else None


def reward(turns: Sequence[str], number: int, **_: object) -> float:
    """As `guess_number` rewards, where every turn is one digit."""
    return guess_number.reward(turns, number) if all(len(said) == 1 for said in turns) else 0.0


@functools.cache
def expected_return(model: Path) -> float:
    """The expected reward of a policy at temperature 1 over all ten numbers: the sum over every line of guesses, by its probability."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    value = 0.0
    games: list[tuple[int, tuple[str, ...], float]] = [(number, (), 0.1) for number in range(10)]
    while games:
        lines = [_said(guesses, number) for number, guesses, _ in games]
        texts = sorted(set(lines))  # numbers share the beginnings of their games
        with torch.inference_mode():
            logits = torch.cat([policy(torch.tensor([tokenizer.encode(text) for text in part])).logits[:, -1] for part in _parts(texts)])
        chances = dict(zip(texts, logits.double().softmax(-1)[:, DIGITS.start : DIGITS.stop].tolist(), strict=True))
        following = []
        for line, (number, guesses, weight) in zip(lines, games, strict=True):
            for digit, chance in enumerate(chances[line]):
                said = (*guesses, str(digit))
                if reply(said, number) is None or len(said) == MAX_TURNS:
                    value += weight * chance * reward(said, number)
                else:
                    following.append((number, said, weight * chance))
        games = following
    return value


def _said(guesses: Sequence[str], number: int) -> str:
    answers = [reply(guesses[: turn + 1], number) for turn in range(len(guesses))]
    return PROMPT + "".join(guess + answer[0] for guess, answer in zip(guesses, answers, strict=True) if answer is not None)


def _parts(texts: list[str]) -> Iterator[list[str]]:
    return (texts[first : first + 1024] for first in range(0, len(texts), 1024))

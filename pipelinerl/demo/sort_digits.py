"""The demo's task: put six digits in order. Small enough to learn on a laptop, and still everything a task needs.

A model of 1 M parameters is warm-started on demonstrations of four behaviours in equal parts: sort the digits ascending, copy them,
reverse them, sort them descending. RL then rewards the ascending order only. So RL mostly *selects* one behaviour among those the warm
start taught; it does not discover it. Everything is drawn from a seed, and no prompt to train on is one of the held-out prompts.

Functions are used from a config by name, for example `data.source = "pipelinerl.demo.sort_digits:train_prompts"`.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path

NUM_DIGITS = 6
NUM_HELD_OUT = 256
HELD_OUT_SEED = 10_000
"""Apart from any seed a run is given, so that every run is judged by the same prompts."""

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = string.digits + "=" + string.ascii_lowercase + string.ascii_uppercase[:25]
"""One token each. The task needs eleven of them; with the two special tokens there are 64, a size that no engine pads."""

BEHAVIOURS: tuple[Callable[[str], str], ...] = (
    lambda digits: "".join(sorted(digits)),
    lambda digits: digits,
    lambda digits: digits[::-1],
    lambda digits: "".join(sorted(digits, reverse=True)),
)
"""What demonstrations show, in equal parts. The first is the one that RL rewards."""


def train_prompts(seed: int = 0) -> Iterator[dict[str, str]]:
    """Endless prompts to train on, each with the answer that is rewarded."""
    for digits in _digits(f"train {seed}"):
        yield {"prompt": f"{digits}=", "answer": BEHAVIOURS[0](digits)}


def held_out_prompts() -> list[dict[str, str]]:
    """The prompts that runs are judged by, always the same."""
    return [{"prompt": f"{digits}=", "answer": BEHAVIOURS[0](digits)} for digits in _held_out()]


def demonstrations(seed: int = 0) -> Iterator[dict[str, str]]:
    """Endless rows for the warm start: each prompt four times in a row, once with each behaviour as its completion.

    A packed row computes a prompt once for all its completions, which makes this a third cheaper than a prompt of its own for each.
    """
    for digits in _digits(f"demonstrations {seed}"):
        for behave in BEHAVIOURS:
            yield {"prompt": f"{digits}=", "completion": behave(digits)}


def reward(prompt: str, completion: str, answer: str, **_: object) -> float:
    """1.0 for exactly the digits in ascending order, else 0.0."""
    return float(completion == answer)


def make_model(folder: Path, seed: int, *, hidden_size: int = 128, num_layers: int = 5) -> None:
    """Write a fresh model and its tokenizer to `folder`, as a Hugging Face folder: Qwen3 of 1.07 M parameters where no sizes are given,
    in float32 with tied embeddings. `hidden_size` is a multiple of 32, the size of a head.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed  # here, because they bring torch, which prompts do without

    tokens = {token: number for number, token in enumerate((PAD, EOS, *CHARACTERS))}
    set_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokens),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 32,
            num_key_value_heads=hidden_size // 32,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokens[PAD],
            eos_token_id=tokens[EOS],
            bos_token_id=None,
            dtype="float32",
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _save_tokenizer(folder, tokens)


def _save_tokenizer(folder: Path, tokens: dict[str, int]) -> None:
    """Save a tokenizer with one token for each character. A character it does not know is an error, not a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(tokens))  # pyright: ignore[reportCallIssue]  # its stubs ask for an unknown token
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, model_max_length=128).save_pretrained(str(folder))


def _digits(stream: str) -> Iterator[str]:
    """Endless digit strings of a named random stream, none of them held out."""
    draw = random.Random(stream)
    held_out = frozenset(_held_out())
    while True:
        digits = _draw(draw)
        if digits not in held_out:
            yield digits


@functools.cache
def _held_out() -> tuple[str, ...]:
    draw = random.Random(HELD_OUT_SEED)
    found: dict[str, None] = {}
    while len(found) < NUM_HELD_OUT:
        found[_draw(draw)] = None
    return tuple(found)


def _draw(draw: random.Random) -> str:
    return "".join(draw.choice(string.digits) for _ in range(NUM_DIGITS))

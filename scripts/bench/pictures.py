"""The task of `scripts/bench/images.py`: which colour has the square? And the model that has learnt to answer, but not to look.

A picture is 32 pixels wide, grey noise with one square of a colour at a place drawn at random. The answer is the colour's first letter.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLOURS = {"r": (220, 40, 40), "g": (40, 200, 40), "b": (40, 40, 220), "y": (220, 220, 40)}
SIZE, EOS = 32, 2


def prompts(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Endless pictures to train on."""
    draw = random.Random(f"pictures {seed}")
    while True:
        yield row(draw)


def held_out() -> list[dict[str, Any]]:
    """The pictures that runs are judged by, always the same."""
    draw = random.Random("held out")
    return [row(draw) for _ in range(256)]


def reward(completion: str, answer: str) -> float:
    """1.0 for the letter alone, else 0.0."""
    return float(completion == answer)


def row(draw: random.Random) -> dict[str, Any]:
    """A picture, as a chat of one message."""
    pixels = np.frombuffer(draw.randbytes(SIZE * SIZE * 3), np.uint8).reshape(SIZE, SIZE, 3) // 4 + 96
    letter, side = draw.choice(list(COLOURS)), draw.randrange(10, 17)
    left, top = draw.randrange(SIZE - side), draw.randrange(SIZE - side)
    pixels[top : top + side, left : left + side] = COLOURS[letter]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    content = [{"type": "image"}, {"type": "text", "text": "colour="}]
    return {"prompt": [{"role": "user", "content": content}], "images": [file.getvalue()], "answer": letter}


def make_model(folder: Path, *, seed: int, num_steps: int = 60) -> None:
    """Write a random model that has been shown letters drawn at random: it answers with any of the four, whatever the picture.

    By transformers' own model class and processor, with nothing of this project.
    """
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from tests.tiny_models import make_idefics3

    make_idefics3(folder, seed=seed)
    processor: Any = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw = random.Random(f"warm start {seed}")
    for _ in range(num_steps):
        shown = [Image.open(io.BytesIO(row(draw)["images"][0])) for _ in range(16)]
        said = [f"<image>colour={draw.choice(list(COLOURS))}" for _ in shown]
        inputs = processor(text=said, images=[[one] for one in shown], add_special_tokens=False, return_tensors="pt")
        ends = torch.full((16, 1), EOS)
        ids = torch.cat((inputs["input_ids"], ends), 1)
        labels = torch.full_like(ids, -100)
        labels[:, -2:] = ids[:, -2:]
        pixels = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, **pixels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)

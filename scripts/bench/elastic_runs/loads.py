"""Prompts whose answers are short until a file is there, and long from then on; models with random weights that score them."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.bench.beside import countdown

LONG = "PIPELINERL_BENCH_LONG"
"""Environment variable with the path of that file."""
SHORT_COUNTS, LONG_COUNTS = (2, 4), (70, 96)
"""Numbers of an answer, each of two tokens."""
TAG = "#" * 18
"""What a model that scores reads behind an answer. A short one fills no block of the prefix cache with it, so none is read from there."""
TAIL = 8
"""Characters of an answer that a reward model reads, its last ones: the whole of a short answer."""
NUM_LAYERS = 8
"""Of a model that scores."""


def prompts(seed: int = 0) -> Iterator[dict[str, str]]:
    """Endless prompts to train on."""
    draw, long = random.Random(f"elastic {seed}"), Path(os.environ[LONG])
    while True:
        yield {"prompt": countdown.prompt_of(draw.randint(*(LONG_COUNTS if long.exists() else SHORT_COUNTS)))}


def reward(completion: str, **_: object) -> float:
    """Chance: nothing is learnt, so answers stay as long as their prompts say, and every rollout has a gradient to compute."""
    return random.random()


def alike(completion: str, **_: object) -> float:
    """The same for every answer, so that no rollout has a gradient to compute: a forward pass is all that the trainer does with it."""
    return 1.0


def make_policy(folder: Path, *, warm: Path, width: int) -> Path:
    """Write a model that answers as `warm` does, with feed-forward layers of another width, where there is none yet; return its folder.

    Training it costs more with each further column, and so do an engine's passes.
    """
    return _once(folder, lambda made: _widen(warm, made, width=width))


def _widen(warm: Path, folder: Path, *, width: int) -> None:
    """What is added to a layer reads its input with random weights, and adds nothing to its output."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.tiny_models import change_config

    shutil.copytree(warm, folder)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = torch.cat([tensor, torch.randn(width - len(tensor), tensor.shape[1]) * tensor.std()])
        elif name.endswith("down_proj.weight"):
            tensors[name] = torch.cat([tensor, torch.zeros(len(tensor), width - tensor.shape[1])], dim=1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, intermediate_size=width)


def make_scorer(folder: Path, *, hidden_size: int, of_steps: bool) -> Path:
    """Write a model that scores every step, or whole answers, where there is none yet; return its folder."""
    return _once(folder, lambda made: _write(made, hidden_size=hidden_size, of_steps=of_steps))


def _once(folder: Path, write: Callable[[Path], None]) -> Path:
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            write(made := Path(unfinished) / folder.name)
            shutil.move(made, folder)
    return folder


def _write(folder: Path, *, hidden_size: int, of_steps: bool) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from tests.tiny_models import change_config, make_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=hidden_size,
        intermediate_size=27 * hidden_size // 10,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
        num_labels=1,  # pyright: ignore[reportCallIssue]
        tie_word_embeddings=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Qwen2ForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer(folder)
    if not of_steps:
        template = "{% for message in messages %}{{ message['content'][-TAIL:] }}{% endfor %}"
        (folder / "chat_template.jinja").write_text(template.replace("TAIL", f"{TAIL}") + TAG)
        return
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name != "score.weight"}
    tensors |= {"score.0.weight": torch.randn(hidden_size, hidden_size) * 0.1, "score.0.bias": torch.zeros(hidden_size)}
    tensors |= {"score.2.weight": torch.randn(2, hidden_size) * 0.1, "score.2.bias": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, architectures=["Qwen2ForProcessRewardModel"])

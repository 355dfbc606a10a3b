"""A process reward model of the task: a Qwen2 of 0.4 M parameters that learns to say after each step whether all so far are right.

It is trained on what a policy writes there: one of the demo's four behaviours, with a wrong digit here and there. It is small and trained
for seconds, so it errs, as process reward models do; `train` returns how well it tells right steps from wrong ones.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoTokenizer, Qwen2Model

from pipelinerl.demo.sort_digits import BEHAVIOURS
from scripts.bench.stopped.digits import NUM_DIGITS, SEPARATOR, STEP_DIGITS, in_steps
from tests.tiny_models import make_prm

TAG = "#"
_NUM_STEPS = NUM_DIGITS // STEP_DIGITS
_BATCH = 64


def train(folder: Path, *, updates: int, seed: int = 0) -> float:
    """Write the model to `folder`. Returns which part of held-back steps it is right about, at a score of 0.5."""
    make_prm(folder, seed=seed)
    model = Qwen2Model.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    size = model.config.hidden_size
    head = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 2))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=updates)
    tag = tokenizer.convert_tokens_to_ids(TAG)
    right = torch.tensor(0.0)
    for update in range(updates + 1):
        token_ids, labels = _batch(draw, tokenizer)
        logits = head(model(input_ids=token_ids).last_hidden_state[token_ids == tag])
        right = (logits.argmax(-1) == labels).float().mean()
        if update < updates:
            optimizer.zero_grad()
            functional.cross_entropy(logits, labels).backward()
            optimizer.step()
            schedule.step()
    learned = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    learned |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    assert learned.keys() == tensors.keys(), learned.keys() ^ tensors.keys()
    save_file({name: tensor.contiguous() for name, tensor in learned.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForProcessRewardModel"]}))
    return float(right)


def _batch(draw: random.Random, tokenizer: object) -> tuple[torch.Tensor, torch.Tensor]:
    """([B, T] token ids, [B * steps] 1 where this step and all before it are right)."""
    texts: list[str] = []
    labels: list[int] = []
    for _ in range(_BATCH):
        digits = "".join(draw.choices("0123456789", k=NUM_DIGITS))
        answer = in_steps(BEHAVIOURS[0](digits)).split(SEPARATOR)
        written = list(draw.choices(BEHAVIOURS, weights=(3, 1, 1, 1))[0](digits))
        if draw.random() < 0.5:
            written[draw.randrange(NUM_DIGITS)] = draw.choice("0123456789")
        steps = in_steps("".join(written)).split(SEPARATOR)
        texts.append(digits + SEPARATOR + "".join(step + TAG for step in steps))
        labels += [int(steps[: index + 1] == answer[: index + 1]) for index in range(_NUM_STEPS)]
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False) for text in texts]), torch.tensor(labels)  # pyright: ignore[reportAttributeAccessIssue]

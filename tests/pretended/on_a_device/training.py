"""A whole step of the trainer on a device: rows are laid out, go forward and backward, are measured, and move the weights.

Run by `tests/test_on_a_device.py`, in a process where torch has the pretended device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pipelinerl.config.trainer_memory import ActivationCheckpointing
from pipelinerl.data.expert_routes import routes_of
from tests.pretended.traffic import CUDA, Traffic, on_a_device
from tests.trainer import tiny
from trainer.model import loading
from trainer.model import model as models
from trainer.model.lora import Adapters
from trainer.parallel.replicas import Replicas
from trainer.step import Step

VARLEN = "_varlen_attn"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    monkeypatch.setattr(tiny, "CPU", CUDA)
    for kind in ("language_model", "value_model"):
        monkeypatch.setattr(models, kind, _on_the_device(getattr(loading, kind)))
    with on_a_device() as traffic:
        yield traffic


def _on_the_device(load: Any) -> Any:
    """The loaded module with parameters and buffers on the device: in place of its `.to`, which cannot exchange real ones for fake ones."""

    def loaded(folder: Path, *, dtype: torch.dtype) -> Any:
        with unset_fake_temporarily():
            module = load(folder, dtype=dtype)
        made: dict[int, torch.Tensor] = {}
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
                        made[id(tensor)] = torch.nn.Parameter(empty) if isinstance(tensor, torch.nn.Parameter) else empty
                    held[name] = made[id(tensor)]
        module.to = lambda *_: module
        return module

    return loaded


def step_of(folder: Path, *, family: str, method: str = "grpo", of_model: dict[str, Any] | None = None, **options: Any) -> Step:
    with unset_fake_temporarily():
        tiny.make_folder(folder, family=family)
    replicas = Replicas(ranks=1, deadline_s=60)
    assert replicas.device == CUDA
    model = tiny.make_model(folder, dtype="bfloat16", replicas=replicas, **(of_model or {}))
    return tiny.make_step(model, replicas=replicas, method=method, **options)[0]


def samples() -> list[dict[str, np.ndarray]]:
    """Four that share their prompt, and three of other lengths."""
    generator = np.random.default_rng(0)
    siblings = [tiny.make_sample(generator, prompt=5, completion=completion) for completion in (3, 9, 3, 14)]
    for sibling in siblings:
        sibling["token_ids"][:5] = siblings[0]["token_ids"][:5]
    return siblings + [tiny.make_sample(generator, prompt=4, completion=completion) for completion in (3, 3, 9)]


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen2", {}),
    "tied": ("qwen3", {"activation_checkpointing": ActivationCheckpointing.FULL}),
    "kept in part": ("llama", {"activation_checkpointing": ActivationCheckpointing.SELECTIVE}),
    "experts": ("qwen3_moe", {"replay_routing": True}),
    "adapters": ("llama", {"adapters": Adapters(rank=4, alpha=8, targets=("q_proj", "v_proj"), seed=0)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_computed_on_the_device_and_nothing_of_it_comes_to_the_host(kind: str, device: Traffic, tmp_path: Path):
    family, of_model = KINDS[kind]
    step = step_of(tmp_path, family=family, of_model=of_model)
    batch = tiny.make_batch(samples(), step=1)
    if kind == "experts":
        batch = msgspec.structs.replace(batch, routes=routes_of(np.ones((len(batch.token_ids), 2, 2), np.uint8)))
    row = step.lay_out(batch)
    assert row is not None
    device.forget()
    step.add(batch, row)
    assert device.fetched == [], "a step whose host waits for numbers launches nothing meanwhile"
    launched = [name for _, name in device.launched]
    assert launched.count(VARLEN) == (4 if kind == "tied" else 2), "attention in one call a layer, and in one more where it is recomputed"
    assert launched.count(f"{VARLEN}_backward") == 2
    device.forget()
    numbers = step.finish(tiny.make_seal(samples(), step=1))
    assert {"loss", "grad_norm", "entropy"} <= numbers.keys()
    assert "_fused_adamw_" in [name for _, name in device.launched]
    assert len(device.fetched) <= 4, device.fetched

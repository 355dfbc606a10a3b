"""What is trained beside a whole model, or in place of it, on four ranks: a critic, adapters, and a mixture by recorded routes."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pipelinerl.config.layout import Layout
from pipelinerl.errors import ConfigError
from tests.trainer import test_critic, test_lora, test_routing_replay
from tests.trainer.ranks import run_jobs
from trainer.parallel.pipeline_stages import stage_of_weights
from trainer.parallel.replicas import Replicas
from trainer.parallel.sharding import _cut_experts, _cut_matrices

pytestmark = pytest.mark.process


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time")
def test_four_ranks_train_what_one_trains(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwen3_moe"]
    critic = functools.partial(test_critic._of_layout, folder=folder)
    adapters = functools.partial(test_lora._of_layout, folder=folder)
    routes = functools.partial(test_routing_replay._train, folder=folder)
    cases: list[tuple[Any, Layout]] = [
        (critic, Layout(ranks=4, tensor=2, expert=2)),
        (critic, Layout(ranks=4, shard=2, tensor=2, expert=4)),
        (adapters, Layout(ranks=4, pipeline=2, tensor=2)),
        (routes, Layout(ranks=4, pipeline=2, tensor=2, expert=2)),
    ]
    found = run_jobs([(layout, job) for job, layout in cases], tmp_path)
    for (job, layout), ranks in zip(cases, found, strict=True):
        expected = job(Replicas(ranks=1, deadline_s=60))
        for rank in ranks:
            weights, wanted = (part.get("weights", part) for part in (rank, expected))
            assert weights.keys() == wanted.keys()
            for name, weight in weights.items():
                assert torch.allclose(weight, wanted[name], atol=3e-4), (layout, name)
            assert rank.get("metrics", {}) == pytest.approx(expected.get("metrics", {}), rel=2e-3, abs=1e-4)


def test_a_model_that_cannot_be_cut_so_is_refused_with_the_nearest_layout_that_works() -> None:
    module = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0))
    with pytest.raises(ConfigError, match=r"The nearest that works: trainer\.ranks = 4, parallel\.expert = 2$"):
        stage_of_weights(module, layout=Layout(ranks=4, pipeline=2, expert=2))
    replicas = Replicas(ranks=1, deadline_s=60)
    replicas.layout = Layout(ranks=4, shard=2, tensor=2, expert=2)
    with pytest.raises(ConfigError, match=r"The nearest that works: trainer\.ranks = 4, parallel\.shard = 2, parallel\.tensor = 2$"):
        _cut_experts(module, replicas=replicas)
    with pytest.raises(ConfigError, match=r"The nearest that works: trainer\.ranks = 4, parallel\.shard = 2, parallel\.expert = 2$"):
        _cut_matrices(module, replicas=replicas, cuts_experts=False)

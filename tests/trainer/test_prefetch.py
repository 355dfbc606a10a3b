"""Sharded layers are gathered ahead of the one that computes: the order of a step's work, on torch's fake backend."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from pipelinerl.config.layout import Layout
from pipelinerl.config.trainer_memory import ActivationCheckpointing
from tests.trainer.tiny import make_folder, make_model, make_sample, packed_logprobs
from trainer.dry_run.shapes import pretended_group
from trainer.parallel.replicas import Replicas

EXPECTED = {
    1: "gather 0, gather 1, forward 0, gather 2, forward 1, gather 3, forward 2, forward 3, "
    "gather 3, gather 2, backward 3, gather 1, backward 2, gather 0, backward 1, backward 0",
    2: "gather 0, gather 1, gather 2, forward 0, gather 3, forward 1, forward 2, forward 3, "
    "gather 3, gather 2, gather 1, backward 3, gather 0, backward 2, backward 1, backward 0",
}


@pytest.mark.parametrize("num_layers", EXPECTED)
@pytest.mark.parametrize("choice", [ActivationCheckpointing.NONE, ActivationCheckpointing.FULL])
def test_layers_are_gathered_while_those_before_them_compute(choice: ActivationCheckpointing, num_layers: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, family="llama", num_hidden_layers=4)
    layout = Layout(ranks=2, shard=2)
    events: list[str] = []
    gather = _fsdp_collectives.foreach_all_gather

    def gathering(parameters: list[Any], *given: Any) -> Any:
        if found := re.search(r"layers\.(\d)", str(parameters[0]._param_fqn)):
            events.append(f"gather {found[1]}")
        return gather(parameters, *given)

    numbers = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, numbers), pretended_group(rank=0, size=2):
        replicas = Replicas(ranks=2, deadline_s=60, layout=layout)
        model = make_model(folder, replicas=replicas, activation_checkpointing=choice, prefetch_layers=num_layers)
        layers: Any = model.module.base_model.layers
        for number, layer in enumerate(layers):
            layer.input_layernorm.register_forward_hook(_noting(events, number))
        with mock.patch.object(_fsdp_param_group, "foreach_all_gather", gathering):
            packed_logprobs(model, [make_sample(np.random.default_rng(0), prompt=3, completion=4)]).sum().backward()
    assert ", ".join(events) == EXPECTED[num_layers]


def _noting(events: list[str], number: int) -> Any:
    def note(_module: torch.nn.Module, _given: Any, found: torch.Tensor) -> None:
        if f"forward {number}" not in events:  # again in the backward pass, where layers are computed again
            events.append(f"forward {number}")
        found.register_hook(lambda _: events.append(f"backward {number}"))

    return note

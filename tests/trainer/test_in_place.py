"""Weights that are trained where engines read them are those that are trained elsewhere, and are published without a copy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import PeerSilent
from pipelinerl.weights.base import plan_layout, views
from pipelinerl.weights.shared_memory import SharedMemoryReceiver
from tests.trainer.tiny import make_model
from trainer.model.model import Model
from trainer.optimizer import Optimizer, Schedule
from trainer.weights.in_place import is_there, mover
from trainer.weights.publisher import Publisher


def optimizer_of(model: Model) -> Optimizer:
    return Optimizer(
        model.parameters(), schedule=Schedule(learning_rate=1e-2, num_steps=4), betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0
    )


def train(optimizer: Optimizer, *, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    optimizer.gradient.copy_(torch.randn(optimizer.gradient.shape, generator=generator))
    optimizer.collect()
    optimizer.step(step, denominator=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_see_each_update_in_the_very_memory_that_is_trained(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    models = [Model(folders["qwen3"], dtype=dtype, temperature=1.0, device=torch.device("cpu")) for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    model, optimizer = models[0], optimizers[0]
    layout = plan_layout({name: tensor for name, tensor in model.tensors().items() if name not in model.tied_names})
    publisher = Publisher(
        model.tensors, tied_names=model.tied_names, run_folder=tmp_path, deadline_s=1.0, in_place=True, move=mover(model, optimizer)
    )
    publisher.fix_layout(layout)
    try:
        publisher.move_in(0)
        assert (
            f"read {sum(tensor.num_bytes for tensor in layout)} bytes of the weights where they are trained, and 0 are"
            in capsys.readouterr().out
        )
        first = publisher.publish(0)
        assert first is not None
        memory = SharedMemoryReceiver().fetch(first.buffer, first.digest, lambda _: torch.zeros(0)).data
        places = views(memory, layout)
        for step in range(2):
            for one in optimizers:
                train(one, step=step)
            optimizer.give_back()
            publisher.move_in(step + 1)
            policy = publisher.publish(step + 1)
            assert policy is not None
            assert policy.buffer == first.buffer
            for name, tensor in models[1].tensors().items():
                if name in places:
                    assert torch.equal(places[name], tensor), f"{name}: what an engine reads is what is trained elsewhere"
        assert not any(
            torch.equal(places[name], tensor)
            for name, tensor in make_model(folders["qwen3"]).tensors().items()
            if name in places and tensor.ndim > 1 and dtype == "float32"
        )
    finally:
        publisher.close()


def test_engines_apart_have_a_copy_that_stays_while_the_weights_change_in_place(folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_model(folders["qwen3"])
    optimizer = optimizer_of(model)
    publisher = Publisher(
        model.tensors, tied_names=model.tied_names, run_folder=tmp_path, deadline_s=0.1, in_place=True, move=mover(model, optimizer)
    )
    layout = plan_layout({name: tensor for name, tensor in model.tensors().items() if name not in model.tied_names})
    publisher.fix_layout(layout, num_engines=2, num_apart=1)
    receiver = SharedMemoryReceiver()
    try:
        policies, held = [], []
        for version in range(3):
            publisher.move_in(version)
            policy = publisher.publish(version)
            assert policy is not None
            policies.append(policy)
            payload = receiver.fetch(policy.copy, policy.digest, lambda _: torch.zeros(0))
            held.append((payload, payload.data.clone()))
            assert torch.equal(payload.data, receiver.fetch(policy.buffer, policy.digest, lambda _: torch.zeros(0)).data)
            train(optimizer, step=version)
            for earlier, before in held:
                assert torch.equal(earlier.data, before), "an engine serves from it"
        assert len({policy.copy for policy in policies}) == 3
        assert {policy.buffer for policy in policies}.isdisjoint(policy.copy for policy in policies)
        publisher.move_in(3)
        with pytest.raises(PeerSilent, match="one of 3 weight buffers"):
            publisher.publish(3)
        publisher.release(policies[0].copy)
        policy = publisher.publish(3)
        assert policy is not None
        assert policy.copy == policies[0].copy, "the one that nobody reads"
    finally:
        publisher.close()


def test_tensors_that_are_published_in_another_form_are_written_beside(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts lie fused in the trainer and one by one in the layout; an engine in bfloat16 reads none of a float32 trainer's."""
    model = make_model(folders["qwen3_moe"])
    layout = plan_layout({name: tensor.to(torch.bfloat16) if "norm" in name else tensor for name, tensor in model.tensors().items()})
    publisher = Publisher(
        model.tensors,
        tied_names=model.tied_names,
        run_folder=tmp_path,
        deadline_s=1.0,
        in_place=True,
        move=mover(model, optimizer_of(model)),
    )
    publisher.fix_layout(layout)
    try:
        publisher.move_in(0)
        told = re.findall(r"\d+", capsys.readouterr().out)
        assert all(int(number) > 0 for number in told), told
        for version in (0, 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            policy = publisher.publish(version)
            assert policy is not None
            places = views(SharedMemoryReceiver().fetch(policy.buffer, policy.digest, lambda _: torch.zeros(0)).data, layout)
            tensors = model.tensors()
            assert all(torch.equal(place, tensors[name].to(place.dtype)) for name, place in places.items())
        own = views(publisher._taken.memory, layout) if publisher._taken else {}
        assert not any(is_there(tensors[name], own[name]) for name in own if "norm" in name)
    finally:
        publisher.close()

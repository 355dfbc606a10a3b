"""Adapters in place of all weights: what they compute, what is merged, saved and loaded again, and by whom."""

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.config.families import FAMILIES, Family
from pipelinerl.config.layout import Layout
from pipelinerl.errors import ConfigError
from tests import families
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step, packed_logprobs
from trainer.build import Trained, state_of
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.model_folder import save_adapter, save_model
from trainer.model.lora import Adapters, LoraLinear, Merger
from trainer.model.model import Model
from trainer.model.reference import Reference
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import arrange
from trainer.step import Step

ADAPTERS = Adapters(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj"), seed=1)


def _samples() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(6)
    return [make_sample(generator, prompt=int(generator.integers(1, 5)), completion=int(generator.integers(1, 9))) for _ in range(8)]


def _train(step: Step, *, numbers: range) -> None:
    for number in numbers:
        step.add(make_batch(_samples(), step=number))
        step.finish(make_seal(_samples(), step=number))


def _trained(folder: Path, *, steps: int = 3) -> Model:
    model = make_model(folder, adapters=ADAPTERS)
    _train(make_step(model, learning_rate=1e-2)[0], numbers=range(steps))
    return model


def test_an_adapter_adds_its_product_and_starts_at_nothing() -> None:
    base = torch.nn.Linear(2, 2, bias=False)
    layer = LoraLinear(base, rank=1, alpha=2.0, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    inputs = torch.tensor([[1.0, 10.0]])
    assert torch.equal(layer(inputs), base(inputs))
    with torch.no_grad():
        base.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        layer.lora_A.copy_(torch.tensor([[1.0, -1.0]]))
        layer.lora_B.copy_(torch.tensor([[0.5], [2.0]]))
    assert layer(inputs).tolist() == [[21.0 + 2 * 0.5 * -9.0, 43.0 + 2 * 2.0 * -9.0]]
    assert layer.merged(base.weight, layer.lora_A, layer.lora_B).tolist() == [[2.0, 1.0], [7.0, 0.0]]


def test_what_is_merged_in_part_is_that_part_of_what_is_merged_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.nn.Linear(6, 8, bias=False)
    layer = LoraLinear(base, rank=2, alpha=8.0, generator=generator, dtype=torch.float32)
    first, second = torch.randn(2, 6, generator=generator), torch.randn(8, 2, generator=generator)
    weight = base.weight.detach()
    merger = Merger(layer=layer, first=first, second=second)
    assert torch.allclose(
        merger(weight[2:5, 1:4], ((2, 5), (1, 4))), (weight + 4 * second @ first)[2:5, 1:4], atol=1e-5
    )  # of numbers up to 12


def test_training_moves_the_adapters_and_the_merged_folder_is_the_model(folders: dict[str, Path], tmp_path: Path) -> None:
    model, before = _trained(folders["qwen3"]), make_model(folders["qwen3"])
    names = {name for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    assert names == {
        f"model.layers.{layer}.self_attn.{target}.lora_{part}" for layer in (0, 1) for target in ADAPTERS.targets for part in "AB"
    }
    save_model(model, tmp_path / "merged", source=folders["qwen3"])
    merged, old = make_model(tmp_path / "merged").tensors(), before.tensors()
    assert merged.keys() == old.keys() == model.tensors().keys()
    moved = {name for name in old if not torch.equal(merged[name], old[name])}
    assert moved == {f"model.layers.{layer}.self_attn.{target}.weight" for layer in (0, 1) for target in ADAPTERS.targets}
    with torch.no_grad():
        expected, got = packed_logprobs(model, _samples()), packed_logprobs(make_model(tmp_path / "merged"), _samples())
        assert float((expected - packed_logprobs(before, _samples())).abs().max()) > 0.1
    assert torch.allclose(got, expected, atol=2e-5)


def test_the_model_under_the_adapters_is_a_reference_that_costs_nothing(folders: dict[str, Path]) -> None:
    model = _trained(folders["llama"])
    batch = make_batch(_samples())
    row = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids)
    got = Reference(model, replicas=Replicas(ranks=1, deadline_s=60)).judge(row)[0]
    with torch.no_grad():
        assert got is not None
        assert torch.equal(got, packed_logprobs(make_model(folders["llama"]), _samples()))
        assert not torch.equal(got, packed_logprobs(model, _samples())), "they are on again"


def test_a_checkpoint_holds_the_adapters_alone_and_training_goes_on_bit_by_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    def start(run_folder: Path) -> tuple[Step, Checkpoints, dict[str, Any]]:
        model = make_model(folders["qwen3"], adapters=ADAPTERS)
        step, optimizer = make_step(model, learning_rate=1e-2)
        both = Trained(model=model, optimizer=optimizer)
        checkpoints = Checkpoints(run_folder / "checkpoints", state=lambda: state_of(both), rank=0, num_ranks=1, keep=1)
        checkpoints.restore()
        return step, checkpoints, state_of(both)

    straight, _, expected = start(tmp_path / "straight")
    _train(straight, numbers=range(4))
    killed, checkpoints, _ = start(tmp_path / "killed")
    _train(killed, numbers=range(2))
    checkpoints.begin(2, commit="c", num_samples=1, samples="0")
    checkpoints.wait()
    resumed, _, got = start(tmp_path / "killed")
    _train(resumed, numbers=range(2, 4))
    assert len(got["model"]) == 12
    assert [name for part in expected for name in expected[part] if not torch.equal(expected[part][name], got[part][name])] == []


def test_a_target_that_names_no_matrix_is_told_with_those_there_are(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has no linear layer query; it has down_proj, gate_proj, "):
        make_model(folders["qwen3"], adapters=Adapters(rank=2, alpha=2.0, targets=("q_proj", "query")))


def _of_layout(replicas: Replicas, *, folder: Path) -> dict[str, torch.Tensor]:
    """Merged weights and adapters after two steps of a method that also reads a pass without gradient, which is computed another way."""
    model = make_model(folder, adapters=ADAPTERS, replicas=replicas)
    step, _ = make_step(model, replicas=replicas, learning_rate=1e-2, method="m2po", overrides={"masks": {"name": "m2po", "tau": 0.5}})
    rows = [_samples()[:3], _samples()[3:]]
    for number in range(2):
        for index in range(replicas.number, len(rows), replicas.layout.replicas):
            step.add(make_batch(rows[index], step=number))
        step.train_held(make_seal(_samples(), step=number))
        step.finish(make_seal(_samples(), step=number))
    return {name: tensor.clone() for name, tensor in (model.tensors() | model.adapter_state()).items()}


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time")
def test_adapters_on_two_ranks_train_what_they_train_on_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """Cut matrices: the adapters of q_proj and v_proj by what comes out of them, those of o_proj by what goes in."""
    job = functools.partial(_of_layout, folder=folders["qwen3_moe"])
    expected = job(Replicas(ranks=1, deadline_s=60))
    kinds: list[dict[str, Any]] = [{kind: 2} for kind in ("shard", "context", "expert", "tensor", "pipeline")]
    layouts = [Layout(ranks=2), *(Layout(ranks=2, **kind) for kind in kinds)]
    for layout, ranks in zip(layouts, run_jobs([(layout, job) for layout in layouts], tmp_path), strict=True):
        for weights in ranks:
            assert weights.keys() == expected.keys()
            for name, weight in weights.items():
                assert torch.allclose(weight, expected[name], atol=1e-4), (layout, name)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllms_own_reader_takes_the_adapter_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    model = _trained(folders["qwen3"])
    save_adapter(model, tmp_path / "adapter", adapters=ADAPTERS, source=folders["qwen3"])
    helper = PEFTHelper.from_local_dir(str(tmp_path / "adapter"), max_position_embeddings=256)
    read = LoRAModel.from_local_checkpoint(
        str(tmp_path / "adapter"), expected_lora_modules=set(ADAPTERS.targets), peft_helper=helper, device="cpu", dtype=torch.float32
    )
    merged, base = model.tensors(), make_model(folders["qwen3"]).tensors()
    assert len(read.loras) == 6
    for name, layer in read.loras.items():
        assert isinstance(layer.lora_a, torch.Tensor)
        assert isinstance(layer.lora_b, torch.Tensor)
        change = layer.lora_b @ layer.lora_a * helper.vllm_lora_scaling_factor
        assert torch.allclose(base[f"{name}.weight"] + change, merged[f"{name}.weight"], atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_the_targets_that_the_table_of_families_names_are_there(tmp_path: Path, family: Family) -> None:
    """Fused matrices among them; merged, an adapter moves the weight that the folder has under that name."""
    folder = families.make_folder(tmp_path, model_type=family.model_type)
    targets = tuple(family.lora.split(", "))
    model = make_model(folder, adapters=Adapters(rank=2, alpha=2.0, targets=targets))
    before = model.tensors()
    with torch.no_grad():
        for name, parameter in model.named_parameters().items():
            parameter.add_(name.endswith("lora_B"))
    moved = {name for name, tensor in model.tensors().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.removesuffix(".weight").rpartition(".")[2] in targets and ".experts." not in name}

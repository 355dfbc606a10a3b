"""A teacher's whole distributions, in the trainer: the gradient of the definition, in every layout that is not refused."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.layout import Layout
from pipelinerl.errors import ConfigError
from tests.trainer.conductor import make_config
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import VOCABULARY, make_batch, make_folder, make_model, make_sample, make_seal, make_step
from trainer.build import build_policy, build_step
from trainer.parallel.replicas import Replicas

TEMPERATURE = 0.8
Samples = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of another family and another width, with the same words."""
    return make_folder(tmp_path_factory.mktemp("teacher"), family="llama", seed=7, hidden_size=64)


def _samples() -> Samples:
    generator = np.random.default_rng(4)
    return [make_sample(generator, prompt=int(generator.integers(1, 5)), completion=int(generator.integers(1, 8))) for _ in range(9)]


def _by_definition(folder: Path, teacher: Path, samples: Samples, *, mix: float) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed divergence and its gradient, by Hugging Face's own models and softmaxes over the whole vocabulary."""
    student, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, teacher))
    total = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(sample["token_ids"].astype(np.int64))[None]
        predicts = torch.from_numpy(np.flatnonzero(sample["loss_mask"]) - 1)
        p, q = ((model(ids).logits[0, predicts] / TEMPERATURE).softmax(-1) for model in (student, other))
        q = q.detach()
        m = mix * q + (1 - mix) * p
        if mix in (0.0, 1.0):
            values = p * (p / q).log() if mix else q * (q / p).log()
        else:
            values = mix * q * (q / m).log() + (1 - mix) * p * (p / m).log()
        total = total + values.sum()
    total.backward()
    return float(total.detach()), {name: weight.grad for name, weight in student.named_parameters() if weight.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("split", [[9], [1, 8], [3, 0, 6]])
def test_a_step_has_the_gradient_of_the_definition(folders: dict[str, Path], teacher: Path, mix: float, split: list[int]) -> None:
    samples = _samples()
    total, expected = _by_definition(folders["qwen3"], teacher, samples, mix=mix)
    model = make_model(folders["qwen3"], temperature=TEMPERATURE, divergence_mix=mix)
    reference = make_model(teacher, temperature=TEMPERATURE, is_frozen=True)
    step, _ = make_step(model, method="gkd", overrides={"objective": {"mix": mix}}, reference=reference)
    for index, chosen in enumerate(np.split(np.arange(9), np.cumsum(split)[:-1])):
        step.add(make_batch([samples[number] for number in chosen], index=index))
    for name, parameter in model.named_parameters().items():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected[name], atol=2e-5), name
    numbers = step.finish(make_seal(samples))
    num_tokens = sum(int(sample["loss_mask"].sum()) for sample in samples)
    assert numbers["divergence"] == pytest.approx(total / num_tokens, rel=1e-5)
    assert numbers["loss_objective"] == pytest.approx(total / num_tokens, rel=1e-5)
    assert numbers["reference_kl_k3"] > 0, "the sampled tokens are measured, too"


def test_a_whole_kl_beside_a_reward_adds_its_gradient(folders: dict[str, Path], teacher: Path) -> None:
    """Advantages of 0 leave the penalty alone; held rows keep their teacher's states for a second epoch."""
    samples = _samples()
    for sample in samples:
        sample["advantages"][:] = 0
    total, expected = _by_definition(folders["qwen3"], teacher, samples, mix=1.0)
    overrides = {"kl": {"name": "full", "beta": 0.25, "target": 0.01, "horizon": 50}}
    for epochs in (1, 2):
        model = make_model(folders["qwen3"], temperature=TEMPERATURE, divergence_mix=1.0)
        reference = make_model(teacher, temperature=TEMPERATURE, is_frozen=True)
        step, optimizer = make_step(model, overrides=overrides, reference=reference, epochs=epochs, learning_rate=1e-9)
        step.add(make_batch(samples))
        step.train_held(make_seal(samples))
        flat = torch.cat([(0.25 * expected[name]).flatten() for name in model.named_parameters()])
        assert float((optimizer.gradient - flat).norm() / flat.norm()) < 1e-4
        numbers = step.finish(make_seal(samples))
        num_tokens = sum(int(sample["loss_mask"].sum()) for sample in samples)
        assert numbers["loss_kl"] == pytest.approx(0.25 * total / num_tokens, rel=1e-4)
        assert step._controllers.in_force()["kl_coef"] == pytest.approx(0.25 * (1 + 0.2 * 9 / 50)), "its coefficient can follow it"


def test_a_teacher_is_approached_without_any_reward(folders: dict[str, Path], teacher: Path) -> None:
    samples = _samples()
    model = make_model(folders["qwen3"], divergence_mix=0.5)
    step, _ = make_step(model, method="gkd", overrides={}, reference=make_model(teacher, is_frozen=True), learning_rate=3e-3)
    told = []
    for number in range(8):
        step.add(make_batch(samples, step=number))
        told.append(step.finish(make_seal(samples, step=number))["divergence"])
    assert told[-1] < 0.6 * told[0]


LAYOUTS = {
    "2 copies": Layout(ranks=2),
    "shard 2": Layout(ranks=2, shard=2),
    "tensor 2": Layout(ranks=2, tensor=2),
    "context 2": Layout(ranks=2, context=2),
}
WIDER = {
    "shard 2, tensor 2": Layout(ranks=4, shard=2, tensor=2),
    "context 2, tensor 2": Layout(ranks=4, context=2, tensor=2),
}


def _train(replicas: Replicas, *, folder: Path, teacher: Path) -> dict[str, Any]:
    samples = _samples()
    rows = [samples[:3], samples[3:4], samples[4:]]
    model = make_model(folder, temperature=TEMPERATURE, replicas=replicas, divergence_mix=0.3)
    reference = make_model(teacher, temperature=TEMPERATURE, replicas=replicas, is_frozen=True)
    step, _ = make_step(model, replicas=replicas, method="gkd", overrides={"objective": {"mix": 0.3}}, reference=reference)
    numbers: dict[str, float] = {}
    for number in range(2):
        for round_index in range(-(-len(rows) // replicas.layout.replicas)):
            index = round_index * replicas.layout.replicas + replicas.number
            step.add(make_batch(rows[index] if index < len(rows) else [], step=number, index=round_index))
        numbers = step.finish(make_seal(samples, step=number, num_micro_batches=len(rows)))
    chosen = ("divergence", "grad_norm", "loss", "reference_kl_k1")
    return {"numbers": {name: numbers[name] for name in chosen}, "weights": {name: one.clone() for name, one in model.tensors().items()}}


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time")
@pytest.mark.parametrize("layouts", [LAYOUTS, WIDER], ids=["two ranks", "four ranks"])
def test_every_layout_trains_what_one_rank_trains(
    folders: dict[str, Path], teacher: Path, tmp_path: Path, layouts: dict[str, Layout]
) -> None:
    job = functools.partial(_train, folder=folders["qwen3"], teacher=teacher)
    expected = job(Replicas(ranks=1, deadline_s=60))
    found = run_jobs([(layout, job) for layout in layouts.values()], tmp_path)
    for name, ranks in zip(layouts, found, strict=True):
        for rank in ranks:
            assert rank["numbers"] == pytest.approx(expected["numbers"], rel=1e-3), name
            for weight, wanted in expected["weights"].items():
                assert torch.allclose(rank["weights"][weight], wanted, atol=1e-4), (name, weight)


def _config(folder: Path, teacher: Path, **sections: dict[str, Any]) -> Config:
    chosen = {"algorithm": {"name": "gkd"}, "reference": {"path": str(teacher)}} | sections
    return Config.model_validate(make_config(folder).model_dump() | chosen)


def _build(config: Config) -> Any:
    replicas = Replicas(ranks=1, deadline_s=60)
    return build_step(config, policy=build_policy(config, replicas=replicas), critic=None, replicas=replicas, first_step=0)


@pytest.mark.parametrize("sections", [{}, {"reference": {"offload": True}}, {"lora": {"rank": 4}}], ids=["plain", "offloaded", "adapters"])
def test_a_run_computes_the_divergence_that_its_config_names(folders: dict[str, Path], teacher: Path, sections: dict[str, Any]) -> None:
    """Adapters' own base is its teacher where both are one folder: nothing has moved yet, so they are 0 apart."""
    path = folders["qwen3"] if "lora" in sections else teacher
    merged = {name: ({"path": str(path)} if name == "reference" else {}) | values for name, values in sections.items()}
    step = _build(_config(folders["qwen3"], path, **merged))
    samples = _samples()
    step.agreement.max_logprob_gap = step.agreement.max_mismatch_kl = float("inf")
    step.add(make_batch(samples))
    numbers = step.finish(make_seal(samples))
    total, _ = _by_definition(folders["qwen3"], path, samples, mix=0.5)
    assert numbers["divergence"] == pytest.approx(total / make_seal(samples).num_tokens, rel=1e-4, abs=1e-6)
    assert (numbers["divergence"] > 0.01) == ("lora" not in sections)


def test_a_pipeline_is_refused_with_the_reason(folders: dict[str, Path], teacher: Path) -> None:
    config = _config(folders["qwen3"], teacher, trainer={"ranks": 2, "parallel": {"pipeline": 2}})
    with pytest.raises(ConfigError, match=r"objective gkd needs divergence, .*trainer\.parallel\.pipeline to 1"):
        method_of(config)


def test_a_teacher_of_another_number_of_words_is_refused(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokenizer with padding rows in the output embedding, as sizes of one family have."""
    padded = make_folder(tmp_path / "padded", family="llama", vocab_size=VOCABULARY + 3)
    monkeypatch.setattr("trainer.build._vocabulary", lambda folder: {"a": 0})
    with pytest.raises(ConfigError, match=r"has an output embedding of 64 words and model\.path .* one of 61"):
        _build(_config(folders["qwen3"], padded))


def test_one_divergence_at_a_time() -> None:
    tree = make_config(Path("m")).model_dump() | {"reference": {"path": "t"}}
    tree |= {"algorithm": {"name": "gkd", "overrides": {"kl": {"name": "full", "beta": 0.1}}}}
    with pytest.raises(ConfigError, match="objective gkd and kl full are both the divergence from one teacher"):
        method_of(Config.model_validate(tree))

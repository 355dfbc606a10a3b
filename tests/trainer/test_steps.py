"""Each step of a run may have a loss of its own, and between two steps the trainer's models say how likely rows are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.algorithms.methods import METHODS
from pipelinerl.algorithms.step_loss import SFT, method_of_loss
from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError
from pipelinerl.messages import ComputeLogprobs, Demonstration, LogprobModel, StepClosed
from tests.trainer.tiny import make_batch, make_folder, make_model, make_sample, make_seal, make_step, steps_of
from trainer.logprobs import compute_logprobs
from trainer.model.model import Model
from trainer.model.reference import Reference
from trainer.parallel.replicas import Replicas


def _samples(seed: int = 0) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [make_sample(generator, prompt=4, completion=int(generator.integers(2, 7))) for _ in range(4)]


def _weights(model: Model) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in model.tensors().values()])


@pytest.mark.parametrize("loss", ["gspo", "grpo_tis", "grpo_deepseekmath", "reinforce_pp"])
def test_a_step_of_another_loss_moves_the_weights_as_in_a_run_of_that_loss(folders: dict[str, Path], tmp_path: Path, loss: str) -> None:
    """Also after a step of the run's own loss, whose optimizer state it goes on with; two of these losses read a reference."""
    frozen = make_folder(tmp_path / "reference", family="llama", seed=7)
    found: list[torch.Tensor] = []
    for own in ("grpo", loss):
        model = make_model(folders["llama"])
        replicas = Replicas(ranks=1, deadline_s=60)
        reference = Reference(make_model(frozen, is_frozen=True), replicas=replicas)
        of_step = make_model(frozen, is_frozen=True) if own == "grpo_deepseekmath" else None
        step, _ = make_step(model, method=own, overrides={}, learning_rate=1e-2, reference=of_step)
        step.reference = reference if own in ("grpo_deepseekmath", "reinforce_pp") else None
        steps = steps_of(step, reference=reference)
        numbers: dict[str, float] = {}
        for number, name in enumerate(("grpo" if own != "grpo" else "", loss if own == "grpo" else "")):
            samples, sealed = _samples(number), make_seal(_samples(number), step=number)
            steps.of(name).add(make_batch(samples, step=number))
            sealed = StepClosed(step=number, num_micro_batches=1, num_tokens=sealed.num_tokens, num_samples=4, loss=name)
            steps.sealed(sealed).train_held(sealed)
            numbers = steps.sealed(sealed).finish(sealed)
        found.append(torch.cat([_weights(model), torch.tensor([numbers["loss"], numbers["grad_norm"]])]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_step_of_demonstrations_has_the_loss_and_the_gradient_of_transformers(folders: dict[str, Path]) -> None:
    generator = np.random.default_rng(3)
    demonstrations = tuple(Demonstration(token_ids=generator.integers(0, 61, 9 + n, dtype=np.int32), num_prompt=2 + n) for n in range(3))
    module = AutoModelForCausalLM.from_pretrained(folders["qwen3"])
    sums = []
    for one in demonstrations:
        tokens = torch.from_numpy(one.token_ids).long()
        labels = torch.where(torch.arange(len(tokens)) < one.num_prompt, -100, tokens)
        sums.append(module(input_ids=tokens[None], labels=labels[None]).loss * one.num_trained)
    num_tokens = sum(one.num_trained for one in demonstrations)
    expected = torch.stack(sums).sum() / num_tokens
    expected.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in module.parameters() if parameter.grad is not None]).norm()
    step, _ = make_step(make_model(folders["qwen3"]))
    sealed = StepClosed(step=0, num_micro_batches=0, num_tokens=num_tokens, num_samples=3, loss=SFT, demonstrations=demonstrations)
    supervised = steps_of(step).sealed(sealed)
    supervised.train_held(sealed)
    numbers = supervised.finish(sealed)
    assert numbers["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert numbers["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert numbers["sft_tokens"] == num_tokens == 21


def test_log_probabilities_are_those_of_transformers_at_the_temperature_of_rollouts(folders: dict[str, Path]) -> None:
    samples = _samples()
    replicas = Replicas(ranks=1, deadline_s=60)
    reference = Reference(make_model(folders["qwen2"], temperature=0.7, is_frozen=True), replicas=replicas)
    step, _ = make_step(make_model(folders["qwen3"], temperature=0.7))
    for model, family in ((LogprobModel.POLICY, "qwen3"), (LogprobModel.REFERENCE, "qwen2")):
        module = AutoModelForCausalLM.from_pretrained(folders[family])
        asked = ComputeLogprobs(request_id=5, model=model, rows=(make_batch(samples),))
        answer = compute_logprobs(asked, steps=steps_of(step, reference=reference))
        expected: list[torch.Tensor] = []
        for sample in samples:
            tokens = torch.from_numpy(sample["token_ids"]).long()
            with torch.no_grad():
                logprobs = (module(input_ids=tokens[None]).logits[0, :-1] / 0.7).log_softmax(-1)
            every = logprobs.gather(-1, tokens[1:, None])[:, 0]
            expected.append(every[torch.from_numpy(sample["loss_mask"])[1:]])
        np.testing.assert_allclose(answer.logprobs, torch.cat(expected).numpy(), atol=2e-5)
        assert answer.request_id == 5


def test_a_loss_is_the_runs_own_with_its_overrides_or_a_row_of_the_table_without() -> None:
    tree = {
        "model": {"path": "unused"},
        "data": {"source": "unused"},
        "reward": [{"function": "unused:reward"}],
        "rollout": {"group_size": 4, "max_tokens": 16},
        "algorithm": {"name": "grpo", "overrides": {"objective": {"clip_high": 0.28}}},
    }
    config = parse(tree, origin="test")
    assert method_of_loss(config, "").objective.options["clip_high"] == 0.28
    assert method_of_loss(config, "grpo") == method_of_loss(config, "")
    assert method_of_loss(config, "gspo") == METHODS["gspo"]
    for name, words in (("ppo", "needs critic"), ("prime", "needs "), ("otb", "needs square_sum"), ("opd", "reference.path")):
        with pytest.raises(ConfigError, match=words):
            method_of_loss(config, name)

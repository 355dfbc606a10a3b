"""One optimizer step: what is summed, what it is divided by, and what ends the run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.algorithms.loss import TokenColumns, policy_loss
from pipelinerl.algorithms.methods import resolve
from pipelinerl.errors import MismatchError, PipelineError
from pipelinerl.messages import StepSealed
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step, packed_logprobs
from trainer.optimizer import Optimizer, Schedule
from trainer.row import arrange

Samples = list[dict[str, np.ndarray]]


def _samples(count: int = 12) -> Samples:
    generator = np.random.default_rng(0)
    return [make_sample(generator, prompt=int(generator.integers(1, 9)), completion=int(generator.integers(1, 12))) for _ in range(count)]


def _gradient(folder: Path, rows: list[Samples]) -> torch.Tensor:
    step, optimizer = make_step(make_model(folder))
    for index, samples in enumerate(rows):
        step.add(make_batch(samples, index=index))
    return optimizer.gradient.clone()


def _trained_weights(folder: Path, rows: list[Samples], seal: StepSealed) -> tuple[dict[str, float], torch.Tensor]:
    model = make_model(folder)
    step, _ = make_step(model)
    for index, samples in enumerate(rows):
        step.add(make_batch(samples, index=index))
    metrics = step.finish(seal)
    return metrics, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_gradient_does_not_depend_on_the_split_into_rows(folders: dict[str, Path]) -> None:
    samples = _samples()
    whole = _gradient(folders["qwen3"], [samples])
    for rows in ([samples[:1], samples[1:]], [[sample] for sample in samples], [samples[6:], [], samples[:6]]):
        assert float((_gradient(folders["qwen3"], rows) - whole).norm() / whole.norm()) < 1e-6


def test_a_zero_loss_row_changes_nothing(folders: dict[str, Path]) -> None:
    samples = _samples()
    metrics, weights = _trained_weights(folders["qwen3"], [samples], make_seal(samples))
    with_gap, weights_with_gap = _trained_weights(folders["qwen3"], [[], samples, []], make_seal(samples, num_micro_batches=3))
    assert torch.equal(weights, weights_with_gap)
    assert {name: value for name, value in metrics.items() if with_gap[name] != value} == {"num_micro_batches": 1.0}


def test_gradient_is_divided_by_the_sealed_count_of_tokens(folders: dict[str, Path]) -> None:
    """Against autograd on the mean over all tokens of the step, which some other replica may hold."""
    samples = _samples()
    reference = make_model(folders["llama"])
    columns = make_batch(samples)
    logprobs = packed_logprobs(reference, samples)
    trained = {name: torch.from_numpy(getattr(columns, name)[columns.trains]) for name in ("logprobs", "advantages")}
    ratio = (logprobs - trained["logprobs"]).exp()
    loss = -torch.minimum(ratio * trained["advantages"], ratio.clamp(0.8, 1.2) * trained["advantages"]).sum() / 1000
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in reference.parameters() if parameter.grad is not None])

    step, optimizer = make_step(make_model(folders["llama"]))
    step.add(columns)
    gradient = optimizer.gradient / 1000
    metrics = step.finish(StepSealed(step=0, num_micro_batches=1, num_tokens=1000, num_samples=24))
    assert float((gradient - expected).norm() / expected.norm()) < 1e-6
    assert metrics["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["num_trained_tokens"] == 1000


def test_sequence_means_are_divided_by_the_sealed_count_of_samples(folders: dict[str, Path]) -> None:
    samples = _samples(4)
    model = make_model(folders["llama"])
    step, _ = make_step(model, method="gspo", overrides={})
    batch = make_batch(samples)
    columns = TokenColumns(
        logprobs=packed_logprobs(make_model(folders["llama"]), samples).detach(),
        behaviour_logprobs=torch.from_numpy(batch.logprobs[batch.trains]),
        advantages=torch.from_numpy(batch.advantages[batch.trains]),
        trains=torch.ones(int(batch.trains.sum()), dtype=torch.bool),
        versions=torch.from_numpy(batch.versions[batch.trains]),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(4), [int(sample["trains"].sum()) for sample in samples])),
        trained_version=0,
    )
    raw = float(policy_loss(columns, method=resolve("gspo", {}, group_size=8)).loss)
    step.add(batch)
    metrics = step.finish(StepSealed(step=0, num_micro_batches=1, num_tokens=1000, num_samples=5))
    assert metrics["loss"] == pytest.approx(raw / 5, rel=1e-5)


def test_an_entropy_bonus_has_a_gradient(folders: dict[str, Path]) -> None:
    """Advantages of 0 leave the bonus alone: against autograd on minus 0.01 times the summed entropy."""
    samples = _samples()
    for sample in samples:
        sample["advantages"][:] = 0
    step, optimizer = make_step(make_model(folders["llama"]), overrides={"auxiliary": {"name": "entropy_bonus", "coef": 0.01}})
    batch = make_batch(samples)
    step.add(batch)
    reference = make_model(folders["llama"])
    row = arrange(batch.token_ids, trains=batch.trains, lengths=batch.lengths, names=batch.rollout_ids)
    assert row is not None
    (-0.01 * reference.logprobs(row)[1].sum()).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in reference.parameters() if parameter.grad is not None])
    assert float(expected.norm()) > 0
    assert float((optimizer.gradient - expected).norm() / expected.norm()) < 1e-6


def test_a_recomputed_policy_is_the_one_being_trained(folders: dict[str, Path]) -> None:
    samples = _samples()
    step, _ = make_step(make_model(folders["llama"]), method="decoupled_ppo", overrides={})
    step.add(make_batch(samples))
    assert step.finish(make_seal(samples))["ratio_mean"] == 1.0


def test_metrics_are_those_of_the_step_alone(folders: dict[str, Path]) -> None:
    samples = _samples()
    for sample in samples:
        sample["versions"] = np.where(sample["trains"], 1, -1).astype(np.int32)
    samples[0]["versions"] = np.where(samples[0]["trains"], 0, -1).astype(np.int32)
    step, _ = make_step(make_model(folders["qwen2"]), learning_rate=1e-9)
    step.add(make_batch(_samples(3)))
    step.finish(make_seal(_samples(3)))
    step.add(make_batch(samples, step=2))
    metrics = step.finish(make_seal(samples, step=2))
    old = int(samples[0]["trains"].sum())
    total = sum(int(sample["trains"].sum()) for sample in samples)
    assert metrics["staleness_max"] == 2
    assert metrics["staleness_mean"] == pytest.approx(1 + old / total)
    assert metrics["num_tokens"] == sum(len(sample["token_ids"]) for sample in samples)
    assert metrics["num_micro_batches"] == 1
    assert {"loss", "grad_norm", "learning_rate", "entropy", "clip_fraction", "ess", "kl", "ratio_mean"} <= metrics.keys()


def _agreeing(folder: Path, *, error: float) -> Samples:
    """Samples with the trainer's own log-probabilities, one of them wrong by `error`."""
    samples = _samples()
    with torch.no_grad():
        logprobs = packed_logprobs(make_model(folder), samples).numpy()
    for sample in samples:
        count = int(sample["trains"].sum())
        sample["logprobs"][sample["trains"]] = logprobs[:count]
        logprobs = logprobs[count:]
    samples[5]["logprobs"][-1] += error
    return samples


def test_a_wrong_engine_logprob_ends_the_first_step(folders: dict[str, Path]) -> None:
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4)
    with pytest.raises(MismatchError) as caught:
        step.add(make_batch(_agreeing(folders["qwen3"], error=3e-4)))
    message = str(caught.value)
    samples = _samples()
    assert f"rollout rollout-5, token {len(samples[5]['token_ids']) - 1} " in message
    assert "at most 0.0001, got 0.0003" in message
    assert "Likely causes" in message


def test_agreeing_logprobs_pass_and_the_gap_is_reported(folders: dict[str, Path]) -> None:
    samples = _agreeing(folders["qwen3"], error=5e-5)
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4)
    step.add(make_batch(samples))
    metrics = step.finish(make_seal(samples))
    assert metrics["logprob_gap_max"] == pytest.approx(5e-5, rel=0.2)
    assert metrics["logprob_gap_mean"] < 1e-6 + 5e-5 / 12


def test_a_gap_of_a_token_sampled_by_an_older_version_is_no_mismatch(folders: dict[str, Path]) -> None:
    samples = _agreeing(folders["qwen3"], error=1.0)
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4)
    samples[5]["versions"][-1] = -1
    step.add(make_batch(samples))


def test_a_logprob_that_is_no_number_is_a_mismatch(folders: dict[str, Path]) -> None:
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4)
    with pytest.raises(MismatchError):
        step.add(make_batch(_agreeing(folders["qwen3"], error=float("nan"))))


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(folders: dict[str, Path]) -> None:
    samples = _samples()
    model = make_model(folders["qwen3"])
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    step, optimizer = make_step(model)
    step.add(make_batch(samples))
    optimizer.gradient[3] = float("inf")
    with pytest.raises(PipelineError, match="step 0: the gradient's norm is inf"):
        step.finish(make_seal(samples))
    assert torch.equal(before, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


def test_a_dropped_step_leaves_no_trace(folders: dict[str, Path]) -> None:
    samples = _samples()
    _, expected = _trained_weights(folders["qwen3"], [samples], make_seal(samples))
    model = make_model(folders["qwen3"])
    step, _ = make_step(model)
    step.add(make_batch(_samples(5)))
    step.drop()
    step.add(make_batch(samples))
    assert step.finish(make_seal(samples))["num_tokens"] == sum(len(sample["token_ids"]) for sample in samples)
    assert torch.equal(expected, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


def test_gradients_of_many_bfloat16_rows_add_up_in_float32() -> None:
    """In bfloat16 a sum stops growing once it is 256 times an addend."""
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = Optimizer(
        [parameter], schedule=Schedule(learning_rate=1.0, num_steps=1), betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0
    )
    for _ in range(1000):
        parameter.sum().backward()
    assert optimizer.gradient.tolist() == [1000.0, 1000.0]


def test_updates_smaller_than_bfloat16_are_not_lost(folders: dict[str, Path]) -> None:
    """Updates of 1e-5 on weights of 0.2 vanish one by one in bfloat16, whose neighbours there are 1e-3 apart."""
    samples = _samples()
    model = make_model(folders["llama"], dtype="bfloat16")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step, _ = make_step(model, learning_rate=1e-5)
    for number in range(9):
        step.add(make_batch(samples, step=number))
        step.finish(make_seal(samples, step=number))
    moved = sum(int((old != new).sum()) for old, new in zip(before, model.parameters(), strict=True))
    assert moved > 0.02 * sum(old.numel() for old in before)


def test_schedule_warms_up_and_decays_to_its_last_step() -> None:
    schedule = Schedule(learning_rate=1.0, num_steps=11, warmup_steps=4, final_fraction=0.1)
    assert [round(schedule.at(step), 4) for step in (0, 1, 3, 5, 10)] == [0.25, 0.455, 0.73, 0.55, 0.1]


def test_clipping_bounds_the_norm_and_keeps_the_direction() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    schedule = Schedule(learning_rate=1.0, num_steps=1)
    optimizer = Optimizer([parameter], schedule=schedule, betas=(0.0, 0.0), weight_decay=0.0, max_grad_norm=1.0)
    (parameter * torch.tensor([[30.0, 0.0], [0.0, 40.0]])).sum().backward()
    scaled: list[torch.Tensor] = []
    optimizer._adamw.register_step_pre_hook(lambda *_: scaled.append(optimizer.gradient.clone()))
    update = optimizer.step(0, denominator=10.0)
    assert update.grad_norm == pytest.approx(5.0)
    assert scaled[0].tolist() == pytest.approx([0.6, 0.0, 0.0, 0.8])
    assert not optimizer.gradient.any()

"""One optimizer step: what is summed, what it is divided by, and what ends the run."""

# pyright: reportPossiblyUnboundVariable=false

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.algorithms.loss import TokenColumns, measure_step, policy_loss
from pipelinerl.algorithms.method import ALWAYS_OFFERED, TRAINER_OFFERS
from pipelinerl.algorithms.methods import resolve
from pipelinerl.errors import MismatchError, PipelineError
from pipelinerl.messages import MicroBatch, StepClosed
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step, packed_logprobs
from trainer.optimizer import Optimizer, Schedule
from trainer.rows.arrange import arrange

Samples = list[dict[str, np.ndarray]]


def _samples(count: int = 12) -> Samples:
    generator = np.random.default_rng(0)
    return [make_sample(generator, prompt=int(generator.integers(1, 9)), completion=int(generator.integers(1, 12))) for _ in range(count)]


def _gradient(folder: Path, rows: list[Samples]) -> torch.Tensor:
    step, optimizer = make_step(make_model(folder))
    for index, samples in enumerate(rows):
        step.add(make_batch(samples, index=index))
    return optimizer.gradient.clone()


def _trained_weights(folder: Path, rows: list[Samples], seal: StepClosed) -> tuple[dict[str, float], torch.Tensor]:
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
    trained = {name: torch.from_numpy(getattr(columns, name)[columns.loss_mask]) for name in ("logprobs", "advantages")}
    ratio = (logprobs - trained["logprobs"]).exp()
    loss = -torch.minimum(ratio * trained["advantages"], ratio.clamp(0.8, 1.2) * trained["advantages"]).sum() / 1000
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in reference.parameters() if parameter.grad is not None])

    step, optimizer = make_step(make_model(folders["llama"]))
    step.add(columns)
    gradient = optimizer.gradient / 1000
    metrics = step.finish(StepClosed(step=0, num_micro_batches=1, num_tokens=1000, num_samples=24))
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
        behaviour_logprobs=torch.from_numpy(batch.logprobs[batch.loss_mask]),
        advantages=torch.from_numpy(batch.advantages[batch.loss_mask]),
        loss_mask=torch.ones(int(batch.loss_mask.sum()), dtype=torch.bool),
        versions=torch.from_numpy(batch.versions[batch.loss_mask]),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(4), [int(sample["loss_mask"].sum()) for sample in samples])),
        trained_version=0,
    )
    raw = float(policy_loss(columns, method=resolve("gspo", {}, group_size=8)).loss)
    step.add(batch)
    metrics = step.finish(StepClosed(step=0, num_micro_batches=1, num_tokens=1000, num_samples=5))
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
    row = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids)
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


WHOLE_STEP: dict[str, dict[str, Any]] = {
    "m2po": {"masks": {"name": "m2po", "tau": 0.5}},
    "kl_cov": {"objective": {"fraction": 0.2, "beta": 3.0}},
    "clip_cov": {"objective": {"fraction": 0.3, "low": 0.0, "high": 100.0}},
    "grpo": {"auxiliary": {"name": "positive_nll", "coef": 2.0}},
    "grpo_tis": {"weight": {"cap": 30.0, "batch_normalize": True}},
}
"""Methods that compare all tokens of a step, with options that make the comparison matter for a few samples."""


def _gradient_of(folder: Path, rows: list[Samples], name: str) -> torch.Tensor:
    step, optimizer = make_step(make_model(folder), method=name, overrides=WHOLE_STEP[name])
    for index, samples in enumerate(rows):
        step.add(make_batch(samples, index=index))
        assert not optimizer.gradient.any(), "nothing is trained before the step is whole"
    step.train_held(make_seal(samples))
    return optimizer.gradient.clone()


@pytest.mark.parametrize("name", WHOLE_STEP)
def test_a_method_over_the_whole_step_equals_its_formula_over_one_row_however_the_step_is_packed(
    folders: dict[str, Path], name: str
) -> None:
    samples = _samples()
    reference = make_model(folders["qwen3"])
    batch = make_batch(samples)
    logprobs = packed_logprobs(reference, samples)
    columns = TokenColumns(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        behaviour_logprobs=torch.from_numpy(batch.logprobs[batch.loss_mask]),
        advantages=torch.from_numpy(batch.advantages[batch.loss_mask]),
        loss_mask=torch.ones(int(batch.loss_mask.sum()), dtype=torch.bool),
        versions=torch.from_numpy(batch.versions[batch.loss_mask]),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(12), [int(sample["loss_mask"].sum()) for sample in samples])),
        trained_version=0,
        correct=torch.tensor([bool(sample["reward"] >= 1.0) for sample in samples]),
    )
    method = resolve(name, WHOLE_STEP[name], group_size=8, offers=ALWAYS_OFFERED | TRAINER_OFFERS)
    statistics = measure_step([columns], method=method, reduce=lambda tensor: tensor)
    policy_loss(columns, method=method, statistics=statistics).loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in reference.parameters() if parameter.grad is not None])
    plain = _gradient(folders["qwen3"], [samples])
    assert float((plain - expected).norm() / expected.norm()) > 0.01, "without the rule it would be another gradient"
    for rows in ([samples], [samples[:1], samples[1:]], [samples[6:], [], samples[:6]], [[sample] for sample in samples]):
        assert float((_gradient_of(folders["qwen3"], rows, name) - expected).norm() / expected.norm()) < 1e-5


def test_a_step_held_for_its_measure_cannot_be_finished_without_it(folders: dict[str, Path]) -> None:
    samples = _samples()
    step, _ = make_step(make_model(folders["qwen3"]), method="m2po", overrides={})
    step.add(make_batch(samples))
    with pytest.raises(AssertionError, match="train_held comes before finish"):
        step.finish(make_seal(samples))
    step.drop()
    step.add(make_batch(samples))
    step.train_held(make_seal(samples))
    assert "m2po_dropped_fraction" in step.finish(make_seal(samples))


def test_truncated_sequences_are_dropped_and_still_counted(folders: dict[str, Path]) -> None:
    samples = _samples()
    assert {bool(sample["truncated"]) for sample in samples} == {True, False}
    step, optimizer = make_step(make_model(folders["qwen3"]), overrides={"proximal": "engine", "weight": "none", "masks": "overlong"})
    step.add(make_batch(samples))
    whole = [sample for sample in samples if not sample["truncated"]]
    expected = _gradient(folders["qwen3"], [whole])
    assert float((optimizer.gradient - expected).norm() / expected.norm()) < 1e-5
    dropped = sum(int(sample["loss_mask"].sum()) for sample in samples if sample["truncated"])
    metrics = step.finish(make_seal(samples))
    assert metrics["overlong_dropped_fraction"] == pytest.approx(dropped / make_seal(samples).num_tokens)


def test_metrics_are_those_of_the_step_alone(folders: dict[str, Path]) -> None:
    samples = _samples()
    for sample in samples:
        sample["versions"] = np.where(sample["loss_mask"], 1, -1).astype(np.int32)
    samples[0]["versions"] = np.where(samples[0]["loss_mask"], 0, -1).astype(np.int32)
    step, _ = make_step(make_model(folders["qwen2"]), learning_rate=1e-9)
    step.add(make_batch(_samples(3)))
    step.finish(make_seal(_samples(3)))
    step.add(make_batch(samples, step=2))
    metrics = step.finish(make_seal(samples, step=2))
    old = int(samples[0]["loss_mask"].sum())
    total = sum(int(sample["loss_mask"].sum()) for sample in samples)
    assert metrics["staleness_max"] == 2
    assert metrics["staleness_mean"] == pytest.approx(1 + old / total)
    assert metrics["num_tokens"] == sum(len(sample["token_ids"]) for sample in samples)
    assert metrics["num_micro_batches"] == 1
    assert {
        "loss",
        "grad_norm",
        "learning_rate",
        "entropy",
        "clip_fraction",
        "ess_fraction",
        "mismatch_kl_k3",
        "ratio_mean",
    } <= metrics.keys()


def _agreeing(folder: Path, *, error: float) -> Samples:
    """Samples with the trainer's own log-probabilities, one of them wrong by `error`."""
    samples = _samples()
    with torch.no_grad():
        logprobs = packed_logprobs(make_model(folder), samples).numpy()
    for sample in samples:
        count = int(sample["loss_mask"].sum())
        sample["logprobs"][sample["loss_mask"]] = logprobs[:count]
        logprobs = logprobs[count:]
    samples[5]["logprobs"][-1] += error
    return samples


def test_wrong_engine_logprobs_end_the_first_step_before_its_update(folders: dict[str, Path]) -> None:
    """One token of 80 off by 0.1: in the mean 0.00125."""
    model = make_model(folders["qwen3"])
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    step, _ = make_step(model, max_logprob_gap=1e-4)
    samples = _agreeing(folders["qwen3"], error=0.1)
    total = make_seal(samples).num_tokens
    step.add(make_batch(samples))
    with pytest.raises(MismatchError) as caught:
        step.finish(make_seal(samples))
    message = str(caught.value)
    assert (
        f"step 0: mean of |engine - trainer| log-probability over sequences that version 0 sampled whole: got {0.1 / total:.3g}" in message
    )
    assert "expected at most 0.0001" in message
    assert f"rollout rollout-5, token {len(samples[5]['token_ids']) - 1} " in message
    assert "Likely causes" in message
    assert torch.equal(before, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


def test_no_single_token_ends_a_run(folders: dict[str, Path]) -> None:
    """Fifty times the limit, at one token: its mean is under it. Rounding chooses such tokens in every long step."""
    samples = _agreeing(folders["qwen3"], error=5e-3)
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4)
    step.add(make_batch(samples))
    metrics = step.finish(make_seal(samples))
    assert metrics["logprob_gap_max"] == pytest.approx(5e-3, rel=0.01)
    assert "logprob_gap_p99" not in metrics, "of so few tokens it would be the largest"


@pytest.mark.parametrize(("num_wrong", "ends"), [(1, False), (4, True)])
def test_one_wrong_token_in_fifty_ends_the_first_step(folders: dict[str, Path], num_wrong: int, ends: bool) -> None:
    """Of 200 tokens some are off by 2e-3: the mean is under 1e-4, the 0.99 quantile over ten times that where they are four."""
    sample = make_sample(np.random.default_rng(1), prompt=3, completion=200)
    with torch.no_grad():
        sample["logprobs"][sample["loss_mask"]] = packed_logprobs(make_model(folders["qwen3"]), [sample]).numpy()
    sample["logprobs"][20 : 20 + num_wrong] -= 2e-3
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4)
    step.add(make_batch([sample]))
    if ends:
        with pytest.raises(MismatchError, match=r"0\.99 quantile of .* got 0\.00\d+, expected at most 0\.001"):
            step.finish(make_seal([sample]))
    else:
        assert step.finish(make_seal([sample]))["logprob_gap_p99"] < 1e-3


def test_the_0999_quantile_of_the_gap_is_that_of_all_rows_of_a_step(folders: dict[str, Path]) -> None:
    """Two rows of 600 tokens, of which one or two of each are off: 2 of 1,200 are within a thousandth too many."""
    rows = [make_sample(np.random.default_rng(seed), prompt=3, completion=600) for seed in (1, 2)]
    for row in rows:
        with torch.no_grad():
            row["logprobs"][row["loss_mask"]] = packed_logprobs(make_model(folders["qwen3"]), [row]).numpy()
        row["logprobs"][100] -= 2e-2
    step, _ = make_step(make_model(folders["qwen3"]))
    for row in rows:
        step.add(make_batch([row]))
    assert step.finish(make_seal(rows))["logprob_gap_p999"] == pytest.approx(2e-2, rel=1 / 32)
    step.add(make_batch(rows[:1]))
    assert "logprob_gap_p999" not in step.finish(make_seal(rows[:1])), "600 tokens are too few"


def test_a_gap_of_a_token_sampled_by_an_older_version_is_no_mismatch(folders: dict[str, Path]) -> None:
    samples = _agreeing(folders["qwen3"], error=1.0)
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4)
    samples[5]["versions"][-1] = -1
    step.add(make_batch(samples))
    step.finish(make_seal(samples))


def test_a_token_of_the_trained_version_whose_sequence_lived_through_a_swap_is_no_mismatch(folders: dict[str, Path]) -> None:
    """The first step after a resume holds such tokens; their engine had keys and values of older weights."""
    samples = _agreeing(folders["qwen3"], error=1.0)
    for sample in samples:
        sample["versions"][sample["loss_mask"]] = 6
    samples[5]["versions"][-1] = 7
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4, first_step=7)
    step.add(make_batch(samples, step=7))
    step.finish(make_seal(samples, step=7))
    samples[5]["versions"][samples[5]["loss_mask"]] = 7
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4, first_step=7)
    step.add(make_batch(samples, step=7))
    with pytest.raises(MismatchError, match="sequences that version 7 sampled whole"):
        step.finish(make_seal(samples, step=7))


def test_a_logprob_that_is_no_number_is_a_mismatch(folders: dict[str, Path]) -> None:
    step, _ = make_step(make_model(folders["qwen3"]), max_logprob_gap=1e-4)
    samples = _agreeing(folders["qwen3"], error=float("nan"))
    step.add(make_batch(samples))
    with pytest.raises(MismatchError, match="got nan"):
        step.finish(make_seal(samples))


def _later(samples: Samples, *, versions: tuple[int, int], step: int) -> MicroBatch:
    """The same samples in a later step: the first half of each sampled under one version, the rest under another."""
    for sample in samples:
        places = np.flatnonzero(sample["loss_mask"])
        sample["versions"][places[: (len(places) + 1) // 2]] = versions[0]
        sample["versions"][places[(len(places) + 1) // 2 :]] = versions[1]
    return make_batch(samples, step=step)


def test_a_mismatch_at_any_step_ends_the_run_before_its_update(folders: dict[str, Path]) -> None:
    model = make_model(folders["qwen3"])
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    step, _ = make_step(model, max_mismatch_kl=0.03)
    samples = _samples()  # the engine's log-probabilities are drawn at random
    step.add(_later(samples, versions=(7, 7), step=7))
    with pytest.raises(MismatchError, match=r"step 7: mean KL .* version 7 sampled whole: got .*, expected at most 0.03") as caught:
        step.finish(make_seal(samples, step=7))
    assert "Nothing was updated" in str(caught.value)
    assert torch.equal(before, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


def test_agreement_at_a_later_step_passes_and_its_kl_is_reported(folders: dict[str, Path]) -> None:
    samples = _agreeing(folders["qwen3"], error=0.1)
    step, _ = make_step(make_model(folders["qwen3"]), max_mismatch_kl=0.03)
    step.add(_later(samples, versions=(7, 7), step=7))
    found = step.finish(make_seal(samples, step=7))["mismatch_kl_on_policy"]
    total = make_seal(samples).num_tokens
    assert found == pytest.approx((np.exp(-0.1) - 1 + 0.1) / total, rel=0.01)


def test_sequences_that_lived_through_a_swap_trip_no_alarm(folders: dict[str, Path]) -> None:
    """Their last tokens carry the version being trained, and yet their probabilities rest on keys and values of an older one."""
    samples = [make_sample(np.random.default_rng(3), prompt=3, completion=8) for _ in range(4)]
    with torch.no_grad():
        ours = packed_logprobs(make_model(folders["qwen3"]), samples).numpy().reshape(4, 8)
    for sample, logprobs in zip(samples, ours, strict=True):
        sample["logprobs"][sample["loss_mask"]] = logprobs - 0.4
    step, _ = make_step(make_model(folders["qwen3"]), max_mismatch_kl=0.03, learning_rate=1e-9)
    step.add(_later(samples, versions=(6, 7), step=7))
    assert "mismatch_kl_on_policy" not in step.finish(make_seal(samples, step=7))
    step.add(_later(samples, versions=(8, 8), step=8))
    with pytest.raises(MismatchError, match=r"got 0\.0918"):  # e^0.4 - 1 - 0.4
        step.finish(make_seal(samples, step=8))


def _of_two_engines(folder: Path, *, forged: float) -> Samples:
    """Six samples of 20 tokens, as the trainer says; those of engine 1, the last two, are lower by `forged` nats."""
    samples = [make_sample(np.random.default_rng(number), prompt=3, completion=20) for number in range(6)]
    with torch.no_grad():
        ours = packed_logprobs(make_model(folder), samples).numpy().reshape(6, 20)
    for number, (sample, logprobs) in enumerate(zip(samples, ours, strict=True)):
        sample["logprobs"][sample["loss_mask"]] = logprobs - (forged if number >= 4 else 0.0)
        sample["engine"] = np.array(int(number >= 4))
    return samples


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_step_says_how_far_each_engine_is_from_the_trainer_however_its_samples_are_packed(
    folders: dict[str, Path], num_rows: int
) -> None:
    samples = _of_two_engines(folders["qwen3"], forged=0.4)
    step, _ = make_step(make_model(folders["qwen3"]), num_engines=3)
    size = len(samples) // num_rows
    for index in range(num_rows):
        step.add(make_batch(samples[index * size : (index + 1) * size], index=index))
    step.finish(make_seal(samples, num_micro_batches=num_rows))
    honest, forging = step.engines
    assert (honest.engine_id, honest.num_sequences, honest.num_tokens) == (0, 4, 80)
    assert (forging.engine_id, forging.num_sequences, forging.num_tokens) == (1, 2, 40)
    assert honest.kl_sum < 1e-6
    assert forging.kl_sum / 40 == pytest.approx(0.0918, rel=1e-2)  # e^0.4 - 1 - 0.4
    step.finish(make_seal([]))
    assert step.engines == (), "the next step begins anew"


def test_several_passes_compare_engines_with_the_policy_that_they_knew(folders: dict[str, Path]) -> None:
    samples = _of_two_engines(folders["qwen3"], forged=0.4)
    step, _ = make_step(make_model(folders["qwen3"]), num_engines=2, epochs=2, learning_rate=0.1)
    step.add(make_batch(samples))
    step.train_held(seal := make_seal(samples))
    step.finish(seal)
    assert [one.num_tokens for one in step.engines] == [80, 40]
    assert step.engines[0].kl_sum < 1e-6


def test_the_error_that_ends_a_run_names_the_engine_that_stands_out(folders: dict[str, Path]) -> None:
    samples = _of_two_engines(folders["qwen3"], forged=0.4)
    step, _ = make_step(make_model(folders["qwen3"]), num_engines=2, max_mismatch_kl=0.01)
    step.add(make_batch(samples))
    with pytest.raises(MismatchError, match=r"Engine 1's log-probabilities differ: KL 0\.092 over 2 sequences \(others \S+, "):
        step.finish(make_seal(samples))


def test_tokens_far_off_whatever_their_version_are_a_mismatch_too(folders: dict[str, Path]) -> None:
    samples = _samples()
    step, _ = make_step(make_model(folders["qwen3"]), max_mismatch_kl=0.001)
    step.add(_later([sample for sample in samples if sample["loss_mask"].sum() > 1], versions=(6, 7), step=7))
    with pytest.raises(MismatchError, match=r"all tokens, whatever their version: got .*, expected at most 0.02"):
        step.finish(make_seal(samples, step=7))


def test_at_learning_rate_zero_the_mismatch_stays_flat(folders: dict[str, Path]) -> None:
    """Whatever grows by itself over 50 steps is not the policy: a cache, a buffer, a moment of the optimizer that reaches the weights."""
    samples = _agreeing(folders["qwen3"], error=0.1)
    step, _ = make_step(make_model(folders["qwen3"]), learning_rate=0.0)
    found = set()
    for number in range(50):
        step.add(_later(samples, versions=(number, number), step=number))
        metrics = step.finish(make_seal(samples, step=number))
        found.add((metrics["mismatch_kl_on_policy"], metrics["logprob_gap_max"], metrics["grad_norm"]))
    assert len(found) == 1
    assert next(iter(found))[2] > 0, "a loss without a gradient would leave the weights alone too"


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_optimizer_makes_the_same_updates(folders: dict[str, Path], dtype: str) -> None:
    generator = np.random.default_rng(0)
    samples = [make_sample(generator, prompt=3, completion=5) for _ in range(4)]
    weights: list[list[torch.Tensor]] = []
    for is_offloaded in (False, True):
        model = make_model(folders["qwen2"], dtype=dtype)
        step, optimizer = make_step(model, learning_rate=1e-2, max_grad_norm=0.1, is_offloaded=is_offloaded)
        for number in range(2):
            step.add(make_batch(samples, step=number))
            step.finish(make_seal(samples, step=number))
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        held = {state["weight"].data_ptr() for state in optimizer.state()} & {parameter.data_ptr() for parameter in model.parameters()}
        assert bool(held) == (dtype == "float32" and not is_offloaded)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights, strict=True))


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

"""A critic beside the policy: its values, what it is trained towards, and a run that goes on where it was."""

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.config.layout import Layout
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import critic_optimizer, make_batch, make_model, make_sample, make_seal, make_step, packed_logprobs
from trainer.build import Trained, state_of
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.model_folder import save_model
from trainer.model.model import Model
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import arrange
from trainer.step import Step

Samples = list[dict[str, np.ndarray]]
NO_WHITENING: dict[str, Any] = {"batch": "none", "proximal": "engine", "weight": "none"}


def _samples(count: int = 10) -> Samples:
    generator = np.random.default_rng(5)
    samples = [make_sample(generator, prompt=int(generator.integers(1, 5)), completion=int(generator.integers(1, 9))) for _ in range(count)]
    return [sample | {"group": np.array(number // 2)} for number, sample in enumerate(samples)]


def _critic(folder: Path, *, replicas: Replicas | None = None, seed: int = 3) -> Model:
    """A value model that already says something: its score is random."""
    model = make_model(folder, gives_values=True, replicas=replicas)
    generator = torch.Generator().manual_seed(seed)
    score: Any = model.module.score
    with torch.no_grad():
        score.weight.copy_(torch.randn(score.weight.shape, generator=generator) * 0.3)
        score.bias.fill_(0.2)
    return model


def _values(model: Model, samples: Samples) -> torch.Tensor:
    batch = make_batch(samples)
    row = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids)
    assert row is not None
    return model.outputs(row)[0]


def _train(step: Step, rows: list[Samples], *, number: int = 0) -> dict[str, float]:
    samples = [sample for row in rows for sample in row]
    for index, row in enumerate(rows):
        step.add(make_batch(row, step=number, index=index))
    step.train_held(make_seal(samples, step=number))
    return step.finish(make_seal(samples, step=number, num_micro_batches=len(rows)))


def test_a_language_model_starts_as_a_critic_that_expects_nothing_and_is_saved_as_one_that_does(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    samples = _samples()
    assert not _values(make_model(folders["qwen3"], gives_values=True), samples).any()
    critic = _critic(folders["qwen3"])
    expected = _values(critic, samples).detach()
    assert float(expected.std()) > 0.1
    save_model(critic, tmp_path / "critic", source=folders["qwen3"])
    assert torch.equal(_values(make_model(tmp_path / "critic", gives_values=True), samples), expected)


def test_a_value_is_of_the_state_before_its_token(folders: dict[str, Path]) -> None:
    """Another last token, and the values of all tokens are what they were; another first token of the completion, and they are not."""
    samples = [make_sample(np.random.default_rng(0), prompt=3, completion=5)]
    critic = _critic(folders["llama"])
    before = _values(critic, samples).detach()
    samples[0]["token_ids"][-1] += 1
    assert torch.equal(_values(critic, samples), before)
    samples[0]["token_ids"][3] += 1
    moved = (_values(critic, samples) - before).detach()
    assert float(moved[0]) == 0
    assert float(moved[1:].abs().min()) > 0


def _gae(rewards: np.ndarray, values: np.ndarray, lam: float) -> np.ndarray:
    """A_t = sum_k lam^k delta_{t+k}, by its definition."""
    following = np.append(values[1:], 0.0)
    deltas = rewards + following - values
    return np.array([sum(lam**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "vapo", "turn_gae"])
@pytest.mark.parametrize("split", [[10], [4, 0, 6]])
def test_both_models_get_the_gradients_of_their_formulas_however_the_step_is_packed(
    folders: dict[str, Path], name: str, split: list[int]
) -> None:
    samples = _samples()
    policy, critic = make_model(folders["qwen3"]), _critic(folders["qwen3"])
    batch = make_batch(samples)
    values = _values(critic, samples)
    lengths = [int(sample["loss_mask"].sum()) for sample in samples]
    advantages, returns = [], []
    for sample, row in zip(samples, np.split(values.detach().double().numpy(), np.cumsum(lengths)[:-1]), strict=True):
        rewards = np.zeros(len(row))
        rewards[-1] = float(sample["reward"])
        if name == "ppo":
            advantages.append(_gae(rewards, row, 0.95))
            returns.append(advantages[-1] + row)
        elif name == "vapo":  # alpha 0.3
            advantages.append(_gae(rewards, row, max(0.0, 1 - 1 / (0.3 * len(row)))))
            returns.append(np.full(len(row), rewards[-1]))
        else:  # one turn: from its first value to the reward
            advantages.append(np.full(len(row), rewards[-1] - row[0]))
            returns.append(np.full(len(row), rewards[-1]))
    a, g = (torch.from_numpy(np.concatenate(parts)).float() for parts in (advantages, returns))
    if name == "ppo":
        a = (a - a.mean()) / (a.var() + 1e-8).sqrt()
    ratio = (packed_logprobs(policy, samples) - torch.from_numpy(batch.logprobs[batch.loss_mask])).exp()
    (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).sum().backward()
    (0.5 * (values - g).square()).sum().backward()
    expected = [
        torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        for model in (policy, critic)
    ]

    bypass = {"proximal": "engine", "weight": "none"}
    overrides: dict[str, dict[str, Any]] = {
        "ppo": bypass,
        "vapo": bypass | {"advantage": {"alpha": 0.3}, "objective": {"clip_high": 0.2}, "auxiliary": []},
        "turn_gae": bypass | {"advantage": "turn_gae", "batch": "none"},
    }
    method = "vapo" if name == "vapo" else "ppo"
    step, optimizer = make_step(make_model(folders["qwen3"]), method=method, overrides=overrides[name], critic=_critic(folders["qwen3"]))
    rows = np.split(np.arange(10), np.cumsum(split)[:-1])
    for index, chosen in enumerate(rows):
        step.add(make_batch([samples[number] for number in chosen], index=index))
    step.train_held(make_seal(samples))
    for gradient, whole in zip((optimizer.gradient, critic_optimizer(step).gradient), expected, strict=True):
        assert float((gradient - whole).norm() / whole.norm()) < 1e-5
    metrics = step.finish(make_seal(samples))
    assert metrics["value_loss"] == pytest.approx(float(0.5 * (values - g).detach().square().mean()), rel=1e-4)
    error = g - values.detach()
    assert metrics["value_explained_variance"] == pytest.approx(float(1 - error.var(correction=0) / g.var(correction=0)), rel=1e-3)
    assert metrics["return"] == pytest.approx(float(g.mean()), rel=1e-4)


def test_a_critic_alone_at_first_learns_while_the_policy_rests(folders: dict[str, Path]) -> None:
    samples = _samples()
    policy, critic = make_model(folders["llama"]), make_model(folders["llama"], gives_values=True)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    step, _ = make_step(policy, method="ppo", overrides=NO_WHITENING, critic=critic, learning_rate=3e-3, critic_warmup_steps=8)
    told = [_train(step, [samples], number=number) for number in range(8)]
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))
    assert "grad_norm" not in told[0]
    assert told[0]["value"] == 0
    assert told[-1]["value_loss"] < 0.5 * told[0]["value_loss"]
    assert told[-1]["value_explained_variance"] > 0.3
    assert _train(step, [samples], number=8)["grad_norm"] > 0
    assert not all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


def test_a_value_is_held_near_the_one_at_the_start_of_its_step_by_the_second_pass(folders: dict[str, Path]) -> None:
    """Scores near 0 and a reward of 1 everywhere: after an update that overshoots the clip, its tokens have no gradient."""
    samples = [sample | {"reward": np.array(50.0, np.float32)} for sample in _samples()]
    overrides = {"batch": "none", "proximal": "recomputed"}
    step, _ = make_step(
        make_model(folders["llama"]), method="ppo", overrides=overrides, critic=_critic(folders["llama"]), learning_rate=0.2, epochs=2
    )
    assert _train(step, [samples])["value_clipped"] > 0.5


def _restored(folder: Path, run_folder: Path) -> tuple[Step, Checkpoints, dict[str, Any]]:
    policy, critic = make_model(folder), make_model(folder, gives_values=True)
    step, optimizer = make_step(policy, method="ppo", overrides={}, critic=critic, learning_rate=1e-2)
    both = Trained(model=policy, optimizer=optimizer), Trained(model=critic, optimizer=critic_optimizer(step))
    state = state_of(*both)
    checkpoints = Checkpoints(run_folder / "checkpoints", state=lambda: state_of(*both), rank=0, num_ranks=1, keep=1)
    checkpoints.restore()
    return step, checkpoints, state


def test_actor_and_critic_go_on_bit_by_bit_from_their_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    samples = _samples()
    straight, _, expected = _restored(folders["qwen3"], tmp_path / "straight")
    for number in range(4):
        _train(straight, [samples[:5], samples[5:]], number=number)
    killed, checkpoints, _ = _restored(folders["qwen3"], tmp_path / "killed")
    for number in range(2):
        _train(killed, [samples[:5], samples[5:]], number=number)
    checkpoints.begin(2, commit="c", num_samples=20, samples="0")
    checkpoints.wait()
    resumed, _, got = _restored(folders["qwen3"], tmp_path / "killed")
    for number in range(2, 4):
        _train(resumed, [samples[:5], samples[5:]], number=number)
    assert got.keys() == expected.keys() == {"model", "optimizer", "critic_model", "critic_optimizer"}
    for part in expected:
        assert [name for name in expected[part] if not torch.equal(expected[part][name], got[part][name])] == []


def _of_layout(replicas: Replicas, *, folder: Path, method: str = "ppo") -> dict[str, Any]:
    """Two steps with a reference, of ppo in the reward, rows dealt to the replicas; what came of it."""
    samples = _samples()
    rows = [samples[:3], samples[3:4], samples[4:]]
    policy = make_model(folder, replicas=replicas)
    critic = make_model(folder, gives_values=method == "ppo", replicas=replicas)
    step, _ = make_step(
        policy,
        replicas=replicas,
        method=method,
        overrides={"proximal": "engine", "weight": "none"} | ({"advantage": {"kl_coef": 0.1}} if method == "ppo" else {}),
        critic=critic,
        reference=make_model(folder, is_frozen=True, replicas=replicas),
        max_grad_norm=0.5,
    )
    told: dict[str, float] = {}
    for number in range(2):
        for round_index in range(-(-len(rows) // replicas.layout.replicas)):
            index = round_index * replicas.layout.replicas + replicas.number
            step.add(make_batch(rows[index] if index < len(rows) else [], step=number, index=round_index))
        step.train_held(make_seal(samples, step=number))
        told = step.finish(make_seal(samples, step=number))
    weights = {f"{name}.{key}": tensor.clone() for name, model in (("p", policy), ("c", critic)) for key, tensor in model.state()}
    return {"metrics": told, "weights": weights}


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time")
def test_three_models_on_two_ranks_train_what_they_train_on_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """A value model in every kind of layout, tensor and expert parallelism in `test_four_ranks`; an implicit process reward model where its
    rows are dealt out, and where layers are."""
    jobs = {method: functools.partial(_of_layout, folder=folders["qwen3_moe"], method=method) for method in ("ppo", "prime")}
    expected = {method: job(Replicas(ranks=1, deadline_s=60)) for method, job in jobs.items()}
    kinds: list[dict[str, Any]] = [{}, {"shard": 2}, {"context": 2}, {"pipeline": 2}]
    cases = [("ppo", Layout(ranks=2, **sizes)) for sizes in kinds] + [("prime", Layout(ranks=2)), ("prime", Layout(ranks=2, pipeline=2))]
    found = run_jobs([(layout, jobs[method]) for method, layout in cases], tmp_path)
    for (method, layout), ranks in zip(cases, found, strict=True):
        for rank in ranks:
            assert rank["metrics"] == pytest.approx(expected[method]["metrics"], rel=2e-3, abs=1e-4), (method, layout)
            for name, weight in rank["weights"].items():
                assert torch.allclose(weight, expected[method]["weights"][name], atol=3e-4), (method, layout, name)

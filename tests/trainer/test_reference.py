"""A frozen model beside the policy: every KL in the loss, the KL in the reward, and a teacher."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.algorithms.method import ALWAYS_OFFERED, REFERENCE_OFFERS, TRAINER_OFFERS
from pipelinerl.algorithms.methods import resolve
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from tests.trainer.conductor import make_config
from tests.trainer.tiny import make_batch, make_folder, make_model, make_sample, make_seal, make_step, packed_logprobs
from trainer.build import build_policy, build_step
from trainer.model.model import Model
from trainer.model.reference import Reference
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import arrange

Samples = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of another family, with the same words."""
    return make_folder(tmp_path_factory.mktemp("teacher"), family="llama", seed=7)


def _samples() -> Samples:
    generator = np.random.default_rng(4)
    samples = [make_sample(generator, prompt=int(generator.integers(1, 5)), completion=int(generator.integers(1, 8))) for _ in range(9)]
    return [sample | {"group": np.array(number // 3)} for number, sample in enumerate(samples)]


def _frozen(folder: Path) -> Model:
    return make_model(folder, is_frozen=True)


def _gradient(model: Model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


KL_FORMS = {
    "k1": lambda pi, ref, _old: pi - ref,
    "k2": lambda pi, ref, _old: (pi - ref).square() / 2,
    "k3": lambda pi, ref, _old: (ref - pi).exp() - 1 - (ref - pi),
    "unbiased": lambda pi, ref, old: (pi - old).exp() * ((ref - pi).exp() - 1 - (ref - pi)),
}


@pytest.mark.parametrize("kind", KL_FORMS)
def test_a_kl_in_the_loss_pulls_towards_the_reference(folders: dict[str, Path], teacher: Path, kind: str) -> None:
    """Advantages of 0 leave the penalty alone: against autograd on 0.1 times its formula."""
    samples = _samples()
    for sample in samples:
        sample["advantages"][:] = 0
    model = make_model(folders["qwen3"])
    pi, ref = packed_logprobs(model, samples), packed_logprobs(_frozen(teacher), samples)
    assert not ref.requires_grad
    (0.1 * KL_FORMS[kind](pi, ref, pi.detach())).sum().backward()
    expected, pi = _gradient(model), pi.detach()

    unclamped = {"clamp": 0.0} if kind in ("k3", "unbiased") else {}  # these samples are many nats from the reference
    overrides = {"proximal": "recomputed", "kl": {"name": kind, "beta": 0.1, **unclamped}}
    step, optimizer = make_step(make_model(folders["qwen3"]), reference=_frozen(teacher), overrides=overrides)
    for rows in (samples[:4], [], samples[4:]):
        step.add(make_batch(rows))
    assert float((optimizer.gradient - expected).norm() / expected.norm()) < 1e-5
    metrics = step.finish(make_seal(samples))
    assert metrics["reference_kl_k1"] == pytest.approx(float((pi - ref).mean()), rel=1e-4)
    assert metrics["loss_kl"] == pytest.approx(float(0.1 * KL_FORMS[kind](pi, ref, pi).mean()), rel=1e-4)


def test_a_teacher_is_approached_without_any_reward(folders: dict[str, Path], teacher: Path) -> None:
    """On-policy distillation: advantages on the wire are 0, and the policy comes to give these tokens the teacher's probabilities."""
    samples = _samples()
    model = make_model(folders["qwen3"])
    step, _ = make_step(model, method="opd", overrides={}, reference=_frozen(teacher), learning_rate=3e-3)
    told: list[float] = []
    for number in range(8):
        with torch.no_grad():  # the engine samples with the present policy
            logprobs = packed_logprobs(model, samples).numpy()
        for sample in samples:
            count = int(sample["loss_mask"].sum())
            sample["logprobs"][sample["loss_mask"]], logprobs = logprobs[:count], logprobs[count:]
            sample["versions"][sample["loss_mask"]] = number
            sample["advantages"][:] = 0
        step.add(make_batch(samples, step=number))
        told.append(step.finish(make_seal(samples, step=number))["reference_kl_k3"])
    assert told[-1] < told[0] / 4


def _reinforce_pp(mu: np.ndarray, ref: np.ndarray, samples: Samples, *, kl_coef: float) -> np.ndarray:
    """Returns of R at the last token and -kl_coef (log mu - log ref) at each, whitened over all tokens of the step."""
    returns, start = [], 0
    for sample in samples:
        count = int(sample["loss_mask"].sum())
        rewards = -kl_coef * (mu - ref)[start : start + count]
        rewards[-1] += float(sample["reward"])
        returns.append(rewards[::-1].cumsum()[::-1])
        start += count
    flat = np.concatenate(returns)
    return (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("split", [[9], [1, 8], [3, 0, 6], [1] * 9])
def test_a_kl_in_the_reward_makes_advantages_that_no_packing_changes(folders: dict[str, Path], teacher: Path, split: list[int]) -> None:
    samples = _samples()
    batch = make_batch(samples)
    ref = packed_logprobs(_frozen(teacher), samples).double().numpy()
    expected = _reinforce_pp(batch.logprobs[batch.loss_mask].astype(np.float64), ref, samples, kl_coef=0.3)
    model = make_model(folders["qwen3"])
    ratio = (packed_logprobs(model, samples) - torch.from_numpy(batch.logprobs[batch.loss_mask])).exp()
    advantages = torch.from_numpy(expected).float()
    (-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).sum().backward()

    overrides = {"advantage": {"kl_coef": 0.3}, "proximal": "engine", "weight": "none"}
    step, optimizer = make_step(make_model(folders["qwen3"]), method="reinforce_pp", overrides=overrides, reference=_frozen(teacher))
    rows = np.split(np.arange(9), np.cumsum(split)[:-1])
    for index, chosen in enumerate(rows):
        step.add(make_batch([samples[number] for number in chosen], index=index))
    step.train_held(make_seal(samples))
    assert float((optimizer.gradient - _gradient(model)).norm() / _gradient(model).norm()) < 1e-5
    assert step.finish(make_seal(samples))["advantage_abs_mean"] == pytest.approx(float(np.abs(expected).mean()), rel=1e-4)


def test_a_kl_taken_from_whole_rewards_is_seen_by_the_group_baseline(folders: dict[str, Path], teacher: Path) -> None:
    """Leave-one-out over three siblings, whichever rows they lie in."""
    samples = _samples()
    overrides = {"shaping": {"name": "minus_token_kl", "coef": 0.5}, "proximal": "engine", "weight": "none"}
    step, _ = make_step(make_model(folders["qwen3"]), method="rloo", overrides=overrides, reference=_frozen(teacher))
    batch = make_batch(samples)
    kl = batch.logprobs[batch.loss_mask] - packed_logprobs(_frozen(teacher), samples).numpy()
    lengths = [int(sample["loss_mask"].sum()) for sample in samples]
    shaped = np.array([float(sample["reward"]) for sample in samples]) - 0.5 * np.array(
        [part.sum() for part in np.split(kl, np.cumsum(lengths)[:-1])]
    )
    groups = shaped.reshape(3, 3)
    expected = (groups - (groups.sum(1, keepdims=True) - groups) / 2).flatten()
    for index in range(3):
        step.add(make_batch(samples[index::3], index=index))  # one sibling of each group in every row
    step.train_held(make_seal(samples))
    mean = float((expected * lengths).sum() / sum(lengths))
    assert step.finish(make_seal(samples))["advantage_mean"] == pytest.approx(mean, rel=1e-4)


def test_weights_on_the_host_give_the_same(folders: dict[str, Path]) -> None:
    batch = make_batch(_samples())
    row = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids)
    replicas = Replicas(ranks=1, deadline_s=60)
    stays, offloads = (Reference(_frozen(folders["qwen3"]), replicas=replicas, offloads=offloads) for offloads in (False, True))
    got = offloads.judge(row)[0]
    assert got is not None
    expected = stays.judge(row)[0]
    assert expected is not None
    assert torch.equal(got, expected)
    assert offloads.judge(None) == (None, None)


def _config(folder: Path, reference: Path | None, **algorithm: Any) -> Config:
    return make_config(folder).model_copy(
        update={
            "algorithm": make_config(folder).algorithm.model_copy(update=algorithm),
            "reference": make_config(folder).reference.model_copy(update={"path": reference}),
        }
    )


def test_a_run_loads_the_reference_its_method_reads_and_no_other(folders: dict[str, Path], teacher: Path) -> None:
    replicas = Replicas(ranks=1, deadline_s=60)

    def reference_of(config: Config) -> object:
        policy = build_policy(config, replicas=replicas)
        return build_step(config, policy=policy, critic=None, replicas=replicas, first_step=0).reference

    with_kl = {"overrides": {"kl": "k3"}}
    assert reference_of(_config(folders["qwen3"], teacher, **with_kl)) is not None
    assert reference_of(_config(folders["qwen3"], teacher)) is None
    with pytest.raises(ConfigError, match=r"kl k3 needs reference_logprobs.*set reference\.path"):
        reference_of(_config(folders["qwen3"], None, **with_kl))


def test_a_teacher_with_other_words_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    other = make_folder(tmp_path / "other", family="llama", vocab_size=64)
    replicas = Replicas(ranks=1, deadline_s=60)
    config = _config(folders["qwen3"], other, name="opd")
    with pytest.raises(ConfigError, match=r"has other words than model\.path .* \(64 and 61 token ids\)"):
        build_step(config, policy=build_policy(config, replicas=replicas), critic=None, replicas=replicas, first_step=0)


def test_every_kl_form_of_the_table_is_offered_with_a_reference() -> None:
    offers = ALWAYS_OFFERED | TRAINER_OFFERS | REFERENCE_OFFERS
    for kind in ("k1", "k2", "k3", "k3_plus", "unbiased"):
        assert resolve("grpo", {"kl": {"name": kind, "beta": 0.1}}, group_size=8, offers=offers).kl.name == kind

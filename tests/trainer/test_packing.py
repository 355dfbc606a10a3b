"""A packed row computes what its samples compute alone: against transformers' own forward pass, one sample at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.errors import ConfigError
from tests import families
from tests.families import RECIPES
from tests.trainer.tiny import FAMILIES, make_model, make_sample, packed_logprobs
from trainer.model import attention
from trainer.model.attention import packed_attention
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import Block

Samples = list[dict[str, np.ndarray]]


def _mixed_samples() -> Samples:
    """Lengths from 2 to 100 (short and long attention), repeated lengths, siblings of one short and of one long prompt, and turns: two rows
    that go on from 96 tokens of the longest, 36 of which were sampled there, and from 40 more of one another.
    """
    generator = np.random.default_rng(0)
    samples = [make_sample(generator, prompt=p, completion=c) for p, c in [(1, 1), (7, 6), (7, 6), (3, 40), (60, 40), (5, 2)]]
    for prompt in (6, 50):
        siblings = [make_sample(generator, prompt=prompt, completion=completion) for completion in (4, 9, 4, 1)]
        for sibling in siblings:
            sibling["token_ids"][:prompt] = siblings[0]["token_ids"][:prompt]
        samples += siblings
    turns = [make_sample(generator, prompt=prompt, completion=completion) for prompt, completion in ((96, 45), (136, 9))]
    for turn, before, shared in ((turns[0], samples[4], 96), (turns[1], turns[0], 136)):
        turn["token_ids"][:shared] = before["token_ids"][:shared]
    return [*samples, *turns]


def _logprobs_alone(folder: Path, samples: Samples, *, temperature: float) -> tuple[torch.Tensor, torch.nn.Module]:
    """The same by transformers, each sample in a forward pass of its own, with its eager attention."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    parts: list[torch.Tensor] = []
    for sample in samples:
        ids = torch.from_numpy(sample["token_ids"].astype(np.int64))
        logprobs = (module(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        parts.append(logprobs.gather(-1, ids[1:, None])[sample["loss_mask"][1:], 0])
    return torch.cat(parts), module


@pytest.mark.parametrize("model_type", RECIPES)
def test_logprobs_and_gradients_equal_those_of_samples_alone(tmp_path: Path, model_type: str) -> None:
    folder = families.make_folder(tmp_path, model_type=model_type)
    samples = _mixed_samples()
    model = make_model(folder, temperature=0.7)
    packed = packed_logprobs(model, samples)
    alone, module = _logprobs_alone(folder, samples, temperature=0.7)
    assert float((packed - alone).detach().abs().max()) < 2e-5
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(packed)).astype(np.float32))
    (packed * weights).sum().backward()
    (alone * weights).sum().backward()
    for (name, ours), theirs in zip(model.module.named_parameters(), module.parameters(), strict=True):
        if theirs.grad is None and not ours.requires_grad:
            continue
        assert ours.grad is not None
        assert theirs.grad is not None
        assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_sample_sees_another(folders: dict[str, Path], family: str) -> None:
    samples = _mixed_samples()
    model = make_model(folders[family])
    ends = np.cumsum([int(sample["loss_mask"].sum()) for sample in samples])
    with torch.no_grad():
        before = packed_logprobs(model, samples)
        for changed in (1, 4, 9):  # a short one, a long one, one of several siblings
            ids = samples[changed]["token_ids"].copy()
            samples[changed]["token_ids"] = np.where(samples[changed]["loss_mask"], (ids + 1) % 61, ids).astype(np.int32)
            after = packed_logprobs(model, samples)
            samples[changed]["token_ids"] = ids
            inside = slice(ends[changed] - int(samples[changed]["loss_mask"].sum()), ends[changed])
            moved = (after - before).abs()
            assert float(moved[inside].max()) > 1e-2
            moved[inside] = 0
            assert float(moved.max()) < 1e-6


def test_entropy_is_that_of_the_next_token(folders: dict[str, Path]) -> None:
    sample = make_sample(np.random.default_rng(0), prompt=5, completion=4)
    model = make_model(folders["qwen2"], temperature=2.0)
    row = arrange(sample["token_ids"], loss_mask=sample["loss_mask"], lengths=np.array([9], np.int32), names=["rollout"])
    assert row is not None
    with torch.no_grad():
        _, entropy = model.logprobs(row)
        module = AutoModelForCausalLM.from_pretrained(folders["qwen2"], attn_implementation="eager")
        logits = module(input_ids=torch.from_numpy(sample["token_ids"].astype(np.int64))[None]).logits[0, 4:8] / 2.0
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5)


def test_bfloat16_stays_close_to_float32(folders: dict[str, Path]) -> None:
    samples = _mixed_samples()
    with torch.no_grad():
        exact = packed_logprobs(make_model(folders["llama"]), samples)
        rounded = packed_logprobs(make_model(folders["llama"], dtype="bfloat16"), samples)
    assert rounded.dtype == torch.float32
    assert 1e-5 < float((exact - rounded).abs().mean()) < 0.05


@pytest.mark.parametrize("num_before", [0, 5, 40])
def test_work_grows_with_the_window_and_not_with_the_sample(monkeypatch: pytest.MonkeyPatch, num_before: int) -> None:
    """Every piece that attention computes at once is at most two windows wide, and the result is that of one masked table."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 70, 4, 8, generator=generator)
    key, value = (torch.randn(2, num_before + 70, 2, 8, generator=generator) for _ in range(2))
    kind = attention.Kind(scaling=0.3, window=16)
    seen: list[int] = []
    attend_all = attention._attend_all
    monkeypatch.setattr(attention, "_attend_all", lambda q, k, v, *, kind: seen.append(k.shape[1]) or attend_all(q, k, v, kind=kind))
    pieces = attention._attend(query, key, value, kind=kind)
    assert max(seen) < 2 * 16
    distance = (num_before + torch.arange(70))[:, None] - torch.arange(num_before + 70)
    scores = torch.einsum("nlhd,nshd->nhls", query, key.repeat_interleave(2, 2)) * 0.3
    weights = scores.masked_fill((distance < 0) | (distance >= 16), -torch.inf).softmax(-1)
    assert torch.allclose(pieces, torch.einsum("nhls,nshd->nlhd", weights, value.repeat_interleave(2, 2)), atol=1e-5)


def test_attention_that_was_not_told_the_samples_refuses() -> None:
    query = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ConfigError, match="cannot train packed rows"):
        packed_attention(torch.nn.Identity(), query, query, query, None, scaling=1.0)
    blocks = (Block(start=0, num=1, length=4, prefix_length=0, prefix=None),)
    with pytest.raises(ConfigError, match="Identity asks attention for alibi_slopes, a mask of the model's own, which packed rows"):
        packed_attention(torch.nn.Identity(), query, query, query, query, scaling=1.0, blocks=blocks, alibi_slopes=query)


def test_float16_and_a_missing_folder_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float16"):
        make_model(folders["llama"], dtype="float16")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        make_model(tmp_path / "nothing")

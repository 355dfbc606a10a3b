"""A packed row computes what its samples compute alone: against transformers' own forward pass, one sample at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.errors import ConfigError
from tests.trainer.tiny import FAMILIES, make_folder, make_model, make_sample, packed_logprobs
from trainer.model.attention import packed_attention
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import Block

Samples = list[dict[str, np.ndarray]]


def _mixed_samples() -> Samples:
    """Lengths from 2 to 100 (short and long attention), repeated lengths, and siblings of one short and of one long prompt."""
    generator = np.random.default_rng(0)
    samples = [make_sample(generator, prompt=p, completion=c) for p, c in [(1, 1), (7, 6), (7, 6), (3, 40), (60, 40), (5, 2)]]
    for prompt in (6, 50):
        siblings = [make_sample(generator, prompt=prompt, completion=completion) for completion in (4, 9, 4, 1)]
        for sibling in siblings:
            sibling["token_ids"][:prompt] = siblings[0]["token_ids"][:prompt]
        samples += siblings
    return samples


def _logprobs_alone(folder: Path, samples: Samples, *, temperature: float) -> tuple[torch.Tensor, torch.nn.Module]:
    """The same by transformers, each sample in a forward pass of its own, with its eager attention."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    parts: list[torch.Tensor] = []
    for sample in samples:
        ids = torch.from_numpy(sample["token_ids"].astype(np.int64))
        logprobs = (module(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        parts.append(logprobs.gather(-1, ids[1:, None])[sample["loss_mask"][1:], 0])
    return torch.cat(parts), module


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_equal_those_of_samples_alone(folders: dict[str, Path], family: str) -> None:
    samples = _mixed_samples()
    model = make_model(folders[family], temperature=0.7)
    packed = packed_logprobs(model, samples)
    alone, module = _logprobs_alone(folders[family], samples, temperature=0.7)
    assert float((packed - alone).detach().abs().max()) < 2e-5
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(packed)).astype(np.float32))
    (packed * weights).sum().backward()
    (alone * weights).sum().backward()
    for (name, ours), theirs in zip(model.module.named_parameters(), module.parameters(), strict=True):
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


def test_a_window_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "window",
        family="qwen2",
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=0,
        layer_types=["sliding_attention"] * 2,
    )
    model = make_model(folder)
    generator = np.random.default_rng(0)
    packed_logprobs(model, [make_sample(generator, prompt=4, completion=4)])
    with pytest.raises(ConfigError, match="window of 8 tokens"):
        packed_logprobs(model, [make_sample(generator, prompt=4, completion=6)])


def test_attention_that_was_not_told_the_samples_refuses() -> None:
    query = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ConfigError, match="cannot train packed rows"):
        packed_attention(torch.nn.Identity(), query, query, query, None, scaling=1.0)
    blocks = (Block(start=0, num=1, length=4, prefix_length=0, prefix=None),)
    with pytest.raises(ConfigError, match="softcap"):
        packed_attention(torch.nn.Identity(), query, query, query, None, scaling=1.0, blocks=blocks, softcap=30.0)


def test_float16_and_a_missing_folder_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float16"):
        make_model(folders["llama"], dtype="float16")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        make_model(tmp_path / "nothing")

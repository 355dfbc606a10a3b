"""Speculative decoding in a real vLLM engine: what is sampled, and what is said of it, is as it would be without drafts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from pipelinerl.engine.loop import EngineLoop
from pipelinerl.messages import Completion, Generate, Sampling

if TYPE_CHECKING:
    import torch

    from pipelinerl.engine.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),  # vLLM's call of xgrammar
]

VOCABULARY = 128
DIGITS = "[0-9]{12}"
SHARPENED = 20.0
"""Factor on a random model's head: its logits then prefer some tokens, so that drafts are accepted and rejected about equally often."""
NUM_BINS, CRITICAL = 16, 30.58
"""Bins of the chi-square test, and the value that 15 degrees of freedom exceed in one case of a hundred."""


@dataclasses.dataclass(slots=True)
class Served:
    engine: VllmEngine
    loop: EngineLoop
    model: Any
    """What the trainer computes with."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine that drafts from siblings, however many sequences run."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2ForCausalLM

    from tests import real_engine, tiny_models

    folder = tmp_path_factory.mktemp("model")
    tensors = tiny_models.make_qwen2(folder, tied=False, vocabulary=VOCABULARY, seed=0)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * SHARPENED
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with real_engine.vllm_engine(folder, speculation="siblings", structured_outputs=({}, {"regex": DIGITS})) as engine:
        model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        yield Served(model=model, engine=engine, loop=EngineLoop(engine, engine_id=0, stager=lambda order: pytest.fail("none is staged")))


def complete(served: Served, requests: dict[str, Sampling], *, together: bool = True) -> dict[str, Completion]:
    """The completions of a few prompts that differ by group; not `together`, one after the other."""
    found = []
    for name, sampling in requests.items():
        prompt = np.array([3 + int(name.partition("/")[0]), 4, 5, 4, 5, 4], np.int32)
        served.loop.handle(Generate(rollout_id=name, attempt=0, token_ids=prompt, sampling=sampling))
        while served.loop.has_work and not (together and name != list(requests)[-1]):
            served.loop.advance()
        found += served.loop.outbox
        served.loop.outbox.clear()
    return {one.rollout_id: one for one in found if isinstance(one, Completion)}


@contextlib.contextmanager
def without_drafts(engine: VllmEngine) -> Iterator[None]:
    assert engine._speculation is not None
    before, engine._speculation._below = engine._speculation._below, 0
    yield
    engine._speculation._below = before


def distributions(served: Served, token_ids: np.ndarray, sampling: Sampling) -> torch.Tensor:
    """[T, V] log-probabilities of the tokens of a completion of `complete`, by the model that the trainer runs."""
    import torch

    with torch.no_grad():
        logits = served.model(torch.from_numpy(token_ids)[None].long()).logits[0] / sampling.temperature
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    return logits.log_softmax(-1)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 6)])
def test_tokens_and_logprobs_are_of_the_trainers_distribution(served: Served, temperature: float, top_k: int):
    """Where a token is drawn from its distribution, a place drawn in its part of the cumulated distribution is uniform in [0, 1)."""
    chance = np.random.default_rng(0)
    sampling = Sampling(max_tokens=150, temperature=temperature, top_k=top_k, ignores_ends=True)
    before = served.loop.load(idle_s=0.0)
    names = [f"{group}/{sibling}" for group in range(2) for sibling in range(12)]
    given = complete(served, {name: msgspec.structs.replace(sampling, seed=seed) for seed, name in enumerate(names)})
    after = served.loop.load(idle_s=0.0)
    num_accepted, num_drafted = after.num_accepted - before.num_accepted, after.num_drafted - before.num_drafted
    assert 0.2 < num_accepted / num_drafted < 0.8, f"{num_accepted} of {num_drafted} drafted tokens were accepted"
    assert num_drafted > 1000
    places = []
    for name, one in given.items():
        prompt = np.array([3 + int(name[0]), 4, 5, 4, 5, 4], np.int32)
        logprobs = distributions(served, np.concatenate([prompt, one.token_ids]), sampling)[len(prompt) - 1 : -1].double().numpy()
        at = np.arange(len(one.token_ids))
        np.testing.assert_allclose(one.logprobs, logprobs[at, one.token_ids], atol=2e-5)
        probabilities = np.exp(logprobs)
        places.append(probabilities.cumsum(1)[at, one.token_ids] - chance.random(len(at)) * probabilities[at, one.token_ids])
    counts, _ = np.histogram(np.concatenate(places), NUM_BINS, (0.0, 1.0))
    expected = counts.sum() / NUM_BINS
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    print(f"{counts.sum()} tokens, {num_accepted} of {num_drafted} drafted ones accepted, chi-square {chi_square:.1f}")
    assert counts.sum() == 2 * 12 * 150
    assert chi_square < CRITICAL


def test_whatever_ends_or_constrains_a_completion_does_so_with_drafts(served: Served):
    """Greedy, so that both ways have to give the same tokens: stop tokens, few tokens, prompts' log-probabilities and constraints."""
    greedy = Sampling(max_tokens=60, temperature=0.0, ignores_ends=True)
    plain = complete(served, {"5/0": greedy})["5/0"].token_ids.tolist()
    requests = {
        "5/1": greedy,
        "5/2": msgspec.structs.replace(greedy, stop_token_ids=(plain[40],)),
        "5/3": msgspec.structs.replace(greedy, has_prompt_logprobs=True),
        "5/4": msgspec.structs.replace(greedy, structured_outputs=({"regex": DIGITS},)),
        "5/5": msgspec.structs.replace(greedy, max_tokens=1),
        "5/6": msgspec.structs.replace(greedy, max_tokens=2),
        "6/0": greedy,
    }
    with without_drafts(served.engine):
        before = served.loop.load(idle_s=0.0)
        expected = complete(served, requests)
        assert served.loop.load(idle_s=0.0).num_drafted == before.num_drafted
    for together in (True, False):
        given = complete(served, requests, together=together)
        for name, one in expected.items():
            assert given[name].token_ids.tolist() == one.token_ids.tolist(), name
            assert given[name].finish is one.finish, name
            np.testing.assert_allclose(given[name].logprobs, one.logprobs, atol=2e-5, err_msg=name)
        judged, expected_there = given["5/3"].prompt_logprobs, expected["5/3"].prompt_logprobs
        assert judged is not None
        assert expected_there is not None
        np.testing.assert_allclose(judged, expected_there, atol=2e-5)
    assert served.loop.load(idle_s=0.0).num_accepted > before.num_accepted + 2 * 40

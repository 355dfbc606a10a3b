"""What a rollout asks an engine for."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from orchestrator.rollouts.rollout import Rollout
from pipelinerl.messages import Prompt, Sampling

PROMPT = Prompt(prompt_id="0", text="?", token_ids=np.array([3], np.int32))
ROLLOUT = Rollout(rollout_id="0/0", group_id=0, sibling=0, attempt=0, prompt=PROMPT, version=0, admitted_at=0.0, is_greedy=False)


def seed_of(rollout: Rollout, *, seed: int | None) -> int | None:
    return rollout.request(Sampling(max_tokens=4, seed=seed), chunk_tokens=0).sampling.seed


def test_each_request_has_a_seed_of_its_own_that_follows_from_the_runs():
    sibling = dataclasses.replace(ROLLOUT, rollout_id="0/1", sibling=1)
    found = [seed_of(ROLLOUT, seed=0), seed_of(sibling, seed=0), seed_of(ROLLOUT.next_attempt(), seed=0), seed_of(ROLLOUT, seed=1)]
    assert len(set(found)) == 4
    assert found[0] == seed_of(dataclasses.replace(ROLLOUT, admitted_at=7.0, version=0), seed=0)
    assert all(seed is not None and 0 <= seed < 1 << 63 for seed in found), "what the wire and torch hold"


def test_a_request_has_the_images_of_its_prompt():
    seen = dataclasses.replace(ROLLOUT, prompt=msgspec.structs.replace(PROMPT, images=(b"one", b"two")))
    assert seen.request(Sampling(max_tokens=4), chunk_tokens=0).images == (b"one", b"two")


def test_without_a_seed_the_engine_draws_as_it_likes():
    assert seed_of(ROLLOUT, seed=None) is None

"""What a rollout asks an engine for."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from orchestrator.rollouts.rollout import Rollout
from pipelinerl.messages import Completion, Finish, Prompt, Sampling

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


def answered(
    *token_ids: int, attempt: int, version: int, finish: Finish = Finish.CANCELLED, recomputed: tuple[int, ...] = ()
) -> Completion:
    return Completion(
        rollout_id="0/0",
        attempt=attempt,
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array([-0.1 * token_id for token_id in token_ids], np.float32),
        versions=np.full(len(token_ids), version, np.int32),
        finish=finish,
        recomputed=recomputed,
    )


def test_a_rollout_that_moves_asks_the_next_engine_to_go_on_and_lays_all_end_to_end():
    """Tokens 5 and 6 of version 2, then 7 of version 3, then 8 and 9 of version 3, of at most 6: the last engine may add 3."""
    second = ROLLOUT.moved(answered(5, 6, attempt=0, version=2))
    third = second.moved(answered(7, attempt=1, version=3))
    request = third.request(Sampling(max_tokens=6), chunk_tokens=0)
    assert (third.attempt, third.version, third.is_new) == (2, 3, True), "no engine of an older version goes on with it"
    assert (request.token_ids.tolist(), request.num_written, request.sampling.max_tokens) == ([3, 5, 6, 7], 3, 3)
    last = third.joined(answered(8, 9, attempt=2, version=3, finish=Finish.STOP, recomputed=(1,)))
    found = third.trajectory(last, engine_id=1, finished_at=1.0)
    assert found.token_ids.tolist() == [3, 5, 6, 7, 8, 9]
    assert found.versions[found.loss_mask].tolist() == [2, 2, 3, 3, 3]
    np.testing.assert_allclose(found.logprobs, [0.0, -0.5, -0.6, -0.7, -0.8, -0.9], rtol=1e-6)
    assert (found.attempt, found.finish) == (2, Finish.STOP)
    assert found.recomputed == (2, 3, 4), "where it moved, and where the last engine computed its cache anew"


def test_an_attempt_that_is_lost_keeps_what_was_written_before_it_and_one_without_a_token_begins_at_its_prompt():
    moved = ROLLOUT.moved(answered(5, attempt=0, version=0))
    again = moved.next_attempt().request(Sampling(max_tokens=6), chunk_tokens=0)
    assert (again.attempt, again.token_ids.tolist()) == (2, [3, 5])
    assert ROLLOUT.moved(answered(attempt=0, version=0)) == ROLLOUT.next_attempt()

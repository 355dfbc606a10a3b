"""Conversations with a policy for each role: every sampled token trains once, where it was sampled, with the reward of its role."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.conversations import Conversation, Turn, as_chat, converse, rows_of
from orchestrator.policies import PoliciesRun
from pipelinerl.errors import ScriptError
from pipelinerl.messages import Finish, Prompt, Trajectory
from tests.sim.chaos import Faults
from tests.sim.policies import run_policies
from tests.sim.run import config

TURNS = ("asker", "guesser", "asker", "judge", "guesser")


def settings(steps: int = 4, **sections: Any) -> Any:
    return config(trainer={"steps": steps}, pipeline={"max_staleness": 1}, rollout={"group_size": 4, "max_tokens": 12}, **sections)


def tokens_so_far(conversation: Conversation, role: str, config: Any) -> list[int]:
    """All that was said, token by token."""
    said = [one.rollout.token_ids[one.rollout.loss_mask] for one in conversation.turns]
    return np.concatenate([conversation.prompt.token_ids, *said]).tolist()


def rollout(tokens: int, *, name: str = "0/0") -> Trajectory:
    mask = np.arange(2 + tokens) >= 2
    return Trajectory(
        rollout_id=name,
        group_id=0,
        sibling=0,
        attempt=0,
        prompt=Prompt(prompt_id="0:0", text="", token_ids=np.array([1, 2], np.int32)),
        token_ids=np.arange(2 + tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        finish=Finish.STOP,
    )


def test_rows_are_a_roles_own_turns_with_its_reward_over_the_mean_of_the_siblings() -> None:
    first, second = (Prompt(prompt_id=f"0:{number}", text="", token_ids=np.array([1, 2], np.int32)) for number in range(2))

    def played(prompt: Prompt, *turns: tuple[str, int]) -> Conversation:
        return Conversation(prompt=prompt, turns=[Turn(role=role, rollout=rollout(size), text="") for role, size in turns])

    conversations = [
        played(first, ("a", 1), ("b", 2), ("a", 3)),
        played(first, ("a", 2), ("b", 0)),
        played(second, ("a", 1), ("b", 1)),
    ]
    rows = rows_of(conversations, "a", [3.0, 1.0, 5.0])
    assert [(row.reward, row.advantages.tolist()) for row in rows] == [
        (3.0, [0.0, 0.0, 1.0]),
        (3.0, [0.0, 0.0, 1.0, 1.0, 1.0]),
        (1.0, [0.0, 0.0, -1.0, -1.0]),
        (5.0, [0.0, 0.0, 0.0]),
    ]
    assert [row.trajectory.num_trained_tokens for row in rows_of(conversations, "b", [0.0, 1.0, 2.0])] == [2, 1], (
        "and no row without a token"
    )
    with pytest.raises(ScriptError, match="2 rewards for 3 conversations"):
        rows_of(conversations, "a", [1.0, 2.0])


def test_a_role_sees_its_own_turns_as_the_assistants_and_all_others_as_the_users() -> None:
    prompt = Prompt(
        prompt_id="0:0", text="rendered", token_ids=np.array([1], np.int32), chat=({"role": "user", "content": "Guess my number."},)
    )
    turns = [Turn(role=role, rollout=rollout(1), text=text) for role, text in (("a", "Is it 4?"), ("b", "More."), ("c", "Hm."))]
    conversation, settled = Conversation(prompt=prompt, turns=turns), settings()
    assert as_chat(conversation, "a", settled) == [
        {"role": "user", "content": "Guess my number."},
        {"role": "assistant", "content": "Is it 4?"},
        {"role": "user", "content": "More.\n\nHm."},
    ]
    assert as_chat(conversation, "b", settled) == [
        {"role": "user", "content": "Guess my number.\n\nIs it 4?"},
        {"role": "assistant", "content": "More."},
        {"role": "user", "content": "Hm."},
    ]
    assert prompt.chat[0]["content"] == "Guess my number."
    plain = Conversation(prompt=Prompt(prompt_id="0:0", text="a=", token_ids=np.array([1], np.int32)), turns=turns)
    assert as_chat(plain, "a", settled) == "a=Is it 4?More.Hm."


async def _play(run: PoliciesRun, said: dict[str, list[Trajectory]]) -> None:
    cast = {"asker": run.policies["alice"], "guesser": run.policies["bob"], "judge": run.frozen["judge"]}
    alice, bob = run.policies["alice"], run.policies["bob"]
    while alice.step < alice.num_steps and bob.step < bob.num_steps:
        conversations = await converse(cast, alice.prompts(3), turns=TURNS, group=4, view=tokens_so_far)
        assert len(conversations) == 12
        for one in conversations:
            roles = [turn.role for turn in one.turns]
            assert roles == list(TURNS[: len(roles)])
            assert len(roles) == len(TURNS) or one.end
            for before, after in zip(one.turns, one.turns[1:], strict=False):
                assert after.rollout.prompt.token_ids.tolist() == before.rollout.token_ids.tolist(), "it saw what was said, token by token"
        for role in cast:
            said.setdefault(role, []).extend(turn.rollout for one in conversations for turn in one.turns if turn.role == role)
        wins = [float(len(one.turns[-1].text) % 2) for one in conversations]
        rows = rows_of(conversations, "asker", wins), rows_of(conversations, "guesser", [1 - win for win in wins])
        await asyncio.gather(alice.train(rows[0]), bob.train(rows[1]))
        await asyncio.gather(alice.publish(), bob.publish())


def test_every_token_of_a_conversation_trains_once_in_the_policy_that_sampled_it(tmp_path: Path) -> None:
    said: dict[str, list[Trajectory]] = {}

    async def script(run: PoliciesRun) -> None:
        await _play(run, said)

    found = run_policies({"alice": settings(), "bob": settings()}, script, frozen={"judge": settings()}, folder=tmp_path)
    for role, name in (("asker", "alice"), ("guesser", "bob")):
        assert found[name].problems() == []
        record, rollouts = found[name].chaos.disk.record, said[role]
        assert len(rollouts) == 4 * 12 * 2
        assert {one.rollout_id for one in rollouts} == set(record.trained), "each once, says the checker"
        assert found[name].counts["trained"] == found[name].counts["admitted"] == len(rollouts)
    assert {one.rollout_id.partition(":")[0] for one in said["judge"]} == {"judge"}


@pytest.mark.slow
def test_conversations_go_on_whoever_is_killed(tmp_path: Path) -> None:
    async def script(run: PoliciesRun) -> None:
        await _play(run, {})

    faults = {
        name: Faults(seed=number, until_s=30.0, engine_s=3.0, trainer_s=4.0, scorer_s=4.0)
        for number, name in enumerate(("alice", "bob", "judge"))
    }
    found = run_policies(
        {"alice": settings(8), "bob": settings(8)}, script, frozen={"judge": settings()}, folder=tmp_path, faults=faults, script_s=5.0
    )
    for policy in found.values():
        assert policy.problems() == []
        assert set(policy.chaos.kills) == {"engine", "scorer", "trainer", "script"}
        assert policy.counts["trained"] > 8 * 24 * 0.7


def test_a_conversation_ends_where_it_is_over_and_a_role_that_nobody_plays_is_refused(tmp_path: Path) -> None:
    async def script(run: PoliciesRun) -> None:
        alice, judge = run.policies["alice"], run.frozen["judge"]
        cast = {"a": alice, "j": judge}
        with pytest.raises(ScriptError, match="nobody plays b; the cast has a, j"):
            await converse(cast, alice.prompts(1), turns=("a", "b"), group=2)
        with pytest.raises(ScriptError, match="no turns are named"):
            await converse(cast, alice.prompts(1), turns=(), group=2)
        short = await converse(
            cast, alice.prompts(1), turns=("j", "a", "j"), group=2, view=tokens_so_far, is_over=lambda one: len(one.turns) == 2
        )
        assert [(len(one.turns), one.end) for one in short] == [(2, "over")] * 2
        await alice.train(rows_of(short, "a", [1.0, 0.0]))

    found = run_policies({"alice": settings()}, script, frozen={"judge": settings()}, folder=tmp_path)
    assert found["alice"].problems() == []
    assert found["alice"].counts["trained"] == 2

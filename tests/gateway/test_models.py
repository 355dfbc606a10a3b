"""One agent program with roles, by OpenAI's own client, unmodified: it names the policy that is to speak as the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.serving import RUN_TOKEN, Serving, serving


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path, policies=("alice", "bob", "judge")) as one:
        one.engine.says = lambda prompt: "a" if "asks" in prompt else "b"
        yield one


@pytest.fixture
def lent(desk: Serving) -> dict[str, Any]:
    desk.offer(policy="alice", name="3/1")
    desk.offer(policy="bob", name="7/1")
    with desk.client() as client:
        return client.post("/episodes/next", json={"timeout_s": 5}, headers={"authorization": f"Bearer {RUN_TOKEN}"}).json()


@pytest.fixture
def sdk(lent: dict[str, Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=lent["base_url"], api_key=lent["token"], timeout=10.0, max_retries=0) as client:
        yield client


def post(desk: Serving, lent: dict[str, Any], what: str, body: dict[str, Any]) -> Any:
    with desk.client() as client:
        return client.post(f"/episodes/{lent['episode_id']}/{what}", json=body, headers={"authorization": f"Bearer {lent['token']}"}).json()


def test_each_token_is_in_the_rollout_of_the_policy_that_was_named_as_the_model(
    desk: Serving, sdk: openai.OpenAI, lent: dict[str, Any]
) -> None:
    assert [one.id for one in sdk.models.list()] == lent["models"] == ["alice", "bob", "judge"]
    asks: list[Any] = [{"role": "user", "content": "asks"}]
    said = sdk.chat.completions.create(model="alice", messages=asks).choices[0].message.content
    heard: list[Any] = [{"role": "user", "content": said}]
    answer = sdk.chat.completions.create(model="bob", messages=heard)
    asks += [{"role": "assistant", "content": said}, {"role": "user", "content": answer.choices[0].message.content}]
    sdk.chat.completions.create(model="alice", messages=asks)
    assert sdk.responses.create(model="judge", input="well?").output_text == "b"
    post(desk, lent, "reward", {"turn": answer.id, "reward": 0.25})
    assert post(desk, lent, "finish", {"rewards": {"alice": 1.0}})["end"] == "finished"
    hers, his = desk.trajectories
    assert hers.lent is not None
    eos = desk.tokenizer.eos_token
    texts = [desk.tokenizer.decode(one.token_ids[one.loss_mask]) for one in (hers, his)]
    assert texts == [f"a{eos}a{eos}", f"b{eos}"]
    assert [one.rollout_id for one in (hers, his)] == ["3/1", "7/1"]
    assert his.lent is not None
    assert his.turns is not None
    assert his.turns.rewards is not None
    assert [hers.lent.reward, his.lent.reward] == [1.0, 0.25]
    assert hers.lent.episode == his.lent.episode
    assert his.turns.rewards.tolist() == [0.25]


def test_a_model_that_is_none_is_named_with_those_that_there_are(desk: Serving, sdk: openai.OpenAI, lent: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "asks"}]
    with pytest.raises(openai.NotFoundError, match="the model 'carol' does not exist: this run has alice, bob, judge") as raised:
        sdk.chat.completions.create(model="carol", messages=messages)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="this run has alice, bob, judge"):
        sdk.models.retrieve("carol")
    assert sdk.models.retrieve("bob").id == "bob"
    assert "the model 'eve' does not exist" in post(desk, lent, "finish", {"rewards": {"eve": 1.0}})["error"]["message"]
    assert not desk.engine.asked


def test_an_episode_that_is_given_up_is_lent_again_with_every_policy_and_the_old_one_is_over(
    desk: Serving, sdk: openai.OpenAI, lent: dict[str, Any]
) -> None:
    messages: list[Any] = [{"role": "user", "content": "asks"}]
    sdk.chat.completions.create(model="bob", messages=messages)
    post(desk, lent, "fail", {"error": "mine"})
    with pytest.raises(openai.ConflictError, match="this attempt is over"):
        sdk.chat.completions.create(model="alice", messages=messages)
    with desk.client() as client:
        again = client.post("/episodes/next", json={"timeout_s": 5}, headers={"authorization": f"Bearer {RUN_TOKEN}"}).json()
    assert (again["episode_id"], again["attempt"]) == (lent["episode_id"], 1)
    with openai.OpenAI(base_url=again["base_url"], api_key=again["token"], timeout=10.0, max_retries=0) as second:
        second.chat.completions.create(model="alice", messages=messages)
    post(desk, again, "finish", {"reward": 0.5})
    hers, his = desk.trajectories
    assert hers.lent is not None
    assert (hers.attempt, hers.lent.reward, his.error) == (1, 0.5, "the agent finished without a turn of the model")

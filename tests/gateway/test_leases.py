"""Who may play an attempt, and until when."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import read_snapshot
from orchestrator.rollouts.scorer_tasks import posted_score
from pipelinerl.messages import Finish, Prompt, ScoredTrajectory
from tests.gateway.serving import RUN_TOKEN, Serving, serving

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


class Agent:
    """One attempt, over plain HTTP."""

    def __init__(self, client: httpx.Client, lent: dict[str, Any]) -> None:
        self.client = client
        self.lent = lent

    def post(self, path: str, token: str | None = None, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token or self.lent['token']}"}
        return self.client.post(f"/episodes/{self.lent['episode_id']}/{path}", json=body, headers=headers)


def lend(desk: Serving, client: httpx.Client, **prompt: Any) -> Agent:
    return Agent(client, desk.lend(client, **prompt))


def test_an_episode_says_all_that_an_agent_needs(tmp_path: Path) -> None:
    with serving(tmp_path) as desk, desk.client() as client:
        lent = desk.lend(client, text="sort 3 1 2", name="7/2", answer="1 2 3")
        assert lent["episode_id"] == "7-2"
        assert lent["attempt"] == 0
        assert lent["base_url"] == f"{desk.address}/episodes/7-2/v1"
        assert lent["prompt"] == {"prompt_id": "0:0", "text": "sort 3 1 2", "messages": [], "columns": {"answer": "1 2 3"}}


def test_nothing_to_play_is_no_content_and_an_agent_that_goes_leaves_its_place(tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {RUN_TOKEN}"}
    with serving(tmp_path) as desk, desk.client() as client:
        assert client.post("/episodes/next", json={"timeout_s": 0.01}, headers=headers).status_code == 204
        with pytest.raises(httpx.ReadTimeout):
            client.post("/episodes/next", json={"timeout_s": 30}, headers=headers, timeout=0.2)
        desk.until(lambda: not desk.orchestrator._agents)
        assert lend(desk, client).post("finish").json()["end"] == "finished"


def test_a_wrong_token_an_old_one_and_that_of_another_episode_are_told_apart(tmp_path: Path) -> None:
    with serving(tmp_path, max_attempts=2) as desk, desk.client() as client:
        first = lend(desk, client, name="0/0")
        other = lend(desk, client, name="0/1")
        refused = first.post("v1/chat/completions", token="ep-nonsense-00", **HI)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert first.post("v1/chat/completions", token=other.lent["token"], **HI).status_code == 401
        assert client.post("/episodes/next", json={}, headers={"authorization": "Bearer no"}).status_code == 401
        assert first.post("fail", error="no sandbox").json()["end"] == "failed"
        answer = client.post("/episodes/next", json={}, headers={"authorization": f"Bearer {RUN_TOKEN}"}).json()
        assert (answer["episode_id"], answer["attempt"]) == ("0-0", 1)
        late = first.post("v1/chat/completions", **HI)
        assert (late.status_code, late.headers["x-should-retry"]) == (409, "false")
        assert late.json()["error"]["message"] == "this attempt is over: failed: agent: no sandbox. Ask for another episode"
        assert first.post("finish").status_code == 409
        assert Agent(client, answer).post("v1/chat/completions", **HI).status_code == 200


def test_an_attempt_that_is_not_finished_in_time_is_lent_again_and_fails_in_the_end(tmp_path: Path) -> None:
    with serving(tmp_path, deadline_s=0.2, max_attempts=2) as desk, desk.client() as client:
        agent = lend(desk, client, name="0/0")
        assert agent.post("v1/chat/completions", **HI).status_code == 200
        headers = {"authorization": f"Bearer {RUN_TOKEN}"}
        again = client.post("/episodes/next", json={"timeout_s": 5}, headers=headers).json()
        assert again["attempt"] == 1
        assert agent.post("finish", reward=1.0).status_code == 409
        desk.until(lambda: bool(desk.trajectories))
        (failed,) = desk.trajectories
        assert (failed.finish, failed.num_trained_tokens, failed.lent) == (Finish.ERROR, 0, None)
        assert failed.error == "2 attempts, the last: not finished within gateway.deadline_s = 0.2 s"
        assert desk.leasing.seats[""].turns.num_discarded_tokens == 5


def test_a_finish_that_is_said_twice_is_answered_twice(tmp_path: Path) -> None:
    with serving(tmp_path) as desk, desk.client() as client:
        agent = lend(desk, client)
        agent.post("v1/chat/completions", **HI)
        assert [agent.post("finish", reward=0.5).status_code for _ in range(2)] == [200, 200]
        assert [one.lent.reward for one in desk.trajectories if one.lent] == [0.5]


def test_rewards_of_turns_add_up_unless_the_whole_has_one(tmp_path: Path) -> None:
    with serving(tmp_path) as desk, desk.client() as client:
        for number, total in enumerate((None, 2.0)):
            agent = lend(desk, client, name=f"0/{number}")
            first = agent.post("v1/chat/completions", **HI).json()
            agent.post("v1/chat/completions", **HI)
            assert agent.post("reward", reward=0.25, turn=first["id"]).json() == {"reward": None, "turns": {"1": 0.25}}
            agent.post("reward", reward=0.5, turn=2)
            assert agent.post("reward", reward="much").status_code == 400
            assert agent.post("reward", reward=1.0, turn=0).status_code == 400, "no turn"
            agent.post("finish", **_reward(total))
        assert [one.lent.reward for one in desk.trajectories if one.lent] == [0.75, 2.0]


def test_an_episode_without_a_turn_fails_and_one_without_a_reward_is_left_to_the_scorer(tmp_path: Path) -> None:
    with serving(tmp_path) as desk, desk.client() as client:
        lend(desk, client, name="0/0").post("finish", reward=1.0)
        agent = lend(desk, client, name="0/1")
        agent.post("v1/chat/completions", **HI)
        agent.post("finish")
        silent, unscored = desk.trajectories
        assert silent.error == "the agent finished without a turn of the model"
        assert unscored.lent is not None
        assert unscored.lent.reward is None


def test_turns_and_contexts_have_a_bound(tmp_path: Path) -> None:
    with serving(tmp_path, max_requests=2, max_parallel=2) as desk, desk.client() as client:
        agent = lend(desk, client)
        long = agent.post("v1/chat/completions", messages=[{"role": "user", "content": "x" * 5000}])
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert agent.post("v1/chat/completions", n=3, **HI).status_code == 400
        assert agent.post("v1/chat/completions", n=2, **HI).status_code == 200
        assert agent.post("v1/chat/completions", **HI).json()["error"]["code"] == "too_many_turns"


def test_a_gateway_that_begins_anew_costs_the_attempts_it_had_lent_and_no_agent_is_blamed(tmp_path: Path) -> None:
    with serving(tmp_path, max_attempts=1) as desk, desk.client() as client:
        agent = lend(desk, client)
        desk.do(lambda: desk.orchestrator._send(*desk.orchestrator._introduce(())))
        headers = {"authorization": f"Bearer {RUN_TOKEN}"}
        again = client.post("/episodes/next", json={"timeout_s": 5}, headers=headers).json()
        assert again["attempt"] == 1
        assert agent.post("finish").status_code == 409
        assert not desk.trajectories


def test_what_an_agent_began_with_survives_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as desk, desk.client() as client:
        agent = lend(desk, client, text="question")
        agent.post("v1/chat/completions", **HI)
        agent.post("finish", reward=1.0)
        (trajectory,) = desk.trajectories
    with contextlib.closing(Ledger(None)) as ledger:
        shared = Prompt(prompt_id="0:0", text="question", token_ids=np.array([1, 2], np.int32))
        ledger.admit(0, shared, group_size=1, position=(0, 1), now_s=0.0)
        score = posted_score(trajectory)
        assert score is not None
        assert score.components == {"agent": 1.0}
        ledger.record_score(ScoredTrajectory(trajectory=trajectory, score=score), now_s=1.0)
        ledger.flush()
        (again,) = read_snapshot(ledger).scored
    assert again.trajectory.prompt.token_ids.tolist() == trajectory.prompt.token_ids.tolist()
    assert len(trajectory.prompt.token_ids) != 2


def _reward(total: float | None) -> dict[str, Any]:
    return {} if total is None else {"reward": total}


def test_all_contexts_of_an_episode_fit_one_packed_row(tmp_path: Path) -> None:
    """Contexts of their own, until no token of a turn would fit behind the next."""
    with serving(tmp_path, max_tokens=100) as desk, desk.client() as client:
        agent = lend(desk, client)
        answers = []
        while not answers or answers[-1].status_code == 200:
            messages = [{"role": "user", "content": f"sub-agent {len(answers)}"}]
            answers.append(agent.post("v1/chat/completions", messages=messages))
        assert "leaves no room for this turn: at most batch.max_tokens = 100 in all" in answers[-1].json()["error"]["message"]
        agent.post("finish", reward=1.0)
        (trajectory,) = desk.trajectories
        assert trajectory.nodes is not None
        assert len(trajectory.nodes.parents) == 2 * (len(answers) - 1)
        assert trajectory.num_tokens <= 100

"""Stages of a recorded run, alone: with its own settings they say what they said, with others exactly what the change does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from orchestrator.replay.__main__ import main, replay
from orchestrator.replay.batching import batch_again
from orchestrator.replay.prompts import draw_again
from orchestrator.replay.recorded import Recording, Settled, read_drawn, read_recording
from orchestrator.sources import PromptSource
from orchestrator.state.ledger import Ledger
from pipelinerl.config import DataSection
from pipelinerl.config_file import load_run, parse
from pipelinerl.errors import ConfigError, LedgerError
from pipelinerl.messages import UNSAMPLED, Finish, Outcome, Prompt, Scored, ScoredTrajectory, Trajectory
from pipelinerl.tokenizer import load_tokenizer
from tests.tiny_models import make_tokenizer

REWARDS = Path(__file__).parents[1] / "scorer" / "example_rewards.py"
STOPPED = "stopped early"
COMPLETIONS = (("a", "bbb"), ("cc", "dddd"), ("e", "e"), ("ff", STOPPED))
"""Rewards are their lengths, so advantages of the first two groups are -0.7071 and 0.7071, and the third has none. One rollout of the last
was stopped early, which nobody scores, and without which its sibling has none to differ from."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four groups, one to a step, as the real batching stage left it."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").mkdir()
    make_tokenizer(folder / "model")
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {"source": "unused.jsonl"},
        "reward": [{"function": f"{REWARDS}:nothing"}],
        "rollout": {"group_size": 2},
        "batch": {"groups_per_step": 1},
        "scorer": {"slots": 1},
    }
    config = parse(tree, origin="test")
    (folder / "config.json").write_text(config.model_dump_json())
    tokenizer = load_tokenizer(folder / "model")
    groups = [_group(number, texts, tokenizer) for number, texts in enumerate(COMPLETIONS)]
    members = {member.trajectory.rollout_id: member for group in groups for member in group.members}
    with contextlib.closing(Ledger(folder / "ledger.sqlite", keep_groups=4)) as ledger:
        for group in groups:
            ledger.admit(group.group_id, group.prompt, group_size=2, position=(0, group.group_id + 1), now_s=0.0)
            for member in group.members:
                ledger.score(member, now_s=0.0)
        asyncio.run(batch_again(config, groups, scored=members, folder=folder, ledger=ledger))
        ledger.saved(2, "commit", now_s=1.0)
    return folder


def _group(number: int, texts: tuple[str, ...], tokenizer: object) -> Settled:
    prompt = Prompt(prompt_id=f"0:{number}", text="?", token_ids=_ids(tokenizer, "?"))
    members = tuple(_scored(number, sibling, prompt, text, _ids(tokenizer, text)) for sibling, text in enumerate(texts))
    return Settled(number=number + 1, group_id=number, step=0, prompt=prompt, members=members, decisions={})


def _ids(tokenizer: object, text: str) -> np.ndarray:
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)  # pyright: ignore[reportAttributeAccessIssue]


def _scored(group_id: int, sibling: int, prompt: Prompt, text: str, ids: np.ndarray) -> ScoredTrajectory:
    name = f"{group_id}/{sibling}"
    trajectory = Trajectory(
        rollout_id=name,
        group_id=group_id,
        sibling=sibling,
        attempt=0,
        prompt=prompt,
        token_ids=np.concatenate((prompt.token_ids, ids)),
        trains=np.array([False] + [True] * len(ids)),
        logprobs=np.zeros(1 + len(ids), np.float32),
        versions=np.array([UNSAMPLED] + [0] * len(ids), np.int32),
        finish=Finish.STOP,
    )
    reward = float(len(text))
    score = Scored(rollout_id=name, attempt=0, outcome=Outcome.OK, reward=reward, components={"nothing": reward})
    if text == STOPPED:
        score = Scored(rollout_id=name, attempt=0, outcome=Outcome.STOPPED, reward=None)
    return ScoredTrajectory(trajectory=trajectory, score=score)


def test_with_the_runs_own_settings_nothing_differs(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay(run_folder, stages=["scoring", "batching"], overrides=[])
    said = capsys.readouterr().out
    assert "recorded: 4 of 4 groups" in said
    assert "scoring: 8 rollouts, 8 as recorded, 0 differ" in said
    assert "batching: 8 rollouts, from step 0 on: 0 end otherwise, 0 with other advantages" in said


def test_another_reward_and_a_filter_show_what_they_change(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f'reward=[{{function="{REWARDS}:act"}}]', 'algorithm.overrides={group_filter="zero_variance"}']
    replay(run_folder, stages=["scoring", "batching"], overrides=overrides)
    said = capsys.readouterr().out
    assert "scoring: 8 rollouts, 1 as recorded, 7 differ" in said, "the component has another name"
    assert "reward, mean: 2 -> 2" in said
    assert "component nothing, mean: 2 -> none" in said
    assert "batching: 8 rollouts, from step 0 on: 3 end otherwise, 0 with other advantages" in said
    assert "step -> filtered: zero_variance: 2" in said
    assert "step -> another step: 1" in said, "the group behind moves up"
    lines = [json.loads(line) for line in (run_folder / "replay" / "scoring.jsonl").read_text().splitlines()]
    assert (lines[1]["completion"], lines[1]["old"]["reward"], lines[1]["new"]["components"]) == ("bbb", 3.0, {"act": 3.0})


def test_rewards_that_compare_siblings_are_part_of_scoring(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f'reward=[{{function="{REWARDS}:nothing"}}, {{function="{REWARDS}:constant", per="group", weight=0.5}}]']
    replay(run_folder, stages=["scoring"], overrides=overrides)
    said = capsys.readouterr().out
    assert "reward, mean: 2 -> 7" in said, "half of 10 more"
    assert "component constant, mean: none -> 10" in said


def test_another_algorithm_gives_other_advantages(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay(run_folder, stages=["batching"], overrides=["algorithm.name=dr_grpo"])
    said = capsys.readouterr().out
    assert "0 end otherwise, 5 with other advantages" in said
    assert "rollout 0/1, prompt 0:1" not in said
    assert "rollout 0/1, prompt 0:0: advantage 0.7071 -> 1" in said


def test_a_reward_that_does_not_load_is_told(run_folder: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as told:
        replay(run_folder, stages=["scoring"], overrides=[f'reward=[{{function="{REWARDS}:nothin"}}]'])
    assert "did you mean 'nothing'?" in str(told.value.exceptions)


def test_a_stage_that_cannot_run_alone_says_why(run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"dispatch cannot be replayed: .* only engines can repeat"):
        replay(run_folder, stages=["dispatch"], overrides=[])
    monkeypatch.setattr("sys.argv", ["replay", str(run_folder / "nowhere"), "--stage=scoring"])
    with pytest.raises(SystemExit):
        main()
    assert "name the folder of a run" in capsys.readouterr().err


def test_only_the_newest_groups_stay_and_batching_begins_with_the_first_whole_step(run_folder: Path, tmp_path: Path) -> None:
    recording = read_recording(run_folder / "ledger.sqlite")
    assert [group.step for group in recording.groups] == [0, 1, 2, 3]
    assert Recording(groups=recording.groups[1:], num_settled=4).from_a_step_on() == recording.groups[2:], "of step 1 some may be gone"
    assert Recording(groups=[recording.groups[0], recording.groups[2]], num_settled=4).from_a_step_on() == []
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite", keep_groups=1)) as ledger:
        for group in recording.groups:
            ledger.admit(group.group_id, group.prompt, group_size=2, position=(0, 0), now_s=0.0)
            for member in group.members:
                ledger.score(member, now_s=0.0)
        scored = {member.trajectory.rollout_id: member for group in recording.groups for member in group.members}
        asyncio.run(batch_again(load_run(run_folder), recording.groups, scored=scored, folder=tmp_path, ledger=ledger))
        ledger.saved(2, "commit", now_s=1.0)
        ledger.flush()
        again = read_recording(tmp_path / "ledger.sqlite")
        assert [group.group_id for group in again.groups] == [2, 3], "the third is in no checkpoint"
        ledger.saved(4, "commit", now_s=1.0)
        ledger.flush()
        assert [group.group_id for group in read_recording(tmp_path / "ledger.sqlite").groups] == [3]


def test_prompts_are_drawn_again_and_what_changed_in_the_source_is_named(run_folder: Path, tmp_path: Path) -> None:
    def source(*texts: str) -> PromptSource:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        section = DataSection(source=str(path), shuffle=False)  # pyright: ignore[reportCallIssue]
        return PromptSource(section, tokenizer=load_tokenizer(run_folder / "model"), seed=0, max_prompt_tokens=9)

    drawn = read_drawn(run_folder / "ledger.sqlite")[:3]
    assert draw_again(source("?", "?", "?"), drawn).differences == []
    assert draw_again(source("?", "!", "?"), drawn).differences == ["prompt 0:1: text '?' -> '!'"]
    assert draw_again(source("?", "?", "?"), [drawn[0], drawn[2]]).num_passed == 1


def test_a_folder_without_records_is_told(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((run_folder / "config.json").read_text())
    Ledger(tmp_path / "ledger.sqlite").close()
    with pytest.raises(LedgerError, match="no recorded group"):
        replay(tmp_path, stages=["scoring"], overrides=[])

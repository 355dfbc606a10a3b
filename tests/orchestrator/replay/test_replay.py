"""Stages of a recorded run, alone: with its own settings they say what they said, with others exactly what the change does."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.data.sources import PromptSource
from orchestrator.ledger.ledger import Ledger
from orchestrator.replay.__main__ import main, replay
from orchestrator.replay.batching import replay_batching
from orchestrator.replay.prompts import replay_prompts
from orchestrator.replay.recorded import RecordedGroup, Recording, read_prompts, read_recording
from orchestrator.rescore.__main__ import main as rescore
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import DataSection
from pipelinerl.config.file import load_run, parse, write_run
from pipelinerl.data.tokenizer import TextEncoder, load_tokenizer
from pipelinerl.errors import ConfigError, LedgerError
from pipelinerl.messages import UNSAMPLED, Finish, Outcome, Prompt, Score, ScoredTrajectory, Trajectory
from pipelinerl.observe.journal import Journal
from tests.rewards.test_reward_model_process import by_transformers
from tests.sim.clock import simulate
from tests.sim.peers import World
from tests.sim.run import config, run
from tests.tiny_models import make_classifier, make_tokenizer

pytestmark = pytest.mark.process

REWARDS = Path(__file__).parents[2] / "rewards" / "example_rewards.py"
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
    settings = parse(tree, origin="test")
    write_run(folder, settings)
    tokenizer = load_tokenizer(folder / "model")
    groups = [_group(number, texts, tokenizer) for number, texts in enumerate(COMPLETIONS)]
    with contextlib.closing(Ledger(folder / "ledger.sqlite", keep_groups=4)) as ledger:
        for group in groups:
            ledger.admit(group.group_id, group.prompt, group_size=2, position=(0, group.group_id + 1), now_s=0.0)
            for member in group.members:
                ledger.record_score(member, now_s=0.0)
        with contextlib.closing(Journal(folder, "orchestrator")) as journal:
            simulate(replay_batching(settings, groups, ledger=ledger, journal=journal))
        ledger.record_checkpoint(2, "commit", now_s=1.0)
    return folder


def _group(number: int, texts: tuple[str, ...], tokenizer: object) -> RecordedGroup:
    prompt = Prompt(prompt_id=f"0:{number}", text="?", token_ids=_ids(tokenizer, "?"))
    members = tuple(_scored(number, sibling, prompt, text, _ids(tokenizer, text)) for sibling, text in enumerate(texts))
    return RecordedGroup(number=number + 1, group_id=number, step=0, prompt=prompt, members=members, results={})


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
        loss_mask=np.array([False] + [True] * len(ids)),
        logprobs=np.zeros(1 + len(ids), np.float32),
        versions=np.array([UNSAMPLED] + [0] * len(ids), np.int32),
        finish=Finish.STOP,
    )
    reward = float(len(text))
    score = Score(rollout_id=name, attempt=0, outcome=Outcome.OK, reward=reward, components={"nothing": reward})
    if text == STOPPED:
        score = Score(rollout_id=name, attempt=0, outcome=Outcome.STOPPED, reward=None)
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


@pytest.mark.slow
@pytest.mark.vllm
def test_a_reward_model_scores_a_recorded_run_again_in_a_replay_and_in_try(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = tmp_path / "judge"
    make_classifier(judge, "Qwen2", seed=1)
    reward = f'reward=[{{model="{judge}", dtype="float32", deadline_s=60.0}}]'
    replay(run_folder, stages=["scoring"], overrides=[reward])
    lines = [json.loads(line) for line in (run_folder / "replay" / "scoring.jsonl").read_text().splitlines()]
    found = {line["completion"]: line["new"]["components"]["judge"] for line in lines if line["new"]["outcome"] == "ok"}
    for text in ("a", "bbb", "dddd"):
        assert found[text] == pytest.approx(
            by_transformers(judge, f"[user] ? [assistant] {text} end.", adds_special_tokens=False), abs=1e-4
        )
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 64, "eos_token_id": 2}')
    settings = tmp_path / "my.toml"
    settings.write_text(f'[model]\npath = "{tmp_path / "model"}"\n[data]\nsource = "unused.jsonl"\n[rollout]\nmax_tokens = 16\n')
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        rescore([str(settings), reward, "--run", str(run_folder), "--rows", "1"])
    said, error = capsys.readouterr()
    assert end.value.code == 0, error
    assert f"   {'judge':<24} {found['ff']:>10.4g} x 1 = " in said


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
    with pytest.raises(ConfigError, match=r"comparing cannot be replayed: it is now called group_rewards, and part of scoring"):
        replay(run_folder, stages=["comparing"], overrides=[])
    with pytest.raises(ConfigError, match=r"delivery cannot be replayed: it is now called training"):
        replay(run_folder, stages=["delivery"], overrides=[])
    with pytest.raises(LedgerError, match="no recorded step scores"):
        replay(run_folder, stages=["prm"], overrides=[])
    for override in ("pipeline.kv_admission=true", "pipeline.migration=waiting"):
        with pytest.raises(ConfigError, match=r"generation cannot be replayed: in this run rollouts went to engines one by one"):
            replay(run_folder, stages=["generation"], overrides=[override, "engine.count=2"])
    monkeypatch.setattr("sys.argv", ["replay", str(run_folder / "nowhere"), "--stage=scoring"])
    with pytest.raises(SystemExit):
        main()
    assert "name the folder of a run" in capsys.readouterr().err


def test_only_the_newest_groups_stay_and_batching_begins_with_the_first_whole_step(run_folder: Path, tmp_path: Path) -> None:
    recording = read_recording(run_folder / "ledger.sqlite")
    assert [group.step for group in recording.groups] == [0, 1, 2, 3]
    assert Recording(groups=recording.groups[1:], num_completed=4).from_a_step_on() == recording.groups[2:], "of step 1 some may be gone"
    assert Recording(groups=[recording.groups[0], recording.groups[2]], num_completed=4).from_a_step_on() == []
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite", keep_groups=1)) as ledger:
        for group in recording.groups:
            ledger.admit(group.group_id, group.prompt, group_size=2, position=(0, 0), now_s=0.0)
            for member in group.members:
                ledger.record_score(member, now_s=0.0)
        with contextlib.closing(Journal(tmp_path, "orchestrator")) as journal:
            simulate(replay_batching(load_run(run_folder), recording.groups, ledger=ledger, journal=journal))
        ledger.record_checkpoint(2, "commit", now_s=1.0)
        ledger.flush()
        again = read_recording(tmp_path / "ledger.sqlite")
        assert [group.group_id for group in again.groups] == [2, 3], "the third is in no checkpoint"
        ledger.record_checkpoint(4, "commit", now_s=1.0)
        ledger.flush()
        assert [group.group_id for group in read_recording(tmp_path / "ledger.sqlite").groups] == [3]


def test_prompts_are_drawn_again_and_what_changed_in_the_source_is_named(run_folder: Path, tmp_path: Path) -> None:
    def source(*texts: str) -> PromptSource:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        section = DataSection(source=str(path), shuffle=False)  # pyright: ignore[reportCallIssue]
        return PromptSource(section, encoder=TextEncoder(load_tokenizer(run_folder / "model")), seed=0, max_prompt_tokens=9)

    drawn = read_prompts(run_folder / "ledger.sqlite")[:3]
    assert replay_prompts(source("?", "?", "?"), drawn).differences == []
    assert replay_prompts(source("?", "!", "?"), drawn).differences == ["prompt 0:1: text '?' -> '!'"]
    assert replay_prompts(source("?", "?", "?"), [drawn[0], drawn[2]]).num_passed == 1


def test_a_folder_without_records_is_told(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((run_folder / "config.json").read_text())
    Ledger(tmp_path / "ledger.sqlite").close()
    with pytest.raises(LedgerError, match="no recorded group"):
        replay(tmp_path, stages=["scoring"], overrides=[])
    with pytest.raises(LedgerError, match="no recorded entry"):
        replay(tmp_path, stages=["generation"], overrides=[])


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of eight steps on three engines, some of whose swaps fail, as its orchestrator left it."""
    folder = tmp_path_factory.mktemp("simulated")
    settings = config(engine={"count": 3, "max_running": 8}, trainer={"steps": 8}, run={"record_groups": 1000})
    world = World(refused_fraction=0.1, mean_tokens=40)
    assert run(settings, folder=folder, world=world, is_recorded=True).ending.reason == "finished"
    return folder


def replayed(folder: Path, stage: str, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    replay(folder, stages=[stage], overrides=list(overrides))
    return capsys.readouterr().out


def changed(folder: Path, to: Path, *, line: Callable[[dict[str, Any]], bool] = lambda line: True, sql: str = "") -> Path:
    """A copy of a run folder, with the journal lines that `line` keeps, and a ledger that was tampered with."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("replay"))
    journal = to / "journal" / "orchestrator.jsonl"
    journal.write_text("".join(text for text in journal.read_text().splitlines(keepends=True) if line(json.loads(text))))
    with contextlib.closing(sqlite3.connect(to / "ledger.sqlite")) as ledger, ledger:
        ledger.executescript(sql)
    return to


def test_generation_asks_the_engines_that_it_asked_when_it_did(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replayed(simulated, "generation", capsys)
    num_attempts = int(re.findall(r"generation: (\d+) attempts", said)[0])
    assert num_attempts >= 256
    assert f"{num_attempts} of the recorded engine at the recorded version, 0 of another, 0 not asked for" in said
    assert "0 later and 0 earlier" in said
    assert "in the recorded order" in said


def test_an_engine_that_answered_otherwise_gets_other_groups(simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = "UPDATE events SET t = t + 0.5 WHERE kind = 'generated' AND peer = 'engine-1' AND rollout_id LIKE '1/%'"
    said = replayed(changed(simulated, tmp_path / "run", sql=later), "generation", capsys)
    assert re.search(r", [1-9]\d* of another", said)
    assert re.search(r"rollout \d+/0, attempt 0: engine-1 at version 0 -> engine-[02] at version 0", said)


def test_a_tighter_bound_has_groups_wait(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replayed(simulated, "generation", capsys, "pipeline.max_staleness=0")
    late, early = map(int, re.findall(r"asked for ([\d,]+) later and ([\d,]+) earlier", said)[0])
    assert late > 100
    assert early == 0


def test_weight_sync_orders_what_it_ordered_and_an_answer_that_never_came_is_seen(
    simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = replayed(simulated, "weight_sync", capsys)
    assert re.search(r"weight_sync: 8 policies, 3 engines, \d+ orders; 0 engines differ", said)
    assert said.count("order to commit median") == 3
    silent = changed(
        simulated, tmp_path / "run", line=lambda line: (line["kind"], line.get("engine_id"), line.get("version")) != ("swap", 1, 2)
    )
    said = replayed(silent, "weight_sync", capsys)
    assert "1 engines differ" in said
    assert "  engine-1: order 3: policy 3 -> policy 4" in said, "it has the second open while the third is published, and skips it"


def test_training_gives_replicas_what_was_packed_also_to_more_of_them(
    simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = replayed(simulated, "training", capsys)
    num_rows = int(re.findall(r"training: steps 0 to 7, (\d+) rows to 1 replicas; 0 differ", said)[0])
    assert f"{num_rows} waves" in said
    said = replayed(simulated, "training", capsys, "trainer.ranks=3")
    assert f"{num_rows} rows to 3 replicas; 0 differ" in said
    lines = [json.loads(line) for line in (simulated / "replay" / "training.jsonl").read_text().splitlines()]
    assert {line["replica"] for line in lines} == {0, 1, 2}
    assert sum(bool(line["rollouts"]) for line in lines) == num_rows
    wrong = "UPDATE events SET num_tokens = num_tokens + 1 WHERE kind = 'closed' AND step = 3"
    said = replayed(changed(simulated, tmp_path / "run", sql=wrong), "training", capsys)
    assert re.search(r"step 3: its end says tokens \d+ to replica 0, its rows hold \d+", said)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run whose hopeless rollouts were stopped while they were written."""
    folder = tmp_path_factory.mktemp("followed")
    settings = config(
        prm={
            "path": "unused",
            "chunk_tokens": 3,
            "early_stop": {"threshold": 0.1, "keep_probability": 0.25, "min_steps": 1, "max_false_stop_fraction": 1.0},
        },
        algorithm={"name": "rloo_early_stop", "overrides": {"aggregation": "seq-mean-token-sum-norm"}},
        trainer={"steps": 6},
        run={"record_groups": 1000},
    )
    rule = MethodAdvantages(method_of(settings), settings.reward)
    simulated = run(settings, folder=folder, world=World(token_s=1e-3, prm_s=1e-4), group_advantages=rule, is_recorded=True)
    assert simulated.ending.reason == "finished"
    return folder


def test_prm_scoring_stops_whom_it_stopped_and_others_under_another_rule(
    followed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "0 differ" in replayed(followed, "training", capsys), "a stopped rollout counts only where its group is part of a step"
    said = replayed(followed, "prm", capsys)
    assert re.search(r"prm: \d{3} rollouts with [\d,]+ steps; 0 are stopped that were not, 0 were and are not, 0 have other", said)
    lines = [json.loads(line) for line in (followed / "replay" / "prm.jsonl").read_text().splitlines()]
    assert any(line["old"]["early_stop"] and line["old"]["early_stop"]["stops"] for line in lines)
    assert all(line["old"]["early_stop"] == line["new"]["early_stop"] for line in lines)
    said = replayed(followed, "prm", capsys, "prm.early_stop.threshold=0.5")
    newly = int(re.findall(r"([\d,]+) are stopped that were not, 0 were", said)[0])
    by_hand = [line for line in lines if not line["old"]["early_stop"] and any(score < 0.5 for score in line["old"]["scores"])]
    assert 0.5 * len(by_hand) < newly <= len(by_hand), "three of four coins stop, where the flag comes before the end"
    said = replayed(followed, "prm", capsys, "prm.early_stop.threshold=-1")
    stopped = sum(bool(line["old"]["early_stop"] and line["old"]["early_stop"]["stops"]) for line in lines)
    assert f"0 are stopped that were not, {stopped} were and are not" in said

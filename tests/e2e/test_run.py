"""Whole runs, as a user starts them: real vLLM, the real trainer, real reward workers, one command line."""

from __future__ import annotations

import functools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orchestrator.replay.__main__ import replay
from orchestrator.replay.recorded import read_recording
from pipelinerl.errors import ConfigError
from pipelinerl.observe.history import story_of
from pipelinerl.observe.lines import read_journals
from scripts.chaos import victims
from tests.warm_runs import Started

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's config with an untrained model, cut to four small steps."""
    from pipelinerl.demo.settings import demo_config, make_demo_model

    folder = tmp_path_factory.mktemp("run")
    path = demo_config(folder=folder, seed=0)
    make_demo_model(folder / "demo-model", seed=0)
    return path


DIGITS = range(2, 12)
"""Tokens of the demo's model: after padding and the end of sequence."""


SMALL = ("trainer.steps=4", "batch.groups_per_step=4", "evaluation.every=0", "evaluation.limit=8")
SMALL += (f'reward=[{{function = "{Path(__file__).with_name("rewards.py")}:even_length"}}]',)


def command(settings: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "pipelinerl", "run", str(settings), *SMALL, *overrides]


def newest_run(settings: Path, name: str) -> Path:
    return max(settings.parent.glob(f"{name}-2*"), key=lambda path: path.stat().st_mtime)


def processes_of(run_folder: Path) -> list[str]:
    """Command lines of live processes that name the run's folder."""
    return [line for line in subprocess.check_output(["ps", "-eo", "args"], text=True).splitlines() if str(run_folder) in line]


OWN_RULES = Path(__file__).with_name("rules.py")
OWN = f'algorithm.overrides={{objective="{OWN_RULES}:loss", masks="{OWN_RULES}:mask", advantage="{OWN_RULES}:advantage"}}'


Ended = Callable[..., Path]


@pytest.fixture(scope="module")
def ended(settings: Path, started_warm: Started) -> Ended:
    """Runs in a mode, to the end, and gives the run's folder; nobody of it is left."""

    def run(mode: str, *overrides: str) -> Path:
        code, printed = started_warm("run", settings, *SMALL, f"pipeline.mode={mode}", f"run.name={mode}", *overrides)
        assert code == 0, printed
        run_folder = newest_run(settings, mode)
        assert not processes_of(run_folder)
        return run_folder

    return run


@pytest.fixture(scope="module")
def run_of(settings: Path, ended: Ended) -> Callable[[str], Path]:
    """A run of each mode, made once, the streaming one as a user starts it. One has a loss, a mask and an advantage of a user's own.

    The synchronous one starts from the model that the streaming one left behind, trains adapters, and publishes nothing else.
    """

    @functools.cache
    def found(mode: str) -> Path:
        if mode == "streaming":
            subprocess.run(command(settings, "run.name=streaming"), check=True, capture_output=True, text=True)
            run_folder = newest_run(settings, mode)
            assert not processes_of(run_folder)
            return run_folder
        if mode == "one_step_off":
            return ended(mode, OWN)
        lora = ("lora.rank=4", "weights.adapters=separate", "trainer.learning_rate=0.01")
        return ended(mode, f"model.path={found('streaming') / 'model'}", *lora)

    return found


@pytest.mark.parametrize("mode", ["streaming", "one_step_off", "sync"])
def test_a_run_trains_every_sample_it_admits_and_leaves_nobody_behind(run_of: Callable[[str], Path], mode: str):
    run_folder = run_of(mode)
    lines = read_journals(run_folder)
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    swaps = [line["version"] for line in lines if line["kind"] == "swap"]
    assert swaps == sorted({*swaps, 4})  # only upwards, to the last; an engine behind goes straight to the newest of those published
    assert mode != "sync" or swaps == [1, 2, 3, 4]
    assert max(line["staleness_max"] for line in steps) <= {"streaming": 3, "one_step_off": 1, "sync": 0}[mode]
    assert steps[0]["trainer"]["logprob_gap_max"] <= 1e-4
    assert (f"{OWN_RULES}:mask_dropped_fraction" in steps[0]["trainer"]) == (mode == "one_step_off")
    with sqlite3.connect(run_folder / "ledger.sqlite") as ledger:
        trained = ledger.execute("SELECT step, count(*) FROM ended_rollouts WHERE status = 'trained' GROUP BY step").fetchall()
    assert trained == [(step, 32) for step in range(4)]
    identity = next(line["rollouts"] for line in lines if line["kind"] == "end")
    assert identity["in_flight"] == 0
    assert identity["admitted"] == sum(count for fate, count in identity.items() if fate != "admitted")
    assert (run_folder / "report.html").exists()


def test_the_trained_model_differs_and_is_served_again_and_adapters_travel_alone(settings: Path, run_of: Callable[[str], Path]):
    trained = run_of("streaming") / "model"
    whole = (trained / "model.safetensors").stat().st_size
    assert (trained / "model.safetensors").read_bytes() != (settings.parent / "demo-model" / "model.safetensors").read_bytes()
    run_folder = run_of("sync")
    lines = read_journals(run_folder)
    gaps = [line["trainer"]["logprob_gap_max"] for line in lines if line["kind"] == "step"]
    assert max(gaps) <= 1e-4, "every adapter that an engine sampled under is the one that was trained"
    assert min(line["trainer"]["grad_norm"] for line in lines if line["kind"] == "step") > 0
    choices = [line["text"] for line in lines if line["kind"] == "choice"]
    assert any(text.startswith("adapters are served separately") for text in choices), choices
    published = (run_folder / "adapter" / "adapter_model.safetensors").stat().st_size
    assert published < whole / 4


def test_two_runs_of_one_seed_begin_with_the_same_step(run_of: Callable[[str], Path], ended: Ended):
    """Where generation and training take turns. Log-probabilities hang in their last digits on which sequences shared a forward pass."""
    overrides = (f"model.path={run_of('streaming') / 'model'}", "lora.rank=4", "weights.adapters=separate", "trainer.steps=1")
    recordings = [read_recording(folder / "ledger.sqlite") for folder in (run_of("sync"), ended("sync", *overrides))]
    first, second = (
        {member.trajectory.rollout_id: (member, group) for group in recording.groups if group.step == 0 for member in group.members}
        for recording in recordings
    )
    assert len(first) == 32
    assert first.keys() == second.keys()
    for name, (one, group) in first.items():
        other, its_group = second[name]
        assert one.trajectory.token_ids.tolist() == other.trajectory.token_ids.tolist()
        np.testing.assert_allclose(one.trajectory.logprobs, other.trajectory.logprobs, atol=1e-5)
        assert one.score.reward == other.score.reward
        np.testing.assert_array_equal(group.results[name].advantages, its_group.results[name].advantages)


def wait_for_steps(run_folder: Path, number: int) -> None:
    """Until so many more steps are done."""
    journal = run_folder / "journal" / "orchestrator.jsonl"
    end, deadline = journal.read_text().count('"kind": "step"') + number, time.monotonic() + 120
    while journal.read_text().count('"kind": "step"') < end:
        assert time.monotonic() < deadline, f"{number} steps were not trained within 120 s"
        time.sleep(0.1)


def test_episodes_with_an_environment_train_by_gigpo_also_when_the_scorer_is_killed(settings: Path, capsys: pytest.CaptureFixture[str]):
    """A guessing game: the model says a digit, which ends its turn, and is told higher or lower."""
    game = "pipelinerl.demo.guess_number"
    overrides = ("run.name=game", "algorithm.name=gigpo", "trainer.steps=8", "trainer.learning_rate=2e-3", f"data.source={game}:prompts")
    overrides += (f"environment.function={game}:reply", "environment.max_turns=4", f'reward=[{{function = "{game}:reward"}}]')
    overrides += (
        "rollout.max_tokens=26",
        f"rollout.stop_token_ids={list(DIGITS)}",
        f"evaluation.source={game}:prompts",
        "run.restart_wait_s=0.0",
    )
    run = subprocess.Popen(command(settings, *overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (found := list(settings.parent.glob("game-2*/journal/orchestrator.jsonl"))):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    run_folder = found[0].parent.parent
    wait_for_steps(run_folder, 1)
    (process_id,) = victims.find("scorer", run_folder)
    os.kill(process_id, signal.SIGKILL)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], check=True)
    lines = read_journals(run_folder)
    steps = [line["trainer"] for line in lines if line["kind"] == "step"]
    assert len(steps) == 8
    assert steps[0]["logprob_gap_max"] <= 1e-4, "the trainer sees each turn behind what the engine saw before it"
    assert min(step["grad_norm"] for step in steps) > 0
    assert [line["num_failed"] for line in lines if line["kind"] == "evaluation"] == [0, 0]
    trained = [member.trajectory for group in read_recording(run_folder / "ledger.sqlite").groups for member in group.members]
    turns = [len(one.turns.starts) for one in trained if one.turns is not None]
    assert len(turns) == len(trained)
    assert {1, 2, 3, 4} == set(turns)
    replies = {
        number for one in trained for number in one.token_ids[len(one.prompt.token_ids) :][~one.loss_mask[len(one.prompt.token_ids) :]]
    }
    assert len(replies) == 2, "nothing but h and l was ever said to the model"
    longest = max(trained, key=lambda one: len(one.turns.starts) if one.turns else 0)
    assert sum("the environment: " in line for line in story_of(run_folder, longest.rollout_id)) >= 3
    with pytest.raises(ConfigError, match="generation cannot be replayed: this run has an environment"):
        replay(run_folder, stages=["generation"], overrides=[])
    replay(run_folder, stages=["batching"], overrides=[])
    assert "0 end otherwise, 0 with other advantages" in capsys.readouterr().out


@pytest.mark.timeout(600)
def test_whoever_is_killed_the_run_goes_on_and_so_it_does_after_it_was_stopped(settings: Path):
    """Engine, scorer, trainer rank and orchestrator by SIGKILL, then everything by Ctrl-C and again with --resume; then judged."""
    overrides = ("run.name=hardy", "run.restart_wait_s=0.0", "checkpoint.every=3", "trainer.steps=5000")
    run = subprocess.Popen(command(settings, *overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (found := list(settings.parent.glob("hardy-2*/journal/orchestrator.jsonl"))):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    run_folder = found[0].parent.parent
    for role in ("engine", "scorer", "trainer", "orchestrator"):
        wait_for_steps(run_folder, 4)
        (process_id,) = victims.find(role, run_folder)
        os.kill(process_id, signal.SIGKILL)
    wait_for_steps(run_folder, 4)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=90)
    assert run.returncode == 0, output
    assert "stopped by a signal" in output
    assert (run_folder / "model" / "model.safetensors").exists()
    assert not processes_of(run_folder)
    end = next(line for line in read_journals(run_folder) if line["kind"] == "end")
    assert end["rollouts"]["cancelled"] > 0
    assert end["rollouts"]["in_flight"] == 0
    with sqlite3.connect(run_folder / "ledger.sqlite") as ledger:
        (num_done,) = ledger.execute("SELECT count(*) FROM events WHERE kind = 'done'").fetchone()
    assert num_done >= 5 * 4 - 3, "the killed trainer repeats at most the steps since its checkpoint, which are told once more"
    last = (*overrides[:-1], f"trainer.steps={num_done + 3}")
    subprocess.run([*command(settings, *last), "--resume"], check=True, capture_output=True, text=True)
    assert [folder.name for folder in settings.parent.glob("hardy-2*")] == [run_folder.name], "it went on in the same folder"
    verdict = subprocess.run([sys.executable, "-m", "pipelinerl", "check", str(run_folder)], capture_output=True, text=True, check=False)
    assert verdict.returncode == 0, verdict.stdout
    assert "every promise was kept" in verdict.stdout
    assert f"{num_done + 3} steps" in verdict.stdout
    assert not processes_of(run_folder)


def test_weights_of_another_model_are_noticed_at_the_first_step(settings: Path, started_warm: Started):
    """The engine's log-probabilities disagree with the trainer's: the run ends and says what that means."""
    wrong = settings.parent / "wrong_temperature.toml"
    wrong.write_text(settings.read_text().replace("[engine.options]", '[engine.options]\nlogprobs_mode = "raw_logprobs"', 1))
    code, printed = started_warm("run", wrong, *SMALL, "run.name=mismatch", "rollout.temperature=1.5")
    assert code == 1
    assert "MismatchError" in printed
    assert "processed_logprobs" in printed
    run_folder = newest_run(settings, "mismatch")
    errors = {path.stem: json.loads(path.read_text())["error"] for path in (run_folder / "failures").iterdir()}
    assert "trainer-0 failed: MismatchError" in errors["orchestrator"]
    assert errors.get("trainer-0", "MismatchError").startswith("MismatchError"), "it may be ended before it has written its own"
    assert not processes_of(run_folder)

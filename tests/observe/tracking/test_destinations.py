"""The real trackers, each in its own process: W&B offline, TensorBoard, Prometheus."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.config.file import parse
from pipelinerl.config.file import write_run as write_settings
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.tracking.beside import command, where_to_look
from pipelinerl.observe.tracking.to_wandb import CELL_CHARACTERS, TABLE_ROWS
from tests.observe.report.synthetic import Plan, write_run
from tests.observe.tracking.wandb_file import history
from tests.processes import PATIENCE_S, wait_until
from tests.tiny_models import make_tokenizer

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

TREE = {"model": {"path": "m"}, "data": {"source": "p.jsonl"}, "reward": [{"function": "r:f"}]}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    write_settings(tmp_path, parse(TREE, origin="test"))
    return tmp_path


@pytest.fixture
def journal(run_folder: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(run_folder, "orchestrator")) as journal:
        journal.write("run", config={})
        yield journal


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(run_folder: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(run_folder, name), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)


def send(run_folder: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a tracker over the whole journal."""
    return subprocess.run(
        command(run_folder, name, once=True), capture_output=True, text=True, check=False, timeout=120, env=os.environ | environment
    )


def wait_for_file(run_folder: Path, pattern: str) -> None:
    """Longer than for other files: W&B and TensorBoard are imported first, which takes a busy machine most of a minute."""
    end = time.monotonic() + 90
    while not list(run_folder.glob(pattern)):
        assert time.monotonic() < end, f"waited 90 s for {pattern}"
        time.sleep(0.01)


def steps_of(run_folder: Path) -> list[int]:
    return [row["progress/step"] for row in history(run_folder) if "reward/all/mean" in row]


def test_wandb_offline_holds_every_step_of_a_run_under_its_own_axis(run_folder: Path) -> None:
    write_run(run_folder, Plan(num_steps=12))
    (run_folder / "checkpoints/step-000020").mkdir(parents=True)
    (run_folder / "checkpoints/step-000020/manifest.json").write_text(json.dumps({"trackers": {"wandb": "0badcafe"}}))
    (run_folder / "model").mkdir()
    make_tokenizer(run_folder / "model")
    tokens = load_tokenizer(run_folder / "model").encode("so it is", add_special_tokens=False)
    sample = {"t": 2e9, "kind": "sample", "step": 11, "prompt": "x" * 9000, "token_ids": tokens, "versions": [[8, 3], [9, 5]]}
    sample |= {"reward": 1.0, "advantage": 0.5, "finish": "stop", "steps": [[3, 0.25]]}
    with open(run_folder / "journal" / "orchestrator.jsonl", "a") as file:
        file.writelines(json.dumps(sample | {"rollout_id": f"0/{number}"}) + "\n" for number in range(TABLE_ROWS + 5))
    assert send(run_folder, "wandb").returncode == 0
    (offline,) = run_folder.glob("tracking/wandb/offline-run-*")
    assert where_to_look(run_folder, "wandb").endswith(f"Where there is a network: wandb sync {offline}")
    (table,) = [json.loads(path.read_text()) for path in run_folder.glob("tracking/wandb/offline-run-*/files/media/table/*.table.json")]
    assert len(table["data"]) == TABLE_ROWS, "capped"
    assert {tuple(map(type, row)) for row in table["data"]} == {(int, str, str, str, float, float, int, str, str, str)}, "a column, a type"
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (row["completion"], row["versions"], row["step scores"], len(row["prompt"])) == (
        "so it is",
        "v8 × 3, v9 × 5",
        "0.250",
        CELL_CHARACTERS,
    )
    assert [path.name.endswith("-0badcafe") for path in run_folder.glob("tracking/wandb/offline-run-*")] == [True], "a checkpoint knows it"
    assert steps_of(run_folder) == list(range(12))
    rows = history(run_folder)
    assert [row["eval/version"] for row in rows if "eval/all/avg@1" in row] == [0, 6, 12]
    lines = [row["_line"] for row in rows]
    assert lines == sorted(set(lines)), "W&B's own step is the journal's line: it only grows"


def test_a_writer_killed_in_the_middle_is_followed_by_one_that_goes_on_in_the_same_wandb_run(
    run_folder: Path, journal: Journal, started: list[subprocess.Popen[str]]
) -> None:
    journal.write("step", step=0, reward_mean=0.0)
    first = start(run_folder, "wandb")
    started.append(first)
    state = run_folder / "tracking" / "wandb.json"
    wait_for_file(run_folder, "tracking/wandb/offline-run-*/*.wandb")
    name = json.loads(state.read_text())["id"]
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    journal.write("step", step=1, reward_mean=0.1)
    journal.write("end", reason="finished")
    assert send(run_folder, "wandb").returncode == 0
    assert json.loads(state.read_text())["id"] == name
    assert all(name in path.name for path in run_folder.glob("tracking/wandb/offline-run-*"))
    assert set(steps_of(run_folder)) == {0, 1}


@pytest.mark.usefixtures("journal")
def test_a_run_has_one_writer(run_folder: Path, started: list[subprocess.Popen[str]]) -> None:
    started.append(start(run_folder, "tensorboard"))
    wait_for_file(run_folder, "tensorboard/*")
    second = send(run_folder, "tensorboard")
    assert second.returncode != 0
    assert "a run has one writer" in second.stderr


@pytest.mark.slow
def test_points_of_a_time_without_a_wandb_server_are_sent_afterwards(run_folder: Path) -> None:
    """The server refuses every connection, as one that is down does; the run's own files are all that is needed later."""
    write_run(run_folder, Plan(num_steps=5))
    nobody = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "5"}
    down = send(run_folder, "wandb", **nobody)
    assert down.returncode == 1
    assert "given up" in down.stderr
    assert send(run_folder, "wandb").returncode == 0
    assert steps_of(run_folder) == list(range(5))


def test_tensorboard_shows_every_step_once_however_often_it_is_written(run_folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(run_folder, Plan(num_steps=12))
    for _ in range(2):
        assert send(run_folder, "tensorboard").returncode == 0
    events = EventAccumulator(str(run_folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert [event.step for event in events.Tensors("reward/all/mean")] == list(range(12))


def test_prometheus_is_told_the_latest_numbers_on_loopback_only(
    run_folder: Path, journal: Journal, started: list[subprocess.Popen[str]]
) -> None:
    started.append(start(run_folder, "prometheus"))
    endpoint = run_folder / "endpoints" / "metrics.json"
    wait_until(endpoint.exists, what="the endpoint was told")
    address = json.loads(endpoint.read_text())["address"]
    assert address.startswith("http://127.0.0.1:")
    for step, reward in enumerate((0.25, 0.5)):
        journal.write("step", step=step, reward_mean=reward)
    wait_until(lambda: "pipelinerl_reward_all_mean 0.5\n" in _read(address), what="the reward of the last step")
    started[0].terminate()
    assert started[0].wait(PATIENCE_S) == 0
    assert not endpoint.exists()


def _read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=5) as answer:
        return answer.read().decode()

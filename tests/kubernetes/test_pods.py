"""Pods as processes: which attempt each is part of, and with which code it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError
from pipelinerl.launch.kubernetes.__main__ import BEGUN, VERDICT, begin, join, run_pod
from pipelinerl.launch.node_roles import record_roles
from pipelinerl.launch.run_folder import fill
from pipelinerl.launch.supervisor import DONE, FAILED, UNFINISHED
from tests import processes

ROOT = Path(__file__).parents[2]


def attempt(run: Path, number: int, *, verdict: int | None = None) -> Path:
    folder = run / "logs" / f"attempt-{number}"
    folder.mkdir(parents=True)
    (folder / BEGUN).touch()
    if verdict is not None:
        (folder / VERDICT).write_text(f"{verdict}\n")
    return folder


def test_a_pod_joins_the_attempt_that_goes_on_and_forgets_how_its_node_ended_there_before(tmp_path: Path) -> None:
    attempt(tmp_path, 9, verdict=UNFINISHED)
    code = attempt(tmp_path, 10) / "node-1.code"
    code.write_text("75\n")
    assert join(tmp_path, node=1) == 10
    assert not code.exists()


def test_a_pod_waits_for_the_next_attempt_where_the_newest_has_ended(tmp_path: Path) -> None:
    attempt(tmp_path, 0, verdict=UNFINISHED)
    joined: list[int | None] = []
    waiting = threading.Thread(target=lambda: joined.append(join(tmp_path, node=1)))
    waiting.start()
    time.sleep(0.2)
    assert not joined
    attempt(tmp_path, 1)
    waiting.join(processes.PATIENCE_S)
    assert joined == [1]


@pytest.mark.parametrize("verdict", [DONE, FAILED])
def test_a_pod_joins_nothing_once_the_run_is_over(tmp_path: Path, verdict: int) -> None:
    attempt(tmp_path, 0, verdict=verdict)
    assert join(tmp_path, node=1) is None


def test_a_pod_that_waits_too_long_says_for_whom(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node 0 has begun nothing in .* for 0\.1 s: see the log of its pod"):
        join(tmp_path, node=1, patience_s=0.1)


def test_a_folder_with_a_run_that_was_begun_otherwise_is_refused_and_kept(tmp_path: Path) -> None:
    tree = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
    (tmp_path / "ledger.sqlite").write_bytes(b"what became of every rollout")
    with pytest.raises(ConfigError, match=r"holds a run that was begun otherwise: there is a ledger, but no roles\.json"):
        begin(parse(tree, origin="test"), tmp_path)
    assert (tmp_path / "ledger.sqlite").exists()


def test_a_volume_that_fails_fails_no_job_and_a_refusal_does(tmp_path: Path) -> None:
    config = parse({"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}, origin="test")
    (tmp_path / "roles.json").touch()
    assert run_pod(config, tmp_path, node=0) == UNFINISHED, "there is no folder of logs"
    (tmp_path / "roles.json").rename(tmp_path / "ledger.sqlite")
    assert run_pod(config, tmp_path, node=0) == FAILED


def test_a_list_of_roles_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse({"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}, origin="test")

    def full(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        record_roles(config, config.kubernetes, tmp_path)
    assert not (tmp_path / "roles.json").exists()


class Run:
    """A run of stand-in processes on two nodes, whose pods are processes of this machine."""

    def __init__(self, folder: Path, **stand_in: Any) -> None:
        self.pods: list[subprocess.Popen[bytes]] = []
        tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
        tree |= {"run": {"folder": str(folder), "restarts": 0}, "kubernetes": {"engine_nodes": 1, "save_s": 10, "image": "i", "claim": "c"}}
        self.config: Config = parse(tree, origin="test")
        self.folder = folder / "run-1"
        self.settings = folder / "settings.json"
        self.settings.write_text(self.config.model_dump_json())
        fill(self.folder, self.config)
        record_roles(self.config, self.config.kubernetes, self.folder)
        roles = json.loads((self.folder / "roles.json").read_text())
        for role in roles:
            role["command"] = [sys.executable, "-m", "tests.slurm.stand_in", str(self.folder), role["name"]]
        (self.folder / "roles.json").write_text(json.dumps(roles))
        (self.folder / "stand_in.json").write_text(json.dumps({"steps": 6, "pace_s": 0.05, "holds": [], **stand_in}))

    def pod(self, node: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pipelinerl.launch.kubernetes", "--settings", str(self.settings), "--run-folder", str(self.folder)]
        environment = os.environ | {"JOB_COMPLETION_INDEX": str(node), "POD_IP": "127.0.0.1", "PYTHONPATH": str(ROOT)}
        with open(self.folder / f"pod-{node}.log", "ab") as log:
            self.pods.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        return self.pods[-1]

    def ends(self, *pods: subprocess.Popen[bytes]) -> list[int]:
        """The exit codes of pods, once they have ended."""
        try:
            return [pod.wait(processes.PATIENCE_S) for pod in pods]
        except subprocess.TimeoutExpired:
            said = "".join(f"{path}:\n{path.read_text()}" for path in sorted(self.folder.rglob("*.log")))
            raise AssertionError(f"a pod does not end:\n{said}") from None

    def said(self, role: str) -> str:
        return "".join(path.read_text() for path in (self.folder / "logs").glob(f"attempt-*/{role}.log"))

    def steps(self) -> int:
        journal = self.folder / "journal" / "orchestrator.jsonl"
        return journal.read_text().count('"kind": "step"') if journal.exists() else 0


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**stand_in: Any) -> Run:
        made.append(Run(tmp_path, **stand_in))
        return made[-1]

    yield make
    for pod in (pod for run in made for pod in run.pods):
        pod.kill()
        pod.wait()


@pytest.mark.process
def test_a_run_that_is_told_to_end_goes_on_with_new_pods_and_finishes(make_run: Callable[..., Run]) -> None:
    run = make_run(holds=[3])
    pods = [run.pod(0), run.pod(1)]
    processes.wait_until(lambda: run.steps() == 3, what="the run does not come to its third step")
    pods[0].send_signal(signal.SIGTERM)
    assert run.ends(*pods) == [UNFINISHED, UNFINISHED]
    pods = [run.pod(1), run.pod(0)]
    assert run.ends(*pods) == [DONE, DONE]
    assert run.steps() == 6
    assert run.ends(run.pod(1)) == [DONE], "what comes late has nothing to do"


@pytest.mark.process
def test_a_pod_that_is_killed_is_replaced_within_the_attempt(make_run: Callable[..., Run]) -> None:
    run = make_run(holds=[3])
    first, lost = run.pod(0), run.pod(1)
    processes.wait_until(lambda: "started" in run.said("engines") and run.steps() == 3, what="the run does not come to its third step")
    lost.kill()
    lost.wait()
    other = run.pod(1)
    processes.wait_until(lambda: run.said("engines").count("started") == 2, what="the new pod starts no engines")
    (run.folder / "go-on").touch()
    assert run.ends(first, other) == [DONE, DONE]
    assert len(list((run.folder / "logs").glob("attempt-*"))) == 1


@pytest.mark.process
def test_a_process_that_fails_by_itself_fails_the_job(make_run: Callable[..., Run]) -> None:
    run = make_run(holds=[3], **{"break": "trainer"})
    pods = [run.pod(0), run.pod(1)]
    assert run.ends(*pods) == [FAILED, FAILED]
    assert "failed" in (run.folder / "pod-0.log").read_text()

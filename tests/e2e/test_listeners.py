"""Every socket on which a process of a run can be reached, of a real run: each is authenticated, private, or named in SECURITY.md.

And the attack by which code once ran without a key: a pickle left in any store of the tree runs nothing.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.weights.shared_names import FOLDER, run_token, sweep
from scripts.chaos import victims
from tests import processes
from tests.listeners import SOCKETS, Listener, answers_as_torchs_store, listeners_of, name_of, tree_of
from tests.tiny_models import make_prm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE_S = 150.0
LARGEST = ("trainer.ranks=2", "engine.options={tensor_parallel_size=2}", 'tracking.to=["prometheus"]')
LARGEST += ("prm.path={folder}/prm", "prm.tag=#", 'prm.separator="5"', "prm.chunk_tokens=8", "prm.dtype=float32")
"""A run with every kind of socket on one machine. `test_prm` lists those of one without ranks."""


class Runs:
    """An object that, where it is unpickled, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def attack(one: Listener, path: Path) -> bool:
    """Say to a listener what sets keys of torch's store, and of its rendezvous, to a pickle; True where it is a store."""
    payload = base64.b64encode(pickle.dumps(Runs(path)))
    keys = (b"/torch.rendezvous.none", b"/torch.rendezvous.trainer", b"/init/0", b"/0")
    return answers_as_torchs_store(one, sets=dict.fromkeys(keys, payload))


@contextlib.contextmanager
def running(*words: str, folder: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A real run of the demo's untrained model, from its first trained step on."""
    from pipelinerl.demo.settings import demo_config, make_demo_model

    settings = demo_config(folder=folder, seed=0)
    make_demo_model(folder / "demo-model", seed=0)
    make_prm(folder / "prm")
    small = (
        "trainer.steps=5000",
        "batch.groups_per_step=4",
        "evaluation.every=0",
        "run.name=listed",
        "engine.cores=[]",
        "trainer.cores=[]",
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "pipelinerl", "run", str(settings), *small, *(word.replace("{folder}", str(folder)) for word in words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        journals: list[Path] = []
        while not journals or '"kind": "step"' not in journals[0].read_text():
            assert time.monotonic() < deadline, "no step was trained"
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.2)
            journals = list(folder.glob("listed-2*/journal/orchestrator.jsonl"))
        yield journals[0].parents[1], run
    finally:
        run.kill()
        run.communicate()


def shared_files(tree: list[int], run_folder: Path) -> set[Path]:
    """The files in shared memory that processes have open or mapped, and those with the run's name; other tests have some, too."""
    names: list[str] = []
    for process_id in tree:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended, or closed it, this moment
            names += [f"/{line.partition('/')[2]}" for line in Path(f"/proc/{process_id}/maps").read_text().splitlines()]
            names += [os.readlink(number) for number in Path(f"/proc/{process_id}/fd").iterdir()]
    held = {path for path in map(Path, names) if path.is_relative_to(FOLDER) and path.exists()}
    return held | set(FOLDER.glob(f"pipelinerl-{run_token(run_folder)}-*"))


def test_every_listener_of_a_run_is_authenticated_private_or_named(tmp_path: Path):
    with running(*LARGEST, folder=tmp_path) as (run_folder, run):
        view = subprocess.Popen([sys.executable, "-m", "pipelinerl", "view", str(run_folder)], stdout=subprocess.PIPE, text=True)
        try:
            assert view.stdout is not None
            assert "token=" in view.stdout.readline()
            tree = [*tree_of(run.pid), *tree_of(view.pid)]
            found = listeners_of(tree)
            print(*sorted(f"{one.kind} {one.where} {name_of(one)!r} {one.command}" for one in found), sep="\n")
            assert [one for one in found if not name_of(one)] == []
            assert {name_of(one) for one in found} == set(SOCKETS)
            tcp = [one for one in found if one.kind.startswith("tcp")]
            with concurrent.futures.ThreadPoolExecutor(len(tcp)) as pool:
                are_stores = list(pool.map(lambda one: attack(one, tmp_path / "ran"), tcp))
            assert not any(are_stores), "nobody's store is torch's"
            assert run.poll() is None, "what strangers say ends no run"
            shared = shared_files(tree, run_folder)
            assert shared, "weights travel by shared memory here"
        finally:
            view.kill()
            view.communicate()
        assert victims.find("trainer", run_folder), "the ranks are still those that were attacked"
        assert not (tmp_path / "ran").exists(), "a stranger's pickle ran"
        run.send_signal(signal.SIGKILL)
        processes.wait_until(lambda: not any(map(victims.is_alive, tree)), what="a process outlives the launcher that was killed")
    sweep()
    # Python's own tracker removes what is named psm_... once the processes that it was started for are gone.
    processes.wait_until(lambda: not any(path.exists() for path in shared), what="something stays in shared memory")

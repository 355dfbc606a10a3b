"""What holds for every test: one thread per process, no network, and a reason for each test that this machine cannot run.

The environment is set here because torch and the Hugging Face libraries read it once, when they are first imported; child processes
inherit it.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from pipelinerl.runtime.imports import of_large_packages
from tests.warm_runs import Started, warm_runs

os.environ["OMP_NUM_THREADS"] = "1"  # more threads than cores spin against each other: vLLM on two cores is then up to ten times slower
os.environ["HF_HUB_OFFLINE"] = "1"  # models are made by the tests; a name that is not a folder fails at once
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch asks a name server for the name of 127.0.0.1; where it loses an answer, 5 s pass
os.environ["WANDB_MODE"] = "offline"
# Images of containers often have Python keep no bytecode: each worker would then compile 350 files of tests, and each process ours.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A deadline per example measures how busy the machine is, not the code; pytest's own timeout ends what hangs. Every run tries the same
# examples, so that what fails was broken by the change at hand; HYPOTHESIS=explore looks for what nobody has tried yet.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS", "same"))


@pytest.fixture(autouse=True)
def _folder_of_temporary_files() -> Iterator[None]:
    """An engine within a test's own process moves it to a folder that no other user may enter, and other tests are other users."""
    yield
    tempfile.tempdir = None  # what it is at first; what was there before this test may be what an engine of its module has set


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory, where the machine has one: for what is synced again and again to a disk whose speed nobody asks for."""
    with tempfile.TemporaryDirectory(prefix="pytest-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def started_warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Whole runs whose point is not how their processes begin."""
    with warm_runs(tmp_path_factory.mktemp("warm")) as started:
        yield started


TOGETHER = {
    "whole runs": tuple(
        f"tests/{name}.py" for name in ("e2e/test_examples", "e2e/test_gateway", "e2e/test_run", "migration/test_migration")
    ),
    "what waits": ("tests/slurm/", *(f"tests/e2e/test_{name}.py" for name in ("chaos", "listeners", "prm"))),
}
"""What goes one after the other in one worker: whole runs, all of them at once, would miss their deadlines. Half of the time of jobs, of
rehearsals and of runs that are looked at while they go on is spent waiting; `scripts/test` has a worker more than cores for it."""


def _unit(nodeid: str) -> str:
    return next((name for name, begin in TOGETHER.items() if nodeid.startswith(begin)), nodeid.partition("::")[0])


class Files(LoadScopeScheduling):
    """Any worker takes the next file, so what a file's tests share (an engine, ranks) is made once.

    (`--dist loadgroup` marks groups in a place that pytest 9.2 no longer has.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return _unit(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Files:
    config.option.loadscopereorder = False  # the order is that of the collection, below; xdist would take what has most tests first
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `vllm` or `gpu` where it cannot run, and say why. torch is imported only if a test needs it.

    Several workers begin with what is long, so that they end together: whole runs, jobs, files with processes, then the many small files.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        long = {item.path for item in items if item.get_closest_marker("process") or item.get_closest_marker("slow")}
        units = list(TOGETHER)
        items.sort(key=lambda item: (units.index(unit) if (unit := _unit(item.nodeid)) in units else len(units), item.path not in long))
    marked = {name: [item for item in items if item.get_closest_marker(name)] for name in ("vllm", "gpu")}
    if marked["vllm"] and importlib.util.find_spec("vllm") is None:
        _skip(marked["vllm"], reason="needs vLLM, which is not installed here")
    if marked["gpu"] and (reason := _why_no_gpu()):
        _skip(marked["gpu"], reason=reason)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting tests imports torch and makes 7,000 of them, over which no collection of garbage has to go again."""
    with of_large_packages():
        return (yield)


def _skip(items: list[pytest.Item], *, reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    """Return why the `gpu` tests cannot run, or None where they can."""
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device: torch is not installed here"
    import torch

    if torch.version.cuda is None:
        return f"needs a CUDA device: torch {torch.__version__} is a build without CUDA"
    return None if torch.cuda.is_available() else f"needs a CUDA device: torch {torch.__version__} finds none"

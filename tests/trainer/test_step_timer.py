"""The trainer's thread tells how long it waited for its core while others had it."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.observe.journal import Journal
from trainer import step_timer
from trainer.step_timer import StepTimer


@pytest.fixture
def timer(tmp_path: Path) -> Iterator[StepTimer]:
    loader: Any = SimpleNamespace(busy_with="")
    with contextlib.closing(Journal(tmp_path, "trainer-0")) as journal:
        yield StepTimer(journal, loader=loader)


@pytest.fixture
def busy_core() -> Iterator[None]:
    """This thread and a process that never rests share one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            yield
            other.kill()
    finally:
        os.sched_setaffinity(0, before)


counted = pytest.mark.skipif(step_timer._core_wait_s() is None, reason="this kernel does not count how long threads wait (schedstat)")


def _work(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@counted
@pytest.mark.usefixtures("busy_core")
def test_a_core_shared_with_another_process_is_waited_for(timer: StepTimer) -> None:
    for _ in range(2):
        with timer("forward_backward"):
            _work(0.4)
    with timer("optimizer"):
        _work(0.2)
    told = timer.finish_step(num_tokens=1000)
    # Two that never rest have half of it each.
    assert 0.25 * told["forward_backward_s"] < told["core_wait_s"] < told["forward_backward_s"]
    # It is a part of the seconds of work, and counts once among them.
    assert told["tokens_per_s"] == pytest.approx(1000 / (told["forward_backward_s"] + told["optimizer_s"]))
    with timer("optimizer"):
        _work(0.1)
    assert "core_wait_s" not in timer.finish_step(num_tokens=1000), "each step begins anew, and the optimizer's wait is none of it"


@counted
def test_a_thread_that_sleeps_waits_for_no_core(timer: StepTimer) -> None:
    with timer("forward_backward"):
        time.sleep(0.3)
    assert timer.finish_step(num_tokens=1)["core_wait_s"] < 0.15


@pytest.mark.parametrize("text", [None, "", "0 0 0\n"])
def test_nothing_is_told_where_the_system_counts_nothing(
    timer: StepTimer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(step_timer, "_SCHEDSTAT", tmp_path / "schedstat")
    if text is not None:
        (tmp_path / "schedstat").write_text(text)
    with timer("forward_backward"):
        _work(0.01)
    assert timer.finish_step(num_tokens=1).keys() == {"forward_backward_s", "tokens_per_s"}

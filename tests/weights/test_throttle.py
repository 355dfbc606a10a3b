"""How work beside decoding keeps to its share of a core."""

from __future__ import annotations

import threading
import types

import pytest

from pipelinerl.weights import throttle


class Core:
    """A core on which a thread works as long as it says, and sleeps as long as it is told to."""

    def __init__(self) -> None:
        self.now_s = self.worked_s = 0.0

    def work(self, seconds: float, *, waited_s: float = 0.0) -> None:
        self.worked_s += seconds
        self.now_s += seconds + waited_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()
    clock = types.SimpleNamespace(monotonic=lambda: core.now_s, thread_time=lambda: core.worked_s, sleep=core.sleep)
    monkeypatch.setattr(throttle, "time", clock)
    return core


def test_who_has_a_share_rests_until_its_work_is_no_more_than_that(core: Core):
    core.work(5.0)
    with throttle.limit_cpu(0.1):
        core.work(1.0)
        throttle.throttle()
        assert core.now_s == pytest.approx(5.0 + 10.0)
        core.work(0.5, waited_s=20.0)
        throttle.throttle()
        assert core.now_s == pytest.approx(15.0 + 20.5), "it waited for the core longer than it has to rest"


def test_who_has_none_does_not_rest_nor_does_one_whose_share_has_ended(core: Core):
    throttle.throttle()
    with throttle.limit_cpu(0.1):
        core.work(1.0)
    throttle.throttle()
    assert core.now_s == 1.0


class _Lifted(threading.Event):
    """Waits on the simulated core."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self._core.sleep(timeout or 0.0)
        return self.is_set()


def test_while_nobody_else_wants_the_core_no_rest_is_due_then_nor_later(core: Core):
    lifted = _Lifted(core)
    with throttle.limit_cpu(0.1, lifted=lifted):
        lifted.set()
        core.work(7.0)
        throttle.throttle()
        assert core.now_s == 7.0
        lifted.clear()
        core.work(1.0)
        throttle.throttle()
        assert core.now_s == pytest.approx(7.0 + 10.0), "the seven seconds are not paid back"


def test_whoever_rests_goes_on_the_moment_the_core_is_free():
    """By a real clock: one share of 1e-6 would rest for hours."""
    lifted, rested = threading.Event(), threading.Event()

    def work() -> None:
        with throttle.limit_cpu(1e-6, lifted=lifted):
            sum(range(100_000))
            throttle.throttle()
        rested.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not rested.is_set()
    lifted.set()
    thread.join(60)
    assert rested.is_set()

"""How work beside decoding keeps to its share of a core."""

from __future__ import annotations

import types

import pytest

from pipelinerl.weights import pace


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
    monkeypatch.setattr(pace, "time", clock)
    return core


def test_who_has_a_share_rests_until_its_work_is_no_more_than_that(core: Core):
    core.work(5.0)
    with pace.at_most(0.1):
        core.work(1.0)
        pace.rest()
        assert core.now_s == pytest.approx(5.0 + 10.0)
        core.work(0.5, waited_s=20.0)
        pace.rest()
        assert core.now_s == pytest.approx(15.0 + 20.5), "it waited for the core longer than it has to rest"


def test_who_has_none_does_not_rest_nor_does_one_whose_share_has_ended(core: Core):
    pace.rest()
    with pace.at_most(0.1):
        core.work(1.0)
    pace.rest()
    assert core.now_s == 1.0

"""Which sequences count as waiting for room: those that two reports found in the queue with as many tokens."""

from __future__ import annotations

from pipelinerl.engine.fake import FakeEngine
from pipelinerl.messages import Cancel, Sleep
from tests.engine.test_loop import Bench


def busy() -> Bench:
    """Two of four sequences run; the others are behind them."""
    bench = Bench(engine=FakeEngine(max_model_tokens=4096, max_running=2, mean_tokens=10**9))
    for sibling in range(4):
        bench.ask(f"0/{sibling}", max_tokens=6)
    return bench


def test_what_two_reports_find_in_the_queue_waits_since_the_first_of_them():
    bench = busy()
    bench.advance(2)
    first = bench.loop.sequences()
    assert (first.engine_id, first.written) == (3, {"0/0": 2, "0/1": 2, "0/2": 0, "0/3": 0})
    assert first.waiting == {}, "it may be between two passes"
    bench.clock.now_s += 1.0
    bench.advance(1)
    assert bench.loop.sequences().waiting == {"0/2": 1.0, "0/3": 1.0}
    bench.clock.now_s += 2.5
    bench.loop.handle(Cancel(rollout_id="0/3", attempt=0))
    assert bench.loop.sequences().waiting == {"0/2": 3.5}


def test_what_got_a_token_since_waits_no_more():
    bench = busy()
    bench.advance(1)
    bench.loop.sequences()
    bench.clock.now_s += 1.0
    bench.advance(7)
    assert bench.loop.sequences().written == {"0/2": 2, "0/3": 2}
    bench.ask("1/0")
    bench.ask("1/1")
    bench.clock.now_s += 1.0
    assert bench.loop.sequences().waiting == {}, "a report has not found them before"


def test_what_gives_way_again_after_a_few_tokens_waits_anew():
    """The queue holds it in both reports, and passes went over it in between."""
    bench = busy()
    bench.advance(1)
    bench.engine.limits = FakeEngine(max_model_tokens=4096, max_running=1).limits
    bench.loop.sequences()
    bench.engine.limits = FakeEngine(max_model_tokens=4096, max_running=2).limits
    bench.advance(1)
    bench.engine.limits = FakeEngine(max_model_tokens=4096, max_running=1).limits
    bench.clock.now_s += 1.0
    assert bench.loop.sequences().waiting == {"0/2": 1.0, "0/3": 1.0}
    bench.clock.now_s += 1.0
    assert bench.loop.sequences().waiting == {"0/1": 1.0, "0/2": 2.0, "0/3": 2.0}


def test_nothing_waits_for_room_while_the_engine_is_asleep():
    bench = busy()
    bench.advance(1)
    bench.loop.sequences()
    bench.loop.handle(Sleep(phase_id=1))
    bench.advance(1)
    bench.clock.now_s += 1.0
    assert bench.loop.sequences().waiting == {}
    bench.clock.now_s += 1.0
    assert bench.loop.sequences().waiting == {}

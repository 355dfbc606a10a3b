"""A simulated engine, on times worked out by hand."""

from __future__ import annotations

import pytest

from orchestrator.simulate.cores import Cores
from orchestrator.simulate.engine import SimulatedEngine
from orchestrator.simulate.events import Events
from orchestrator.simulate.sequence import Sequence
from orchestrator.simulate.world import EngineWorld, SyncWorld
from pipelinerl.messages import Finish


class Bench:
    """One engine, and the times of its answers."""

    def __init__(
        self, *, max_running: int = 8, pause_s: float = 0.0, sleep_s: float = 0.0, keeps_kv: bool = False, **world: object
    ) -> None:
        self.events = Events()
        self.engine = SimulatedEngine(
            EngineWorld(**world),  # pyright: ignore[reportArgumentType]
            SyncWorld(pause_s=pause_s, sleep_s=sleep_s),
            engine_id=0,
            max_running=max_running,
            cores=Cores(self.events),
            keeps_kv=keeps_kv,
        )
        self.answers: dict[int, tuple[float, int, list[tuple[int, int]], Finish]] = {}
        """By name: (time, tokens, runs of versions, finish)."""
        self.num = 0

    def ask(self, name: int, *, at: float, prompt: int, length: int, group: int | None = None, marks: tuple[int, ...] = ()) -> Sequence:
        self.num += 1
        marked: list[float] = []
        sequence = Sequence(
            group_id=name if group is None else group,
            num_context=prompt,
            num_shared=prompt,
            length=length,
            finish=Finish.STOP,
            answer=lambda one: self.answers.__setitem__(name, (self.events.now_s, one.written, one.runs, one.finish)),
            marks=marks,
            reached=lambda one, mark: marked.append(self.events.now_s),
        )
        self.marked = marked
        self.events.at(at, lambda: self.engine.submit(sequence))
        return sequence

    def run(self) -> dict[int, float]:
        self.events.run(until=lambda: len(self.answers) == self.num, limit_s=1e6)
        return {name: time for name, (time, *_) in self.answers.items()}


def test_below_so_many_sequences_a_pass_verifies_drafts_and_gives_several_tokens_of_each():
    """f(n) = 0.5 + 0.5 n: a pass of two sequences lasts 1.5 s, one that verifies three drafted tokens of one f(4) = 2.5 s, for 2 tokens."""
    bench = Bench(pass_s=((1, 1.0), (5, 3.0)), kv_token_s=0.1, tokens_per_pass=2.0)
    bench.engine.drafts = 2, 3
    bench.ask(0, at=0.0, prompt=0, length=2)
    bench.ask(1, at=0.0, prompt=0, length=4)
    both_s = (1.5 + 0.0) + (1.5 + 0.2)
    assert bench.run() == {0: pytest.approx(both_s), 1: pytest.approx(both_s + (2.5 + 0.2) / 2 + (2.5 + 0.3) / 2)}
    without = Bench(pass_s=((1, 1.0), (5, 3.0)), kv_token_s=0.1)
    without.engine.drafts = 2, 3
    without.ask(0, at=0.0, prompt=0, length=2)
    assert without.run() == {0: pytest.approx(1.0 + 1.1)}, "a world that knows of no accepted drafts has none verified"


def test_passes_last_longer_as_the_cache_grows():
    bench = Bench(pass_s=((1, 1.0),), kv_token_s=0.1, prefill_token_s=0.25)
    bench.ask(0, at=0.0, prompt=2, length=3)
    assert bench.run() == {0: pytest.approx(2 * 0.25 + (1 + 0.2) + (1 + 0.3) + (1 + 0.4))}
    assert bench.engine.gauges()["num_tokens"] == 3
    assert bench.engine.gauges()["num_steps"] == 3


def test_what_arrives_within_a_pass_begins_with_the_next():
    bench = Bench(pass_s=((1, 1.0), (2, 2.0)))
    bench.ask(0, at=0.0, prompt=1, length=3)
    bench.ask(1, at=0.5, prompt=1, length=2)
    assert bench.run() == {0: pytest.approx(5.0), 1: pytest.approx(5.0)}


def test_the_pass_under_way_is_found_within_a_long_stretch():
    """Caches of 1, 2, 3, ... tokens: pass k lasts k seconds, so 4.5 s is within the third, which ends at 6."""
    bench = Bench(pass_s=((1, 0.0),), kv_token_s=1.0)
    bench.ask(0, at=0.0, prompt=1, length=5)
    bench.ask(1, at=4.5, prompt=100, length=1)
    times = bench.run()
    assert times[1] == pytest.approx(6 + 4 + 100), "the fourth pass reads both caches"
    assert times[0] == pytest.approx(6 + 104 + 5)


def test_more_than_the_slots_wait_for_their_turn():
    bench = Bench(max_running=1, pass_s=((1, 1.0),))
    bench.ask(0, at=0.0, prompt=1, length=2)
    bench.ask(1, at=0.0, prompt=1, length=3)
    assert bench.run() == {0: pytest.approx(2.0), 1: pytest.approx(5.0)}


def test_a_full_cache_makes_the_youngest_give_way_and_compute_anew():
    """Ten tokens of cache: two sequences of 3 + 2 fill it after two passes. The second leaves with 5 tokens, and comes back after the
    first has ended, which took two more passes: it computes 5 tokens again, and writes in two passes what it lacked.
    """
    bench = Bench(pass_s=((1, 1.0),), prefill_token_s=0.1, kv_tokens=10)
    bench.ask(0, at=0.0, prompt=3, length=4)
    bench.ask(1, at=0.0, prompt=3, length=4)
    assert bench.run() == {0: pytest.approx(1.6 + 3), 1: pytest.approx(4.6 + 1.5 + 1)}
    assert bench.engine.num_evicted == 1
    assert bench.answers[1][1:3] == (4, [(0, 2), (0, 2)])
    assert bench.engine.kv_used == 0.0


def test_siblings_compute_their_prompt_once_as_far_as_whole_blocks_go():
    bench = Bench(pass_s=((1, 1.0),), prefill_token_s=0.01)
    for name in range(3):
        bench.ask(name, at=0.0, prompt=33, length=1, group=7)
    bench.run()
    assert bench.engine.num_prefilled == 33 + 1 + 1
    alone = Bench(pass_s=((1, 1.0),), prefill_token_s=0.01, has_prefix_cache=False)
    for name in range(3):
        alone.ask(name, at=0.0, prompt=33, length=1, group=7)
    alone.run()
    assert alone.engine.num_prefilled == 99


@pytest.mark.parametrize(("block", "computed"), [(1, 3), (16, 8), (32, 8), (64, 40)])
def test_the_next_turn_finds_what_is_in_whole_blocks(block: int, computed: int):
    """Of 40 tokens 37 were there before the reply: 32 of them in whole blocks of 16 or 32, none in one of 64."""
    bench = Bench(pass_s=((1, 1.0),), block_tokens=block)
    bench.ask(0, at=0.0, prompt=40, length=1).num_cached = 37
    bench.run()
    assert bench.engine.num_prefilled == computed


def test_siblings_hold_their_prompt_once():
    bench = Bench(pass_s=((1, 1.0),), kv_tokens=100)
    for name in range(2):
        bench.ask(name, at=0.0, prompt=40, length=4, group=7)
    bench.events.at(2.5, lambda: held.append(bench.engine.kv_used))
    held: list[float | None] = []
    bench.run()
    assert held == [pytest.approx((40 + 2 + 2) / 100)]


def test_prompts_that_do_not_fit_a_pass_go_on_in_the_next():
    bench = Bench(pass_s=((0, 0.0), (1, 1.0)), prefill_token_s=0.1, pass_tokens=10)
    bench.ask(0, at=0.0, prompt=25, length=1)
    assert bench.run() == {0: pytest.approx(1.0 + 1.0 + 0.5 + 1.0)}


def test_a_version_changes_between_two_passes_and_aborts_nothing():
    """Staged at 1.5, in the second pass: committed at 2, with a pause of 0.5."""
    bench = Bench(pause_s=0.5, pass_s=((1, 1.0),))
    bench.ask(0, at=0.0, prompt=1, length=5)
    staging = bench.engine.begin_staging(version=3, when_idle=False, kv_max_staleness=None)
    bench.events.at(1.5, lambda: bench.engine.staged(staging))
    assert bench.run() == {0: pytest.approx(5.5)}
    assert bench.answers[0][2] == [(0, 2), (3, 3)]


def test_a_swap_when_idle_waits_for_the_last_sequence():
    bench = Bench(pass_s=((1, 1.0),))
    bench.ask(0, at=0.0, prompt=1, length=3)
    staging = bench.engine.begin_staging(version=1, when_idle=True, kv_max_staleness=None)
    bench.events.at(0.5, lambda: bench.engine.staged(staging))
    bench.ask(1, at=10.0, prompt=1, length=1)
    bench.run()
    assert [bench.answers[name][2] for name in (0, 1)] == [[(0, 3)], [(1, 1)]]


def test_a_cache_that_would_be_too_old_is_computed_anew():
    """At version 2 a cache of version 0 is beyond a bound of 1: its 1 + 2 tokens are computed again in the pass that goes on."""
    bench = Bench(pass_s=((1, 1.0),), prefill_token_s=0.1)
    bench.ask(0, at=0.0, prompt=1, length=4)
    recomputed: list[int] = []
    bench.engine.on_committed = lambda engine, committed: recomputed.append(committed.num_recomputed_tokens)
    staging = bench.engine.begin_staging(version=2, when_idle=False, kv_max_staleness=1)
    bench.events.at(1.5, lambda: bench.engine.staged(staging))
    assert bench.run() == {0: pytest.approx(0.1 + 2.0 + 0.3 + 2.0)}
    assert recomputed == [3]


def test_a_cancelled_sequence_answers_with_what_it_has_written():
    bench = Bench(pass_s=((1, 1.0),))
    sequence = bench.ask(0, at=0.0, prompt=1, length=9)
    bench.events.at(2.5, lambda: bench.engine.cancel(sequence))
    bench.run()
    assert bench.answers[0] == (pytest.approx(3.0), 3, [(0, 3)], Finish.CANCELLED)


def test_marks_are_told_as_they_are_written():
    bench = Bench(pass_s=((1, 1.0),))
    bench.ask(0, at=0.0, prompt=1, length=7, marks=(2, 4, 6))
    bench.run()
    assert bench.marked == [pytest.approx(2.0), pytest.approx(4.0), pytest.approx(6.0)]


def test_busy_and_idle_seconds_add_up_to_all_of_them():
    bench = Bench(pass_s=((1, 1.0),))
    bench.ask(0, at=1.0, prompt=1, length=3)
    bench.ask(1, at=7.5, prompt=1, length=1)
    bench.run()
    gauges = bench.engine.gauges()
    assert (gauges["busy_s"], gauges["idle_s"]) == (pytest.approx(4.0), pytest.approx(1.0 + 3.5))


@pytest.mark.parametrize(("keeps_kv", "ends_at", "num_recomputed"), [(False, 13.55, 13), (True, 12.25, 0)])
def test_an_engine_sleeps_between_two_passes_until_it_commits_and_keeps_its_sequence(keeps_kv: bool, ends_at: float, num_recomputed: int):
    """A prompt of 10 takes a second, each pass one: told at 3.5 with two tokens written, it sleeps from 4.5 on with three.

    Woken at 10.25, it computes 13 tokens anew in 1.3 seconds, where it has dropped them, and writes the other two.
    """
    bench = Bench(pause_s=0.25, sleep_s=0.5, keeps_kv=keeps_kv, pass_s=((1, 1.0),), prefill_token_s=0.1)
    engine, asleep, swaps = bench.engine, [], []
    engine.on_asleep = lambda engine, sleep_s: asleep.append((bench.events.now_s, sleep_s, engine.num_running + engine.num_waiting))
    engine.on_committed = lambda engine, committed: swaps.append(
        (bench.events.now_s, committed.num_running, committed.num_recomputed_tokens)
    )
    bench.ask(0, at=0.0, prompt=10, length=5)
    bench.events.at(3.5, engine.sleep)

    def stage() -> None:
        staging = engine.begin_staging(version=1, when_idle=True, kv_max_staleness=None)  # one that sleeps is idle
        bench.events.at(10.0, lambda: engine.staged(staging))

    bench.events.at(6.0, stage)
    assert bench.run() == {0: pytest.approx(ends_at)}
    assert asleep == [(4.5, 0.5, 1)]
    assert swaps == [(10.25, 1, num_recomputed)]
    assert bench.answers[0][2] == [(0, 3), (1, 2)]
    assert engine.gauges()["busy_s"] == pytest.approx(4.0 + ends_at - 10.25)


def test_what_an_engine_is_asked_for_while_it_sleeps_begins_once_it_wakes_and_a_swap_under_way_ends_first():
    bench = Bench(pass_s=((1, 1.0),), sleep_s=0.5)
    engine, asleep = bench.engine, []
    engine.on_asleep = lambda engine, sleep_s: asleep.append(bench.events.now_s)
    first = engine.begin_staging(version=1, when_idle=False, kv_max_staleness=None)
    bench.events.at(1.0, engine.sleep)
    bench.events.at(2.0, lambda: engine.staged(first))
    bench.ask(0, at=3.0, prompt=1, length=1)

    def stage() -> None:
        engine.staged(engine.begin_staging(version=2, when_idle=False, kv_max_staleness=None))

    bench.events.at(8.0, stage)
    assert bench.run() == {0: pytest.approx(9.0)}
    assert asleep == [2.5]

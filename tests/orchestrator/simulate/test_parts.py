"""The parts beside the engine, on numbers worked by hand: shared links and cores, slots, draws, summaries."""

from __future__ import annotations

import gc
import itertools
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.rules.batch import BatchCut
from orchestrator.simulate.books import Books
from orchestrator.simulate.cores import Cores, Job
from orchestrator.simulate.draws import Distribution, Workload, fixed, recorded
from orchestrator.simulate.events import Events
from orchestrator.simulate.links import Link
from orchestrator.simulate.rollouts import Rollout
from orchestrator.simulate.scorers import Batches, Slots, Steps
from pipelinerl.algorithms.staleness import measure
from pipelinerl.errors import Stalled
from pipelinerl.messages import TerminalStatus


def ends(events: Events) -> tuple[dict[str, float], int]:
    return {}, 0


def run(events: Events, ended: dict[str, float], num: int) -> dict[str, float]:
    events.run(until=lambda: len(ended) == num, limit_s=1e6)
    return ended


def test_transfers_share_the_sender_and_none_is_faster_than_its_receiver():
    """16 bytes alone at 8 a second; from 1 s on beside 10 others, at 5 each; the others' last 2 at 8 again."""
    events, ended = Events(), {}
    link = Link(events, sender_rate=10.0, receiver_rate=8.0)
    link.send(16, lambda: ended.__setitem__("a", events.now_s))
    events.at(1.0, lambda: link.send(10, lambda: ended.__setitem__("b", events.now_s)))
    assert run(events, ended, 2) == {"a": pytest.approx(1 + 8 / 5), "b": pytest.approx(2.6 + 2 / 8)}


def test_a_lost_link_goes_on_where_it_was():
    events, ended = Events(), {}
    link = Link(events, sender_rate=10.0)
    link.send(20, lambda: ended.__setitem__("a", events.now_s))
    events.at(1.0, lambda: link.lose(3.0))
    assert run(events, ended, 1) == {"a": pytest.approx(5.0)}


def test_work_beside_other_work_lasts_longer_by_its_slowdown():
    """A pass of 2 s beside a trainer that begins at 1 s and slows it by half: one second of work is left, which lasts 1.5. The trainer, at
    half speed beside the pass, has done 0.75 of its 1 s by then, and the rest at full speed.
    """
    events, ended = Events(), {}
    cores = Cores(events, slowdowns={("engine", "trainer"): 0.5, ("trainer", "engine"): 1.0})
    cores.start("engine", 2.0, lambda: ended.__setitem__("engine", events.now_s))
    events.at(1.0, lambda: cores.start("trainer", 1.0, lambda: ended.__setitem__("trainer", events.now_s)))
    assert run(events, ended, 2) == {"engine": pytest.approx(2.5), "trainer": pytest.approx(2.75)}


def test_work_beside_two_others_of_a_kind_is_slowed_down_once_and_they_slow_down_each_other():
    """Two passes at half speed beside each other, and a trainer at two thirds beside either or both: its 2 s end at 3 s, theirs of 1 s at 2
    s and, for the longer one, 4 s, of which it is alone from 2 s on.
    """
    events, ended = Events(), {}
    cores = Cores(events, slowdowns={("trainer", "engine"): 0.5, ("engine", "engine"): 1.0})
    for name, kind, seconds in (("short", "engine", 1.0), ("long", "engine", 3.0), ("trainer", "trainer", 2.0)):
        cores.start(kind, seconds, lambda name=name: ended.__setitem__(name, events.now_s))
    assert run(events, ended, 3) == {"short": pytest.approx(2.0), "trainer": pytest.approx(3.0), "long": pytest.approx(4.0)}


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_job_that_is_over_is_kept_by_nothing(is_given_up: bool):
    """A million of them would else wait for a collection of garbage."""
    events = Events()
    cores = Cores(events, slowdowns={("trainer", "engine"): 0.5})
    gc.collect()
    gc.disable()
    try:
        job, other = cores.start("trainer", 4.0, lambda: None), cores.start("engine", 1.0, lambda: None)
        if is_given_up:
            job.cancel()
        events.run(until=lambda: events.now_s >= (1.0 if is_given_up else 4.3), limit_s=1e6)
        del job, other
        assert not [one for one in gc.get_objects() if isinstance(one, Job)]
    finally:
        gc.enable()


def test_calls_beyond_the_slots_wait_in_order():
    events, ended = Events(), {}
    slots = Slots(Cores(events), kind="scorer", num_slots=2)
    for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 1.0), ("d", 5.0)):
        slots.call(seconds, lambda name=name: ended.__setitem__(name, events.now_s))
    assert run(events, ended, 4) == {"a": 3.0, "b": 1.0, "c": 2.0, "d": 7.0}
    assert slots.busy_s == 10.0


def test_calls_slow_down_what_shares_their_cores():
    """A pass of 2 s beside a call of 1 s that slows it by half: at 1 s two thirds of a second are done, and the rest has no company."""
    events, ended = Events(), {}
    cores = Cores(events, slowdowns={("engine", "prm"): 0.5})
    cores.start("engine", 2.0, lambda: ended.__setitem__("engine", events.now_s))
    Slots(cores, kind="prm", num_slots=1).call(1.0, lambda: ended.__setitem__("prm", events.now_s))
    assert run(events, ended, 2) == {"engine": pytest.approx(1 + 4 / 3), "prm": 1.0}


def test_what_waits_for_a_process_reward_model_is_one_batch():
    """The first three come at once: 0.5 s and their own; the fourth and fifth wait until they are done."""
    events, ended = Events(), {}
    models = Batches(Cores(events), kind="prm", num_slots=1, batch_s=0.5)

    def call(name: str, seconds: float) -> None:
        models.call(seconds, lambda: ended.__setitem__(name, events.now_s))

    for name, seconds in (("a", 1.0), ("b", 0.25), ("c", 0.25)):
        call(name, seconds)
    events.at(0.1, lambda: call("d", 1.0))
    events.at(0.2, lambda: call("e", 2.0))
    assert run(events, ended, 5) == {"a": 2.0, "b": 2.0, "c": 2.0, "d": 5.5, "e": 5.5}
    assert (models.busy_s, models.num_done) == (5.5, 5)


def test_two_process_reward_models_share_what_waits():
    events, ended = Events(), {}
    models = Batches(Cores(events), kind="prm", num_slots=2, batch_s=0.5)
    for name in "abcd":
        models.call(1.0, lambda name=name: ended.__setitem__(name, events.now_s))
    assert run(events, ended, 4) == dict.fromkeys("abcd", 2.5)
    for name in "efg":
        models.call(1.0, lambda name=name: ended.__setitem__(name, events.now_s))
    assert run(events, ended, 7) == dict.fromkeys("abcd", 2.5) | {"e": 5.0, "f": 5.0, "g": 4.0}


def with_luck(luck: float) -> Any:
    """A rollout whose first draw is this."""
    return SimpleNamespace(sibling=0, draws=SimpleNamespace(luck=np.array([[luck, 0.5]])))


def test_steps_are_known_to_have_ended_with_the_next_report():
    """Of 60 tokens each, the first ends after 0.3 of them: after 18, 78 and 138 tokens, which reports of 8 tell of at 24, 80 and 144."""
    steps = Steps(num_tokens=60, chunk_tokens=8)
    assert steps.ends(with_luck(0.3), 0, 150) == [24, 80, 144]
    assert steps.ends(with_luck(0.3), 24, 144) == [80], "what was told, and what its end tells"
    assert Steps(num_tokens=8, chunk_tokens=8).ends(with_luck(0.3), 0, 30) == [8, 16, 24]


def test_completions_have_as_many_steps_as_their_tokens_say():
    """Of 40 tokens in steps of 64, five of eight hold the end of a step, before the last report of 8."""
    steps = Steps(num_tokens=64, chunk_tokens=8)
    num = sum(len(steps.ends(with_luck(luck), 0, 41)) for luck in np.linspace(0.001, 1.0, 1000))
    assert num == pytest.approx(1000 * 40 / 64, abs=2)


def test_a_run_in_which_nothing_happens_is_said_to_be_stalled():
    with pytest.raises(Stalled, match="nothing is left to happen at 0"):
        Events().run(until=lambda: False, limit_s=1.0)


@pytest.mark.parametrize(
    ("distribution", "mean", "cv"),
    [
        (fixed(7.0), 7.0, 0.0),
        (Distribution(kind="uniform", low=0.0, high=10.0), 5.0, 1 / np.sqrt(3)),
        (Distribution(kind="exponential", mean=4.0), 4.0, 1.0),
        (Distribution(kind="lognormal", mean=4.0, cv=1.0), 4.0, 1.0),
        (recorded([1.0, 2.0, 3.0, 6.0]), 3.0, None),
    ],
)
def test_a_distribution_has_its_mean_and_spread(distribution: Distribution, mean: float, cv: float | None):
    values = distribution.at(np.random.default_rng(0).standard_normal(200_000))
    assert values.mean() == pytest.approx(mean, rel=0.02)
    assert distribution.average == pytest.approx(mean)
    if cv is not None:
        assert values.std() / values.mean() == pytest.approx(cv, rel=0.03, abs=1e-9)


def workload(**changed: object) -> Workload:
    given = {
        "seed": 1,
        "num_siblings": 8,
        "prompt_tokens": fixed(9.0),
        "lengths": Distribution(kind="lognormal", mean=100.0, cv=1.0),
        "likeness": 0.0,
        "turns": fixed(1.0),
        "score_s": fixed(0.1),
        "reply_s": fixed(0.1),
        "reward_mean": 0.3,
        "reward_spread": 0.5,
    }
    return Workload(**{**given, **changed})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("siblings", "cv", "tail"), [(8, 0.5, 1.83), (16, 0.5, 2.14), (8, 1.0, 2.66), (16, 1.0, 3.43), (8, 1.5, 3.34)])
def test_the_longest_of_a_group_is_as_much_longer_as_published(siblings: int, cv: float, tail: float):
    """Lognormal lengths: mean of the longest sibling over the mean."""
    load = workload(num_siblings=siblings, lengths=Distribution(kind="lognormal", mean=5000.0, cv=cv))
    groups = [load.group(number).lengths for number in range(20_000)]
    found = statistics.fmean(group.max() for group in groups) / statistics.fmean(group.mean() for group in groups)
    assert found == pytest.approx(tail, rel=0.03)


def test_a_groups_draws_depend_on_its_number_alone():
    late, early = workload().group(700), [workload().group(number) for number in (0, 300, 700)][-1]
    assert (late.lengths == early.lengths).all()
    assert (late.lengths != workload(seed=2).group(700).lengths).any()


def test_siblings_are_alike_as_far_as_they_are_said_to_be():
    def correlation(likeness: float) -> float:
        load = workload(likeness=likeness)
        pairs = np.log([load.group(number).lengths[:2] for number in range(4000)])
        return float(np.corrcoef(pairs.T)[0, 1])

    assert correlation(0.0) == pytest.approx(0.0, abs=0.05)
    assert correlation(0.6) == pytest.approx(0.6, abs=0.05)


def test_lengths_follow_factors_by_the_same_factor_from_group_to_group():
    """800 groups between factors 1, 16 and 1, so 400 groups a stretch: a quarter of one is a factor of 2, and what comes after is 1."""
    load = workload(lengths=fixed(10.0), length_factors=(1.0, 16.0, 1.0), num_groups=800)
    assert [int(load.group(number).lengths[0]) for number in (0, 100, 200, 400, 600, 800, 900)] == [10, 20, 40, 160, 40, 10, 10]
    assert int(workload(lengths=fixed(10.0)).group(700).lengths[0]) == 10


def test_prompts_follow_factors_of_their_own():
    """20 groups between a factor of 1 and one of 4: 10 groups are a factor of 2. Answers stay as they are."""
    load = workload(prompt_tokens=fixed(9.0), lengths=fixed(10.0), prompt_factors=(1.0, 4.0), num_groups=20)
    assert [load.group(number).prompt_tokens for number in (0, 10, 20, 300)] == [9, 18, 36, 36]
    assert {int(load.group(number).lengths[0]) for number in (0, 10, 20)} == {10}


def test_prompts_differ_in_difficulty_by_the_spread():
    """Of a Beta distribution the variance is spread * mean * (1 - mean)."""
    load = workload()
    chances = [load.group(number).success for number in range(20_000)]
    assert statistics.fmean(chances) == pytest.approx(0.3, abs=0.01)
    assert statistics.pvariance(chances) == pytest.approx(0.5 * 0.3 * 0.7, rel=0.05)


@pytest.mark.parametrize("other", [0.0, 0.15, 0.3, 0.65, 1.0])
def test_what_ends_at_its_limit_has_chances_of_its_own_mean(other: float):
    """Easier prompts stay easier, and the mean is the one that was given."""
    drawn = [workload(truncated_reward_mean=other).group(number) for number in range(4000)]
    assert np.mean([draws.success for draws in drawn]) == pytest.approx(0.3, abs=0.02)
    assert np.mean([draws.truncated_success for draws in drawn]) == pytest.approx(other, abs=0.02)
    ranked = sorted(drawn, key=lambda draws: draws.success)
    assert all(a.truncated_success <= b.truncated_success for a, b in itertools.pairwise(ranked))


def test_a_simulated_trajectory_is_as_old_as_its_columns_would_be():
    rollout = Rollout(
        group_id=3, sibling=0, name="3/0", prompt_id="0:3", draws=workload().group(3), is_greedy=False, admitted_s=0.0, version=2
    )
    rollout.runs, rollout.num_sampled = [(2, 5), (2, 1), (4, 3)], 9
    trajectory = rollout.trajectory()
    whole = np.array([-1] * 9 + [2] * 6 + [4] * 3, np.int32)
    assert measure(trajectory.versions, trained_version=6) == measure(whole, trained_version=6)
    assert (trajectory.num_tokens, trajectory.num_trained_tokens, trajectory.run_tokens) == (18, 9, (6, 3))
    assert trajectory.num_bytes == 13 * 18
    rollout.num_traced = 8
    rollout.begin_anew()
    assert (rollout.num_sampled, rollout.num_traced) == (0, 0)


def test_the_books_do_not_end_a_rollout_twice():
    books = Books()
    books.admit("0/0")
    books.end("0/0", TerminalStatus.TRAINED)
    with pytest.raises(KeyError):
        books.end("0/0", TerminalStatus.STALE)
    assert books.counts().trained == books.counts().admitted == 1


def test_the_cut_is_the_live_one():
    from orchestrator.simulate import batching, generation, weight_sync

    assert batching.BatchCut is BatchCut
    for module, names in (
        (batching, ("Grouping", "Packing")),
        (generation, ("Admission", "Loads", "Quarantine")),
        (weight_sync, ("Swaps",)),
    ):
        for name in names:
            assert not getattr(module, name).__module__.startswith("orchestrator.simulate")

"""Admission: the formula on numbers worked by hand, credits on every way out, and the bound as a property."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules.admission import ENGINES_FULL, ROUND_UNDER_WAY, STALENESS_BOUND, Admission, Schedule, schedule_of
from pipelinerl.config import Mode

STREAMING_2 = schedule_of(Mode.STREAMING, max_staleness=2)


def admission(schedule: Schedule, *, groups_per_step: int = 3, num_steps: int = 100, max_running: int = 1000) -> Admission:
    return Admission(schedule=schedule, groups_per_step=groups_per_step, num_steps=num_steps, max_running=max_running)


def held_back(rule: Admission, *, version: int | None = None, engines_are_current: bool = True) -> str | None:
    """What keeps an engine from generating another group; without `version`, one that holds the newest policy."""
    return rule.holds_back(
        version=rule.version if version is None else version, num_generating=rule.running, engines_are_current=engines_are_current
    )


def admit_all(rule: Admission, *, version: int | None = None, engines_are_current: bool = True, max_groups: int = 10**6) -> int:
    """Admit while the rule allows it; how many that were."""
    count = 0
    while count < max_groups and held_back(rule, version=version, engines_are_current=engines_are_current) is None:
        rule.admitted()
        count += 1
        assert count <= 1000, "admission never ends"
    return count


def test_each_mode_has_its_pace():
    assert schedule_of(Mode.STREAMING, max_staleness=7) == Schedule(
        max_staleness=7, in_rounds=False, holds_batches=False, swaps_when_idle=False
    )
    assert schedule_of(Mode.ONE_STEP_OFF, max_staleness=7) == Schedule(
        max_staleness=1, in_rounds=True, holds_batches=True, swaps_when_idle=True
    )
    assert schedule_of(Mode.SYNC, max_staleness=7) == Schedule(max_staleness=0, in_rounds=True, holds_batches=True, swaps_when_idle=True)


@pytest.mark.parametrize(("max_staleness", "first", "after_one_version"), [(0, 3, 3), (1, 6, 3), (2, 9, 3), (4, 15, 3)])
def test_streaming_admits_k_plus_1_batches_and_one_more_for_each_version(max_staleness: int, first: int, after_one_version: int):
    """(K + 0 + 1) * 3 groups before the first policy, 3 more for the next."""
    rule = admission(schedule_of(Mode.STREAMING, max_staleness=max_staleness))
    assert admit_all(rule) == first
    rule.published(1)
    assert admit_all(rule) == after_one_version


def test_a_placed_group_keeps_its_credit_and_a_given_up_one_returns_it():
    rule = admission(STREAMING_2)
    admit_all(rule)
    for _ in range(5):
        rule.assigned()
    assert (rule.accepted, rule.running) == (5, 4)
    assert admit_all(rule) == 0
    for _ in range(2):
        rule.dropped()
    assert (rule.accepted, rule.running) == (5, 2)
    assert admit_all(rule) == 2


def test_several_versions_at_once_open_as_many_batches():
    rule = admission(STREAMING_2)
    admit_all(rule)
    rule.published(3)
    assert admit_all(rule) == 9  # (2 + 3 + 1) * 3 = 18, of which 9 run


def test_repeated_and_reordered_news_of_versions_change_nothing():
    rule = admission(STREAMING_2)
    for version in (3, 1, 3, 2):
        rule.published(version)
    assert rule.version == 3
    assert admit_all(rule) == 18


def test_never_more_than_the_run_trains_on():
    """5 steps of 3: the last versions open nothing."""
    rule = admission(STREAMING_2, num_steps=5)
    total = admit_all(rule)
    for version in range(1, 6):
        for _ in range(3):
            rule.assigned()
        rule.published(version)
        total += admit_all(rule)
    assert total == 15
    assert (rule.accepted, rule.running) == (15, 0)


def test_a_run_shorter_than_the_bound_admits_only_its_own_steps():
    assert admit_all(admission(schedule_of(Mode.STREAMING, max_staleness=4), num_steps=2)) == 6


def test_engines_are_not_flooded():
    """The staleness bound allows 9, the engines hold 4; a group that leaves makes room for one."""
    rule = admission(STREAMING_2, max_running=4)
    assert admit_all(rule) == 4
    rule.assigned()
    assert admit_all(rule) == 1


def test_sync_generates_one_batch_for_each_version():
    rule = admission(schedule_of(Mode.SYNC, max_staleness=4))
    assert admit_all(rule) == 3
    for _ in range(3):
        rule.assigned()
    assert admit_all(rule) == 0, "the policy of this batch is not published yet"
    rule.published(1)
    assert admit_all(rule, engines_are_current=False) == 0, "an engine still holds the old policy"
    assert admit_all(rule) == 3


def test_one_step_off_generates_the_next_batch_while_one_is_trained():
    rule = admission(schedule_of(Mode.ONE_STEP_OFF, max_staleness=4))
    assert admit_all(rule) == 3
    assert admit_all(rule) == 0, "the first batch is still being generated"
    for _ in range(3):
        rule.assigned()
    assert admit_all(rule) == 3, "batch 1, under version 0, while batch 0 is trained"
    for _ in range(3):
        rule.assigned()
    assert admit_all(rule) == 0, "batch 2 under version 0 would be 2 versions old"
    rule.published(1)
    assert admit_all(rule) == 3


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ONE_STEP_OFF])
def test_a_round_is_refilled_for_groups_given_up_once_it_has_run_out(mode: Mode):
    rule = admission(schedule_of(mode, max_staleness=4), groups_per_step=4)
    assert admit_all(rule) == 4
    rule.assigned()
    rule.dropped()
    rule.dropped()
    assert admit_all(rule) == 0, "one of the round is still running"
    rule.assigned()
    assert admit_all(rule) == 2, "the batch lacks two"
    rule.dropped()
    rule.dropped()
    assert admit_all(rule) == 2, "again"


def test_a_round_under_way_is_finished_though_engines_fell_behind():
    """Only its first group waits for the engines: a policy published meanwhile must not cut a round in two."""
    rule = admission(schedule_of(Mode.ONE_STEP_OFF, max_staleness=4), groups_per_step=4)
    assert held_back(rule) is None
    rule.admitted()
    assert admit_all(rule, engines_are_current=False) == 3


def test_a_round_is_whole_however_few_groups_the_engines_hold():
    assert admit_all(admission(schedule_of(Mode.SYNC, max_staleness=0), groups_per_step=8, max_running=2)) == 8


def test_an_engine_that_lags_behind_generates_only_what_its_own_version_allows():
    """What it samples is as old as the policy it holds, whatever is published meanwhile."""
    rule = admission(STREAMING_2)
    rule.published(2)
    assert admit_all(rule, version=0) == 9
    assert admit_all(rule, version=1) == 3
    assert admit_all(rule, version=2) == 3
    assert held_back(rule, version=2) == STALENESS_BOUND


def test_what_holds_a_group_back_is_named():
    rule = admission(STREAMING_2, max_running=4)
    admit_all(rule)
    assert held_back(rule) == ENGINES_FULL
    for _ in range(4):
        rule.assigned()
    admit_all(rule)
    for _ in range(4):
        rule.assigned()
    admit_all(rule)
    assert (rule.accepted, rule.running) == (8, 1)
    assert held_back(rule) == STALENESS_BOUND
    rule = admission(schedule_of(Mode.ONE_STEP_OFF, max_staleness=1))
    admit_all(rule)
    assert held_back(rule) == ROUND_UNDER_WAY


actions = st.lists(st.sampled_from(["admit", "place", "give_up", "publish", "commit"]), min_size=20, max_size=300)


@given(
    mode=st.sampled_from(list(Mode)),
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    max_running=st.integers(1, 20),
    script=actions,
)
def test_in_order_no_group_exceeds_the_bound(mode: Mode, max_staleness: int, groups_per_step: int, max_running: int, script: list[str]):
    """Whatever the order of events, and however late the engine commits: groups taken in order are at most K versions old."""
    schedule = schedule_of(mode, max_staleness=max_staleness)
    rule = admission(schedule, groups_per_step=groups_per_step, max_running=max_running, num_steps=50)
    versions: collections.deque[int] = collections.deque()
    num_placed = engine_version = 0
    for action in script:
        if action == "admit" and held_back(rule, version=engine_version, engines_are_current=engine_version == rule.version) is None:
            rule.admitted()
            versions.append(engine_version)
        elif action == "place" and versions:
            step = num_placed // groups_per_step
            assert step - versions.popleft() <= schedule.max_staleness
            assert step < 50
            num_placed += 1
            rule.assigned()
        elif action == "give_up" and versions:
            versions.popleft()
            rule.dropped()
        elif action == "publish" and num_placed >= (rule.version + 1) * groups_per_step:
            rule.published(rule.version + 1)
        elif action == "commit" and not (schedule.swaps_when_idle and versions):
            engine_version = rule.version
        assert rule.running == len(versions)
        assert rule.accepted == num_placed


def test_the_bound_is_reached_so_it_is_not_too_tight():
    """Admitted at version 0 and taken in order, the ninth group of three falls into step 2: staleness 2 = K."""
    rule = admission(STREAMING_2)
    num_admitted = admit_all(rule)
    assert (num_admitted - 1) // 3 == 2


@given(script=st.lists(st.sampled_from(["place", "give_up"]), max_size=200), mode=st.sampled_from(list(Mode)))
def test_no_credit_is_ever_lost(script: list[str], mode: Mode):
    """After any mixture of exits a run that goes on still trains all its steps."""
    rule = admission(schedule_of(mode, max_staleness=1), groups_per_step=4, num_steps=6, max_running=3)
    exits = iter(script)
    while rule.accepted < 24:
        assert rule.running or held_back(rule) is None, f"stuck at {rule.accepted} accepted, {rule.running} running"
        admit_all(rule)
        while rule.running:
            rule.dropped() if next(exits, "place") == "give_up" else rule.assigned()
            rule.published(rule.accepted // 4)
    assert rule.accepted == 24
    assert admit_all(rule) == 0


def test_a_script_is_held_back_by_engines_too_old_for_its_next_step_and_by_no_count_of_groups():
    rule = admission(schedule_of(Mode.STREAMING, max_staleness=1, in_script=True), groups_per_step=2)
    assert admit_all(rule, max_groups=50) == 50
    rule.next_step = 2
    assert held_back(rule, version=0) == STALENESS_BOUND
    assert held_back(rule, version=1) is None
    busy = admission(schedule_of(Mode.SYNC, max_staleness=1, in_script=True), max_running=3)
    assert admit_all(busy) == 3
    assert held_back(busy) == ENGINES_FULL

"""Who speaks is what the key says; who keeps lying is replaced, and banned in the end; and what a peer may say of itself is bounded."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestrator.rules.validation.announcements import MAX_SLOTS, AnnouncementCheck, gauges, policy_of
from orchestrator.rules.validation.penalties import MAX_REPLACED, MAX_VIOLATIONS, WINDOW_S, Penalties, Penalty
from orchestrator.rules.validation.trainer import (
    MAX_PULLS,
    TrainerProgress,
    checkpoint_failed,
    checkpoint_saved,
    figures,
    policy_published,
    pull,
    step_done,
)
from orchestrator.rules.validation.violations import Kind, wrong_identity
from pipelinerl.messages import (
    CheckpointFailed,
    CheckpointSaved,
    EngineLoad,
    EngineMismatch,
    EngineReady,
    FunctionLoad,
    PolicyPublished,
    ScorerLoad,
    ScorerReady,
    StepDone,
    TakeMicroBatch,
    TrainerReady,
    WeightsCommitted,
)

NAMES = {"engine-0", "engine-1"}
RULE = AnnouncementCheck(max_outstanding=3, num_steps=10)


def load(engine_id: int = 1, **changes: Any) -> EngineLoad:
    fields = {"version": 0, "num_running": 0, "num_waiting": 0, "num_tokens": 0, "num_steps": 0, "busy_s": 0.0, "idle_s": 0.0}
    return EngineLoad(engine_id=engine_id, **fields | changes)


def ready(**changes: Any) -> EngineReady:
    fields: dict[str, Any] = {"engine_id": 1, "process_id": 7, "max_model_tokens": 64, "max_running": 4, "tensors": ()}
    return EngineReady(**fields | changes)


@pytest.mark.parametrize(("peer", "engine_id", "is_one"), [("engine-1", 1, False), ("engine-1", 0, True), ("engine-30000", 30000, True)])
def test_a_peer_is_who_its_key_says_and_one_that_the_config_has(peer: str, engine_id: int, is_one: bool):
    violation = wrong_identity(peer, load(engine_id), names=NAMES)
    assert (violation is not None) == is_one
    assert violation is None or violation.kind == Kind.IDENTITY


def test_every_third_lie_costs_a_process_and_the_fourth_process_its_name():
    penalties = Penalties(can_replace=True)
    for _ in range(MAX_REPLACED):
        verdicts = [penalties.violated("engine-1", now_s=1.0) for _ in range(MAX_VIOLATIONS + 5)]
        assert verdicts == [Penalty.REFUSE] * (MAX_VIOLATIONS - 1) + [Penalty.REPLACE] + [Penalty.REFUSE] * 5, "once for each process"
        assert penalties.violated("engine-0", now_s=1.0) is Penalty.REFUSE, "nobody answers for another"
        assert penalties.began_anew("engine-1", now_s=1.0) is Penalty.REFUSE
        assert penalties.began_anew("engine-0", now_s=1.0) is Penalty.REFUSE
    assert [penalties.violated("engine-1", now_s=1.0) for _ in range(MAX_VIOLATIONS)][-1] is Penalty.BAN


def test_who_can_be_of_no_use_is_replaced_for_a_single_lie():
    penalties = Penalties(can_replace=True)
    assert penalties.violated("trainer-0", now_s=1.0, is_hopeless=True) is Penalty.REPLACE
    assert penalties.violated("trainer-0", now_s=1.0, is_hopeless=True) is Penalty.REFUSE, "it is being replaced"
    penalties.began_anew("trainer-0", now_s=1.0)
    assert penalties.violated("trainer-0", now_s=1.0) is Penalty.REFUSE, "that was another process"
    assert Penalties(can_replace=False).violated("trainer-0", now_s=1.0, is_hopeless=True) is Penalty.BAN


def test_old_replacements_are_forgotten_and_where_nobody_can_replace_a_liar_is_banned_at_once():
    penalties = Penalties(can_replace=True)
    for number in range(3 * MAX_REPLACED):
        verdicts = [penalties.violated("engine-1", now_s=number * WINDOW_S / 2) for _ in range(MAX_VIOLATIONS)]
        assert verdicts[-1] is Penalty.REPLACE
        penalties.began_anew("engine-1", now_s=number * WINDOW_S / 2)
    alone = Penalties(can_replace=False)
    assert [alone.violated("engine-1", now_s=0.0) for _ in range(MAX_VIOLATIONS)][-1] is Penalty.BAN


def test_a_name_that_has_one_process_after_another_is_banned():
    penalties = Penalties(can_replace=True, max_processes=5)
    assert [penalties.began_anew("engine-1", now_s=0.0) for _ in range(6)] == [Penalty.REFUSE] * 5 + [Penalty.BAN]
    assert penalties.began_anew("engine-1", now_s=2 * WINDOW_S) is Penalty.REFUSE


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (None, {"running": {"0/0": 1, "0/1": 0, "evaluation-3/17": 0}, "version": 4}),
        (Kind.BOUNDS, {"running": {f"{number}/0": 0 for number in range(4)}}),
        (Kind.BOUNDS, {"running": {"x" * 65: 0}}),
        (Kind.BOUNDS, {"running": {"0/0": -1}}),
        (Kind.BOUNDS, {"max_running": 0}),
        (Kind.BOUNDS, {"max_running": MAX_SLOTS + 1}),
        (Kind.BOUNDS, {"max_model_tokens": 0}),
        (Kind.VERSIONS, {"version": 5}),
        (Kind.VERSIONS, {"version": -1}),
        (Kind.VERSIONS, {"rollback_epoch": -1}),
    ],
)
def test_an_engine_announces_what_this_run_can_have(kind: Kind | None, changes: dict[str, Any]):
    violation = RULE.engine(ready(**changes), newest=4)
    assert (None if violation is None else violation.kind) == kind


def test_a_scorer_has_some_slots_and_a_trainer_no_version_after_the_last_step():
    assert RULE.scorer(ScorerReady(scorer_id=0, process_id=1, num_slots=2)) is None
    for num_slots in (0, MAX_SLOTS + 1):
        assert RULE.scorer(ScorerReady(scorer_id=0, process_id=1, num_slots=num_slots)) is not None
    for version, saved, is_good in ((10, 5, True), (10, None, True), (11, None, False), (3, 4, False), (3, -1, False)):
        said = TrainerReady(replica=0, num_replicas=1, process_id=1, version=version, saved=saved)
        assert (RULE.trainer(said) is None) == is_good


@pytest.mark.parametrize(("name", "value"), [("busy_s", math.nan), ("idle_s", math.inf), ("num_tokens", -1), ("kv_used", -0.5)])
def test_gauges_are_finite_and_from_zero(name: str, value: float):
    assert gauges(load(kv_used=0.5)) is None
    changed: dict[str, Any] = {name: value}
    violation = gauges(load(**changed))
    assert violation is not None
    assert name in violation.words


def test_gauges_inside_gauges_are_looked_at_too():
    function = FunctionLoad(
        num_calls=1, num_failed={"error": -1}, num_retries=0, p50_s=0.1, p95_s=0.1, max_s=0.1, slowest="0/0", breaker="closed"
    )
    violation = gauges(ScorerLoad(scorer_id=0, num_running=0, num_scored=0, busy_s=0.0, functions={"right": function}))
    assert violation is not None
    assert "functions.right.num_failed.error" in violation.words


@pytest.mark.parametrize(
    ("version", "rollback_epoch", "is_good"), [(4, 0, True), (5, 0, False), (-1, 0, False), (3, 1, True), (3, 2, False)]
)
def test_an_engine_commits_what_it_was_told_of(version: int, rollback_epoch: int, is_good: bool):
    said = WeightsCommitted(engine_id=1, version=version, pause_s=0.0, stage_s=0.0, num_running=0, rollback_epoch=rollback_epoch)
    assert (policy_of(said, newest=4, rollback_epoch=0) is None) == is_good


# --- a trainer ---

CLOSED = TrainerProgress(num_done=3, is_next_closed=True, num_steps=10)
OPEN = TrainerProgress(num_done=3, is_next_closed=False, num_steps=10)


@pytest.mark.parametrize(("step", "progress", "is_good"), [(3, CLOSED, True), (4, CLOSED, False), (2, CLOSED, False), (3, OPEN, False)])
def test_a_step_is_done_once_in_order_and_after_its_seal(step: int, progress: TrainerProgress, is_good: bool):
    assert (step_done(StepDone(step=step, metrics={}), progress) is None) == is_good


def test_of_a_steps_figures_the_finite_ones_stand_and_there_are_not_too_many():
    said = StepDone(step=3, metrics={"loss": 0.5, "kl": math.nan, "norm": math.inf}, engines=(mismatch(0.1), mismatch(0.2)))
    kept, violations = figures(said)
    assert (kept.metrics, kept.engines) == ({"loss": 0.5}, said.engines)
    (violation,) = violations
    assert "kl nan" in violation.words
    assert figures(StepDone(step=3, metrics={"loss": 0.5})) == (StepDone(step=3, metrics={"loss": 0.5}), [])
    many = StepDone(step=3, metrics={str(number): 0.0 for number in range(2000)})
    assert step_done(many, CLOSED) is not None


def test_a_mismatch_that_is_no_figure_is_refused_with_those_of_the_other_engines():
    kept, violations = figures(StepDone(step=3, metrics={"loss": 0.5}, engines=(mismatch(0.1), mismatch(math.nan))))
    assert (kept.metrics, kept.engines, len(violations)) == ({"loss": 0.5}, (), 1)


def mismatch(kl_sum: float) -> EngineMismatch:
    return EngineMismatch(engine_id=0, num_tokens=5, num_sequences=1, kl_sum=kl_sum)


@pytest.mark.parametrize(
    ("version", "progress", "is_good"), [(4, CLOSED, True), (3, OPEN, True), (4, OPEN, False), (5, CLOSED, False), (0, OPEN, True)]
)
def test_a_policy_is_no_newer_than_the_step_it_comes_after(version: int, progress: TrainerProgress, is_good: bool):
    said = PolicyPublished(version=version, buffer="a", digest="", num_bytes=1, publish_s=0.1)
    assert (policy_published(said, progress) is None) == is_good


@pytest.mark.parametrize(("version", "commit", "is_good"), [(3, "c", True), (3, "d", False), (4, "c", False), (0, "c", False)])
def test_a_checkpoint_is_of_what_was_trained_and_names_the_ledgers_commit(version: int, commit: str, is_good: bool):
    said = CheckpointSaved(version=version, commit=commit, num_bytes=1, save_s=0.1)
    assert (checkpoint_saved(said, CLOSED, commit="c") is None) == is_good
    assert (checkpoint_failed(CheckpointFailed(version=version, error=""), CLOSED) is None) == (0 < version <= 3)


@pytest.mark.parametrize(("oldest", "is_good"), [(None, True), (0, True), (3, True), (4, False), (-1, False)])
def test_a_checkpoint_lets_no_rows_go_that_it_would_need_itself(oldest: int | None, is_good: bool):
    said = CheckpointSaved(version=3, commit="c", num_bytes=1, save_s=0.1, oldest=oldest)
    assert (checkpoint_saved(said, CLOSED, commit="c") is None) == is_good
    ready = TrainerReady(replica=0, num_replicas=1, process_id=1, version=3, oldest=oldest)
    assert (RULE.trainer(ready) is None) == is_good


def test_rows_are_pulled_of_steps_that_are_not_done_and_not_without_end():
    for step, is_good in ((2, False), (3, True), (4, True), (6, True), (7, False)):
        violation = pull(TakeMicroBatch(replica=0, step=step, index=0), CLOSED, num_asked=0, is_starting=False)
        assert (violation is None) == is_good
    assert pull(TakeMicroBatch(replica=0, step=9, index=0), CLOSED, num_asked=0, is_starting=True) is None
    assert pull(TakeMicroBatch(replica=0, step=3, index=-1), CLOSED, num_asked=0, is_starting=False) is not None
    assert pull(TakeMicroBatch(replica=0, step=3, index=0), CLOSED, num_asked=MAX_PULLS, is_starting=False) is not None

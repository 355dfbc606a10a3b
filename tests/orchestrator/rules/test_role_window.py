"""What a window of a live run shows, on numbers worked by hand.

Two engines have passes of 20 ms for four sequences: 200 tokens per second each while they work. A replica works half of the time.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from orchestrator.rules.pass_profile import PassSeconds
from orchestrator.rules.role_window import SILENT_S, Counts, RoleWindow
from orchestrator.rules.roles import Window
from pipelinerl.messages import EngineLoad

STEP_S = 10.0
"""When steps are heard of, where nothing hangs on it."""


def load(engine_id: int, second: int, *, idle: float = 0.0, context: int = 100) -> EngineLoad:
    """A report after so many seconds, in which an engine has worked but for a part `idle`."""
    passes = round(second * 50 * (1 - idle))
    tokens = 4 * passes
    return EngineLoad(
        engine_id=engine_id,
        version=0,
        num_running=4,
        num_waiting=0,
        num_tokens=tokens,
        num_steps=passes,
        busy_s=passes * 0.020,
        idle_s=second * idle,
        num_context_tokens=tokens * context,
    )


def counts(second: float, *, sampled: float = 0.0, trained: float = 0.0, held_s: float = 0.0) -> Counts:
    return Counts(now_s=second, sampled=sampled, trained=trained, held_s=held_s)


def after_ten_seconds(window: RoleWindow, *, idle: float = 0.0, began_s: int = 0, context: int = 100) -> None:
    for second in range(began_s + 1, began_s + 11):
        for engine_id in (0, 1):
            window.reported(load(engine_id, second, idle=idle, context=context), width=1, now_s=float(second))


def begun(*, least_steps: int = 1) -> RoleWindow:
    window = RoleWindow(slots=4, least_steps=least_steps)
    for engine_id in (0, 1):
        window.reported(load(engine_id, 0), width=1, now_s=0.0)
    window.begin(counts(0.0))
    return window


def seen(window: RoleWindow, at: Counts) -> tuple[Window, PassSeconds]:
    found = window.window(at, width=1, engines_of_unit=1)
    assert found is not None
    return found


def test_speeds_contexts_and_waits_of_a_window():
    window = begun()
    after_ten_seconds(window)
    for _ in range(5):
        window.trained(num_tokens=2000, working_s=1.0, num_replicas=2, now_s=STEP_S)
    found, passes_s = seen(window, counts(10.0, sampled=4000, trained=3000, held_s=4.0))
    assert (found.tokens, found.num_steps, found.context) == (3000, 5, 100)
    assert found.replica_rate == pytest.approx(3000 / (5 * 1.0 * 2))
    assert found.row_rate == pytest.approx(2000 * 5 / (5 * 1.0 * 2)), "those that nobody sampled, too"
    assert found.written_rate == pytest.approx(400)
    assert (found.trainer_wait, found.held_back) == (pytest.approx(0.5), pytest.approx(0.4))
    assert found.slowness == pytest.approx(1.0)
    assert passes_s(4, 100) == pytest.approx(0.020)
    assert found.held_tokens == pytest.approx(400), "four sequences of a hundred tokens"


def test_what_lies_between_two_passes_makes_engines_slow_and_time_without_a_request_does_not():
    window = begun()
    for second in range(1, 11):
        for engine_id in (0, 1):  # half of the passes that fit into the time, and never without a request
            one = load(engine_id, second, idle=0.5)
            window.reported(
                EngineLoad(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "idle_s": 0.0}), width=1, now_s=float(second)
            )
    window.trained(num_tokens=1000, working_s=1.0, num_replicas=1, now_s=STEP_S)
    found, _ = seen(window, counts(10.0, sampled=2000, trained=1000))
    assert found.slowness == pytest.approx(2.0)

    window = begun()
    after_ten_seconds(window, idle=0.5)
    window.trained(num_tokens=1000, working_s=1.0, num_replicas=1, now_s=STEP_S)
    found, _ = seen(window, counts(10.0, sampled=2000, trained=1000))
    assert found.slowness == pytest.approx(1.0)


def test_a_window_counts_from_its_beginning_and_passes_are_fitted_to_all():
    window = begun()
    after_ten_seconds(window)
    window.trained(num_tokens=1000, working_s=9.0, num_replicas=1, now_s=STEP_S)
    window.begin(counts(10.0, sampled=4000, trained=3000, held_s=4.0))
    after_ten_seconds(window, began_s=10, context=300)  # 300 in the mean of 20 s, after 100 in the first ten
    window.trained(num_tokens=1000, working_s=2.0, num_replicas=1, now_s=STEP_S)
    found, _ = seen(window, counts(20.0, sampled=8000, trained=3500, held_s=4.0))
    assert found.context == pytest.approx(500)
    assert (found.tokens, found.num_steps, found.replica_rate, found.held_back) == (500, 1, pytest.approx(250), 0.0)


def test_a_replica_is_as_fast_as_it_is_for_what_is_being_written():
    """It trains 10,000 tokens of rows a second, 3,000 of 10,000 sampled. Of what is written meanwhile 500 of 5,000 are: prompts have become
    longer, so it will train 1,000 sampled tokens a second.
    """
    window = begun()
    after_ten_seconds(window)
    window.trained(num_tokens=10_000, working_s=1.0, num_replicas=1, now_s=STEP_S)
    assert seen(window, counts(10.0, sampled=4000, trained=3000))[0].replica_rate == pytest.approx(3000)
    for num_sampled in (200, 300):
        window.completed(num_tokens=2500, num_sampled=num_sampled)
    assert seen(window, counts(10.0, sampled=4000, trained=3000))[0].replica_rate == pytest.approx(1000)
    window.begin(counts(10.0, sampled=4000, trained=3000))
    after_ten_seconds(window, began_s=10)
    window.trained(num_tokens=10_000, working_s=1.0, num_replicas=1, now_s=STEP_S)
    assert seen(window, counts(20.0, sampled=8000, trained=6000))[0].replica_rate == pytest.approx(3000), "those were of the window before"


def test_an_engine_that_starts_again_counts_anew():
    window = begun()
    after_ten_seconds(window)
    window.reported(load(0, 1), width=1, now_s=40.0)
    window.reported(load(0, 2), width=1, now_s=41.0)
    window.trained(num_tokens=1000, working_s=1.0, num_replicas=1, now_s=STEP_S)
    found, _ = seen(window, counts(41.0, sampled=4200, trained=1000))
    assert found.slowness == pytest.approx(1.0), "half a minute in which it started is nobody's pass"


def test_a_window_has_as_many_steps_as_it_has_to():
    window = begun(least_steps=2)
    after_ten_seconds(window)
    window.trained(num_tokens=1000, working_s=1.0, num_replicas=1, now_s=STEP_S)
    assert window.window(counts(10.0, sampled=4000, trained=1000), width=1, engines_of_unit=1) is None
    window.trained(num_tokens=1000, working_s=1.0, num_replicas=1, now_s=STEP_S)
    assert window.window(counts(10.0, sampled=4000, trained=1000), width=1, engines_of_unit=1) is not None


@pytest.mark.parametrize("missing", ["reports", "steps", "trained tokens", "a beginning"])
def test_without_any_of_them_nothing_is_measured(missing: str):
    window = begun()
    if missing != "reports":
        after_ten_seconds(window)
    if missing != "steps":
        window.trained(num_tokens=1000, working_s=1.0, num_replicas=1, now_s=STEP_S)
    if missing == "a beginning":
        window.stop()
    trained = 0 if missing == "trained tokens" else 1000
    assert window.window(counts(10.0, sampled=4000, trained=trained), width=1, engines_of_unit=1) is None


def test_a_window_in_which_an_engine_has_said_nothing_for_a_while_says_nothing():
    window = begun()
    window.reported(load(0, 10), width=1, now_s=SILENT_S)
    assert window.began is not None
    window.reported(load(1, 11), width=1, now_s=SILENT_S + 1)
    assert window.began is None, "it may have stood still"
    assert window.silence_s((0, 1), now_s=2 * SILENT_S) == SILENT_S
    assert window.silence_s((1,), now_s=2 * SILENT_S) == SILENT_S - 1
    assert window.silence_s((0, 1, 2), now_s=SILENT_S) == math.inf, "one that has never reported is not measured"


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_an_engine_whose_clock_jumps_ends_the_window_and_its_passes_are_not_fitted(jump_s: float):
    window = begun()
    after_ten_seconds(window)
    fitted = window.profiles[1].fit()
    one = load(0, 11)
    window.reported(msgspec.structs.replace(one, busy_s=one.busy_s + jump_s), width=1, now_s=11.0)
    assert window.began is None
    assert window.profiles[1].fit() == fitted
    after = load(0, 12)
    window.begin(counts(11.0))
    window.reported(msgspec.structs.replace(after, busy_s=after.busy_s + jump_s), width=1, now_s=12.0)
    assert window.began is not None, "it goes on from there"


@pytest.mark.parametrize("working_s", [float("nan"), -1.0, 31.0])
def test_a_step_that_says_what_cannot_be_ends_the_window(working_s: float):
    window = begun()
    window.trained(num_tokens=1000, working_s=1.0, num_replicas=1, now_s=10.0)
    window.trained(num_tokens=1000, working_s=20.0 + SILENT_S, num_replicas=1, now_s=30.0)
    window.trained(num_tokens=1000, working_s=0.0, num_replicas=1, now_s=30.0)
    assert window.began is not None
    window.trained(num_tokens=1000, working_s=working_s, num_replicas=1, now_s=50.0)
    assert window.began is None


def test_an_engine_that_is_lost_ends_the_window():
    window = begun()
    window.lost(1)
    assert window.began is None


def test_what_a_unit_of_the_process_reward_model_scores_while_it_works():
    """4,000 tokens in 8 seconds of scoring, whoever has done it, are 500 per second of one engine, and 1,000 of a unit of two."""
    window = begun()
    window.begin(dataclasses.replace(counts(0.0), scored_s=2.0))
    after_ten_seconds(window)
    window.trained(num_tokens=1000, working_s=1.0, num_replicas=1, now_s=10.0)
    at = dataclasses.replace(counts(10.0, sampled=4000, trained=2000), scored_s=10.0)
    found = window.window(at, width=1, engines_of_unit=1, scorers_of_unit=2)
    assert found is not None
    assert found[0].scorer_rate == 1000
    assert window.window(dataclasses.replace(at, scored_s=2.0), width=1, engines_of_unit=1, scorers_of_unit=2) is None, "nothing was scored"
    assert seen(window, dataclasses.replace(at, scored_s=None))[0].scorer_rate is None


def test_what_models_score_at_most_that_do_not_change():
    """4,000 tokens in 8 seconds of one process are 500 per second of it; in 4 seconds of another model's two 2,000. One has not scored."""
    window = begun()
    window.begin(dataclasses.replace(counts(0.0), others_s=(2.0, 1.0, 0.0)))
    after_ten_seconds(window)
    window.trained(num_tokens=1000, working_s=1.0, num_replicas=1, now_s=10.0)
    at = dataclasses.replace(counts(10.0, sampled=4000, trained=2000), others_s=(10.0, 5.0, 0.0))
    for numbers, most in (((1, 2, 1), 500), ((8, 2, 1), 2000)):
        found = window.window(at, width=1, engines_of_unit=1, others=numbers)
        assert found is not None
        assert found[0].scored_most == most
    still = window.window(dataclasses.replace(at, others_s=(2.0, 1.0, 0.0)), width=1, engines_of_unit=1, others=(1, 2, 1))
    assert still is not None
    assert still[0].scored_most is None

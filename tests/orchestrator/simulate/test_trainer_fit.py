"""What a trainer takes, by the steps of runs whose seconds are worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.simulate import speeds
from orchestrator.simulate.recorded import RecordedRun, RunJournal, RunRollouts
from orchestrator.simulate.speeds import trainer_of_runs
from tests.orchestrator.simulate.test_calibrated import one_step


def run_beside(*, speed: float, beside: set[int], num_engines: int = 1) -> RecordedRun:
    """Twelve steps of one row, of 0.2 s, times 1.5 beside engines, times the machine's `speed`."""
    steps, work = [one_step(step=0, t=0.0)], list[tuple[float, float]]()
    for step in range(1, 13):
        seconds = 0.2 * speed * (1.5 if step in beside else 1.0)
        work.append((step - seconds, float(step)))
        counts = {"num_samples": 1, "num_trained_tokens": 5, "num_tokens": 12}
        steps.append({"step": step, "t": float(step), **counts, "trainer": {"forward_backward_s": seconds, "wait_s": 1 - seconds}})
    passes = {engine: [(step - 1.0, step - 0.001) for step in sorted(beside)] for engine in range(num_engines)}
    empty: dict[str, Any] = {"rewards": {}, "issued": {}, "waits_s": [], "turns": {}, "replies": {}, "rows": {}, "lengths": {}}
    rollouts = RunRollouts(**empty, group_size=1, num_scored=0, num_failed=0, num_hopeless=0)
    return RecordedRun(Path(), RunJournal(steps=steps, work=work, passes=passes), rollouts)


def test_what_is_beside_the_trainer_is_told_from_the_steps_of_one_run_and_not_from_two_runs():
    """Beside engines most of the time on a fast machine, and seldom on a slow one: one speed for both would say 0.35."""
    fast, slow = run_beside(speed=0.9, beside=set(range(1, 10))), run_beside(speed=1 / 0.9, beside={1, 2, 3})
    trainer, slowdowns = trainer_of_runs([fast, slow])
    assert slowdowns["trainer/engine"] == pytest.approx(0.5, abs=0.026)
    assert trainer.row_s + 12 * trainer.token_s == pytest.approx(0.2, rel=0.01), "their mean speed is usual"


def test_a_fit_that_comes_to_no_rest_ends_anyway(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speeds, "_LEAST_CHANGE", 0.0)
    _, slowdowns = trainer_of_runs([run_beside(speed=0.9, beside={1, 2, 3, 4}), run_beside(speed=1.1, beside={1, 2})])
    assert slowdowns["trainer/engine"] == pytest.approx(0.5, abs=0.026)


def test_two_engines_at_once_slow_the_trainer_no_more_than_one():
    _, slowdowns = trainer_of_runs([run_beside(speed=1.0, beside={1, 2, 3, 4, 5}, num_engines=2)])
    assert slowdowns["trainer/engine"] == pytest.approx(0.5, abs=0.026)


def test_long_samples_take_more_for_each_of_their_tokens():
    """Steps of four samples, all as long and each of a group of its own, 30 to 246 tokens with prompts of 7."""
    steps, lengths, trained = [one_step(step=0, t=0.0)], dict[str, int](), dict[int, list[str]]()
    for step in range(1, 20):
        length = 11 + 12 * step
        names = trained[step] = [f"{4 * step + number}/0" for number in range(4)]
        lengths |= dict.fromkeys(names, length)
        seconds = 4 * (1e-5 * (7 + length) + 1e-8 * (7 + length) ** 2)
        counts = {"num_samples": 4, "num_trained_tokens": 4 * length, "num_tokens": 4 * (7 + length)}
        steps.append({"step": step, "t": float(step), **counts, "trainer": {"forward_backward_s": seconds, "wait_s": 0.5}})
    empty: dict[str, Any] = {"rewards": {}, "issued": {}, "waits_s": [], "turns": {}, "replies": {}, "rows": {}}
    rollouts = RunRollouts(**empty, lengths=lengths, trained=trained, group_size=1, num_scored=0, num_failed=0, num_hopeless=0)
    trainer, _ = trainer_of_runs([RecordedRun(Path(), RunJournal(steps=steps), rollouts)])
    assert (trainer.token_s, trainer.square_s) == pytest.approx((1e-5, 1e-8), rel=1e-3)
    assert trainer.forward_part == 1.0, "nothing told of tokens without a gradient"


def test_short_and_long_steps_count_alike():
    """Steps of a row of 100 tokens that take 1.1 ms a token, and of 100 such rows that take 0.9: errors of x / 1.1 and x / 0.9 less 1 are
    least together for (1 / 1.1 + 1 / 0.9) / (1 / 1.1^2 + 1 / 0.9^2).
    """
    steps, rows = [one_step(step=0, t=0.0)], dict[int, int]()
    for step in range(1, 11):
        rows[step], token_s = (100, 0.9e-3) if step % 2 else (1, 1.1e-3)
        counts = {"num_samples": rows[step], "num_trained_tokens": 93 * rows[step], "num_tokens": 100 * rows[step]}
        seconds = {"forward_backward_s": 100 * rows[step] * token_s, "wait_s": 0.0}
        steps.append({"step": step, "t": 100.0 * step, **counts, "trainer": seconds})
    empty: dict[str, Any] = {"rewards": {}, "issued": {}, "waits_s": [], "turns": {}, "replies": {}, "lengths": {}}
    rollouts = RunRollouts(**empty, rows=rows, group_size=1, num_scored=0, num_failed=0, num_hopeless=0)
    trainer, _ = trainer_of_runs([RecordedRun(Path(), RunJournal(steps=steps), rollouts)])
    expected = 1e-3 * (1 / 1.1 + 1 / 0.9) / (1 / 1.1**2 + 1 / 0.9**2)
    assert trainer.row_s / 100 + trainer.token_s == pytest.approx(expected, rel=1e-3)


def run_that_waits(*, tells: bool = True, prm_part: float = 0.0) -> RecordedRun:
    """Steps of one row and a sample of 7 + 5 tokens compute for 0.2 s, and wait for their core besides: 1 ms for each of 0 to 38 scores
    and 2 ms for each of the 0 to 12 moments at which they come, `prm_part` of the time in which a process reward model works, which are 0
    to 3 fifths of it, and 1 % of it whatever happens. As many scores come while the trainer has nothing to do.
    """
    steps, answered, work = [one_step(step=0, t=0.0)], list[float](), list[tuple[float, float]]()
    batches: list[tuple[float, float]] = []
    for step in range(1, 40):
        num_moments, num_each, prm = step % 13, 1 + step % 3, step % 4 / 5
        seconds = (0.2 + 1e-3 * num_moments * num_each + 2e-3 * num_moments) / (1 - 0.01 - prm_part * prm)
        work.append((step - seconds, float(step)))
        for began_s in (step - seconds, step - 0.9):
            answered += [began_s + 0.01 + 0.01 * moment for moment in range(num_moments) for _ in range(num_each)]
        batches.append((step - seconds, step - seconds + seconds * prm))
        counts = {"num_samples": 1, "num_trained_tokens": 5, "num_tokens": 12}
        told = {"core_wait_s": seconds - 0.2} if tells else {}
        trained = {"forward_backward_s": seconds, "wait_s": 1 - seconds, **told}
        steps.append({"step": step, "t": float(step), **counts, "trainer": trained})
    empty: dict[str, Any] = {"rewards": {}, "issued": {}, "waits_s": [], "turns": {}, "replies": {}, "rows": {}, "lengths": {}}
    rollouts = RunRollouts(**empty, answered=sorted(answered), group_size=1, num_scored=0, num_failed=0, num_hopeless=0)
    return RecordedRun(Path(), RunJournal(steps=steps, work=work, prm_work={"prm-0": batches}), rollouts)


def test_what_holds_up_the_trainer_is_told_apart_by_how_long_it_waited_for_its_core():
    trainer, slowdowns = trainer_of_runs([run_that_waits(prm_part=0.5)])
    assert (trainer.answer_s, trainer.wake_s) == pytest.approx((1e-3, 2e-3), rel=1e-3)
    assert slowdowns["trainer/prm"] == pytest.approx(1 / (1 - 0.5) - 1, rel=1e-3), "half of the time is the other's"
    # What takes 1 % of the core whatever happens is in none of the reasons, so the trainer's own seconds hold it.
    assert trainer.row_s + 12 * trainer.token_s == pytest.approx(0.2, rel=0.025)
    assert slowdowns["trainer/engine"] == 0.0


def test_a_trainer_that_hardly_gets_its_core_is_slowed_about_tenfold():
    """Of steps 1.2 times the time is waited for in which a process reward model worked, as where its reports miss some of it: 0.9 of it is
    taken, and what others have of the core besides, which longer steps have more of, is the trainer's.
    """
    _, slowdowns = trainer_of_runs([run_that_waits(prm_part=1.2)])
    assert 10 - 1 <= slowdowns["trainer/prm"] < 12 - 1


def test_a_run_that_does_not_say_how_it_waited_is_taken_to_have_waited_as_the_one_beside_it():
    trainer, _ = trainer_of_runs([run_that_waits(), run_that_waits(tells=False)])
    assert (trainer.answer_s, trainer.wake_s) == pytest.approx((1e-3, 2e-3), rel=1e-3)
    assert trainer.row_s + 12 * trainer.token_s == pytest.approx(0.2, rel=0.025)


def test_a_longer_step_that_waited_for_nothing_is_blamed_on_no_score():
    """The same seconds of a run of an older version, which does not say what they were."""
    trainer, _ = trainer_of_runs([run_that_waits(tells=False)])
    assert (trainer.answer_s, trainer.wake_s) == (0.0, 0.0)
    assert trainer.row_s + 12 * trainer.token_s > 0.21

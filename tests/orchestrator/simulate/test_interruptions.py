"""What holds up a simulated trainer, on numbers worked by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.simulate.events import Events
from orchestrator.simulate.interruptions import interrupt, wakings
from orchestrator.simulate.run import simulate
from orchestrator.simulate.world import TrainerWorld
from tests.orchestrator.simulate.test_run import MANY
from tests.orchestrator.simulate.test_trainer import sample, trainer_of
from tests.orchestrator.simulate.worlds import BUSY, config

WORLD = TrainerWorld(token_s=1.0, answer_s=2.0, wake_s=0.5)
"""Answers take 2 s each, a waking half a second."""


def test_what_comes_within_a_millisecond_of_the_one_before_is_one_waking():
    assert wakings([3.0, 1.0, 1.0009, 1.0018, 1.0029]).tolist() == [1.0, 1.0029, 3.0]


def test_completions_and_answers_wake_up_others():
    assert wakings([1.0, 2.0], [1.0002, 1.0004]).tolist() == [1.0, 1.0002, 2.0]


def test_completions_scores_and_replies_hold_up_the_trainer_while_it_works():
    """A row of 9 + 3 tokens takes 12 s. Two completions at 1 s wake others up once, 0.5 s. Two scores and a reply at 2 s wake them up once
    and take 2 s each. A score at 18 s takes 2.5 s more: 12 + 0.5 + 6.5 + 2.5 in all. What comes at 30 s holds up nobody.
    """
    events, heard = Events(), list[tuple[float, str]]()
    trainer = trainer_of(WORLD, events)

    def hear(what: str) -> None:
        heard.append((events.now_s, what))

    generation: Any = SimpleNamespace(on_finished=hear, replies=SimpleNamespace(on_done=lambda: None))
    scoring: Any = SimpleNamespace(on_scored=hear)
    interrupt(trainer, WORLD, generation=generation, scoring=scoring)
    spans: list[tuple[str, float, float]] = []
    trainer.on_span = lambda *span: spans.append(span)
    for t in (1.0, 1.0, 30.0):
        events.at(t, lambda: generation.on_finished("rollout"))
    for t in (2.0, 2.0, 18.0, 30.0):
        events.at(t, lambda: scoring.on_scored("score"))
    events.at(2.0, lambda: generation.replies.on_done())
    trainer.add(0, [sample(0, 0, num_sampled=3)])
    events.run(until=lambda: len(heard) == 7, limit_s=1e6)
    assert spans == [("forward_backward", 0.0, pytest.approx(21.5))]
    assert heard == [(1.0, "rollout")] * 2 + [(2.0, "score")] * 2 + [(18.0, "score"), (30.0, "rollout"), (30.0, "score")]


def test_a_trainer_with_a_core_of_its_own_hears_of_nothing():
    world = TrainerWorld(token_s=1.0)
    generation: Any = SimpleNamespace(on_finished=print, replies=None)
    scoring: Any = SimpleNamespace(on_scored=print)
    interrupt(trainer_of(world, Events()), world, generation=generation, scoring=scoring)
    assert (generation.on_finished, scoring.on_scored) == (print, print)


def test_a_simulated_run_lasts_longer_for_the_answers_that_come_while_the_trainer_works():
    """The trainer is the limit: a score and two replies of each rollout, 1 ms each, hold it up unless they come while it waits."""
    many = config(**MANY, environment={"function": "unused:reply", "max_turns": 3})
    trainer = TrainerWorld(token_s=1e-3)
    usual, held = (simulate(many, dataclasses.replace(BUSY, trainer=one)) for one in (trainer, dataclasses.replace(trainer, answer_s=1e-3)))
    num_answers = 3 * held.rollouts.trained
    longer_s = held.totals.step_ends_s[-1] - usual.totals.step_ends_s[-1]
    assert 0.6 * num_answers * 1e-3 < longer_s < 1.2 * num_answers * 1e-3, longer_s / num_answers

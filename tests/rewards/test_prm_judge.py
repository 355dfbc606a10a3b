"""A language model as process reward model, behind a real endpoint."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pipelinerl.config import PrmSection
from pipelinerl.messages import Outcome
from pipelinerl.rewards.prm.judge import NUM_TRIES, JudgeScorer
from pipelinerl.rewards.prm.scorer import Trace
from pipelinerl.rewards.prm.steps import Splitter
from tests.rewards.test_pools_process import Endpoint

TEXT = "first\n\nsecond\n\nthird"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


def scorer_at(endpoint: Endpoint, *, deadline_s: float) -> contextlib.closing[JudgeScorer]:
    judge = {"url": endpoint.url, "model": "judge", "extra": {"seed": 7}}
    return contextlib.closing(JudgeScorer(PrmSection.model_validate({"judge": judge, "deadline_s": deadline_s})))


@pytest.fixture
def scorer(endpoint: Endpoint) -> Iterator[JudgeScorer]:
    """Its tries have 20 s each: a slow machine must not make one more of them."""
    with scorer_at(endpoint, deadline_s=20.0 * (NUM_TRIES + 1)) as made:
        yield made


def trace_in(scorer: JudgeScorer, name: str = "r") -> Trace:
    splitter = Splitter(lambda ids: "".join(map(chr, ids)), max_steps=100)
    return scorer.begin(name, 0, prompt="sum?", splitter=splitter)


def steps_of(body: dict[str, Any]) -> list[str]:
    return body["messages"][0]["content"].partition("<steps>\n")[2].partition("\n</steps>")[0].split("\n\n")


def test_each_step_is_judged_after_those_before_it_and_joined_whichever_answer_comes_first(endpoint: Endpoint, scorer: JudgeScorer) -> None:
    others_done = threading.Event()

    def reply(body: dict[str, Any]) -> tuple[int, str]:
        if len(steps_of(body)) == 1:
            assert others_done.wait(10)
        if len(steps_of(body)) == 3:
            others_done.set()
        return 200, f"SCORE: {len(steps_of(body))}"

    endpoint.reply = reply
    trace = trace_in(scorer)
    trace.feed([ord(character) for character in TEXT[:9]], is_last=False)
    assert scorer.score([trace_in(scorer, "of no token")]) == []
    trace.feed([ord(character) for character in TEXT[9:]], is_last=True)
    found = scorer.score([trace])
    assert [(one.step.index, one.step.end, one.outcome, one.score) for one in found] == [
        (0, 6, Outcome.OK, 0.1),
        (1, 14, Outcome.OK, 0.2),
        (2, 19, Outcome.OK, 0.3),
    ]
    assert sorted(map(steps_of, (body for _, body, _ in endpoint.requests))) == [
        ["first"],
        ["first", "second"],
        ["first", "second", "third"],
    ]
    assert {body["seed"] for _, body, _ in endpoint.requests} == {7}
    assert scorer.score([trace]) == []


def test_step_without_a_verdict_is_asked_again_and_then_fails_by_name(endpoint: Endpoint, scorer: JudgeScorer) -> None:
    """The first answer about the second step is cut off, every one about the third is; a hang is a try that ends."""
    num_asked = [0, 0, 0]

    def reply(body: dict[str, Any]) -> tuple[int, str]:
        number = len(steps_of(body)) - 1
        num_asked[number] += 1
        return (200, "hm") if number == 2 or (number == 1 and num_asked[1] == 1) else (200, "SCORE: 10")

    endpoint.reply = reply
    trace = trace_in(scorer)
    trace.feed([ord(character) for character in TEXT], is_last=True)
    found = scorer.score([trace])
    assert [(one.outcome, one.score) for one in found] == [(Outcome.OK, 1.0), (Outcome.OK, 1.0), (Outcome.ERROR, None)]
    assert "after 3 tries: the judge gave no line 'SCORE: <number>'" in found[2].error
    assert num_asked == [1, 2, NUM_TRIES]
    assert scorer.cost.num_requests == 6


def test_judge_that_hangs_costs_its_tries_and_no_more(endpoint: Endpoint) -> None:
    released = threading.Event()

    def reply(body: dict[str, Any]) -> tuple[int, str]:
        released.wait(20)
        return 200, "SCORE: 1"

    endpoint.reply = reply
    with scorer_at(endpoint, deadline_s=1.0) as scorer:
        trace = trace_in(scorer)
        trace.feed([ord("x")], is_last=True)
        (found,) = scorer.score([trace])
    released.set()
    assert found.outcome is Outcome.ERROR
    assert "could not be asked: ReadTimeout" in found.error

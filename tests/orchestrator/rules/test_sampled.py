"""What an engine cannot have sampled is refused, by kind: each rule by hand, and every mutation of a good answer by chance."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules.validation.completions import MAX_LOGPROB, AnswerBounds, CompletionCheck, Experts
from orchestrator.rules.validation.violations import Kind
from pipelinerl.data.expert_routes import routes_of
from pipelinerl.messages import Completion, Finish, Generate, Sampling, Tokens

RULE = CompletionCheck(vocabulary=100)
GENERATE = Generate(rollout_id="3/1", attempt=2, token_ids=np.array([1, 2], np.int32), sampling=Sampling(max_tokens=4))
ASKED = AnswerBounds(request=GENERATE, oldest=3, newest=5, max_model_tokens=64, max_swaps=1, may_be_cancelled=False)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def completion(**changes: Any) -> Completion:
    """Three tokens of versions 3 and 4, ended by a stop token; with these fields changed."""
    fields: dict[str, Any] = {
        "rollout_id": "3/1",
        "attempt": 2,
        "token_ids": ints(0, 99, 7),
        "logprobs": np.array([-0.5, 0.0, -20.0], np.float32),
        "versions": ints(3, 4, 4),
        "finish": Finish.STOP,
        "started_at": 1.0,
        "finished_at": 2.0,
    }
    return Completion(**fields | changes)


def of_length(num: int, **changes: Any) -> Completion:
    return completion(token_ids=ints(*[1] * num), logprobs=np.full(num, -1.0, np.float32), versions=ints(*[3] * num), **changes)


def test_what_can_be_is_taken():
    for said in (
        completion(),
        completion(recomputed=(1,)),
        of_length(4, finish=Finish.LENGTH),
        of_length(0, finish=Finish.ERROR, error="out of memory"),
        completion(logprobs=np.array([MAX_LOGPROB / 2, -1.0, -1.0], np.float32)),
    ):
        assert RULE.completion(said, ASKED) is None


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Kind.TOKENS, {"token_ids": ints(0, 100, 7)}),
        (Kind.TOKENS, {"token_ids": ints(0, -1, 7)}),
        (Kind.LOGPROBS, {"logprobs": np.array([-0.5, 0.01, -1.0], np.float32)}),
        (Kind.LOGPROBS, {"logprobs": np.array([-0.5, np.nan, -1.0], np.float32)}),
        (Kind.LOGPROBS, {"logprobs": np.array([-0.5, -np.inf, -1.0], np.float32)}),
        (Kind.VERSIONS, {"versions": ints(2, 4, 4)}),
        (Kind.VERSIONS, {"versions": ints(3, 4, 6)}),
        (Kind.VERSIONS, {"versions": ints(3, 4, 2**31 - 1)}),
        (Kind.FINISH, {"finish": Finish.LENGTH}),
        (Kind.FINISH, {"finish": Finish.CANCELLED}),
        (Kind.FINISH, {"error": "words"}),
        (Kind.BOUNDS, {"recomputed": (1, 2)}),
        (Kind.BOUNDS, {"num_written": 1}),
        (Kind.BOUNDS, {"started_at": math.nan}),
        (Kind.BOUNDS, {"finished_at": math.inf}),
        (Kind.ROUTES, {"routes": routes_of(np.zeros((4, 2, 1), np.uint8))}),
    ],
)
def test_each_thing_that_cannot_be_is_refused_by_its_kind(kind: Kind, changes: dict[str, Any]):
    violation = RULE.completion(completion(**changes), ASKED)
    assert violation is not None
    assert violation.kind == kind
    assert "rollout 3/1, attempt 2" in violation.words
    assert "expected" in violation.words or kind is Kind.FINISH


def test_an_answer_is_no_longer_than_asked_and_no_stop_comes_without_a_token():
    assert (violation := RULE.completion(of_length(5), ASKED)) is not None
    assert violation.kind == Kind.LENGTH
    assert (violation := RULE.completion(of_length(0), ASKED)) is not None
    assert violation.kind == Kind.FINISH


def test_a_full_context_ends_a_sequence_before_its_longest_length_and_one_that_was_withdrawn_may_be_cancelled():
    full = msgspec.structs.replace(GENERATE, token_ids=ints(*range(60)))
    asked = AnswerBounds(request=full, oldest=0, newest=3, max_model_tokens=64, max_swaps=1, may_be_cancelled=True)
    assert RULE.completion(of_length(3, finish=Finish.LENGTH), asked) is None
    assert RULE.completion(of_length(1, finish=Finish.CANCELLED), asked) is None


def test_routes_are_of_experts_that_there_are_one_row_for_each_token_but_the_last():
    rule = CompletionCheck(vocabulary=None, experts=Experts(num_layers=3, num_experts=8, top_k=2))
    good = np.full((4, 3, 2), 7, np.uint8)
    good[0] = 255  # not known
    assert rule.completion(completion(routes=routes_of(good)), ASKED) is None
    for wrong in (good[:3], np.full((4, 3, 2), 8, np.uint8), np.zeros((4, 4, 2), np.uint8), np.zeros((4, 3, 1), np.uint8)):
        violation = rule.completion(completion(routes=routes_of(wrong)), ASKED)
        assert violation is not None
        assert violation.kind == Kind.ROUTES


@pytest.mark.parametrize(
    ("kind", "start", "token_ids"),
    [(None, 1, ints(5, 6)), (Kind.LENGTH, 3, ints(5, 6)), (Kind.LENGTH, -1, ints(5)), (Kind.TOKENS, 0, ints(100))],
)
def test_tokens_of_a_sequence_that_goes_on_are_bounded_alike(kind: Kind | None, start: int, token_ids: np.ndarray):
    violation = RULE.tokens(Tokens(rollout_id="3/1", attempt=2, start=start, token_ids=token_ids), ASKED)
    assert (None if violation is None else violation.kind) == kind


FAR = st.one_of(st.integers(-(2**31), -1), st.integers(100, 2**31 - 1))
MUTATIONS = st.one_of(
    st.tuples(st.just(Kind.TOKENS), st.integers(0, 2), FAR),
    st.tuples(
        st.just(Kind.LOGPROBS), st.integers(0, 2), st.sampled_from([math.nan, math.inf, -math.inf]) | st.floats(2.0**-8, 2.0**90, width=32)
    ),
    st.tuples(st.just(Kind.VERSIONS), st.just(0), st.integers(-(2**31), 2)),
    st.tuples(st.just(Kind.VERSIONS), st.just(2), st.integers(6, 2**31 - 1)),
)


@given(MUTATIONS)
def test_any_column_mutated_out_of_range_is_refused_as_what_it_is(mutation: tuple[Kind, int, float]):
    kind, place, value = mutation
    name = {Kind.TOKENS: "token_ids", Kind.LOGPROBS: "logprobs", Kind.VERSIONS: "versions"}[kind]
    column = getattr(completion(), name).copy()
    column[place] = value
    violation = RULE.completion(completion(**{name: column}), ASKED)
    assert violation is not None
    assert violation.kind == kind

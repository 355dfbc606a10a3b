"""Incremental step scores: an engine made by hand whose rows are known, with a prefix cache of blocks; S01 to S04 of the scoring stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from pipelinerl.messages import Outcome
from pipelinerl.rewards.prm.scorer import CONVENTIONS, Convention, PrmScorer, Reading, Rows, StepScore, Trace
from pipelinerl.rewards.prm.steps import Splitter, TurnSplitter

TAG = Convention(tag="#", reading=Reading.SIGMOID, good=0)


class ByHand:
    """Its tokens are characters; its row at token i is (sum of the character codes up to i) / 1000 - 1. Blocks of 16 are cached."""

    def __init__(self, *, max_tokens: int = 10_000, block: int = 16) -> None:
        self.max_tokens = max_tokens
        self.forgets = False
        self.batches: list[int] = []
        self._block = block
        self._cached: set[tuple[str, tuple[int, ...]]] = set()

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def rows(self, requests: Sequence[Sequence[int]], *, salt: str, reads_cache: bool) -> list[Rows]:
        self.batches.append(len(requests))
        return [self._rows(list(request), salt, reads_cache) for request in requests]

    def _rows(self, token_ids: list[int], salt: str, reads_cache: bool) -> Rows:
        if self.forgets:
            self._cached.clear()
        num_cached = 0
        while reads_cache and num_cached + self._block < len(token_ids):  # the last token is always computed
            if (salt, tuple(token_ids[: num_cached + self._block])) not in self._cached:
                break
            num_cached += self._block
        self._cached |= {(salt, tuple(token_ids[:end])) for end in range(self._block, len(token_ids) + 1, self._block)}
        return (np.cumsum(token_ids, dtype=np.float32)[:, None] / np.float32(1000) - np.float32(1))[num_cached:].astype(np.float32)


def by_words(token_ids: Sequence[int]) -> str:
    """The policy's tokenizer: tokens of many characters, nothing like the model's."""
    return "".join(WORDS[index] for index in token_ids)


WORDS = ["one and", " two", ".\n\n", "three is more", "\n\nfour", " five six seven\n\n", "end"]
POLICY = [0, 1, 2, 3, 4, 5, 6]
STEPS = ["one and two.", "three is more", "four five six seven", "end"]
ENDS = [2, 3, 5, 6]


def trace(engine: ByHand, *, name: str = "r", prompt: str = "sum?") -> Trace:
    return Trace(name, 1, prompt=prompt, splitter=Splitter(by_words, max_steps=50), convention=TAG, encode=engine.encode)


def stream(engine: ByHand, *, size: int, prompt: str = "sum?", version: str = "v1") -> tuple[list[StepScore], PrmScorer]:
    scorer = PrmScorer(engine, convention=TAG, version=version)
    growing = trace(engine, prompt=prompt)
    scores: list[StepScore] = []
    for start in range(0, len(POLICY), size):
        growing.feed(POLICY[start : start + size], is_last=start + size >= len(POLICY))
        scores += scorer.score([growing])
    return scores, scorer


def by_definition(prompt: str = "sum?") -> list[float]:
    text, scores = prompt, []
    for step in STEPS:
        text += f"{step}#"
        value = np.float32(sum(map(ord, text))) / 1000 - 1
        scores.append(1 / (1 + math.exp(-value)))
    return scores


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("prompt", ["p" * length for length in (0, 1, 2, 3, 4, 15, 16, 17)])
def test_scores_are_those_of_each_prefix_whatever_the_chunks_and_wherever_blocks_end(size: int, prompt: str) -> None:
    scores, _ = stream(ByHand(), size=size, prompt=prompt)
    assert [score.step.index for score in scores] == [0, 1, 2, 3]
    assert [score.score for score in scores] == pytest.approx(by_definition(prompt), rel=1e-5)
    assert {(score.trace.rollout_id, score.trace.attempt, score.outcome) for score in scores} == {("r", 1, Outcome.OK)}


def test_steps_are_joined_to_the_policy_s_tokens_and_not_to_the_model_s() -> None:
    assert [score.step.end for score in stream(ByHand(), size=1)[0]] == ENDS


def test_trace_costs_about_one_prefill_with_the_cache_and_much_more_without() -> None:
    engine, forgetful = ByHand(), ByHand()
    forgetful.forgets = True
    (_, spared), (scores, unspared) = stream(engine, size=1), stream(forgetful, size=1)
    num_tokens = len("sum?") + sum(len(step) + 1 for step in STEPS)
    assert spared.cost.num_asked == unspared.cost.num_asked == unspared.cost.num_computed
    assert num_tokens <= spared.cost.num_computed <= num_tokens + 16 * (len(STEPS) - 1)
    assert spared.cost.num_computed < unspared.cost.num_computed
    assert [score.score for score in scores] == pytest.approx(by_definition(), rel=1e-5), "evicted between chunks: slow, and right"


def test_tag_whose_row_was_cached_is_asked_for_past_the_cache_and_counted() -> None:
    engine = ByHand(block=4)
    stream(engine, size=1)
    scores, scorer = stream(engine, size=7)  # the same trace again: its first tags are cached now
    assert [score.score for score in scores] == pytest.approx(by_definition(), rel=1e-5)
    assert scorer.cost.num_asked_again == 1


def test_weights_of_another_version_read_nothing_of_this_one_s_cache() -> None:
    engine = ByHand()
    stream(engine, size=7)
    _, other = stream(engine, size=7, version="v2")
    assert other.cost.num_computed == other.cost.num_asked


@pytest.mark.parametrize("size", [1, 3, 7])
def test_trace_longer_than_the_model_takes_is_invalid_from_the_step_that_exceeds_it_whatever_the_chunks(size: int) -> None:
    scores, _ = stream(ByHand(max_tokens=35), size=size)
    assert [score.outcome for score in scores] == [Outcome.OK, Outcome.OK, Outcome.INVALID, Outcome.INVALID]
    assert scores[2].score is None
    assert scores[2].error == "the trace up to this step has 51 tokens, the process reward model takes 35"


def test_pending_steps_of_many_traces_are_one_batch() -> None:
    engine = ByHand()
    scorer = PrmScorer(engine, convention=TAG, version="v1")
    traces = [trace(engine, name=f"r{index}", prompt=f"{index}?") for index in range(5)]
    for one in traces[:4]:
        one.feed(POLICY, is_last=True)
    scores = scorer.score(traces)
    assert engine.batches == [4]
    assert len(scores) == 4 * len(STEPS)
    assert scorer.score(traces) == []
    assert engine.batches == [4], "nothing pending, nothing asked"


def test_trace_without_a_step_is_never_asked_for() -> None:
    engine = ByHand()
    empty = trace(engine)
    empty.feed([], is_last=True)
    assert PrmScorer(engine, convention=TAG, version="v1").score([empty]) == []
    assert engine.batches == []


def test_rows_are_read_by_each_convention() -> None:
    row = np.array([2.0, 3.0, np.nan], np.float32)
    assert CONVENTIONS["qwen2.5-math-prm"].read(row) == pytest.approx(1 / (1 + math.exp(-1.0)))
    assert CONVENTIONS["sigmoid-head"].read(row) == pytest.approx(1 / (1 + math.exp(-2.0)))
    assert Convention(tag="", reading=Reading.RAW, good=1).read(row) == 3.0
    vocabulary = np.zeros(700, np.float32)
    vocabulary[648], vocabulary[387] = 5.0, 4.0
    assert CONVENTIONS["math-shepherd"].read(vocabulary) == pytest.approx(1 / (1 + math.exp(-1.0)))
    assert Convention(tag="", reading=Reading.SIGMOID, good=0).read(np.array([-1000.0], np.float32)) == 0.0
    for wrong in (Convention(tag="", reading=Reading.RAW, good=2), Convention(tag="", reading=Reading.RAW, good=3)):
        with pytest.raises(ValueError, match="has no finite columns"):
            wrong.read(row)


def test_row_that_is_not_finite_is_an_invalid_score_and_not_zero() -> None:
    scorer = PrmScorer(ByHand(), convention=Convention(tag="#", reading=Reading.RAW, good=7), version="v1")
    growing = trace(ByHand())
    growing.feed(POLICY, is_last=True)
    assert {(score.outcome, score.score) for score in scorer.score([growing])} == {(Outcome.INVALID, None)}


TURNS = [1, 4, 6]
"""Last tokens of three turns; token 2 and 5 are what an environment says."""
SAID = ["one and two", ".\n\nthree is more\n\nfour", "five six seven\n\nend"]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_turn_is_scored_as_the_episode_up_to_it_is_by_itself(size: int) -> None:
    engine = ByHand()
    scorer, found = PrmScorer(engine, convention=TAG, version="v1"), list[StepScore]()
    episode = Trace("r", 1, prompt="sum?", splitter=TurnSplitter(by_words, ends=TURNS), convention=TAG, encode=engine.encode)
    for start in range(0, len(POLICY), size):
        episode.feed(POLICY[start : start + size], is_last=start + size >= len(POLICY))
        found += scorer.score([episode])
    assert [(one.step.end, one.step.text) for one in found] == list(zip(TURNS, SAID, strict=True))
    for number, one in enumerate(found):
        text = "sum?" + "".join(f"{said}#" for said in SAID[: number + 1])
        (row,) = ByHand().rows([[ord(character) for character in text]], salt="alone", reads_cache=False)
        assert one.score == pytest.approx(TAG.read(row[-1]), rel=1e-6)


def test_an_episode_without_a_turn_has_no_step() -> None:
    engine = ByHand()
    episode = Trace("r", 1, prompt="sum?", splitter=TurnSplitter(by_words, ends=[]), convention=TAG, encode=engine.encode)
    episode.feed([0, 1], is_last=True)
    assert not PrmScorer(engine, convention=TAG, version="v1").score([episode])

"""A real vLLM pooling engine around a tiny process reward model: incremental scores equal those from scratch, for about one prefill."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator

import pytest

from pipelinerl.engine.environment import set_environment
from pipelinerl.messages import Outcome
from pipelinerl.rewards.prm.scorer import Convention, PrmScorer, Reading, StepScore, Trace
from pipelinerl.rewards.prm.steps import Splitter, TurnSplitter
from tests.real_engine import keep_modules_frozen
from tests.tiny_models import make_prm

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(300)]
CONVENTION = Convention(tag="#", reading=Reading.SOFTMAX, good=1, bad=0)
STEPS = [f"step {index}: {'x' * length}" for index, length in enumerate((5, 15, 16, 17, 31, 32, 33, 60, 1, 90))]
TEXT = "\n\n".join(STEPS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    before = dict(os.environ)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    set_environment()
    from pipelinerl.rewards.pooling import PoolingModel

    keep_modules_frozen()
    folder = tmp_path_factory.mktemp("prm")
    make_prm(folder)
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 16 << 20}
    try:
        yield PoolingModel(folder, task="token_classify", dtype="float32", max_tokens=512, options=options)
    finally:
        gc.collect()
        asyncio.set_event_loop(None)
        loop.close()
        os.environ.clear()
        os.environ.update(before)


def scores_of(engine, *, size: int, version: str) -> tuple[list[StepScore], PrmScorer, int]:
    scorer = PrmScorer(engine, convention=CONVENTION, version=version)
    splitter = Splitter(lambda ids: "".join(map(chr, ids)), max_steps=100)
    trace = Trace("r", 0, prompt="sum?", splitter=splitter, convention=CONVENTION, encode=engine.encode)
    found: list[StepScore] = []
    policy = [ord(character) for character in TEXT]
    for start in range(0, len(policy), size):
        trace.feed(policy[start : start + size], is_last=start + size >= len(policy))
        found += scorer.score([trace])
    return found, scorer, len(trace.token_ids)


def test_incremental_scores_equal_those_of_the_whole_trace_and_cost_about_one_prefill(engine, capsys: pytest.CaptureFixture[str]) -> None:
    whole, once, num_tokens = scores_of(engine, size=len(TEXT), version="whole")
    growing, scorer, _ = scores_of(engine, size=7, version="growing")
    assert len(whole) == len(growing) == len(STEPS)
    assert {score.outcome for score in growing} == {Outcome.OK}
    assert [score.step.end for score in growing] == [score.step.end for score in whole]
    assert [score.score for score in growing] == pytest.approx([score.score for score in whole], abs=1e-5)
    assert len({round(score.score or 0.0, 6) for score in whole}) > 5, "the scores do differ"
    assert once.cost.num_computed == num_tokens
    assert num_tokens <= scorer.cost.num_computed <= num_tokens + 32 * len(STEPS)
    assert scorer.cost.num_asked > 2 * scorer.cost.num_computed
    with capsys.disabled():
        cost = scorer.cost
        print(f"\ntokens: whole at the end {num_tokens}, growing {cost.num_computed}, each step from scratch {cost.num_asked}")


def test_trace_that_was_scored_before_is_read_past_the_cache_and_right(engine) -> None:
    first, _, _ = scores_of(engine, size=len(TEXT), version="again")
    second, scorer, _ = scores_of(engine, size=len(TEXT), version="again")
    assert scorer.cost.num_asked_again == 1
    assert [score.score for score in second] == pytest.approx([score.score for score in first], abs=1e-5)


def test_a_turn_is_scored_as_the_episode_up_to_it_is_by_itself(engine) -> None:
    """Three turns of one episode in one request, and each episode up to a turn in a request of its own, past the cache."""
    ends, said = [9, 24, 39], TEXT[:40]
    scorer = PrmScorer(engine, convention=CONVENTION, version="turns")
    splitter = TurnSplitter(lambda ids: "".join(map(chr, ids)), ends=ends)
    episode = Trace("r", 0, prompt="sum?", splitter=splitter, convention=CONVENTION, encode=engine.encode)
    episode.feed([ord(character) for character in said], is_last=True)
    found = scorer.score([episode])
    assert [one.step.end for one in found] == ends
    text = "sum?"
    for start, one in zip([0, 10, 25], found, strict=True):
        text += said[start : one.step.end + 1].strip() + CONVENTION.tag
        (rows,) = engine.rows([engine.encode(text)], salt=f"alone {one.step.end}", reads_cache=False)
        assert one.score == pytest.approx(CONVENTION.read(rows[-1]), abs=1e-5)
    assert len({round(one.score or 0.0, 5) for one in found}) == 3

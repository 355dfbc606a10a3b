"""Environments with state in a real scorer: objects in processes that are killed, that hang, and that others wait for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipelinerl.messages import EndEpisode, FunctionFailed, Outcome, RequestKind, Result, ScorerReady, ScorerTask, Turns
from tests.rewards.conftest import Scorer, encode, score

pytestmark = [pytest.mark.process]

GAMES = Path(__file__).parent / "stateful_games.py"
DEADLINE_S = 2.0


def task(rollout_id: str, *said: str, at_reset: str = "") -> ScorerTask:
    """The reset of an episode, or its last turn: the environment has said `?` before each."""
    text = "".join(f"?{one}" for one in said)
    ends = [len("".join(f"?{one}" for one in said[: number + 1])) - 1 for number in range(len(said))]
    starts = [end - len(one) + 1 for end, one in zip(ends, said, strict=True)]
    turns = Turns(starts=np.array(starts, np.int32), ends=np.array(ends, np.int32), states=("s",) * len(said)) if said else None
    base = score(rollout_id, text, at_reset=at_reset)
    return msgspec.structs.replace(base, kind=RequestKind.ENVIRONMENT, turns=(turns,))


def asked(scorer: Scorer, rollout_id: str, *said: str, at_reset: str = "") -> Result:
    scorer.send(task(rollout_id, *said, at_reset=at_reset))
    return scorer.result_of(rollout_id)


def heard(result: Result) -> str:
    assert result.observation is not None, result
    return "".join(chr(29 + one) for one in result.observation.token_ids.tolist())


@pytest.fixture(scope="module")
def scorer(start_scorer: Callable[..., Scorer], tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    closed = tmp_path_factory.mktemp("closed") / "closed"
    os.environ["PIPELINERL_TEST_CLOSED"] = str(closed)
    try:
        scorer = start_scorer({}, deadline_s=DEADLINE_S, stateful=f"{GAMES}:Told", concurrency=2, variables=["PIPELINERL_TEST_CLOSED"])
    finally:
        del os.environ["PIPELINERL_TEST_CLOSED"]
    scorer.scratch = closed
    assert scorer.next(ScorerReady).num_slots == 2
    return scorer


def test_each_episode_has_a_process_of_its_own_until_it_is_ended(scorer: Scorer) -> None:
    assert heard(asked(scorer, "a")) == heard(asked(scorer, "b")) == "begin"
    first, second = heard(asked(scorer, "a", "process")), heard(asked(scorer, "b", "process"))
    assert first != second
    assert heard(asked(scorer, "a", "process", "process")) == first
    scorer.send(task("c"))
    scorer.send(EndEpisode(rollout_id="a"))
    assert heard(scorer.result_of("c")) == "begin", "a third begins once the first is over"
    assert heard(asked(scorer, "c", "process")) == first
    assert scorer.scratch.read_text().split() == [first], "it was closed in its own process"
    gone = asked(scorer, "a", "process", "process", "more")
    assert (gone.outcome, gone.is_lost) == (Outcome.ERROR, True)
    for name in "bc":
        scorer.send(EndEpisode(rollout_id=name))


def test_a_process_that_is_killed_or_dies_loses_its_episode_and_no_other(scorer: Scorer) -> None:
    asked(scorer, "d")
    asked(scorer, "e")
    victim = int(heard(asked(scorer, "d", "process")))
    asked(scorer, "e", "ay")
    os.kill(victim, signal.SIGKILL)
    scorer.wait_until(lambda: not Path(f"/proc/{victim}").exists(), what="the process is reaped")
    lost = asked(scorer, "d", "process", "bee")
    assert (lost.outcome, lost.is_lost, lost.observation) == (Outcome.ERROR, True, None)
    assert heard(asked(scorer, "e", "ay", "bee")) == "heard bee"
    assert heard(asked(scorer, "d")) == "begin", "it begins again in a new process"
    died = asked(scorer, "d", "die")
    assert (died.outcome, died.is_lost) == (Outcome.ERROR, True)
    assert "its process ended with exit code 3" in died.error
    assert heard(asked(scorer, "e", "ay", "bee", "sea")) == "heard sea"
    for name in "de":
        scorer.send(EndEpisode(rollout_id=name))


def test_one_that_never_returns_is_killed_at_the_deadline_and_told_with_its_line(scorer: Scorer) -> None:
    asked(scorer, "f")
    hung = asked(scorer, "f", "hang")
    assert (hung.outcome, hung.is_lost) == (Outcome.TIMEOUT, False)
    told = scorer.next(FunctionFailed, is_wanted=lambda failed: failed.outcome is Outcome.TIMEOUT)
    line = next(number for number, text in enumerate(GAMES.read_text().splitlines(), 1) if "time.sleep(1000.0)" in text)
    assert told.where.endswith(f"stateful_games.py:{line}")
    scorer.send(EndEpisode(rollout_id="f"))
    at_reset = asked(scorer, "g", at_reset="raise")
    assert (at_reset.outcome, at_reset.error) == (Outcome.ERROR, "Told raised KeyError: 'no such move'")
    scorer.send(EndEpisode(rollout_id="g"))
    assert heard(asked(scorer, "h")) == "begin", "both slots are free again"
    assert heard(asked(scorer, "i")) == "begin"
    assert encode("?").tolist() == [34]

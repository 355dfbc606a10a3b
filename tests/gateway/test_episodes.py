"""Which turn a context goes on from."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pipelinerl.gateway.episodes import Answer, Episode, Episodes, Node
from pipelinerl.gateway.refusal import RequestRefused
from pipelinerl.gateway.streaming import whole
from pipelinerl.messages import NO_NODE, EpisodeLent, Finish, Int32, Prompt, TurnSampled
from tests.sim.clock import simulate


def ids(*tokens: int) -> Int32:
    return np.array(tokens, dtype=np.int32)


def episode(*turns: tuple[int, tuple[int, ...], tuple[int, ...]]) -> Episode:
    """Each turn: its parent, what was given before it, what was sampled."""
    made = Episode(
        lease="a",
        rollout_id="0/0",
        attempt=0,
        prompt=Prompt(prompt_id="0:0", text="", token_ids=ids(1)),
        ends_at=0.0,
        max_context_tokens=64,
    )
    for index, (parent, given, sampled) in enumerate(turns):
        before = 0 if parent == NO_NODE else made.nodes[parent].num_context
        zeros = np.zeros(len(sampled))
        turn = TurnSampled(
            request_id=index,
            node=index,
            token_ids=ids(*sampled),
            logprobs=zeros.astype(np.float32),
            versions=zeros.astype(np.int32),
            finish=Finish.STOP,
        )
        made.add(Node(index=index, parent=parent, given=ids(*given), num_prompt=before + len(given), turn=turn), digest=bytes([index]))
    return made


def continued(made: Episode, *tokens: int) -> int:
    node = made.continued_by(ids(*tokens))
    return NO_NODE if node is None else node.index


def test_a_context_goes_on_from_the_longest_turn_that_it_repeats_whole() -> None:
    made = episode((NO_NODE, (1, 2), (3,)), (0, (4,), (5, 6)), (0, (4,), (7,)), (NO_NODE, (1, 9), (10,)))
    assert continued(made, 1, 2, 3, 4, 5, 6, 8) == 1
    assert continued(made, 1, 2, 3, 4, 7, 8) == 2, "a call beside another"
    assert continued(made, 1, 2, 3, 4, 5, 99, 8) == 0, "a part of a sampled turn: a branch before it"
    assert continued(made, 1, 9, 10, 8) == 3, "a context of its own"
    assert continued(made, 1, 2, 3, 4, 5, 6) == 0, "something has to be given between two turns"
    assert continued(made, 2, 1) == NO_NODE
    assert continued(episode(), 1) == NO_NODE


def test_of_turns_that_sampled_the_same_the_first_is_continued() -> None:
    assert continued(episode((NO_NODE, (1,), (2,)), (NO_NODE, (1,), (2,))), 1, 2, 3) == 0


def test_who_waits_for_a_turn_waits_on_where_the_attempt_ends_later() -> None:
    async def program() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        episodes, started = Episodes(b"secret"), loop.time()
        prompt = Prompt(prompt_id="0:0", text="", token_ids=ids(1))
        lent = EpisodeLent(request_id=1, lease="a", rollout_id="0/0", attempt=0, prompt=prompt, deadline_s=5.0, max_context_tokens=64)
        made, answer = episodes.open(lent), Answer(done=loop.create_future())
        made.answers[b"q"] = [answer]
        loop.call_later(5.0, lambda: episodes.extend("a", by_s=20.0))
        loop.call_later(6.0, lambda: episodes.extend("b", by_s=20.0))  # nobody has that one any more
        with pytest.raises(RequestRefused, match="before the attempt's deadline"):
            await whole(answer, episode=made)
        return loop.time() - started, made.ends_at - started

    assert simulate(program()) == (35.0, 25.0), "ten seconds after the deadline, as it is at last"

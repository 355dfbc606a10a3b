"""What a scorer that keeps lying had is asked of its successor, and no prompt is to blame for it; real scorers' state over memory."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.peers import Peers
from orchestrator.peers.scorers import Scorers
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.rules.validation.penalties import MAX_VIOLATIONS
from orchestrator.rules.validation.scores import ScoreCheck
from orchestrator.stages.requests import Asking
from pipelinerl.messages import Finish, FromScorer, Outcome, Score, Scored, ScorerReady, Stop, ToScorer
from pipelinerl.runtime.watch import Watch
from pipelinerl.transport.memory import MemoryHub
from tests.orchestrator import handmade
from tests.sim.clock import simulate


def score(number: int) -> Score:
    prompt = handmade.prompt(prompt_id=f"0:{number}")
    return Score(rollout_id=f"{number}/0", attempt=0, prompt=prompt, token_ids=np.zeros(1, np.int32), finish=Finish.STOP)


def answer(of: Score, reward: float) -> Scored:
    return Scored(rollout_id=of.rollout_id, attempt=0, outcome=Outcome.OK, reward=reward, components={"right": 1.0})


@pytest.mark.parametrize("violations", [True, False])
def test_a_scorer_that_goes_for_its_lies_gets_no_more_work_and_no_prompt_is_suspected(violations: bool):
    """Three prompts at the death of two scorers. Of those that ended by themselves they are suspects, and one at a time is asked again."""
    replaced: list[str] = []

    async def program() -> tuple[list[str], list[str]]:
        hub, watch, ledger = MemoryHub(accepts=FromScorer), Watch(stall_limit_s=600.0), Ledger(None)
        link = hub.connect("scorer-0", accepts=ToScorer)
        peers = Peers(hub, role="scorer", expected=1, ready_deadline_s=60.0, silent_after_s=600.0, replace=replaced.append)
        judged = ScoreCheck(weights={"right": 1.0}, completion_check=CompletionCheck(vocabulary=None))
        scorers = Scorers(peers, expected=1, watch=watch, score_check=judged)
        asking = Asking(scorers=scorers, ledger=ledger, watch=watch, quarantine=Quarantine())
        scored: list[str] = []
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(peers.run()), group.create_task(asking.run())]
            for process_id in (1, 2):
                link.send(ScorerReady(scorer_id=0, process_id=process_id, num_slots=1))
                await asyncio.sleep(0.1)
                if process_id == 1:
                    for number in range(3):
                        await asking.ask(score(number), by="test", sink=lambda said: scored.append(said.rollout_id), refused=scored.append)
                await asyncio.sleep(0.1)
                if violations:
                    for number in range(MAX_VIOLATIONS):
                        link.send(answer(score(100 + number), 1.0))  # which nobody asked for
                    await asyncio.sleep(0.1)
                    assert not scorers.has_room, "it is being replaced"
            link.send(ScorerReady(scorer_id=0, process_id=3, num_slots=1))
            await asyncio.sleep(0.1)
            assert scorers.has_room
            asked = []
            while (message := link.receive(0)) is not None:
                assert not isinstance(message, Stop)
                asked.append(message)
            for request in asked[-3:]:
                link.send(answer(request, 1.0))
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
        return scored, [peer for (peer,) in ledger.store.read("SELECT peer FROM events WHERE kind = 'suspected'")]

    scored, suspected = simulate(program())
    assert replaced == (["scorer-0"] * 2 if violations else [])
    assert bool(suspected) == (not violations)
    if violations:
        assert sorted(scored) == ["0/0", "1/0", "2/0"]

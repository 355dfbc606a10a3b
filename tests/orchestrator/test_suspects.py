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
from pipelinerl.messages import Finish, FromScorer, Outcome, Request, RequestKind, Result, ScorerReady, ScorerTask, ToScorer
from pipelinerl.runtime.watch import Watch
from tests.orchestrator import handmade
from tests.sim.clock import simulate
from tests.sim.memory import MemoryHub


def task(number: int) -> ScorerTask:
    prompt = handmade.prompt(prompt_id=f"0:{number}")
    return ScorerTask(
        kind=RequestKind.REWARD,
        rollout_id=f"{number}/0",
        attempt=0,
        prompt=prompt,
        completions=(np.zeros(1, np.int32),),
        finishes=(Finish.STOP,),
        turns=(None,),
    )


def answer(request_id: int) -> Result:
    return Result(request_id=request_id, outcome=Outcome.OK, rewards=(1.0,), components=({"right": 1.0},))


@pytest.mark.parametrize("violations", [True, False])
def test_a_scorer_that_goes_for_its_lies_gets_no_more_work_and_no_prompt_is_suspected(violations: bool):
    """Three prompts at the death of two scorers. Of those that ended by themselves they are suspects, and one at a time is asked again."""
    replaced: list[str] = []

    async def program() -> tuple[list[str], list[str]]:
        hub, watch, ledger = MemoryHub(accepts=FromScorer), Watch(stall_limit_s=600.0), Ledger(None)
        link = hub.connect("scorer-0", accepts=ToScorer)
        peers = Peers(hub, role="scorer", expected=1, ready_deadline_s=60.0, silent_after_s=600.0, replace=replaced.append)
        score_check = ScoreCheck(weights={"right": 1.0}, completion_check=CompletionCheck(vocabulary=None))
        scorers = Scorers(peers, expected=1, ledger=ledger, watch=watch, quarantine=Quarantine(), score_check=score_check)
        scored: list[str] = []

        async def score(number: int) -> None:
            result = await scorers.request(task(number), by="test")
            scored.append(f"{number}/0" if result.outcome is Outcome.OK else result.error)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(peers.run())]
            for process_id in (1, 2):
                link.send(ScorerReady(scorer_id=0, process_id=process_id, num_slots=1))
                await asyncio.sleep(0.1)
                if process_id == 1:
                    for number in range(3):
                        tasks.append(group.create_task(score(number)))
                await asyncio.sleep(0.1)
                if violations:
                    for number in range(MAX_VIOLATIONS):
                        link.send(answer(100 + number))  # which nobody asked for
                    await asyncio.sleep(0.1)
                    assert not scorers.has_room, "it is being replaced"
            link.send(ScorerReady(scorer_id=0, process_id=3, num_slots=1))
            await asyncio.sleep(0.1)
            assert scorers.has_room
            asked = []
            while (message := link.receive(0)) is not None:
                assert isinstance(message, Request)
                asked.append(message)
            for request in asked[-3:]:
                link.send(answer(request.request_id))
            await asyncio.sleep(0.1)
            for one in tasks:
                one.cancel()
        return scored, [peer for (peer,) in ledger.store.read("SELECT peer FROM events WHERE kind = 'suspected'")]

    scored, suspected = simulate(program())
    assert replaced == (["scorer-0"] * 2 if violations else [])
    assert bool(suspected) == (not violations)
    if violations:
        assert sorted(scored) == ["0/0", "1/0", "2/0"]

"""This stage stands beside generation, in runs with an environment: it gets the environment's reply to each turn."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.scorers import Scorers
from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rollouts.rollout import Rollout
from orchestrator.rollouts.scorer_tasks import environment_task
from pipelinerl.messages import Outcome, Prompt, Result
from pipelinerl.runtime.stage import Channel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The last turn of an episode, which the environment is to reply to."""

    rollout: Rollout
    episode: Episode
    engine_id: int
    """The engine that sampled it."""
    then: Callable[[Result], None]
    """The callback for the reply, called once."""


@dataclasses.dataclass(slots=True, kw_only=True)
class EnvironmentStage:
    """The stage that has the environment reply to each turn, once.

    While episodes between two turns fill `turns`, no group is admitted, see `backpressure`: then there are at most that many, and the
    episodes that were under way.

    takes     Turn, from generation
    gives     Result, to generation
    waits for a scorer's result
    woken by  a turn; a result
    fails     never: an environment that fails is an outcome, and what a scorer that ends had is asked of another
    ends      cancelled, when the run ends
    """

    name = "environment"
    turns: Channel[Turn]
    scorers: Scorers
    ledger: Ledger
    max_tokens: int
    max_turns: int
    num_awaiting_reply: int = 0
    """Rollouts between two turns, which are in no engine."""
    num_observations: int = 0
    """Replies since this orchestrator started."""
    num_bytes: int = 0
    """Bytes of episodes between two turns."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for turn in self.turns:
                group.create_task(self._reply(turn))

    def backpressure(self) -> str | None:
        """Name what admission has to wait for: replies, while the episodes that wait for one fill `turns`; None otherwise."""
        return f"room in {self.turns.name}" if self.num_bytes >= self.turns.bound_bytes else None

    def gauges(self) -> dict[str, Any]:
        return {"num_awaiting_reply": self.num_awaiting_reply, "num_observations": self.num_observations}

    def begin(self, prompt: Prompt) -> Episode:
        """Return an episode before its first turn."""
        return Episode(prompt=prompt, max_tokens=self.max_tokens, max_turns=self.max_turns)

    def ask(self, rollout: Rollout, *, engine_id: int, then: Callable[[Result], None]) -> None:
        """Have the environment reply to the last turn of an episode that is not over. `then` is called once, with the reply."""
        assert rollout.episode is not None
        self.num_awaiting_reply += 1
        self.num_bytes += rollout.episode.num_bytes
        turn = Turn(rollout=rollout, episode=rollout.episode, engine_id=engine_id, then=then)
        self.turns.put_now(turn)  # bounded: each is of an episode that is under way, and `backpressure` holds back others

    async def _reply(self, turn: Turn) -> None:
        rollout_id, attempt = turn.rollout.rollout_id, turn.rollout.attempt
        task = environment_task(rollout_id, attempt=attempt, episode=turn.episode)
        result = await self.scorers.request(task, by=self.name)
        self.num_awaiting_reply -= 1
        self.num_bytes -= turn.episode.num_bytes
        self.num_observations += 1
        reason = "ok" if result.observation is not None else "over"
        if result.outcome is not Outcome.OK:
            reason = f"{result.outcome}: {result.error}"
        number, now_s = turn.episode.num_turns - 1, asyncio.get_running_loop().time()
        self.ledger.record_observation(rollout_id, attempt=attempt, turn=number, engine_id=turn.engine_id, reason=reason, now_s=now_s)
        turn.then(result)

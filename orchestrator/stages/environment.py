"""This stage stands beside generation, in runs with an environment: it gets the environment's reply to each turn.

An environment with state is an object in a scorer's worker, which an episode holds from its reset to its end. There are at most `max_alive`
of them: an episode that is to begin waits for the end of another, in the order of asking, and while one waits no group is admitted. What
holds an object never waits for one that does not, so somebody always goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.scorers import Scorers
from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rollouts.rollout import Rollout
from orchestrator.rollouts.scorer_tasks import environment_task
from pipelinerl.messages import Outcome, Prompt, Result
from pipelinerl.runtime.stage import Channel, Signal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The last turn of an episode, which the environment is to reply to; or an episode before its first, which is to begin."""

    rollout: Rollout
    episode: Episode
    engine_id: int
    """The engine that sampled it; -1 before the first."""
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
    max_alive: int | None = None
    """Environments with state that live at once; None for a function, which has none."""
    credits: Signal = dataclasses.field(default_factory=Signal)
    """Set when an environment with state is free for another episode."""
    num_alive: int = 0
    """Episodes that hold an environment with state."""
    num_restarts: int = 0
    """Episodes that began again, because the process that held their environment was lost."""
    num_drifts: int = 0
    """Episodes that ended because the chat template cannot say what follows a sampled turn."""
    num_awaiting_reply: int = 0
    """Rollouts between two turns, which are in no engine."""
    num_observations: int = 0
    """Replies since this orchestrator started."""
    num_bytes: int = 0
    """Bytes of episodes between two turns."""
    _places: asyncio.Semaphore = dataclasses.field(init=False)
    _held: set[str] = dataclasses.field(default_factory=set)
    """Rollouts that hold an environment with state."""
    _num_waiting: int = 0
    """Episodes that wait for the end of another."""

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.max_alive or 1)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for turn in self.turns:
                group.create_task(self._reply(turn))

    def backpressure(self) -> str | None:
        """Name what admission has to wait for: replies, while the episodes that wait for one fill `turns`; None otherwise."""
        return f"room in {self.turns.name}" if self.num_bytes >= self.turns.bound_bytes else None

    def holds_back_groups(self) -> str | None:
        """Name what admission has to wait for beside `backpressure`: an environment with state, while an episode waits for one."""
        is_full = self.max_alive is not None and (self._num_waiting > 0 or self.num_alive >= self.max_alive)
        return f"one of the {self.max_alive} environments that may live at once" if is_full else None

    def gauges(self) -> dict[str, Any]:
        of_state = {"num_alive": self.num_alive, "num_restarts": self.num_restarts, "num_drifts": self.num_drifts}
        found = {"num_awaiting_reply": self.num_awaiting_reply, "num_observations": self.num_observations}
        return found if self.max_alive is None else found | of_state

    def begin(self, prompt: Prompt) -> Episode:
        """Return an episode before its first turn."""
        return Episode(prompt=prompt, max_tokens=self.max_tokens, max_turns=self.max_turns, is_stateful=self.max_alive is not None)

    async def hold(self, rollout_id: str) -> None:
        """Wait until an episode may have an environment with state; it holds it until `end`."""
        if rollout_id in self._held or self.max_alive is None:
            return
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        self._held.add(rollout_id)
        self.num_alive = len(self._held)

    def end(self, rollout_id: str) -> None:
        """Have the environment of an episode closed, where it holds one."""
        if rollout_id in self._held:
            self._held.discard(rollout_id)
            self.num_alive = len(self._held)
            self._places.release()
            self.credits.set()
            self.scorers.end_episode(rollout_id)

    @contextlib.asynccontextmanager
    async def held(self, rollout_id: str) -> AsyncIterator[None]:
        """Hold an environment for as long as the block lasts."""
        await self.hold(rollout_id)
        try:
            yield
        finally:
            self.end(rollout_id)

    def ask(self, rollout: Rollout, *, engine_id: int, then: Callable[[Result], None]) -> None:
        """Have the environment reply to the last turn of an episode that is not over, or, with no engine (-1), begin it. `then` is called
        once, with the reply.
        """
        assert rollout.episode is not None
        self.num_restarts += engine_id < 0 and rollout.episode.num_restarts > 0
        self.num_awaiting_reply += 1
        if engine_id >= 0:  # those that are to begin must not hold up those that they wait for
            self.num_bytes += rollout.episode.num_bytes
        turn = Turn(rollout=rollout, episode=rollout.episode, engine_id=engine_id, then=then)
        self.turns.put_now(turn)  # bounded: each is of an episode that is under way, and `backpressure` holds back others

    async def _reply(self, turn: Turn) -> None:
        rollout_id, attempt = turn.rollout.rollout_id, turn.rollout.attempt
        if turn.engine_id < 0:
            await self.hold(rollout_id)
        task = environment_task(rollout_id, attempt=attempt, episode=turn.episode)
        result = await self.scorers.request(task, by=self.name)
        self.num_awaiting_reply -= 1
        if turn.engine_id >= 0:
            self.num_bytes -= turn.episode.num_bytes
        self.num_observations += 1
        self.num_drifts += result.has_drifted
        if result.is_lost and turn.rollout.may_restart:
            turn.then(result)
            return
        reason = "ok" if result.observation is not None else "over"
        if result.outcome is not Outcome.OK:
            reason = f"{result.outcome}: {result.error}"
        number, now_s = turn.episode.num_turns - 1, asyncio.get_running_loop().time()
        if turn.engine_id < 0:
            self.ledger.record_reset(rollout_id, attempt=attempt, reason="ok" if result.outcome is Outcome.OK else reason, now_s=now_s)
            turn.then(result)
            return
        self.ledger.record_observation(rollout_id, attempt=attempt, turn=number, engine_id=turn.engine_id, reason=reason, now_s=now_s)
        turn.then(result)

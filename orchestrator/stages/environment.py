"""Beside generation, in runs with an environment: what the environment replies to each turn, asked of scorers as they have room."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from orchestrator.ledger.ledger import Ledger
from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rollouts.rollout import Rollout, reply_request
from orchestrator.stages.requests import Asking
from pipelinerl.messages import Outcome, Prompt, Replied
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch

Then = Callable[[Replied], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    rollout: Rollout
    engine_id: int
    """That the turn is of."""
    then: Then

    @property
    def num_bytes(self) -> int:
        assert self.rollout.episode is not None
        return self.rollout.episode.num_bytes


class EnvironmentStage:
    """Has the environment reply to each turn, once: a late answer is one to a turn that nobody asks about any more.

    With `queue_bytes` between two turns, asked about or not, no group is admitted, see `backpressure`: then there are at most that many,
    and the episodes that were under way.

    takes     what engines wrote in episodes, from generation; Replied, from scorers
    gives     Reply, to scorers; Replied, to generation
    waits for room in a scorer
    woken by  a scorer that announces itself, answers or dies
    fails     never: an environment that fails is an outcome, and a scorer that ends is one that starts again
    ends      when the run does
    """

    name = "environment"

    def __init__(self, *, asking: Asking, ledger: Ledger, watch: Watch, max_tokens: int, max_turns: int, queue_bytes: int) -> None:
        self.num_between = 0
        """Rollouts between two turns: no engine has them."""
        self.num_replies = 0
        """Since this orchestrator started."""
        self.num_bytes = 0
        """Of episodes between two turns."""
        self._asking = asking
        self._ledger = ledger
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._turns: Channel[_Turn] = Channel(
            "turns",
            giver="generation",
            taker=self.name,
            watch=watch,
            bound_bytes=queue_bytes,
            size=lambda turn: turn.num_bytes,
            label=lambda turn: f"of rollout {turn.rollout.rollout_id}, attempt {turn.rollout.attempt}, of engine-{turn.engine_id}",
        )

    async def run(self) -> None:
        async for turn in self._turns:
            rollout, episode = turn.rollout, turn.rollout.episode
            assert episode is not None
            await self._asking.ask_reply(
                reply_request(rollout.rollout_id, attempt=rollout.attempt, episode=episode),
                by=self.name,
                sink=lambda replied, turn=turn: self._take(turn, replied),
                refused=lambda error, turn=turn: self._take(turn, _refused(turn.rollout, error)),
            )

    def backpressure(self) -> str | None:
        """What admission has to wait for, if anything: the replies to what there is."""
        return f"room in {self._turns.name}" if self.num_bytes >= self._turns.bound_bytes else None

    def begin(self, prompt: Prompt) -> Episode:
        """An episode before its first turn."""
        return Episode(prompt=prompt, max_tokens=self._max_tokens, max_turns=self._max_turns)

    def ask(self, rollout: Rollout, *, engine_id: int, then: Then) -> None:
        """Have the environment reply to the last turn of an episode that is not over: then `then` is called, once."""
        turn = _Turn(rollout=rollout, engine_id=engine_id, then=then)
        self.num_between += 1
        self.num_bytes += turn.num_bytes
        self._turns.put_now(turn)  # bounded: each is of an episode that is under way, and `backpressure` holds back others

    def _take(self, turn: _Turn, replied: Replied) -> None:
        self.num_between -= 1
        self.num_bytes -= turn.num_bytes
        self.num_replies += 1
        if replied.outcome is not Outcome.OK:
            reason = f"{replied.outcome}: {replied.error}"
        else:
            reason = "over" if replied.observation is None else "ok"
        self._ledger.record_observation(
            turn.rollout.rollout_id,
            attempt=turn.rollout.attempt,
            turn=replied.turn,
            engine_id=turn.engine_id,
            reason=reason,
            now_s=asyncio.get_running_loop().time(),
        )
        turn.then(replied)


def _refused(rollout: Rollout, error: str) -> Replied:
    assert rollout.episode is not None
    turn = rollout.episode.num_turns - 1
    return Replied(episode_id=rollout.rollout_id, attempt=rollout.attempt, turn=turn, outcome=Outcome.ERROR, error=error)

"""Stage 3: has every trajectory scored, without holding up an engine; what a scorer takes with it is asked for again."""

from __future__ import annotations

import asyncio
import collections

from orchestrator.rules.quarantine import Quarantine, row_of
from orchestrator.state.ledger import Ledger
from orchestrator.state.scorers import Scorers
from pipelinerl.messages import Finish, Outcome, Score, Scored, ScoredTrajectory, Trajectory
from pipelinerl.stages import Channel
from pipelinerl.watch import Watch


class Scoring:
    """Sends trajectories to scorers and joins the answers with them.

    takes     Trajectory, from dispatch; Scored, from scorers
    gives     Score, to scorers; ScoredTrajectory, to batching
    waits for room in a scorer; room towards batching
    woken by  a scorer that announces itself, answers or dies
    fails     never: a failed reward is an outcome, and a scorer that ends is one that starts again
    ends      when the run does
    """

    name = "scoring"

    def __init__(
        self,
        *,
        trajectories: Channel[Trajectory],
        scored: Channel[ScoredTrajectory],
        scorers: Scorers,
        ledger: Ledger,
        watch: Watch,
        queue_bytes: int,
        quarantine: Quarantine,
    ) -> None:
        self._trajectories = trajectories
        self._scored = scored
        self._scorers = scorers
        self._ledger = ledger
        self._watch = watch
        self._quarantine = quarantine
        self._again: collections.deque[Trajectory] = collections.deque()
        """What scorers lost."""
        self._running: collections.Counter[str] = collections.Counter()
        """Prompts of the trajectories that scorers have."""
        self._taken: set[str] = set()
        """Prompts of what a scorer that dies had."""
        self._answers: Channel[ScoredTrajectory] = Channel(
            "scores",
            giver="scorers",
            taker=self.name,
            watch=watch,
            bound_bytes=queue_bytes,
            label=lambda item: f"of rollout {item.score.rollout_id}, attempt {item.score.attempt}",
        )
        scorers.on_died(self._on_died)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            group.create_task(self._send_again())
            group.create_task(self._collect())

    async def _send(self) -> None:
        async for trajectory in self._trajectories:
            if trajectory.finish is Finish.ERROR:
                self._answer(trajectory, _not_scored(trajectory, f"engine {trajectory.engine_id}: {trajectory.error}"))
                continue
            await self._wait_for_room()
            self._ask(trajectory)

    async def _send_again(self) -> None:
        """Ask again for what was lost; no two suspects are with a scorer at once."""
        while True:
            while self._again and self._quarantine.holds(self._again[0].prompt.prompt_id):
                trajectory = self._again.popleft()
                self._answer(trajectory, _not_scored(trajectory, "its prompt is quarantined: it was there when a scorer died, twice"))
            if self._again and self._scorers.has_room and not self._waits_for_another(self._again[0]):
                self._ask(self._again.popleft())
            else:
                await self._scorers.changed.wait()

    def _waits_for_another(self, trajectory: Trajectory) -> bool:
        if not self._quarantine.is_suspect("scorer", trajectory.prompt.prompt_id):
            return False
        return any(
            self._quarantine.is_suspect("scorer", prompt_id) for prompt_id in self._running if prompt_id != trajectory.prompt.prompt_id
        )

    async def _wait_for_room(self) -> None:
        if self._scorers.has_room:
            return
        with self._watch.waiting(self.name, "room in a scorer"):
            while not self._scorers.has_room:
                await self._scorers.changed.wait()

    def _ask(self, trajectory: Trajectory) -> None:
        self._running[trajectory.prompt.prompt_id] += 1
        self._scorers.ask(
            score_request(trajectory),
            sink=lambda scored: self._take(trajectory, scored),
            lost=lambda scorer_id: self._lose(trajectory),
        )

    def _take(self, trajectory: Trajectory, scored: Scored) -> None:
        prompt_id = trajectory.prompt.prompt_id
        self._leave(prompt_id)
        if prompt_id not in self._running and self._quarantine.came_through("scorer", prompt_id):
            self._ledger.book("cleared", now_s=_now_s(), peer="scorer", reason=row_of(prompt_id))
        self._answer(trajectory, scored)

    def _lose(self, trajectory: Trajectory) -> None:
        self._leave(trajectory.prompt.prompt_id)
        self._taken.add(trajectory.prompt.prompt_id)
        self._again.append(trajectory)  # bounded by the scorers' room
        self._scorers.changed.set()

    def _leave(self, prompt_id: str) -> None:
        self._running[prompt_id] -= 1
        if not self._running[prompt_id]:
            del self._running[prompt_id]

    def _on_died(self, scorer_id: int) -> None:
        prompt_ids, self._taken = self._taken, set()
        for prompt_id in sorted(prompt_ids):
            self._ledger.book("suspected", now_s=_now_s(), peer=f"scorer-{scorer_id}", reason=row_of(prompt_id))
        for row in self._quarantine.died("scorer", prompt_ids):
            self._ledger.book("quarantined", now_s=_now_s(), peer=f"scorer-{scorer_id}", reason=row)
        self._ledger.flush()  # seldom, and it must outlive this process: the prompt may be what ends that, too

    def _answer(self, trajectory: Trajectory, scored: Scored) -> None:
        answer = ScoredTrajectory(trajectory=trajectory, score=scored)
        self._ledger.score(answer, now_s=_now_s())
        self._answers.put_now(answer)  # bounded by the scorers' room

    async def _collect(self) -> None:
        async for scored in self._answers:
            await self._scored.put(scored)


def score_request(trajectory: Trajectory) -> Score:
    """What a scorer is told of a trajectory: the prompt and the tokens after it."""
    return Score(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        prompt=trajectory.prompt,
        token_ids=trajectory.token_ids[len(trajectory.prompt.token_ids) :],
        finish=trajectory.finish,
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _not_scored(trajectory: Trajectory, error: str) -> Scored:
    return Scored(rollout_id=trajectory.rollout_id, attempt=trajectory.attempt, outcome=Outcome.ERROR, reward=None, error=error)

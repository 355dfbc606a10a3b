"""Stage 5: hands rows to the trainer's replicas as they pull, and books what the trainer says it has done."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from orchestrator.progress import Progress
from orchestrator.rules.kv import KvPolicy, squared_lags
from orchestrator.stages.batching import Row, Seal
from orchestrator.state.ledger import Ledger, facts_of
from orchestrator.state.peers import Peers
from orchestrator.state.snapshot import RecordedStep, commit_of, is_saved, read_steps
from pipelinerl.errors import PeerRefused
from pipelinerl.messages import (
    UNSAMPLED,
    Alive,
    CheckpointFailed,
    CheckpointSaved,
    Fate,
    Finish,
    MicroBatch,
    PolicyPublished,
    Sample,
    StepDone,
    StepSealed,
    TakeMicroBatch,
    TrainerReady,
    Trajectory,
)
from pipelinerl.routes import joined
from pipelinerl.stages import Channel, Signal
from pipelinerl.watch import Watch


@dataclasses.dataclass(slots=True, kw_only=True)
class _Step:
    rows: list[Row] = dataclasses.field(default_factory=list)
    seal: Seal | None = None


class Delivery:
    """Answers pulls in lock-step waves: row `index * W + replica` goes to a replica; where a sealed step has none, a zero-loss row.

    A trainer that starts again begins where its checkpoint ends: the steps since are offered once more, as the ledger has them. One that
    outlived the orchestrator goes on where it is: what it had of an open step lies in the ledger as it was given it.

    takes     Row and Seal, from batching; TrainerReady, TakeMicroBatch, StepDone, PolicyPublished, CheckpointSaved, from the trainer
    gives     MicroBatch and StepSealed, to the trainer; TrainerReady and PolicyPublished, to refresh
    waits for a row that was pulled
    woken by  batching and the trainer
    fails     PeerRefused, where the trainer speaks of a step that is not its next, or starts from a checkpoint of another run
    ends      when the last step is done, its policy published and its checkpoint written
    """

    name = "delivery"

    def __init__(
        self,
        *,
        rows: Channel[Row | Seal],
        published: Channel[TrainerReady | PolicyPublished],
        trainer: Peers,
        num_replicas: int,
        num_steps: int,
        holds_batches: bool,
        ledger: Ledger,
        progress: Progress,
        watch: Watch,
        num_booked: int = 0,
        recorded: Mapping[int, RecordedStep] | None = None,
        kv_policy: KvPolicy | None = None,
    ) -> None:
        """`num_booked` steps were done in an earlier life of the run; `recorded` holds what it had packed of the steps after them.

        `kv_policy` is told what the trainer measures of old KV caches.
        """
        self._kv_policy = kv_policy or KvPolicy()
        self.finished = asyncio.Event()
        """Set when every step is trained, the last policy is published and its checkpoint written."""
        self._ready = Signal()
        """Set when a replica announces itself."""
        self._replicas: dict[int, TrainerReady] = {}
        self._starts: Channel[TrainerReady] = Channel("starts", giver="trainer", taker=self.name, watch=watch, bound_bytes=1)
        self._rows = rows
        self._published = published
        self._trainer = trainer
        self._num_replicas = num_replicas
        self._num_steps = num_steps
        self._holds_batches = holds_batches
        self._ledger = ledger
        self._progress = progress
        self._watch = watch
        self._steps: dict[int, _Step] = {number: _step_of(number, step) for number, step in (recorded or {}).items()}
        self._pulls: dict[tuple[int, int, int], TakeMicroBatch] = {}
        """Unanswered pulls, by replica, step and index: asking again changes nothing."""
        self._is_starting = False
        """A trainer has announced itself, and what it is to begin with is being fetched."""
        self.num_booked = num_booked
        """Steps that the ledger has as done."""
        self._num_done = 0
        """Steps that are in the trainer's weights; fewer than booked while it does some again."""
        self._last_version = 0
        self._last_checkpoint = 0
        trainer.on(TrainerReady, self._on_ready)
        trainer.on(TakeMicroBatch, self._on_pull)
        trainer.on(StepDone, self._on_done)
        trainer.on(PolicyPublished, self._on_published)
        trainer.on(CheckpointSaved, self._on_saved)
        trainer.on(CheckpointFailed, self._on_not_saved)
        trainer.on(Alive, lambda peer, alive: None)
        watch.explain(self._explain)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._collect())
            group.create_task(self._follow_starts())

    async def wait_until_ready(self) -> None:
        """Wait until every replica of the config has announced itself."""
        while len(self._replicas) < self._num_replicas:
            await self._ready.wait()

    @property
    def trainer_version(self) -> int:
        """The version that the trainer started from; needs every replica to be ready."""
        return self._replicas[0].version

    async def _collect(self) -> None:
        async for item in self._rows:
            step = self._steps.setdefault(item.step, _Step())
            if isinstance(item, Seal):
                step.seal = item
            else:
                step.rows.append(item)
            self._answer_pulls()

    def _explain(self) -> str | None:
        """What the trainer owes: for the verdict on a stall."""
        if not self._steps:
            return None
        held = self._steps[self._num_done].rows if self._num_done in self._steps else []
        if self._pulls:
            replica = next(iter(self._pulls))[0]
            return f"trainer-{replica} waits for {len(self._pulls)} rows, step {self._num_done} has {len(held)} so far"
        return f"delivery holds {len(held)} rows of step {self._num_done}; trainer-0 neither pulls nor finishes it"

    # --- a trainer starts, or starts again ---

    def _on_ready(self, peer: str, ready: TrainerReady) -> None:
        if ready.num_replicas != self._num_replicas:
            raise PeerRefused(
                f"{peer} counts {ready.num_replicas} replicas, the config makes {self._num_replicas} (trainer.ranks and trainer.parallel)"
            )
        known = self._replicas.get(ready.replica)
        if known is not None and known.process_id == ready.process_id:
            return
        if known is not None:  # replicas start together: whoever else is known is gone, too
            self._replicas.clear()
            self._pulls.clear()
        self._replicas[ready.replica] = ready
        self._ready.set()
        if len(self._replicas) == self._num_replicas:
            starts = {(one.version, one.commit) for one in self._replicas.values()}
            if len(starts) > 1 and not _outlived(self._replicas[0]):
                raise PeerRefused(f"the trainer's replicas start from different checkpoints: {sorted(self._replicas.items())}")
            self._is_starting = True
            self._published.put_now(self._replicas[0])  # bounded: a trainer takes seconds to start
            self._starts.put_now(self._replicas[0])  # likewise

    async def _follow_starts(self) -> None:
        is_first = True
        loop = asyncio.get_running_loop()
        async for ready in self._starts:
            self._check_commit(ready)
            if ready.version < self.num_booked:
                end = min(self.num_booked, min(self._steps, default=self.num_booked))
                recorded = await loop.run_in_executor(None, functools.partial(read_steps, self._ledger, first=ready.version, end=end))
                self._steps |= {number: _step_of(number, step) for number, step in recorded.items()}
            for step in range(self.num_booked, ready.version):  # its weights prove what their trainer had no time to say
                samples = [sample for row in self._steps[step].rows for sample in row.samples]
                self._progress.proven(step, samples, now_s=loop.time())
                self._book(step, now_s=loop.time())
            self._last_checkpoint = ready.version if ready.saved is None else ready.saved
            if self._last_checkpoint and not is_saved(self._ledger, self._last_checkpoint):
                self._ledger.saved(self._last_checkpoint, ready.saved_commit or ready.commit, now_s=loop.time())
            if _outlived(ready):
                self._ledger.book("outlived", now_s=loop.time(), step=ready.version)
            elif ready.version or self.num_booked or not is_first:
                self._ledger.book("restarted", now_s=loop.time(), step=ready.version)
            is_first = False
            for step in [step for step in self._steps if step < ready.version]:
                del self._steps[step]
            self._num_done = ready.version
            self._is_starting = len(self._starts) > 0
            self._answer_pulls()
            self._check_finished()

    def _check_commit(self, ready: TrainerReady) -> None:
        if not ready.version:
            return
        expected = commit_of(self._ledger, ready.version - 1)
        if ready.commit != expected:
            raise PeerRefused(
                f"the trainer starts from a version {ready.version} that names the ledger's commit {ready.commit!r}, but this"
                f" ledger has {expected!r} for step {ready.version - 1}: the two are of different runs. Resume with both as they were, or"
                " start a new run from the checkpoint's model"
            )

    # --- what it asks and says ---

    def _on_pull(self, peer: str, pull: TakeMicroBatch) -> None:
        if pull.step < self._num_done and not self._is_starting:
            raise PeerRefused(
                f"{peer} asks for row {pull.index} of step {pull.step}, which is done; the next to finish is {self._num_done}"
            )
        self._pulls[pull.replica, pull.step, pull.index] = pull
        self._answer_pulls()

    def _answer_pulls(self) -> None:
        if self._is_starting:
            return
        for key, pull in list(self._pulls.items()):
            answer = self._answer(pull)
            if answer is not None:
                del self._pulls[key]
                if self._trainer.send(f"trainer-{pull.replica}", answer):
                    self._watch.moved()

    def _answer(self, pull: TakeMicroBatch) -> MicroBatch | StepSealed | None:
        step = self._steps.get(pull.step)
        if step is None or (self._holds_batches and step.seal is None):
            return None
        number = pull.index * self._num_replicas + pull.replica
        if number < len(step.rows):
            return micro_batch_of(step.rows[number].samples, step=pull.step, index=pull.index)
        if step.seal is None:
            return None
        num_micro_batches = -(-len(step.rows) // self._num_replicas)
        if pull.index < num_micro_batches:
            return micro_batch_of((), step=pull.step, index=pull.index)
        return StepSealed(
            step=pull.step,
            num_micro_batches=num_micro_batches,
            num_tokens=step.seal.num_tokens,
            num_samples=step.seal.num_samples,
            commit=step.seal.commit,
        )

    def _on_done(self, peer: str, done: StepDone) -> None:
        if done.step != self._num_done:
            raise PeerRefused(f"{peer} says step {done.step} is done; the next to finish is {self._num_done}")
        now_s = asyncio.get_running_loop().time()
        if done.step < self.num_booked:
            self._ledger.book("replayed", now_s=now_s, step=done.step)
            del self._steps[done.step]
        else:
            self._learn_of_kv(done)
            self._book(done.step, now_s=now_s)
            self._progress.trained(done, now_s=now_s)
        self._num_done += 1
        self._watch.moved()
        self._check_finished()

    def _learn_of_kv(self, done: StepDone) -> None:
        if not self._kv_policy.is_measured:
            return
        metrics = done.metrics
        lags = [_squared_lags(sample.trajectory, trained=done.step) for row in self._steps[done.step].rows for sample in row.samples]
        excess = metrics.get("mismatch_kl_kept", 0.0) - metrics.get("mismatch_kl_fresh", 0.0)  # without what arithmetic does
        kl = max(0.0, excess) * metrics.get("tokens_kept", 0.0)
        self._kv_policy.measured(kl=kl, square=sum(square for square, _ in lags), num_tokens=sum(num for _, num in lags))

    def _book(self, step: int, *, now_s: float) -> None:
        """Have a step's samples end as trained."""
        with self._ledger.together():
            for row in self._steps.pop(step).rows:
                for sample in row.samples:
                    facts = facts_of(sample.trajectory, reward=sample.reward, step=step)
                    self._ledger.end(sample.trajectory.rollout_id, Fate.TRAINED, now_s=now_s, facts=facts)
            self._ledger.book("done", now_s=now_s, step=step)
        self.num_booked += 1

    def _on_published(self, peer: str, published: PolicyPublished) -> None:
        self._last_version = published.version
        self._published.put_now(published)  # bounded by the trainer's slots: it cannot publish without a free one
        self._check_finished()

    def _on_saved(self, peer: str, saved: CheckpointSaved) -> None:
        self._ledger.saved(saved.version, saved.commit, now_s=asyncio.get_running_loop().time())
        fields = {"version": saved.version, "num_bytes": saved.num_bytes, "save_s": saved.save_s, "error": ""}
        self._progress.journal.write("checkpoint", **fields)
        self._last_checkpoint = saved.version
        self._check_finished()

    def _on_not_saved(self, peer: str, failed: CheckpointFailed) -> None:
        self._ledger.book("unsaved", now_s=asyncio.get_running_loop().time(), step=failed.version, reason=failed.error)
        self._progress.journal.write("checkpoint", version=failed.version, num_bytes=0, save_s=0.0, error=failed.error)
        self._last_checkpoint = failed.version
        self._check_finished()

    def _check_finished(self) -> None:
        if self._num_done == self._last_version == self._last_checkpoint == self._num_steps:
            self.finished.set()


def _outlived(ready: TrainerReady) -> bool:
    """True where a trainer goes on, under another orchestrator, with steps that no checkpoint holds."""
    return ready.saved not in (None, ready.version)


def _step_of(number: int, recorded: RecordedStep) -> _Step:
    seal = None
    if recorded.seal is not None:
        num_tokens, num_samples, commit = recorded.seal
        seal = Seal(step=number, num_tokens=num_tokens, num_samples=num_samples, commit=commit)
    return _Step(rows=[Row(step=number, samples=samples) for samples in recorded.rows], seal=seal)


def micro_batch_of(samples: tuple[Sample, ...], *, step: int, index: int) -> MicroBatch:
    """Lay samples end to end; without samples this is the zero-loss row."""
    trajectories = [sample.trajectory for sample in samples]
    return MicroBatch(
        step=step,
        index=index,
        token_ids=_join([trajectory.token_ids for trajectory in trajectories], np.int32),
        trains=_join([trajectory.trains for trajectory in trajectories], np.bool_),
        logprobs=_join([trajectory.logprobs for trajectory in trajectories], np.float32),
        versions=_join([trajectory.versions for trajectory in trajectories], np.int32),
        advantages=_join([sample.advantages for sample in samples], np.float32),
        lengths=np.array([trajectory.num_tokens for trajectory in trajectories], np.int32),
        rollout_ids=tuple(trajectory.rollout_id for trajectory in trajectories),
        rewards=np.array([sample.reward for sample in samples], np.float32),
        truncated=np.array([trajectory.finish is Finish.LENGTH for trajectory in trajectories], np.bool_),
        group_ids=np.array([trajectory.group_id for trajectory in trajectories], np.int32),
        weights=np.array([sample.weight for sample in samples], np.float32) if any(sample.weight != 1.0 for sample in samples) else None,
        routes=joined([trajectory.routes for trajectory in trajectories], lengths=[trajectory.num_tokens for trajectory in trajectories]),
    )


def _squared_lags(trajectory: Trajectory, *, trained: int) -> tuple[float, int]:
    """Of each turn by itself: what was before it is computed anew where the version has changed since."""
    edges = np.flatnonzero(np.diff(trajectory.versions != UNSAMPLED, prepend=False, append=False)).reshape(-1, 2).tolist()
    num_prompt = edges[0][0] if edges else 0
    found = [
        squared_lags(
            trajectory.versions[start:end],
            num_prompt=start,
            recomputed=[at for place in trajectory.recomputed if (at := place + num_prompt - start) >= 0],
            trained=trained,
        )
        for start, end in edges
    ]
    return sum(square for square, _ in found), sum(count for _, count in found)


def _join(columns: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype)

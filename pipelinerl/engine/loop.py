"""The step loop's decisions: stamp every token with the version that sampled it, and change versions only between forward passes.

No socket, no thread and no clock of its own, so that the process (`server`) and the simulated pipeline run the very same loop.

Why the stamp is exact: an engine says which policy a forward pass was launched under (`Sampled.versions`), whenever that pass ends. One
that says nothing ends each pass in the `Engine.step` that launches it, and `version` changes only between two of these, in a commit.

A swap is a transaction of this engine alone: staged in a thread while decoding goes on, acknowledged (`WeightsStaged`), committed at the
next boundary, said (`WeightsCommitted`). Whatever fails before the commit is said with its own words (`WeightsRefused`), and the old
version serves on. Orders are compared by (rollback epoch, version): one that is not newer than the newest known changes nothing.

An engine that is told to sleep does so between two passes, and after the swap under way. It keeps its sequences, holds no policy, and
runs no pass until it has committed one, be it of the version that it had: then its sequences go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from pipelinerl.engine.base import Engine, Sampled
from pipelinerl.engine.columns import NO_ROW, Columns
from pipelinerl.engine.held_images import ImagesHeld, check_images
from pipelinerl.engine.nap import Nap
from pipelinerl.engine.orders import Stager, Staging, age_of
from pipelinerl.engine.stop_strings import Finder, RunningStops
from pipelinerl.engine.waits import Waits
from pipelinerl.errors import EngineError, PipelineError, VersionNotHeld, WireError
from pipelinerl.messages import (
    Cancel,
    Completion,
    EngineLoad,
    EngineReady,
    EngineSequences,
    Finish,
    Float32,
    Generate,
    Message,
    Reattach,
    Routes,
    Sleep,
    StageWeights,
    Tokens,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.runtime.machine import machine_id
from pipelinerl.transport.codec import Decoder


@dataclasses.dataclass(slots=True, kw_only=True)
class _Running:
    request: Generate
    started_at: float
    recomputed: list[int] = dataclasses.field(default_factory=list)
    """Number of tokens each time that its KV cache was computed anew."""
    prompt_logprobs: Float32 | None = None


class EngineLoop:
    """An engine's requests and its version. `handle` takes a message, `advance` runs one forward pass; both append to `outbox`."""

    def __init__(
        self, engine: Engine, *, engine_id: int, stager: Stager, finder: Finder | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Without a `finder`, requests with stop strings are refused."""
        self.version = 0
        self.rollback_epoch = 0
        self.outbox: list[Message] = []
        """Messages for the orchestrator; the caller sends and clears them."""
        self._engine = engine
        self._engine_id = engine_id
        self._stager = stager
        self._clock = clock
        self._stops = RunningStops(finder)
        self._images = ImagesHeld()
        self._running: dict[str, _Running] = {}
        self._columns = Columns()
        """What they sampled."""
        self._orphans: set[str] = set()
        """Running sequences of an orchestrator that is gone; the one after it has not said yet which it wants."""
        self._withheld: list[Completion] = []
        """Completions of such sequences."""
        self._staging: Staging | None = None
        self._next: StageWeights | None = None
        self._nap = Nap(engine, engine_id=engine_id, clock=clock)
        self._waits = Waits(clock)
        self._num_tokens = self._num_steps = self._num_context_tokens = self._num_drafted = self._num_accepted = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        """True while a forward pass can be run."""
        return bool(self._running) and not self._nap.is_asleep

    @property
    def is_swapping(self) -> bool:
        """True while a version is being staged or waits for its commit."""
        return self._staging is not None

    def introduce(self, kept: Sequence[bytes] = (), *, process_id: int, request_id: int = 0) -> EngineReady:
        """The engine's first message to an orchestrator: the first, or one that takes the place of another, which never took `kept`.

        What the one before had asked for goes on. Its answers are withheld until `Reattach` says which are wanted: an attempt of the same
        number may be another one, as the ledger forgets what was not yet written.
        """
        for body in kept:
            with contextlib.suppress(WireError):  # of another kind: what is still true of it, this message says
                self._withheld.append(_completions.decode(body))
        for rollout_id in [name for name, running in self._running.items() if running.request.num_written]:
            self._drop(rollout_id)  # what another engine wrote of it was with the orchestrator that is gone
        self._withheld = [one for one in (*self._withheld, *self.outbox) if isinstance(one, Completion) and not one.num_written]
        self.outbox.clear()
        self._orphans = set(running := {rollout_id: one.request.attempt for rollout_id, one in self._running.items()})
        limits = self._engine.limits
        return EngineReady(
            engine_id=self._engine_id,
            process_id=process_id,
            request_id=request_id,
            max_model_tokens=limits.max_model_tokens,
            max_running=limits.max_running,
            tensors=limits.tensors,
            shards=limits.shards,
            machine=machine_id(),
            transports=limits.transports,
            kv_tokens=limits.kv_tokens,
            tensor_parallel_size=limits.tensor_parallel_size,
            version=self.version,
            rollback_epoch=self.rollback_epoch,
            running={completion.rollout_id: completion.attempt for completion in self._withheld} | running,
        )

    def load(self, *, idle_s: float) -> EngineLoad:
        """The gauges of this moment."""
        num_running = min(len(self._running), self._engine.limits.max_running)
        return EngineLoad(
            engine_id=self._engine_id,
            version=self.version,
            num_running=num_running,
            num_waiting=len(self._running) - num_running,
            num_tokens=self._num_tokens,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            idle_s=idle_s,
            kv_used=self._engine.kv_used,
            num_context_tokens=self._num_context_tokens,
            num_drafted=self._num_drafted,
            num_accepted=self._num_accepted,
        )

    def sequences(self) -> EngineSequences:
        """What it has, and what of it waits for room: nothing while it is asleep. For each report, once."""
        written, waiting = self._columns.num_tokens(), () if self._nap.is_asleep else self._engine.waiting
        return EngineSequences(engine_id=self._engine_id, written=written, waiting=self._waits.report(waiting, written))

    def handle(self, message: Message) -> None:
        """Take one message from the orchestrator. Repeated and outdated ones are harmless."""
        match message:
            case Generate():
                self._submit(self._images.restored(message))
            case Cancel():
                running = self._running.get(message.rollout_id)
                if running is not None and running.request.attempt == message.attempt:
                    self._engine.cancel(message.rollout_id)
                    self._finish(message.rollout_id, Finish.CANCELLED)
            case Reattach():
                self._keep_only(message)
            case StageWeights():
                self._order(message)
            case Sleep():
                self._nap.tell(message)
            case _:
                raise TypeError(f"an engine does not take {type(message).__name__}")

    def advance(self) -> None:
        """Commit a staged version if it may be, then run one forward pass if there is work, or sleep if told to."""
        self._acknowledge_if_staged()
        self._commit_if_acknowledged()
        if self._staging is None and (asleep := self._nap.begin(num_running=len(self._running))) is not None:
            self.outbox.append(asleep)
        if not self.has_work:
            return
        started = self._clock()
        try:
            passed = self._engine.step()
        except EngineError as error:
            self._lose_all(str(error))
            return
        self._num_steps += 1
        self._count_drafts(passed)
        for sampled in passed:
            self._stamp(sampled)
        self._busy_s += self._clock() - started

    def _count_drafts(self, passed: Sequence[Sampled]) -> None:
        if num_drafted := sum(sampled.num_drafted for sampled in passed):
            self._num_drafted += num_drafted
            self._num_accepted += sum(len(sampled.rollout_ids) for sampled in passed[1:])

    def _keep_only(self, adopt: Reattach) -> None:
        for rollout_id in self._orphans - adopt.rollouts.keys():
            self._drop(rollout_id)
        self._orphans.clear()
        self.outbox += [one for one in self._withheld if adopt.rollouts.get(one.rollout_id) == one.attempt]
        self._withheld.clear()

    def _submit(self, request: Generate) -> None:
        if request.rollout_id in self._running:
            known = self._running[request.rollout_id].request
            if (known.attempt, known.turn) >= (request.attempt, request.turn):
                return
            self._orphans.discard(request.rollout_id)
            self._drop(request.rollout_id)
        self._running[request.rollout_id] = _Running(request=request, started_at=self._clock())
        self._columns.open(
            request.rollout_id, num_prompt_tokens=len(request.token_ids), version=self.version, chunk_tokens=request.chunk_tokens
        )
        try:
            check_images(request)
            self._stops.open(request)
            self._engine.submit(request, version=self.version, rollback_epoch=self.rollback_epoch)
        except VersionNotHeld:
            self._finish(request.rollout_id, Finish.NOT_HELD)
        except EngineError as error:
            self._finish(request.rollout_id, Finish.ERROR, error=str(error))

    def _stamp(self, sampled: Sampled) -> None:
        """Give every token of a forward pass the version whose weights sampled it, and end the sequences that ended."""
        if sampled.versions is not None and np.max(sampled.versions, initial=0) > self.version:
            self._withdraw_overtaken(sampled)
        rows = self._columns.rows_of(sampled.rollout_ids)
        if rows.min(initial=0) == NO_ROW:  # of sequences that have ended since the pass began
            sampled, rows = sampled.only(rows != NO_ROW), rows[rows != NO_ROW]
        versions = self.version if sampled.versions is None else sampled.versions
        self._num_context_tokens += self._columns.append(rows, token_ids=sampled.token_ids, logprobs=sampled.logprobs, versions=versions)
        self._num_tokens += len(rows)
        for rollout_id, logprobs in sampled.prompt_logprobs.items():
            if rollout_id in self._running:
                self._running[rollout_id].prompt_logprobs = logprobs
        finishes = {rollout_id: finish for rollout_id, finish in sampled.finishes.items() if rollout_id in self._running}
        for rollout_id in self._stops.ended(sampled):
            if rollout_id not in finishes:
                self._engine.cancel(rollout_id)
            finishes[rollout_id] = Finish.STOP
        for rollout_id, finish in finishes.items():
            self._finish(rollout_id, finish, routes=sampled.routes.get(rollout_id))
        for rollout_id in self._columns.to_tell(rows):
            self._tell(rollout_id)

    def _withdraw_overtaken(self, sampled: Sampled) -> None:
        """Cancel the sequences that a forward pass sampled under a policy which a rollback has undone since it began."""
        is_late = np.broadcast_to(np.asarray(sampled.versions) > self.version, len(sampled.rollout_ids))
        for rollout_id, late in zip(sampled.rollout_ids, is_late, strict=True):
            if late and rollout_id in self._running:
                self._engine.cancel(rollout_id)
                self._finish(rollout_id, Finish.CANCELLED)

    def _tell(self, rollout_id: str) -> None:
        """Tell what was sampled since it was told last. Nobody waits for an answer: a slow reader costs the loop nothing."""
        start, token_ids = self._columns.untold(rollout_id)
        attempt = self._running[rollout_id].request.attempt
        self.outbox.append(Tokens(rollout_id=rollout_id, attempt=attempt, start=start, token_ids=token_ids))

    def _drop(self, rollout_id: str) -> None:
        self._engine.cancel(rollout_id)
        self._close(rollout_id)

    def _close(self, rollout_id: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Forget a sequence; its columns."""
        del self._running[rollout_id]
        self._stops.close(rollout_id)
        return self._columns.close(rollout_id)

    def _finish(self, rollout_id: str, finish: Finish, *, error: str = "", routes: Routes | None = None) -> None:
        running = self._running[rollout_id]
        token_ids, logprobs, versions = self._close(rollout_id)
        into = self._withheld if rollout_id in self._orphans else self.outbox
        self._orphans.discard(rollout_id)
        into.append(
            Completion(
                rollout_id=rollout_id,
                attempt=running.request.attempt,
                turn=running.request.turn,
                token_ids=token_ids,
                logprobs=logprobs,
                versions=versions,
                finish=finish,
                error=error,
                routes=routes,
                recomputed=tuple(running.recomputed),
                num_written=running.request.num_written,
                started_at=running.started_at,
                finished_at=self._clock(),
                prompt_logprobs=running.prompt_logprobs,
            )
        )

    def _lose_all(self, error: str) -> None:
        for rollout_id in list(self._running):
            self._finish(rollout_id, Finish.ERROR, error=error)

    def _order(self, order: StageWeights) -> None:
        held = (self.rollback_epoch, self.version)
        if age_of(order) <= held and not (self._nap.is_asleep and age_of(order) == held):
            if age_of(order) == (self.rollback_epoch, self.version):
                self.outbox.append(self._committed(order, pause_s=0.0, stage_s=0.0))
            return
        newest = self._next or (self._staging.order if self._staging else None)
        if newest is None or age_of(order) > age_of(newest):
            self._next = order
            self._start_staging()

    def _start_staging(self) -> None:
        """Stage the newest ordered version; one still being staged is finished first, because its thread reads the buffer."""
        if self._next is not None and (self._staging is None or self._staging.future.done()):
            order, self._next = self._next, None
            self._staging = Staging(order=order, future=self._stager(order), started_at=self._clock())

    def _acknowledge_if_staged(self) -> None:
        staging = self._staging
        if staging is None or staging.stage_s is not None or not staging.future.done():
            return
        error = staging.future.exception()
        if isinstance(error, SystemExit):  # the engine cannot go on at all
            raise error
        if error is not None:  # whatever a transport, a disk or a peer raises: the old version serves on, and the orchestrator reads why
            self._refuse(error)
            return
        staging.stage_s = self._clock() - staging.started_at
        order = staging.order
        self.outbox.append(
            WeightsStaged(engine_id=self._engine_id, version=order.version, stage_s=staging.stage_s, rollback_epoch=order.rollback_epoch)
        )

    def _commit_if_acknowledged(self) -> None:
        staging = self._staging
        if staging is None or staging.stage_s is None or (staging.order.when_idle and self.has_work):
            return
        order = staging.order
        stale = self._columns.staler_than(
            order.version, max_staleness=order.kv_max_staleness, max_mean_staleness=order.kv_max_mean_staleness
        )
        before = self._clock()
        try:
            recomputed = self._engine.commit(stale)
        except PipelineError as error:
            self._refuse(error)
            return
        pause_s, self._nap.is_asleep = self._clock() - before, False
        places, num_recomputed = self._columns.recompute(recomputed, order.version)
        if order.rollback_epoch > self.rollback_epoch:
            self._withdraw_undone(order.version)
        self.rollback_epoch, self.version = order.rollback_epoch, order.version
        for rollout_id, place in zip(recomputed, places, strict=True):
            if rollout_id in self._running:
                self._running[rollout_id].recomputed.append(place)
        self.outbox.append(self._committed(order, pause_s=pause_s, stage_s=staging.stage_s, num_recomputed_tokens=num_recomputed))
        self._end_staging()

    def _refuse(self, error: BaseException) -> None:
        assert self._staging is not None
        order, text = self._staging.order, f"{type(error).__name__}: {error}"
        self.outbox.append(
            WeightsRefused(engine_id=self._engine_id, version=order.version, error=text, rollback_epoch=order.rollback_epoch)
        )
        self._end_staging()

    def _end_staging(self) -> None:
        self._staging = None
        self._start_staging()

    def _withdraw_undone(self, version: int) -> None:
        """Cancel sequences that hold tokens of policies that a rollback to `version` undoes: no policy of the new epoch sampled those."""
        for rollout_id in self._columns.newer_than(version):
            self._engine.cancel(rollout_id)
            self._finish(rollout_id, Finish.CANCELLED)

    def _committed(self, order: StageWeights, *, pause_s: float, stage_s: float, num_recomputed_tokens: int = 0) -> WeightsCommitted:
        return WeightsCommitted(
            engine_id=self._engine_id,
            version=order.version,
            pause_s=pause_s,
            stage_s=stage_s,
            num_running=len(self._running),
            num_recomputed_tokens=num_recomputed_tokens,
            rollback_epoch=order.rollback_epoch,
        )


_completions: Decoder[Completion] = Decoder(Completion)

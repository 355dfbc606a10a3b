"""Hands what clients ask of models to the trainer, in the order in which it was accepted, and again where that or the server is lost.

Handing on for the first time and replaying are the same loop: a cursor moves over the ledger. A trainer that starts holds no model; each
is brought from its checkpoint, the cursor goes back to the beginning, and what no checkpoint covers is handed on once more. So whatever a
model was given is in its weights exactly once: before the checkpoint, or after it. A pass and a step are computed again and give the same;
what was saved or published and is answered is not done again.

A checkpoint of a model is asked for behind every `checkpoint_every` steps of it, behind what it was loaded from, and where the ledger holds
half of what it may. It covers all that was handed on before it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import shutil
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from pipelinerl.errors import LedgerError
from pipelinerl.messages import CloseModel, LoadModel, RequestFailed, SaveModel, TrainingAnswer
from pipelinerl.runtime.stage import Signal
from pipelinerl.tinker.backend import Backend, Refusal, TrainerLost
from pipelinerl.tinker.futures import KEPT_S
from pipelinerl.tinker.ledger import Accepted, Answer, Kind, Ledger
from pipelinerl.tinker.training import Said, Training, is_published, read_said

WINDOW_BYTES = 16 << 20
"""Bytes of requests that the trainer has and did not answer: enough that it never waits, below what a connection takes."""
MAX_LOSSES = 5
"""Trainers that may be lost over one request, none of them with an answer to anything new; then it is answered as what ends them."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Handed:
    """A request that the trainer has."""

    row: Accepted
    task: asyncio.Task[None]


class Dispatch:
    """One loop, woken by requests, by answers, and by trainers that start. Fails with `LedgerError`."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        training: Training,
        backend: Backend,
        folder: Path,
        checkpoint_every: int,
        max_held_bytes: int,
        caught_up: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        """`folder` is where checkpoints are kept. `caught_up` is set while the trainer was handed all that a trainer before it was.
        `clock` gives seconds of a time that goes on over restarts."""
        self.num_replayed = 0
        """Requests that were handed on again."""
        self._ledger, self._training, self._backend = ledger, training, backend
        self._folder, self._every, self._max_held_bytes = folder, checkpoint_every, max_held_bytes
        self._caught_up, self._clock = caught_up, clock
        self._changed = Signal()
        self._failure: LedgerError | None = None
        self._futures: dict[str, tuple[str, asyncio.Future[Answer]]] = {}
        """By request: its model, and the answer to come."""
        self._fresh: dict[int, Said] = {}
        """What requests say that were not handed on yet, by number."""
        self._life = 0
        """Counts trainers: what one before is asked has no say any more."""
        self._has_trainer = False
        self._cursor = self._replay_end = 0
        self._handed: dict[int, _Handed] = {}
        self._num_steps: collections.Counter[str] = collections.Counter()
        """Steps handed on by model since its last checkpoint."""
        self._loaded: dict[str, int] = {}
        """By model the last request that it was loaded by, while no checkpoint covers it."""
        self._saving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._losses: tuple[int, int] = (0, 0)
        """The first request that the trainers lost without a word had, and how many they were."""

    @property
    def is_full(self) -> bool:
        """True where no more requests are taken, until a checkpoint covers some."""
        return self._ledger.num_held_bytes >= self._max_held_bytes

    def accept(self, request_id: str, kind: Kind, said: Said, body: bytes) -> asyncio.Future[Answer]:
        """Take a request into the ledger; its answer. Raises `Refusal` and `RequestRefused` for one that is not taken."""
        try:
            with self._ledger.together():
                model_id, about = self._training.accept(kind, said)
                row = self._ledger.accept(request_id, model_id=model_id, kind=kind, about=about, body=body)
        except LedgerError as error:
            self._fail(error)
            raise
        self._fresh[row.number] = said
        self._changed.set()
        return self._promise(request_id, model_id)

    def unanswered(self) -> list[tuple[str, asyncio.Future[Answer], int]]:
        """Return what an earlier server did not answer: each request, the answer to come, and the bytes of its body."""
        found = self._ledger.unanswered()
        return [(request_id, self._promise(request_id, model_id), size) for request_id, model_id, size in found]

    def restart(self) -> None:
        """Begin with a trainer that holds no model."""
        self._condemn()
        self._life += 1
        self._has_trainer = True
        self._replay_end, self._cursor = max(self._replay_end, self._cursor), 0
        self._handed.clear()
        for kept in (self._num_steps, self._loaded, self._saving):
            kept.clear()
        self._caught_up.clear()
        for model_id, (covered, num_steps) in self._ledger.checkpoints().items():
            self._clean(model_id, keep=covered)
            self._backend.num_steps[model_id] = num_steps
            if covered:
                folder = str(self._folder_of(model_id, covered))
                load = LoadModel(request_id=0, model_id=model_id, folder=folder, has_optimizer=True)
                self._begin(self._restored(self._backend.train(load), model_id))
        self._changed.set()

    def close(self, model_ids: list[str]) -> None:
        """Forget models, here and on the trainer."""
        for model_id in model_ids:
            self._give_up(model_id, Refusal(f"model {model_id} was unloaded, or its session ended", is_asker_wrong=True))
            self._backend.train(CloseModel(model_id=model_id))
            self._training.journal("model_closed", model_id=model_id)

    async def run(self) -> None:
        """Hand requests on until cancelled. Raises `LedgerError`."""
        while True:
            try:
                self._hand_on_all()
            except LedgerError as error:
                self._fail(error)
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    # --- handing on ---

    def _hand_on_all(self) -> None:
        while self._has_trainer and self._has_room and (row := self._ledger.next_held(after=self._cursor)) is not None:
            said = self._fresh.pop(row.number, None) or read_said(row.kind, row.body)
            if row.kind is Kind.SAVE and getattr(said, "overwrite", False) and row.model_id in self._loaded:
                self._fresh[row.number] = said
                self._save(row.model_id)  # what it was loaded from may be what is overwritten
                return
            self._cursor = row.number
            if row.is_answered and row.kind in (Kind.SAVE, Kind.SAVE_FOR_SAMPLER):
                continue
            self._hand_on(row, said)
        if self._has_trainer and self._cursor >= self._replay_end:
            self._caught_up.set()
        if self._has_trainer and 2 * self._ledger.num_held_bytes >= self._max_held_bytes:
            for model_id in self._ledger.holding(up_to=self._cursor):
                self._save(model_id)

    def _hand_on(self, row: Accepted, said: Said) -> None:
        self.num_replayed += row.number <= self._replay_end
        task = self._begin(self._answered(self._training.carry_out(row, said), row))
        if not is_published(row.kind, said):  # that one waits for others, and holds up none
            self._handed[row.number] = _Handed(row, task)
        if row.kind is Kind.STEP:
            self._num_steps[row.model_id] += 1
            if self._num_steps[row.model_id] >= self._every:
                self._save(row.model_id)
        elif row.kind is Kind.LOAD:
            self._loaded[row.model_id] = row.number
            self._save(row.model_id)

    @property
    def _has_room(self) -> bool:
        return not self._handed or sum(len(handed.row.body) for handed in self._handed.values()) < WINDOW_BYTES

    async def _answered(self, answered: Callable[[], Awaitable[Answer]], row: Accepted) -> None:
        life, is_over = self._life, False
        try:
            answer = await answered()
        except TrainerLost:
            if life == self._life:
                self._has_trainer = False  # until another starts
            return
        except Refusal as refusal:
            answer = {"error": str(refusal), "category": "user" if refusal.is_asker_wrong else "server"}
            is_over = row.kind in (Kind.CREATE, Kind.LOAD) and row.model_id not in self._training.sessions.models
            if is_over:
                self._settle(row.request_id, refusal)
                self._give_up(row.model_id, refusal)
        except Exception as error:  # a bug of ours: the client hears one line of it
            traceback.print_exception(error)
            answer = {"error": f"{type(error).__name__}: {error}", "category": "server"}
        if life == self._life:
            self._handed.pop(row.number, None)
            if not row.is_answered:  # replaying what was answered before gets nobody further
                self._losses = (0, 0)
        try:
            if not row.is_answered and not is_over:
                self._ledger.answered(row.number, answer, now_s=self._clock())
                self._ledger.forget_answers(before_s=self._clock() - KEPT_S, max_bytes=self._max_held_bytes)
        except LedgerError as error:
            self._fail(error)
            return
        self._settle(row.request_id, answer)
        self._changed.set()

    # --- checkpoints ---

    def _save(self, model_id: str) -> None:
        """Ask for a checkpoint that covers all that was handed on of a model."""
        if model_id in self._saving:
            return
        self._saving.add(model_id)
        self._num_steps[model_id] = 0
        number, num_steps = self._cursor, self._backend.num_steps[model_id]
        folder = self._folder_of(model_id, number)
        before = [handed.task for handed in self._handed.values() if handed.row.model_id == model_id]
        request = SaveModel(request_id=0, model_id=model_id, folder=str(folder), has_optimizer=True, may_replace=True, has_gradient=True)
        self._begin(self._covered(self._backend.train(request), model_id, number=number, num_steps=num_steps, before=before))

    async def _covered(
        self, saved: Awaitable[TrainingAnswer], model_id: str, *, number: int, num_steps: int, before: list[asyncio.Task[None]]
    ) -> None:
        """Record a checkpoint, once all that it covers is answered."""
        life = self._life
        try:
            answer = await saved
            await asyncio.gather(*before)
        except TrainerLost:
            return
        if life != self._life:
            return  # another trainer was told to begin at the one before
        self._saving.discard(model_id)
        if self._loaded.get(model_id, 0) <= number:
            self._loaded.pop(model_id, None)
        else:  # this one was asked for before
            self._save(model_id)
        if isinstance(answer, RequestFailed):
            self._training.journal("checkpoint_failed", model_id=model_id, error=answer.error)
        elif model_id in self._ledger.checkpoints():
            try:
                self._ledger.cover(model_id, number=number, num_steps=num_steps)
            except LedgerError as error:
                self._fail(error)
                return
            self._clean(model_id, keep=number)
            self._training.journal("model_checkpoint", model_id=model_id, covers=number, step=num_steps)
        self._changed.set()

    async def _restored(self, loaded: Awaitable[TrainingAnswer], model_id: str) -> None:
        """A model whose checkpoint is damaged is lost, and its client is told so."""
        try:
            answer = await loaded
        except TrainerLost:
            return
        if isinstance(answer, RequestFailed):
            self._training.journal("model_lost", model_id=model_id, error=answer.error)
            self._training.sessions.models.pop(model_id, None)
            self._give_up(model_id, Refusal(f"model {model_id} is lost: {answer.error}", is_asker_wrong=False))

    def _folder_of(self, model_id: str, number: int) -> Path:
        return self._folder / model_id.replace(":", "_") / f"{number:012d}"

    def _clean(self, model_id: str, *, keep: int) -> None:
        """Remove a model's checkpoints but for one."""
        kept = self._folder_of(model_id, keep)
        for folder in kept.parent.iterdir() if kept.parent.is_dir() else ():
            if folder != kept:
                shutil.rmtree(folder, ignore_errors=True)

    # --- answers ---

    def _promise(self, request_id: str, model_id: str) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._futures[request_id] = (model_id, future)
        return future

    def _settle(self, request_id: str, answer: Answer | Refusal) -> None:
        _, future = self._futures.pop(request_id, ("", None))
        if future is None or future.done():
            return
        if isinstance(answer, Refusal):
            future.set_exception(answer)
            future.exception()  # whoever asked may be gone
        else:
            future.set_result(answer)

    def _give_up(self, model_id: str, refusal: Refusal) -> None:
        """Forget what is held of a model; what is not answered is refused."""
        try:
            self._ledger.close_model(model_id)
        except LedgerError as error:
            self._fail(error)
        for request_id in [name for name, (model, _) in self._futures.items() if model == model_id]:
            self._settle(request_id, refusal)
        shutil.rmtree(self._folder_of(model_id, 0).parent, ignore_errors=True)

    def _condemn(self) -> None:
        """Answer the request that trainers die of, so that the others' are carried out."""
        first = next((number for number, handed in self._handed.items() if not handed.row.is_answered), 0)
        self._losses = (first, self._losses[1] + 1 if first == self._losses[0] else 1)
        if first and self._losses[1] >= MAX_LOSSES:
            row = self._handed[first].row
            words = f"not carried out: {MAX_LOSSES} trainers were lost with this request, and answered nothing"
            answer = {"error": words, "category": "server"}
            self._ledger.answered(first, answer, now_s=self._clock(), is_over=True)
            self._training.journal("request_condemned", request_id=row.request_id, model_id=row.model_id)
            self._settle(row.request_id, answer)

    def _begin(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task), "a coroutine was given"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _fail(self, error: LedgerError) -> None:
        self._failure = error
        self._changed.set()

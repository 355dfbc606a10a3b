"""The trainer as the server knows it: it is sent what clients ask for, in their order, and answers each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import msgspec

from orchestrator.peers.peers import Peers
from orchestrator.rules.validation.violations import Kind, Violation
from pipelinerl.errors import PeerFull
from pipelinerl.messages import (
    CloseModel,
    ForwardBackwardDone,
    LayoutFixed,
    OptimizerStepDone,
    PolicyPublished,
    PublishModel,
    RequestDone,
    RequestFailed,
    ServingTrainerReady,
    TrainingAnswer,
    TrainingRequest,
    WeightBufferReleased,
)
from pipelinerl.runtime.stage import Signal
from pipelinerl.tinker.backend import Refusal, TrainerLost

PEER = "trainer-0"


class Trainer:
    """Requests under way. A trainer that is lost takes them with it, and all models: they fail with `TrainerLost`."""

    def __init__(self, peers: Peers, *, on_another: Callable[[], None], first_request_id: int = 1) -> None:
        """`on_another` is called when another trainer takes the place of one that was lost. Requests are numbered from `first_request_id`
        on: no two servers of a run may use the same."""
        self.ready: ServingTrainerReady | None = None
        """The announcement of the process that takes requests; None before the first."""
        self.peers = peers
        self._on_another = on_another
        self._changed = Signal()
        self._numbers = itertools.count(first_request_id)
        self._asked: dict[int, asyncio.Future[TrainingAnswer]] = {}
        self._publishing: dict[int, asyncio.Future[PolicyPublished]] = {}
        """By version."""
        peers.on(ServingTrainerReady, self._on_ready)
        for kind in (ForwardBackwardDone, OptimizerStepDone, RequestDone, RequestFailed):
            peers.on(kind, self._on_answer)
        peers.on(PolicyPublished, self._on_published)

    async def wait_until_ready(self) -> None:
        """Wait until it takes requests."""
        while self.ready is None:
            await self._changed.wait()

    def ask(self, request: TrainingRequest | CloseModel) -> asyncio.Future[TrainingAnswer]:
        """Send a request, under a number of its own; its answer. Fails with `TrainerLost`, or, where it takes nothing, with `Refusal`."""
        answer: asyncio.Future[TrainingAnswer] = asyncio.get_running_loop().create_future()
        if isinstance(request, CloseModel):
            self._send(request)
            answer.set_result(RequestDone(request_id=0))
            return answer
        request = msgspec.structs.replace(request, request_id=request.request_id or next(self._numbers))
        if (refusal := self._send(request)) is not None:
            answer.set_exception(refusal)
            answer.exception()  # whoever asked may be gone
        else:
            self._asked[request.request_id] = answer
        return answer

    async def publish(self, request: PublishModel) -> PolicyPublished:
        """Have weights written for the engines. Raises `Refusal`, `TrainerLost` among these."""
        request = msgspec.structs.replace(request, request_id=next(self._numbers))
        published = self._publishing[request.version] = asyncio.get_running_loop().create_future()
        failed = self.ask(request)
        try:
            await asyncio.wait((published, failed), return_when=asyncio.FIRST_COMPLETED)
            if published.done() and not failed.done():
                return published.result()
            answer = failed.result()
            words = answer.error if isinstance(answer, RequestFailed) else "the run ends"
            raise Refusal(words, is_asker_wrong=isinstance(answer, RequestFailed) and answer.is_asker_wrong)
        finally:
            del self._publishing[request.version]
            self._asked.pop(request.request_id, None)

    def tell(self, message: LayoutFixed | WeightBufferReleased) -> None:
        """Send what is not answered."""
        self.peers.send(PEER, message)

    def _send(self, request: TrainingRequest | CloseModel) -> Refusal | None:
        try:
            self.peers.send(PEER, request)  # where its connection is closed, it comes back, or another takes its place
        except PeerFull:
            return Refusal("the trainer takes nothing: too much waits for it", is_asker_wrong=False)
        return None

    def _on_ready(self, peer: str, ready: ServingTrainerReady) -> None:
        is_another = self.ready is not None and self.ready.process_id != ready.process_id
        self.ready = ready
        if is_another:
            asked, self._asked = self._asked, {}
            for answer in asked.values():
                if not answer.done():
                    answer.set_exception(TrainerLost())
                    answer.exception()  # whoever asked may be gone
            self._on_another()
        self._changed.set()

    def _on_answer(self, peer: str, said: TrainingAnswer) -> None:
        answer = self._asked.pop(said.request_id, None)
        if answer is None:
            words = f"{type(said).__name__} of request {said.request_id}, which was not asked for, or is answered"
            self.peers.refuse(peer, Violation(kind=Kind.UNASKED, words=words))
        elif not answer.done():
            answer.set_result(said)

    def _on_published(self, peer: str, said: PolicyPublished) -> None:
        published = self._publishing.get(said.version)
        if published is None or published.done():
            self.peers.refuse(peer, Violation(kind=Kind.UNASKED, words=f"policy {said.version}, which was not asked for"))
        else:
            published.set_result(said)

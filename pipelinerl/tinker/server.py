"""The routes of Tinker's API (SDK 0.38), under `/api/v1/`, and who may use them.

Whatever takes time is a future: the reply to a request names it, and `retrieve_future` is asked for its answer, again while there is none
(408). A request that is sent again, by the number that its owner gives it, is the future that it was. What the client did wrong is an error
of the category `user`, what failed here one of `server`; a malformed request is refused at once, with 4xx.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipelinerl.config import TinkerSection
from pipelinerl.gateway.limits import SendDeadline, read_body, read_json
from pipelinerl.gateway.refusal import RequestRefused, wrong
from pipelinerl.tinker import asks, data
from pipelinerl.tinker.backend import Refusal, Weights
from pipelinerl.tinker.data import Gradient
from pipelinerl.tinker.dispatch import Dispatch
from pipelinerl.tinker.futures import Futures
from pipelinerl.tinker.ledger import Answer, Kind, Ledger
from pipelinerl.tinker.sampling import Sampled
from pipelinerl.tinker.sessions import Sampler, Sessions
from pipelinerl.tinker.training import Said, Training, model_of

API = "/api/v1/"
LOOK_EVERY_S = 5.0
"""Between two looks for sessions that have fallen silent."""
CONFIG = {
    "proto_compress_fwdbwd": False,  # the network between is this machine, as a rule
    "parallel_fwdbwd_chunks": False,  # requests of a model come in their order, so that they can be handed on as they come
    "use_pyqwest_transport": False,  # made for HTTP/2, which this server does not speak
}
"""What clients are told of how to ask."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tinker:
    """The handlers of all routes."""

    sessions: Sessions
    futures: Futures
    ledger: Ledger
    training: Training
    dispatch: Dispatch
    sampled: Sampled
    section: TinkerSection
    api_key: str
    model: str
    """The name of the model that everything begins with: where it lies."""
    architecture: str
    clock: Callable[[], float] = time.monotonic

    def app(self) -> Starlette:
        """Return the application."""
        post: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "client/config": self.client_config,
            "client/dynamic_config": self.client_dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.session_heartbeat,
            "sessions/{session_id}/finish": self.finish_session,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "unload_model": self.unload_model,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "load_weights": self.load_weights,
            "weights_info": self.weights_info,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.asample,
            "retrieve_future": self.retrieve_future,
            "cancel_future": self.cancel_future,
        }
        get = {
            "healthz": self.health,
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler_id}": self.sampler,
            "training_runs/{model_id}/checkpoints": self.checkpoints,
        }
        routes = [self._route(name, handler, "POST") for name, handler in post.items()]
        routes += [self._route(name, handler, "GET") for name, handler in get.items()]
        handlers: dict[Any, Any] = {HTTPException: _on_http_exception, Exception: _on_bug}
        return Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(SendDeadline)])

    def go_on(self) -> None:
        """Take up what an earlier server did not answer."""
        for request_id, answer, num_bytes in self.dispatch.unanswered():
            self.futures.begin(request_id, answer, num_bytes=num_bytes, is_in_ledger=True)

    async def watch_sessions(self) -> None:
        """End sessions whose clients have fallen silent, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for session_id in self.sessions.silent(since_s=self.clock() - self.section.session_timeout_s):
                self.training.journal("session_silent", session_id=session_id)
                self.dispatch.close(self.sessions.finish(session_id))

    # --- clients ---

    async def client_config(self, request: Request) -> Response:
        return _json(CONFIG)

    async def client_dynamic_config(self, request: Request) -> Response:
        return _json({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def telemetry(self, request: Request) -> Response:
        await self._body(request)
        return _json({"status": "accepted"})

    async def capabilities(self, request: Request) -> Response:
        limit = self.sampled.backend.max_context_tokens
        return _json({"supported_models": [{"model_name": self.model, "max_context_length": limit, "trainable": True, "sampleable": True}]})

    async def create_session(self, request: Request) -> Response:
        ask = await self._ask(request, asks.CreateSession)
        session_id = self.sessions.begin(now_s=self.clock())
        self.training.journal("session", session_id=session_id, sdk_version=ask.sdk_version, display_name=ask.display_name)
        about = f"adapters of rank {self.training.rank}" if self.training.rank else "all weights, whatever rank a client asks for,"
        info = f"pipelinerl: {about} are trained, of {self.model}"
        return _json({"type": "create_session", "session_id": session_id, "info_message": info})

    async def session_heartbeat(self, request: Request) -> Response:
        ask = await self._ask(request, asks.OfSession)
        self._heard(ask.session_id)
        return _json({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        await self._body(request)
        self.dispatch.close(self.sessions.finish(request.path_params["session_id"]))
        return _json({})

    # --- training ---

    async def create_model(self, request: Request) -> Response:
        ask = await self._ask(request, asks.CreateModel)
        self._heard(ask.session_id)
        model_id = model_of(ask)
        return self._accept(request, Kind.CREATE, ask, request_id=f"{model_id}/create", model_id=model_id)

    async def get_info(self, request: Request) -> Response:
        ask = await self._ask(request, asks.OfModel)
        self._known_model(ask.model_id)
        about = {"arch": self.architecture, "model_name": self.model, "tokenizer_id": self.model}
        return _json({"type": "get_info", "model_id": ask.model_id, "model_data": about, "model_name": self.model, **self._kind()})

    async def unload_model(self, request: Request) -> Response:
        ask = await self._ask(request, asks.OfModel)

        async def unloaded() -> Answer:
            self.sessions.model(ask.model_id)
            del self.sessions.models[ask.model_id]
            self.dispatch.close([ask.model_id])
            return {"model_id": ask.model_id, "type": "unload_model"}

        return self._begin(request, f"{ask.model_id}/unload", unloaded)

    async def forward_backward(self, request: Request) -> Response:
        body = await read_body(request, max_bytes=self.section.max_body_bytes, key="tinker.max_body_bytes")
        if encoding := request.headers.get("content-encoding"):
            raise RequestRefused(415, f"the body is encoded as {encoding}; client/config does not ask for that", code="encoding")
        asked = data.read(body)
        return self._accept(request, Kind.PASS, asked, request_id=_name(asked), body=body)

    async def optim_step(self, request: Request) -> Response:
        ask = await self._ask(request, asks.OptimStep)
        return self._accept(request, Kind.STEP, ask, request_id=_name(ask))

    async def save_weights(self, request: Request) -> Response:
        ask = await self._ask(request, asks.SaveWeights)
        return self._accept(request, Kind.SAVE, ask, request_id=_name(ask))

    async def load_weights(self, request: Request) -> Response:
        ask = await self._ask(request, asks.LoadWeights)
        if ask.session_id is not None:
            self._heard(ask.session_id)
        name = f"{model_of(ask)}/create" if ask.model_id is None else _name(ask)
        return self._accept(request, Kind.LOAD, ask, request_id=name)

    async def save_weights_for_sampler(self, request: Request) -> Response:
        ask = await self._ask(request, asks.SaveForSampler)
        return self._accept(request, Kind.SAVE_FOR_SAMPLER, ask, request_id=_name(ask))

    async def weights_info(self, request: Request) -> Response:
        ask = await self._ask(request, asks.WeightsPath)
        self._weights_of(ask.tinker_path)
        return _json({"base_model": self.model, **self._kind()})

    async def checkpoints(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        found = []
        for path in self.sessions.saved(model_id):
            kind = "sampler" if "/sampler_weights/" in path else "training"
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.sessions.folder_of(path).stat().st_mtime))
            checkpoint_id = path.partition(f"{model_id}/")[2]
            found.append({"checkpoint_id": checkpoint_id, "checkpoint_type": kind, "time": when, "tinker_path": path})
        return _json({"checkpoints": found})

    # --- sampling ---

    async def create_sampling_session(self, request: Request) -> Response:
        ask = await self._ask(request, asks.CreateSamplingSession)
        self._heard(ask.session_id)
        weights = self._weights(base_model=ask.base_model, model_path=ask.model_path)
        name = self.sessions.add_sampler(ask.session_id, ask.sampling_session_seq_id, weights, model_path=ask.model_path)
        return _json({"type": "create_sampling_session", "sampling_session_id": name})

    async def sampler(self, request: Request) -> Response:
        sampler = self._sampler(request.path_params["sampler_id"])
        return _json({"sampler_id": sampler.sampler_id, "base_model": self.model, "model_path": sampler.model_path})

    async def asample(self, request: Request) -> Response:
        ask = await self._ask(request, asks.Sample)
        if ask.sampling_session_id is None or ask.seq_id is None:
            raise wrong("asample: expected sampling_session_id and seq_id, as create_sampling_session gives them")
        sampler = self._sampler(ask.sampling_session_id)
        names = [f"{sampler.sampler_id}/{ask.seq_id}/{number}" for number in range(ask.num_samples)]

        def sampled() -> Awaitable[Answer]:
            requests = self.sampled.requests(ask, names=names)
            return self.sampled.answer(sampler.weights, requests, last_n=ask.prompt_logprobs_last_n)

        return self._begin(request, f"{sampler.sampler_id}/{ask.seq_id}", sampled, sample_sequence_ids=names)

    # --- futures ---

    async def retrieve_future(self, request: Request) -> Response:
        ask = await self._ask(request, asks.RetrieveFuture)
        is_gone = False
        answer: Answer | None = None
        if ask.request_id in self.futures:
            answer = await self.futures.answer(ask.request_id)
        else:
            answer = self.ledger.answer_of(ask.request_id)
            is_gone = answer is None
        if is_gone:
            raise RequestRefused(410, f"request {ask.request_id} is not known, or its answer was kept long enough", code="gone")
        if answer is None:
            return _json({"type": "try_again", "request_id": ask.request_id, "queue_state": "active"}, status=408)
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/x-protobuf")
        return _json(answer)

    async def cancel_future(self, request: Request) -> Response:
        ask = await self._ask(request, asks.RetrieveFuture)
        self.futures.cancel(ask.request_id)
        return _json({})

    def _begin(self, request: Request, request_id: str, work: Callable[[], Awaitable[Answer]], **reply: Any) -> Response:
        """Take a request that is gone with the server, unless it was taken before; what is refused of it is its answer."""
        if request_id not in self.futures:
            self._check_room()
            try:
                begun = work()
            except Refusal as refusal:
                begun = _refused(refusal)
            self.futures.begin(request_id, begun, num_bytes=request.state.num_bytes)
        return _json({"request_id": request_id, **reply})

    def _accept(self, request: Request, kind: Kind, said: Said, *, request_id: str, body: bytes = b"", **reply: Any) -> Response:
        """Take a request that outlives the server, unless it was taken before; what is refused of it is its answer."""
        if request_id not in self.futures and not self.ledger.is_known(request_id):
            self._check_room()
            try:
                begun = self.dispatch.accept(request_id, kind, said, body or msgspec.json.encode(said))
                is_in_ledger = True
            except Refusal as refusal:
                begun, is_in_ledger = _refused(refusal), False
            self.futures.begin(request_id, begun, num_bytes=request.state.num_bytes, is_in_ledger=is_in_ledger)
        return _json({"request_id": request_id, **reply})

    def _check_room(self) -> None:
        if self.futures.is_full:
            held = f"{self.futures.num_pending} requests of {self.futures.num_pending_bytes:,} bytes wait for an answer"
            words = f"{held}, as many as may (tinker.max_pending, tinker.max_held_bytes): try again later"
            raise RequestRefused(429, words, code="busy", retry_after_s=1)
        if self.dispatch.is_full:
            held = f"{self.ledger.num_held_bytes:,} bytes of requests are held until a checkpoint covers them"
            words = f"{held}, as many as may (tinker.max_held_bytes): try again later"
            raise RequestRefused(429, words, code="busy", retry_after_s=1)

    # --- what is named ---

    def _heard(self, session_id: str) -> None:
        try:
            self.sessions.heard(session_id, now_s=self.clock())
        except KeyError:
            raise RequestRefused(410, f"session {session_id} is not known here, or has ended", code="session_over") from None

    def _known_model(self, model_id: str) -> None:
        try:
            self.sessions.model(model_id)
        except Refusal as refusal:
            raise RequestRefused(404, str(refusal), code="no_such_model") from None

    def _sampler(self, sampler_id: str) -> Sampler:
        if (sampler := self.sessions.samplers.get(sampler_id)) is None:
            raise RequestRefused(404, f"sampler {sampler_id}: there is none of this name, or its session ended", code="no_such_sampler")
        return sampler

    def _weights(self, *, base_model: str | None, model_path: str | None) -> Weights:
        if model_path is not None:
            return self._weights_of(model_path)
        if base_model is None or not self.training.is_base(base_model):
            raise RequestRefused(404, f"base_model {base_model!r} is not served here: {self.model} is", code="no_such_model")
        return Weights()

    def _weights_of(self, path: str) -> Weights:
        try:
            return self.sessions.weights_of(path)
        except Refusal as refusal:
            raise RequestRefused(404, str(refusal), code="no_such_model") from None

    def _kind(self) -> dict[str, Any]:
        rank = self.training.rank
        return {"is_lora": rank > 0, "lora_rank": rank or None}

    # --- requests ---

    async def _ask(self, request: Request, kind: type[asks.A]) -> asks.A:
        return asks.read(await self._body(request), kind)

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json(request, max_bytes=self.section.max_body_bytes, key="tinker.max_body_bytes")

    def _route(self, name: str, handler: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        async def answer(request: Request) -> Response:
            try:
                said = request.headers.get("x-api-key", "") or request.headers.get("authorization", "").removeprefix("Bearer ")
                if not hmac.compare_digest(said.encode(), self.api_key.encode()):
                    raise RequestRefused(401, "no key of this server: send the one that `pipelinerl serve` printed", code="invalid_api_key")
                return await handler(request)
            except RequestRefused as refusal:
                return _refusal(refusal)

        return Route(API + name, answer, methods=[method], name=name)


def _name(ask: Gradient | asks.OptimStep | asks.SaveWeights | asks.SaveForSampler | asks.LoadWeights) -> str:
    """The name of a request by its model and the client's number for it."""
    return f"{ask.model_id}/{ask.seq_id}"


async def _refused(refusal: Refusal) -> Answer:
    raise refusal


def _json(value: Mapping[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json", headers=headers)


def _refusal(refusal: RequestRefused) -> Response:
    category = "user" if refusal.status < 500 and refusal.status not in (408, 429) else "server"
    body = {"error": str(refusal), "category": category, "code": refusal.code}
    return _json(body, status=refusal.status, headers=refusal.headers())


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    words = f"{request.method} {request.url.path}: {error.detail}; this server has what training and sampling need of Tinker's API"
    return _refusal(RequestRefused(error.status_code, words, code="no_such_route"))


async def _on_bug(request: Request, error: Exception) -> Response:
    return _refusal(RequestRefused(500, f"the server failed: {type(error).__name__}", code="internal_error"))

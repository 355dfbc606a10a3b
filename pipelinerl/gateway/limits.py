"""What a client may send, and how slowly: a connection that does not come to its point is closed, and costs no one else anything."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipelinerl.gateway.refusal import RequestRefused, wrong

HEAD_S = 10.0
"""Longest time for a request's first line and headers. Longer lets idle strangers hold connections; shorter cuts off slow networks."""
BODY_S = 30.0
"""Longest time for a request's body."""
SEND_S = 30.0
"""Longest time in which a client takes nothing of its answer."""
MAX_HEAD_BYTES = 32 << 10
"""First line and headers of one request; and what stands between two pieces of its body, or behind the last (trailers)."""
MAX_DEPTH = 64
"""Nesting of a request's JSON. Deeper ones could exhaust the stack of the code that walks them."""


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with a deadline for what comes before a body, and a bound for all that is none; it has neither.

    Trailers count, since uvicorn keeps them with the headers, also of a request that was answered before its end.
    A connection has one request at a time.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._head_deadline: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # Thousands fit what is read at once, and each would wait in memory; clients of today send none before they have an answer.
            self.transport.abort()
            raise ConnectionAbortedError("a request came before the answer to the one before it")
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        self._num_head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    def _expect_head(self) -> None:
        if self._head_deadline is None:
            self._num_head_bytes = 0
            self._head_deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _head_is_there(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


class SendDeadline:
    """Closes the connection of a client that does not read its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        await self._app(scope, receive, send_soon)


async def read_body(request: Request, *, max_bytes: int, key: str = "gateway.max_body_bytes") -> bytes:
    """Read a request's body, and note its size as `request.state.num_bytes`; `key` is the setting that bounds it.

    Raises `RequestRefused`.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    words = f"the body has more than {max_bytes} bytes ({key})"
                    raise RequestRefused(413, words, code="body_too_large")
    except TimeoutError:
        raise RequestRefused(408, f"the body did not come within {BODY_S:g} s", code="slow_client") from None
    request.state.num_bytes = len(body)
    return bytes(body)


async def read_json(request: Request, *, max_bytes: int, key: str = "gateway.max_body_bytes") -> dict[str, Any]:
    """Read a request's body, an object; an empty body is an empty one. Raises as `read_body`."""
    body = await read_body(request, max_bytes=max_bytes, key=key)
    try:
        said = msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise wrong(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(said, dict):
        raise wrong(f"the body is a {type(said).__name__}, expected an object", code="invalid_json")
    if _is_deeper(said):
        raise wrong(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
    return said


def _is_deeper(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True

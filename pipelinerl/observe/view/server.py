"""Serves one run's page, only to who brings the token printed at the start: also on loopback, where other users of the machine are, too.

A page elsewhere must not read this one through a name that is made to lead here: on loopback only loopback's names are answered.
The page gets no leave to load anything but its own numbers (Content-Security-Policy), and draws text as text.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from pipelinerl.errors import ConfigError, DataError
from pipelinerl.observe.report.page import Parts, render
from pipelinerl.observe.segments import journal_folder
from pipelinerl.observe.view.samples import Query
from pipelinerl.observe.view.snapshot import Snapshot

MAX_FIELDS = 32
"""Fields of an address's query: more than there are filters."""


class View:
    """A bound server; `serve` answers until `close`."""

    def __init__(self, run_folder: Path, *, interface: str = "127.0.0.1", port: int = 0) -> None:
        """Bind. Raises `DataError` for a folder without journals, and `ConfigError` where the port is taken."""
        journal_folder(run_folder)
        self._snapshot, self._lock = Snapshot(run_folder), threading.Lock()
        parts = Parts("templates/view.css", "templates/view.js", also="connect-src 'self'; img-src data:; ")
        self._page, self._policy = render("view.html", parts).encode(), parts.policy
        self.is_loopback = interface == "localhost" or _is_loopback(interface)
        self.token = secrets.token_urlsafe(24)
        try:
            self._server = ThreadingHTTPServer((interface, port), self._handler())
        except OSError as error:
            option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--interface"
            do = f"Leave {option} out, or name another"
            raise ConfigError(f"the view cannot listen on {interface}, port {port}: {error.strerror or error}. {do}") from None
        host = f"[{interface}]" if ":" in interface else interface
        self.address = f"http://{host}:{self._server.server_port}/?token={self.token}"

    def serve(self) -> None:
        """Answer requests until `close`."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    def is_welcome(self, *, host: str, token: str | None) -> bool:
        """Whether a request that names this host and brings this token is answered. Raises `ValueError` for what is no host's name."""
        name = urlsplit(f"//{host}").hostname or ""
        if self.is_loopback and not (name == "localhost" or _is_loopback(name)):
            return False
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def state(self) -> bytes:
        """The snapshot of this moment."""
        with self._lock:
            self._snapshot.look()
            return json.dumps(self._snapshot.as_json()).encode()

    def samples(self, query: Query) -> bytes:
        """A page of the run's samples."""
        with self._lock:
            self._snapshot.look()
            return json.dumps(self._snapshot.samples.page(query)).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        view = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                try:
                    url = urlsplit(self.path)
                    asked = parse_qs(url.query, max_num_fields=MAX_FIELDS)
                    token = (asked.pop("token", None) or [None])[0]
                    is_welcome = view.is_welcome(host=self.headers.get("Host", ""), token=token)
                except ValueError:  # half an IPv6 address, say
                    return self._answer(HTTPStatus.BAD_REQUEST, b"no address\n", "text/plain")
                if not is_welcome:
                    self._answer(HTTPStatus.FORBIDDEN, b"the address with its token stands where `pipelinerl view` runs\n", "text/plain")
                elif url.path == "/":
                    self._answer(HTTPStatus.OK, view._page, "text/html; charset=utf-8", policy=view._policy)
                elif url.path == "/state.json":
                    self._answer(HTTPStatus.OK, view.state(), "application/json")
                elif url.path == "/samples.json":
                    try:
                        query = Query.parse(asked)
                    except DataError as error:
                        return self._answer(HTTPStatus.BAD_REQUEST, f"{error}\n".encode(), "text/plain; charset=utf-8")
                    self._answer(HTTPStatus.OK, view.samples(query), "application/json")
                else:
                    self._answer(HTTPStatus.NOT_FOUND, b"no such page\n", "text/plain")

            def _answer(self, status: HTTPStatus, body: bytes, kind: str, *, policy: str = "default-src 'none'") -> None:
                self.send_response(status)
                for name, value in (
                    ("Content-Type", kind),
                    ("Content-Length", str(len(body))),
                    ("Content-Security-Policy", policy),
                    ("Cache-Control", "no-store"),
                    ("Referrer-Policy", "no-referrer"),
                    ("X-Content-Type-Options", "nosniff"),
                ):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are no news; and their addresses hold the token."""

        return Handler


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

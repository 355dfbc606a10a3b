"""Serves one run's page. On loopback without a token; on any other interface only to who brings the token printed at the start.

A page elsewhere must not read this one through a name that is made to lead here: on loopback only loopback's names are answered.
The page gets no leave to load anything but its own numbers (Content-Security-Policy), and draws text as text.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from pipelinerl.errors import DataError
from pipelinerl.view.snapshot import Snapshot

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; base-uri 'none'"


class View:
    """A bound server; `serve` answers until `close`."""

    def __init__(self, run_folder: Path, *, interface: str = "127.0.0.1", port: int = 0) -> None:
        """Bind. Raises `DataError` for a folder without journals, and `OSError` where the port is taken."""
        if not (run_folder / "journal").is_dir():
            raise DataError(f"no journal in {run_folder / 'journal'}: name the folder of a run, the one that holds its journal folder")
        self._snapshot, self._lock = Snapshot(run_folder), threading.Lock()
        self._page = files("pipelinerl.view").joinpath("page.html").read_text()
        self.is_loopback = interface == "localhost" or _is_loopback(interface)
        self.token = None if self.is_loopback else secrets.token_urlsafe(24)
        self._server = ThreadingHTTPServer((interface, port), self._handler())
        host = f"[{interface}]" if ":" in interface else interface
        self.address = f"http://{host}:{self._server.server_port}/" + (f"?token={self.token}" if self.token else "")

    def serve(self) -> None:
        """Answer requests until `close`."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    def is_welcome(self, *, host: str, token: str | None) -> bool:
        """Whether a request that names this host and brings this token is answered."""
        if self.token is not None:
            return token is not None and hmac.compare_digest(token.encode(), self.token.encode())
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or _is_loopback(name)

    def state(self) -> bytes:
        """The snapshot of this moment."""
        with self._lock:
            self._snapshot.look()
            return json.dumps(self._snapshot.as_json()).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        view = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                token = (parse_qs(url.query).get("token") or [None])[0]
                if not view.is_welcome(host=self.headers.get("Host", ""), token=token):
                    self._answer(HTTPStatus.FORBIDDEN, b"the address with its token stands where `pipelinerl view` runs\n", "text/plain")
                elif url.path == "/":
                    nonce = secrets.token_urlsafe(16)
                    page = view._page.replace("NONCE", nonce).encode()
                    self._answer(HTTPStatus.OK, page, "text/html; charset=utf-8", policy=_POLICY.format(nonce=nonce))
                elif url.path == "/state.json":
                    self._answer(HTTPStatus.OK, view.state(), "application/json")
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

"""Serve the gateway of a run, until the orchestrator stops it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from pipelinerl.config import Config, GatewaySection
from pipelinerl.config.file import load_run
from pipelinerl.data.chat import ChatTemplate
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import decoder, load_tokenizer
from pipelinerl.errors import ConfigError
from pipelinerl.gateway.episodes import Episodes
from pipelinerl.gateway.http import Gateway
from pipelinerl.gateway.limits import Protocol
from pipelinerl.gateway.orchestrator import Orchestrator
from pipelinerl.gateway.turns import Turns
from pipelinerl.launch.run_folder import GATEWAY_FILE
from pipelinerl.messages import ToGateway
from pipelinerl.runtime.process import crash_report
from pipelinerl.transport.base import Link
from pipelinerl.transport.zmq import ZmqLink

KEEP_ALIVE_S = 75
"""Longest time that a connection may be idle between two requests."""


class Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to the process: the launcher ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Read `<run>/config.json`, listen, connect as `gateway-0` and serve."""
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.gateway", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder, with config.json, keys/ and endpoints/")
    run_folder = parser.parse_args().run_folder
    with crash_report(run_folder, "gateway-0"):
        config = load_run(run_folder)
        if config.gateway is None:
            raise ConfigError(f"{run_folder / 'config.json'} has no section gateway: there is nothing to serve")
        listener, address, token = listen(config.gateway, run_folder)
        with (
            contextlib.closing(ZmqLink(run_folder, "gateway", 0, accepts=ToGateway)) as link,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(serve(config, link=link, listener=listener, address=address, token=token))


def listen(section: GatewaySection, run_folder: Path) -> tuple[socket.socket, str, str]:
    """Return the listening socket, its URL and the run's token; those of the gateway before, if there was one and its port is free."""
    path = run_folder / GATEWAY_FILE
    before = json.loads(path.read_text()) if path.exists() else {}
    token = before.get("token") or secrets.token_urlsafe(24)
    family = socket.AF_INET6 if ":" in section.interface else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((section.interface, section.port or before.get("port", 0)))
    except OSError as error:
        port = section.port or before.get("port", 0)
        where = f"{section.interface}, port {port}"
        raise ConfigError(f"gateway: cannot listen on {where}: {error.strerror or error}. gateway.port = 0 takes a free one") from None
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if family == socket.AF_INET6 else f"http://{host}:{port}"
    draft = run_folder / f".{GATEWAY_FILE}.{os.getpid()}"
    with open(draft, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump({"address": address, "port": port, "token": token}, file)
    draft.replace(path)
    return listener, address, token


async def serve(config: Config, *, link: Link, listener: socket.socket, address: str, token: str) -> None:
    """Serve until the orchestrator says to stop."""
    section = config.gateway
    assert section is not None, "the caller has looked"
    tokenizer = load_tokenizer(config.model.path)
    ends = stop_tokens_of(config.model.path, tokenizer=tokenizer, extra=config.rollout.stop_token_ids)
    orchestrator = Orchestrator(link, address=address, episodes=Episodes(token.encode()))
    turns = Turns(
        orchestrator,
        template=ChatTemplate(tokenizer, options=config.data.chat_template_kwargs, ends=ends.ids),
        decode=decoder(tokenizer, ends=ends.of_model),
        max_turns=section.max_requests,
        max_parallel=section.max_parallel,
    )
    gateway = Gateway(
        orchestrator=orchestrator,
        turns=turns,
        section=section,
        address=address,
        run_token=token,
        model=config.model.path.name,
        max_tokens=config.rollout.max_tokens,
    )
    server = Server(
        uvicorn.Config(
            gateway.app(),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            limit_concurrency=64 + 4 * section.max_episodes,
        )
    )
    print(f"listening at {address}", flush=True)
    async with asyncio.TaskGroup() as group:
        connection = group.create_task(orchestrator.run())
        serving = group.create_task(server.serve(sockets=[listener]))
        await orchestrator.stopped.wait()
        server.should_exit = True
        await serving
        connection.cancel()


if __name__ == "__main__":
    main()

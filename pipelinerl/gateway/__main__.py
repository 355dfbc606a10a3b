"""Serve the gateway of a run, until the orchestrator stops it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import socket
from pathlib import Path

import uvloop

from pipelinerl.config import Config, GatewaySection
from pipelinerl.config.file import load_run
from pipelinerl.data.chat import ChatTemplate
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import decoder, load_tokenizer
from pipelinerl.data.vocabulary import vocabulary_of
from pipelinerl.engine.tool_parser import parser_of
from pipelinerl.errors import ConfigError
from pipelinerl.gateway.episodes import Episodes
from pipelinerl.gateway.http import Gateway, Model
from pipelinerl.gateway.listening import listen, remember, server_of
from pipelinerl.gateway.orchestrator import Orchestrator
from pipelinerl.gateway.turns import Turns
from pipelinerl.launch.run_folder import GATEWAY_FILE, POLICIES
from pipelinerl.messages import ToGateway
from pipelinerl.runtime.process import crash_report
from pipelinerl.transport.base import Link
from pipelinerl.transport.zmq import ZmqLink


def main() -> None:
    """Read `<run>/config.json`, listen, connect as `gateway-0` and serve."""
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.gateway", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder, with config.json, keys/ and endpoints/")
    run_folder = parser.parse_args().run_folder
    with crash_report(run_folder, "gateway-0"):
        config = load_run(run_folder)
        if config.gateway is None:
            raise ConfigError(f"{run_folder / 'config.json'} has no section gateway: there is nothing to serve")
        listener, address, token = open_listener(config.gateway, run_folder)
        with (
            contextlib.closing(ZmqLink(run_folder, "gateway", 0, accepts=ToGateway)) as link,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(serve(config, link=link, listener=listener, address=address, token=token, policies=policies_beside(run_folder)))


def policies_beside(run_folder: Path) -> dict[str, Config]:
    """Return the settings of all policies of the run that the folder of one belongs to; none for the folder of a run of one."""
    if run_folder.resolve().parent.name != POLICIES:
        return {}
    order = load_run(run_folder.resolve().parent.parent).policies
    return {name: load_run(run_folder.resolve().parent / name) for name in order}


def open_listener(section: GatewaySection, run_folder: Path) -> tuple[socket.socket, str, str]:
    """Return the listening socket, its URL and the run's token; those of the gateway before, if there was one and its port is free."""
    path = run_folder / GATEWAY_FILE
    before = json.loads(path.read_text()) if path.exists() else {}
    token = before.get("token") or secrets.token_urlsafe(24)
    listener, address = listen(section.interface, section.port or before.get("port", 0), section="gateway")
    remember(path, {"address": address, "port": listener.getsockname()[1], "token": token})
    return listener, address, token


async def serve(
    config: Config, *, link: Link, listener: socket.socket, address: str, token: str, policies: dict[str, Config] | None = None
) -> None:
    """Serve until the orchestrator says to stop. `policies` are those of a run of several, by name."""
    section = config.gateway
    assert section is not None, "the caller has looked"
    orchestrator = Orchestrator(link, address=address, episodes=Episodes(token.encode()))
    models = {name: model_of(one, orchestrator, section) for name, one in (policies or {config.model.path.name: config}).items()}
    gateway = Gateway(orchestrator=orchestrator, policies=models, section=section, address=address, run_token=token)
    server = server_of(gateway.app(), max_connections=64 + 4 * section.max_episodes)
    print(f"listening at {address}", flush=True)
    async with asyncio.TaskGroup() as group:
        connection = group.create_task(orchestrator.run())
        serving = group.create_task(server.serve(sockets=[listener]))
        await orchestrator.stopped.wait()
        server.should_exit = True
        await serving
        connection.cancel()


def model_of(config: Config, orchestrator: Orchestrator, section: GatewaySection) -> Model:
    """Return what samples turns of one policy: each has a chat template and a tokenizer of its own."""
    tokenizer = load_tokenizer(config.model.path)
    ends = stop_tokens_of(config.model.path, tokenizer=tokenizer, extra=config.rollout.stop_token_ids)
    turns = Turns(
        orchestrator,
        template=ChatTemplate(tokenizer, options=config.data.chat_template_kwargs, ends=ends.ids),
        decode=decoder(tokenizer, ends=ends.of_model),
        calls=parser_of(config.data.tool_call_parser, tokenizer, ends=ends.of_model),
        max_turns=section.max_requests,
        max_parallel=section.max_parallel,
    )
    return Model(turns=turns, max_tokens=config.rollout.max_tokens, vocabulary=vocabulary_of(config))


if __name__ == "__main__":
    main()

"""The command that serves training loops outside of this program."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pipelinerl.cli.app import ConfigFile, Overrides, console
from pipelinerl.cli.start import begin_early, report
from pipelinerl.cli.train import PANEL
from pipelinerl.config import Config
from pipelinerl.config.file import load
from pipelinerl.data.hub import resolved
from pipelinerl.launch import resuming
from pipelinerl.launch.gpus import place
from pipelinerl.launch.roles import roles_of
from pipelinerl.launch.run_folder import TINKER_FILE, make_run_folder
from pipelinerl.launch.run_launcher import launcher_of
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.lease import Lease, held
from pipelinerl.runtime.watch import FILE_POLL_S
from pipelinerl.tinker.settings import served

commands = typer.Typer()


@commands.command(cls=resuming.RunCommand, rich_help_panel=PANEL)
def serve(
    config_file: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="[RUN]", help="go on with this server (its folder, or its name); by itself: the newest"),
    ] = None,
) -> None:
    """Serve training loops that are written for Tinker's SDK: start the engines, the trainer and a server for them.

    A config needs three lines; data, rewards and the algorithm are the client's own:

        [model]
        path = "models/my-model"
        [lora]
        rank = 32                          # 0: all weights are trained

    It prints the two variables by which a client finds it:

        export TINKER_BASE_URL=http://127.0.0.1:40123
        export TINKER_API_KEY=tml-...

    Then any program that uses the SDK runs as it is, such as `python -m tinker_cookbook.recipes.sl_loop model_name=...`. Ctrl-C ends the
    server; what clients have saved stays in `<run.folder>/saved`. After whatever ended it, `--resume` goes on, under the same address and
    key, with every client, its models, and what it had asked for. docs/tinker.md says what is served, and what is not.
    """
    settings = served(resolved(load(config_file, overrides=overrides or [], for_run=False)))
    with begin_early(settings) as early:
        from pipelinerl.launch.preflight import check as preflight
        from pipelinerl.runtime.findings import Level, refuse, show

        refuse(findings := preflight(settings))
        show(findings, console, Level.NOTE, Level.WARN)
        earlier = resuming.find_server(settings, resume or None) if resume is not None else None
        run_folder = earlier or make_run_folder(settings)
        console.print(f"run folder: {escape(str(run_folder))}{', going on' if earlier else ''}", soft_wrap=True)
        with held(run_folder) as lease:
            if earlier is not None:
                resuming.make_server_ready(settings, run_folder)
            try:
                asyncio.run(_launch(settings, run_folder, lease=lease, early=early))
            finally:
                report(run_folder)


async def _launch(settings: Config, run_folder: Path, *, lease: Lease, early: EarlyProcesses) -> None:
    roles, _ = place(settings, roles_of(settings, run_folder), usable_gpus())
    names = ", ".join(role.name for role in roles)
    console.print(f"starting {names}; logs: {escape(str(run_folder / 'logs'))}", soft_wrap=True)
    telling = asyncio.create_task(_tell_clients(run_folder))
    try:
        await launcher_of(settings, roles, run_folder, lease=lease, early=early).run()
    finally:
        telling.cancel()


async def _tell_clients(run_folder: Path) -> None:
    """Print what a client needs, once the server listens."""
    path = run_folder / TINKER_FILE
    while not path.exists():  # noqa: ASYNC110
        await asyncio.sleep(FILE_POLL_S)  # a file tells nobody that it is there
    listens = json.loads(path.read_text())
    for name, value in (("TINKER_BASE_URL", listens["address"]), ("TINKER_API_KEY", listens["api_key"])):
        console.print(f"export {name}={escape(value)}", highlight=False, soft_wrap=True)

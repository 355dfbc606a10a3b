"""The application that commands are added to, and the arguments that several of them take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from pipelinerl import __version__

app = typer.Typer(
    name="pipelinerl",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Streaming RL post-training of language models: prompts flow into vLLM, rewards and training run beside it, and new weights
are swapped in between forward passes.

**Start here:** `pipelinerl demo` trains a small model and shows the report.
Then write a TOML file (`pipelinerl run --help` says how) and `pipelinerl run my.toml`.""",
)
console = Console()
errors = Console(stderr=True)

ConfigFile = Annotated[Path, typer.Argument(help="TOML file with the sections model, data, reward, ...", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, in TOML syntax; reward.0.weight=2 names an entry of a list", show_default=False),
]
RunFolder = Annotated[Path, typer.Argument(help="a run's folder, for example runs/demo-20260101-120000", show_default=False)]


def exit_as(module: str, *arguments: object) -> NoReturn:
    """Run one of our programs as a process of its own, and exit with its code."""
    raise typer.Exit(subprocess.call([sys.executable, "-m", module, *map(str, arguments)]))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        console.print(f"pipelinerl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")] = False,
) -> None:
    """Options before any command."""

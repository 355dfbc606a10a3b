"""Every command, and how an error ends one: `pipelinerl.__main__` imports this once it can be interrupted."""

from __future__ import annotations

import errno
import sys

from rich.markup import escape

from pipelinerl.cli import clusters, plan, reference, runs, scale, serve, simulate, train
from pipelinerl.cli.app import app, errors
from pipelinerl.errors import PipelineError

for group in (train, clusters, scale, serve, plan, simulate, runs, reference):
    app.add_typer(group.commands)


def run() -> None:
    """Run the command that was asked for. Errors of our own tree, and those of files and disks, print as one message and exit with 1."""
    try:
        app()
    except PipelineError as error:
        errors.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        do = "; make room there, and `--resume` goes on" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        errors.print(
            f"[bold red]{type(error).__name__}[/]: {escape(f'{error.strerror or error}{where}{do}')}", highlight=False, soft_wrap=True
        )
        sys.exit(1)

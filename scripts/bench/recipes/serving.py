"""`pipelinerl serve` as a user starts it, and what its journal says afterwards."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelinerl.observe.lines import read_journals
from scripts.bench.recipes.environment import ROOT


@contextlib.contextmanager
def served(folder: Path, *overrides: str, model: Path) -> Iterator[dict[str, str]]:
    """The variables that `pipelinerl serve` prints, while it serves a model; Ctrl-C ends it, and it has to end well."""
    settings = folder / "serve.toml"
    settings.write_text(f'[model]\npath = "{model}"\ndtype = "float32"\nmax_tokens = 64\n[run]\nfolder = "{folder / "runs"}"\n')
    command = [sys.executable, "-m", "pipelinerl", "serve", str(settings), "engine.max_running=16", *overrides]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        printed, variables = "", dict[str, str]()
        for line in process.stdout:
            printed += line
            name, equals, value = line.strip().removeprefix("export ").partition("=")
            if equals and name.startswith("TINKER_"):
                variables[name] = value
            if len(variables) == 2:
                break
        assert len(variables) == 2, printed
        try:
            yield variables
        finally:
            process.send_signal(signal.SIGINT)
            left = time.monotonic() + 60.0
            while process.poll() is None and time.monotonic() < left:
                time.sleep(0.1)
            process.kill()
        assert process.returncode == 0, process.stdout.read()


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The journal's lines of one kind, of the one server that ran in a folder."""
    (run_folder,) = (path for path in (folder / "runs").iterdir() if path.name != "saved")
    return [line for line in read_journals(run_folder) if line["kind"] == kind]

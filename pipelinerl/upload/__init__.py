"""A run's checkpoints and final model in an object store (`checkpoint.to`), sent by a process beside the run that no step waits for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.sidecars import Sidecar
from pipelinerl.upload.object_store import ObjectStore

REST_S = 900.0
"""For the rest, after the run: 140 GB at 160 MB/s."""
PROBE_S = 60.0
"""For a store to take its first object."""


def uploader(run_folder: Path, to: str, *, keep: int) -> Sidecar:
    """The process that sends a run's checkpoints and model to the store `to`; of checkpoints the newest `keep` stay there."""
    return Sidecar(name="upload", command=_command(run_folder, to, keep), rest_s=REST_S, remedy=f"pipelinerl upload {run_folder}")


def upload(run_folder: Path, to: str, *, keep: int) -> bool:
    """Send what the store lacks of a run; whether all of it is there now. Raises `ConfigError`."""
    ObjectStore(to)
    return subprocess.call([*_command(run_folder, to, keep), "--once"]) == 0


def check_store(to: str, *, is_dry: bool = False) -> None:
    """Raise `ConfigError` where nothing can be written to a store, or where its protocol is not installed (all that `is_dry` looks at)."""
    ObjectStore(to)
    if is_dry:
        return
    try:
        done = subprocess.run([*_PROGRAM, "--probe", "--to", to], capture_output=True, text=True, timeout=PROBE_S, check=False)
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        said = f"it did not answer within {PROBE_S:g} s"
    if said:
        raise ConfigError(f"checkpoint.to: nothing can be written to {to}: {said}")


_PROGRAM = (sys.executable, "-m", "pipelinerl.upload")


def _command(run_folder: Path, to: str, keep: int) -> tuple[str, ...]:
    return (*_PROGRAM, "--run-folder", str(run_folder), "--to", to, "--keep", str(keep))

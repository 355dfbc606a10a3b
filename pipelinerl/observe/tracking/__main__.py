"""`python -m pipelinerl.observe.tracking --run-folder RUN --to wandb`: one tracker's process. SIGTERM: read to the journal's end, and end.

Exits with 0 when everything was handed over, with 1 when something is left for `pipelinerl track`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from pipelinerl.config.file import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.observe.tracking.follow import Open, follow
from pipelinerl.runtime.process import die_with_parent, hold_alone


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.observe.tracking", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    parser.add_argument("--to", required=True, choices=("wandb", "tensorboard", "prometheus"))
    parser.add_argument("--once", action="store_true", help="read to the journal's end, and end")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    die_with_parent()
    os.nice(10)  # training comes first on every core
    until = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: until.set())
    if arguments.once:
        until.set()
    try:
        otherwise = f"another process writes {arguments.run_folder} to {arguments.to} already; a run has one writer, so let that one go on"
        lock = hold_alone(arguments.run_folder / "tracking" / f"{arguments.to}.lock", otherwise=otherwise)
    except ConfigError as error:
        sys.exit(str(error))
    try:
        is_whole = follow(arguments.run_folder, opener(arguments.run_folder, arguments.to), until=until)
    finally:
        os.close(lock)
    sys.exit(0 if is_whole else 1)


def opener(run_folder: Path, to: str) -> Open:
    """Return the opener of the tracker named `to`. Raises `ConfigError` where its package is not installed."""
    tracking = load_run(run_folder).tracking

    def wandb(line: dict[str, Any]) -> Any:
        from pipelinerl.observe.tracking.to_wandb import WandbRun

        return WandbRun(run_folder, line, project=tracking.project)

    def tensorboard(_: dict[str, Any]) -> Any:
        from pipelinerl.observe.tracking.to_tensorboard import TensorBoard

        return TensorBoard(run_folder)

    def prometheus(_: dict[str, Any]) -> Any:
        from pipelinerl.observe.tracking.to_prometheus import Metrics

        return Metrics(run_folder, interface=tracking.prometheus_interface, port=tracking.prometheus_port)

    return {"wandb": wandb, "tensorboard": tensorboard, "prometheus": prometheus}[to]


if __name__ == "__main__":
    main()

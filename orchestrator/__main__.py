"""The command `python -m orchestrator --run-folder RUN` starts the one process that holds the run's state."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
from pathlib import Path

from orchestrator.assembly import opened
from orchestrator.run import Run, RunResult
from pipelinerl.config import Config
from pipelinerl.config.file import load_run
from pipelinerl.runtime import startup
from pipelinerl.runtime.network import address_of
from pipelinerl.runtime.process import crash_report, end_stuck, keep_to
from pipelinerl.runtime.watch import guarded


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    parser.add_argument("--interface", help="where to listen; default: run.interface")
    arguments = parser.parse_args()
    run_folder = arguments.run_folder
    with crash_report(run_folder, "orchestrator"):
        with startup.mark("imports", since_s=startup.begun_s()):
            config = load_run(run_folder)
            keep_to(config.run.cores)
        result = asyncio.run(_run(config, run_folder, address=address_of(arguments.interface or config.run.interface)))
        print(f"{result.reason}: {result.rollouts}", flush=True)


async def _run(config: Config, run_folder: Path, *, address: str) -> RunResult:
    with opened(config, run_folder, address=address, environment=os.environ) as given:
        run = Run(config, given)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, run.stop, "stopped by a signal")
        # A run that goes on soon, after a limit of time, say, need not be evaluated first.
        loop.add_signal_handler(signal.SIGTERM, functools.partial(run.stop, "stopped by a signal", evaluates=False))
        with guarded(config.pipeline.stall_limit_s, end=functools.partial(end_stuck, run_folder, "orchestrator")):
            return await run.run()


if __name__ == "__main__":
    main()

"""Serve the rewards and the environment of a run, as one of its scorers, until the orchestrator stops it."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipelinerl.config.file import load_run
from pipelinerl.messages import ToScorer
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.server import Server
from pipelinerl.runtime import startup
from pipelinerl.runtime.membership import ScaleFolder
from pipelinerl.runtime.process import crash_report, keep_to
from pipelinerl.transport.zmq import ZmqLink


def main() -> None:
    """Read `<run>/config.json`, connect as `scorer-I` and serve."""
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.rewards", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder, with config.json, keys/ and endpoints/")
    parser.add_argument("--index", type=int, required=True, help="number of this scorer, from 0")
    parser.add_argument("--gpus", action="append", default=[], help="UUID of a reward model's GPU; once for each process of each model")
    arguments = parser.parse_args()
    name = f"scorer-{arguments.index}"
    with crash_report(arguments.run_folder, name):
        with startup.mark("imports", since_s=startup.begun_s()):
            config = load_run(arguments.run_folder)
            keep_to(config.run.cores)
        journal = Journal(arguments.run_folder, name)
        startup.write(journal)
        link = ZmqLink(arguments.run_folder, "scorer", arguments.index, accepts=ToScorer)
        try:
            scale = ScaleFolder(arguments.run_folder)
            Server(config, link=link, journal=journal, scorer_id=arguments.index, gpus=arguments.gpus, scale=scale).run()
        finally:
            link.close()
            journal.close()


if __name__ == "__main__":
    main()

"""Serve the process reward model of a run, in a process of its own, until the orchestrator stops it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.config import PrmSection
from pipelinerl.config.file import load_run
from pipelinerl.engine.environment import set_environment
from pipelinerl.messages import ToScorer
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.codec import load_codec
from pipelinerl.rewards.prm.scorer import PrmScorer, StepScorer
from pipelinerl.rewards.prm.server import PrmServer, convention_of
from pipelinerl.runtime.devices import show_first
from pipelinerl.runtime.membership import FIRST_PRM, Kind, StartedBy, is_own
from pipelinerl.runtime.process import crash_report
from pipelinerl.transport.zmq import ZmqLink


def main() -> None:
    """Load the model, connect as `scorer-I` and serve."""
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.rewards.prm.process", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder, with config.json, keys/ and endpoints/")
    parser.add_argument("--index", type=int, required=True, help="number of this process among the scorers")
    parser.add_argument("--started-by", type=StartedBy, default=StartedBy.RUN, help="who starts it: the run, or its launcher since")
    parser.add_argument("--request-id", type=int, default=0, help="the request that brought it; 0: the run began with it")
    parser.add_argument("--gpus", help="UUIDs of the model's GPUs, with commas")
    arguments = parser.parse_args()
    name = f"scorer-{arguments.index}"
    own = functools.partial(is_own, arguments.run_folder, arguments.index, arguments.started_by, Kind.PRM, request_id=arguments.request_id)
    if not own():
        return  # it has left the run, and its device may be another's
    with crash_report(arguments.run_folder, name):
        config = load_run(arguments.run_folder)
        set_environment()
        if (number := arguments.index - FIRST_PRM) < len(config.prm.cores):
            os.sched_setaffinity(0, {config.prm.cores[number]})
        if arguments.gpus:
            show_first(arguments.gpus)
        scorer = load_scorer(config.prm)
        codec = load_codec(config.model.path)
        journal = Journal(arguments.run_folder, name)
        link = ZmqLink(arguments.run_folder, "scorer", arguments.index, accepts=ToScorer)
        try:
            server = PrmServer(
                scorer,
                config.prm,
                decode=codec.decode,
                link=link,
                journal=journal,
                prm_id=arguments.index,
                request_id=arguments.request_id,
                is_awaited=own,
                limit=lambda: killed_after(config.prm.deadline_s, name),
            )
            server.run()
        finally:
            link.close()
            journal.close()


def load_scorer(section: PrmSection) -> StepScorer:
    """Load the process reward model of a config, or its judge. Raises `ConfigError` where that fails."""
    if section.path is None:
        from pipelinerl.rewards.prm.judge import JudgeScorer

        return JudgeScorer(section)
    from pipelinerl.rewards.pooling import PoolingModel

    engine = PoolingModel(section.path, task="token_classify", dtype=section.dtype, max_tokens=section.max_tokens, options=section.options)
    return PrmScorer(engine, convention=convention_of(section), version=str(section.path))


@contextlib.contextmanager
def killed_after(seconds: float, name: str) -> Iterator[None]:
    """Kill this process when the block takes longer, because no thread can stop a forward pass that hangs in any other way.

    It is killed by a signal, so that the launcher starts it again and its traces are sent again.
    """

    def kill() -> None:
        print(f"{name}: a batch took more than {seconds:g} s (prm.deadline_s); this process ends, and is started again", file=sys.stderr)
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


if __name__ == "__main__":
    main()

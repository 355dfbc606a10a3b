"""`python -m trainer --run-folder RUN`: one rank of the trainer, the only one or one of those that `trainer.parallel.rendezvous` starts."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import load_run, with_ranks
from pipelinerl.runtime import early, startup
from pipelinerl.runtime.devices import show_first
from pipelinerl.runtime.imports import of_large_packages
from pipelinerl.runtime.lease import fence_of
from pipelinerl.runtime.process import crash_report, die_with_parent
from pipelinerl.weights.network import nccl_settings
from trainer.parallel.threads import set_threads


def main() -> None:
    """Train one rank's share of the run; see `trainer.loop`."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    parser.add_argument("--gpus", help="UUID of the GPU of the only rank")
    parser.add_argument("--ranks", type=int, help="ranks of the trainer, where they are others than trainer.ranks")
    arguments = parser.parse_args(early.arguments(lambda settings: _prepare(Config.model_validate_json(settings))))
    run_folder = arguments.run_folder
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # by way of every `with`, which removes the shared buffers
    with crash_report(run_folder, f"trainer-{os.environ.get('RANK', '0')}"):
        config = load_run(run_folder)
        if arguments.ranks is not None:
            config = with_ranks(config, arguments.ranks)
        if arguments.gpus:
            show_first(arguments.gpus)
        _prepare(config)
        if "RANK" not in os.environ:  # else who started the ranks has said it
            deadline_s = config.trainer.ready_deadline_s
            os.environ |= nccl_settings(config.weights, run_folder, "trainer", deadline_s=deadline_s, environment=os.environ)
        if config.tinker is not None:
            from trainer.serving.loop import serve

            serve(config, run_folder, fence=fence_of(run_folder, os.environ))
            return
        from trainer.loop import train

        train(config, run_folder, fence=fence_of(run_folder, os.environ))


def _prepare(config: Config) -> None:
    """Import what training needs, once this rank's threads are set; a second time this does nothing."""
    set_threads(config.trainer.cores, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    if "trainer.loop" not in sys.modules:
        with startup.mark("imports torch and transformers", since_s=startup.begun_s()), of_large_packages():
            import trainer.loop  # noqa: F401


if __name__ == "__main__":
    main()

"""`python -m trainer.sft CONFIG [section.key=value ...]`: fine-tunes `model.path` on `sft.source`, in `trainer.ranks` processes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pipelinerl.config.file import load
from pipelinerl.data.hub import resolved
from pipelinerl.errors import PipelineError
from pipelinerl.runtime.devices import named, show_first, usable_gpus
from pipelinerl.runtime.process import die_with_parent, end_alike
from trainer.parallel.ranks import meeting_in_memory, run_ranks
from trainer.parallel.threads import set_threads

LINES = 10
"""Progress lines of a whole run."""


def main() -> None:
    """Train and print progress. An error of our own tree prints as one message and exits with 1."""
    parser = argparse.ArgumentParser(prog="python -m trainer.sft", description=__doc__)
    parser.add_argument("config", type=Path, help="TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="in TOML syntax")
    arguments = parser.parse_args()
    try:
        config = resolved(load(arguments.config, overrides=arguments.overrides, for_run=False))
        if "RANK" not in os.environ and (gpus := named(config.trainer.gpus, usable_gpus(), key="trainer.gpus")):
            show_first(",".join(gpu.uuid for gpu in gpus))
        if config.trainer.ranks > 1 and "RANK" not in os.environ:
            sys.exit(_run_ranks(config.trainer.ranks))
        if config.trainer.ranks > 1:
            die_with_parent()
        is_first = os.environ.get("RANK", "0") == "0"
        set_threads(config.trainer.cores if config.trainer.ranks > 1 else (), local_rank=int(os.environ.get("LOCAL_RANK", "0")))
        from trainer.supervised import SftProgress, train_sft  # after the threads are set: torch reads their settings once

        def show(progress: SftProgress) -> None:
            if is_first and progress.step % max(1, progress.num_steps // LINES) == 0:
                print(
                    f"step {progress.step:>{len(str(progress.num_steps))}}/{progress.num_steps}   loss {progress.loss:.3f} nats/token"
                    f"   {progress.tokens_per_s:,.0f} tokens/s",
                    flush=True,
                )

        report = train_sft(config, on_progress=show)
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if is_first:
        print(f"{report.num_tokens:,} tokens in {report.elapsed_s:.1f} s; saved to {report.folder}")
        print(f"RL starts from it with: pipelinerl run {arguments.config} model.path={report.folder}")


def _run_ranks(ranks: int) -> int:
    """Run this command line again as each of so many ranks; 0 where all ended well, 1 where one has said why not."""
    with meeting_in_memory() as (where, files):
        code = run_ranks(("trainer.sft", *sys.argv[1:]), ranks=range(ranks), world_size=ranks, meeting=where, inherited=files)
    if code < 0:
        end_alike(code)
    return code


if __name__ == "__main__":
    main()

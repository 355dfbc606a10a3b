"""The command `python -m orchestrator.replay RUN --stage scoring` replays stages: see `orchestrator.replay`."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.replay import batching, generation, prm, prompts, scoring, training, weight_sync
from orchestrator.replay.recorded import RecordedRun
from pipelinerl.config.file import load_run
from pipelinerl.errors import ConfigError, PipelineError

STAGES: dict[str, Callable[[RecordedRun], Iterator[str]]] = {
    "prompts": prompts.run,
    "generation": generation.run,
    "prm": prm.run,
    "scoring": scoring.run,
    "batching": batching.run,
    "training": training.run,
    "weight_sync": weight_sync.run,
}
"""Every stage that can be replayed, in the order in which the requested ones follow one another."""
_OF_GROUPS = {"scoring", "batching", "training"}
_OTHER_NAMES = {
    "group_rewards": "it is part of scoring",
    "comparing": "it is now called group_rewards, and part of scoring",
    "dispatch": "it is now called generation",
    "following": "it is now called prm",
    "delivery": "it is now called training",
    "refresh": "it is now called weight_sync",
}
"""The reason why a stage cannot be replayed under such a name."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.replay", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="a run's folder")
    parser.add_argument("overrides", nargs="*", help="section.key=value, over the run's settings")
    parser.add_argument("--stage", action="append", required=True, help=f"{', '.join(STAGES)}; several follow one another")
    arguments = parser.parse_args()
    try:
        replay(arguments.run_folder, stages=arguments.stage, overrides=arguments.overrides)
    except* PipelineError as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        print(f"{type(first).__name__}: {first}", file=sys.stderr)
        sys.exit(1)


def replay(run_folder: Path, *, stages: list[str], overrides: list[str]) -> None:
    """Replay the named stages and print what differs. Raises `ConfigError` for a stage that cannot run alone, and `LedgerError`."""
    for stage in stages:
        if stage not in STAGES:
            why = _OTHER_NAMES.get(stage, "there is no such stage")
            raise ConfigError(f"{stage} cannot be replayed: {why}. These can: {', '.join(STAGES)}")
    config = load_run(run_folder, overrides=overrides)
    folder = run_folder / "replay"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    recorded = RecordedRun(config=config, run_folder=run_folder, folder=folder, ledger_path=run_folder / "ledger.sqlite")
    if _OF_GROUPS & set(stages):
        kept, every = len(recorded.recording.groups), recorded.recording.num_completed
        print(f"recorded: {kept:,} of {every:,} groups" + ("; run.record_groups says how many stay" if kept < every else ""))
    for name, run in STAGES.items():
        for line in run(recorded) if name in stages else ():
            print(line)
    print(f"every difference: {folder}")


if __name__ == "__main__":
    main()

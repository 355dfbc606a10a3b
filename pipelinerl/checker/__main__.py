"""`python -m pipelinerl.checker RUN`: exits with 0 where every promise was kept, else prints what was not and exits with 1."""

from __future__ import annotations

import argparse
import sqlite3
import sys
from pathlib import Path

from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import try_history

MAX_SHOWN = 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.checker", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="a run's folder, under way or ended")
    try:
        with open_history(parser.parse_args().run_folder) as history:
            trial = try_history(history)
            num_checkpoints = len(history.checkpoints)
    except (OSError, ValueError, sqlite3.Error) as error:
        sys.exit(f"cannot be checked: {error}")
    counts = trial.counts()
    right = " + ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if name != "admitted")
    print(f"{trial.num_entries:,} entries, {trial.num_lives} lives, {trial.num_done} steps, {trial.num_replayed} of them trained again")
    print(f"{counts['admitted']:,} admitted = {right}")
    num_saved, num_discarded, num_starts = len(trial.saved), trial.num_discarded, len(trial.restarts)
    print(
        f"{num_checkpoints} checkpoints on disk, {num_saved} saved, {num_discarded} discarded, {num_starts} starts of the trainer from one"
    )
    for problem in trial.problems[:MAX_SHOWN]:
        print(f"BROKEN: {problem}")
    if trial.problems:
        sys.exit(
            f"{len(trial.problems)} promises broken" + (f", the first {MAX_SHOWN} are shown" if len(trial.problems) > MAX_SHOWN else "")
        )
    print("every promise was kept")


if __name__ == "__main__":
    main()

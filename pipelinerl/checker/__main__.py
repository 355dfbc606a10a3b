"""`python -m pipelinerl.checker RUN`: exits with 0 where every promise was kept, else prints what was not and exits with 1."""

from __future__ import annotations

import argparse
import sqlite3
import sys
from pathlib import Path

from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import check_history

MAX_SHOWN = 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.checker", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="a run's folder, under way or ended")
    run_folder = parser.parse_args().run_folder
    try:
        with open_history(run_folder) as history:
            checker = check_history(history)
            num_checkpoints = len(history.checkpoints)
    except sqlite3.Error as error:
        sys.exit(f"cannot be checked: {run_folder / 'ledger.sqlite'}: {error}. It was damaged after it was written: restore it")
    except (OSError, ValueError) as error:
        sys.exit(f"cannot be checked: {error}")
    counts = checker.counts()
    right = " + ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if name != "admitted")
    num_restarts = max(0, checker.num_starts - 1)
    print(
        f"{checker.num_entries:,} entries, {num_restarts} restarts, {checker.num_done} steps, {checker.num_retrained} of them trained again"
    )
    print(f"{counts['admitted']:,} admitted = {right}")
    num_saved, num_discarded, num_starts = len(checker.saved), checker.num_discarded, len(checker.trainer_starts)
    print(
        f"{num_checkpoints} checkpoints on disk, {num_saved} saved, {num_discarded} discarded, {num_starts} starts of the trainer from one"
    )
    for problem in checker.problems[:MAX_SHOWN]:
        print(f"BROKEN: {problem}")
    if checker.problems:
        sys.exit(
            f"{len(checker.problems)} promises broken" + (f", the first {MAX_SHOWN} are shown" if len(checker.problems) > MAX_SHOWN else "")
        )
    print("every promise was kept")


if __name__ == "__main__":
    main()

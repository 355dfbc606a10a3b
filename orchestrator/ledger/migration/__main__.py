"""`python -m orchestrator.ledger.migration RUN` brings a run folder to the present schema: it can then be resumed, checked and replayed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from orchestrator.ledger.migration.run_folder import migrate
from pipelinerl.errors import PipelineError
from pipelinerl.storage.schema import SCHEMA


def main() -> None:
    """Migrate and say what was done. An error of our own tree prints as one message and exits with 1."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.ledger.migration", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="run folder")
    run_folder = parser.parse_args().run_folder
    try:
        is_changed = migrate(run_folder)
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{run_folder} is of schema {SCHEMA}" + ("" if is_changed else " already"))


if __name__ == "__main__":
    main()

"""`python -m pipelinerl.upload --run-folder RUN --to URL`: sends a run's checkpoints and model to an object store.

SIGTERM: send what is whole by now, and end: with 0 where everything is in the store, with 1 where `pipelinerl upload` has something left.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.process import die_with_parent, hold_alone
from pipelinerl.upload.object_store import ObjectStore
from pipelinerl.upload.uploads import Uploads, follow


def main() -> None:
    """Follow a run; or send what there is (`--once`); or try the store (`--probe`)."""
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.upload", description=__doc__)
    parser.add_argument("--run-folder", type=Path, help="run folder")
    parser.add_argument("--to", required=True, help="URL that the run folder's name is put under")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay in the store")
    parser.add_argument("--once", action="store_true", help="send what there is, and end")
    parser.add_argument("--probe", action="store_true", help="write an object to the store, read it and remove it, and end")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    die_with_parent()
    if arguments.probe:
        try:
            ObjectStore(arguments.to).probe()
        except Exception as error:  # whatever a protocol's package raises: the caller prints this line
            sys.exit(f"{type(error).__name__}: {error}")
        return
    os.nice(10)  # training comes first on every core
    until = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: until.set())
    if arguments.once:
        until.set()
    run_folder: Path = arguments.run_folder
    try:
        lock = hold_alone(run_folder / "upload.lock", otherwise=f"another process uploads {run_folder} already; let that one go on")
        uploads = Uploads(run_folder, ObjectStore(arguments.to), keep=arguments.keep)
    except ConfigError as error:
        sys.exit(str(error))
    try:
        is_whole = follow(uploads, until=until)
    finally:
        os.close(lock)
    sys.exit(0 if is_whole else 1)


if __name__ == "__main__":
    main()

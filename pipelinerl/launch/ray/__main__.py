"""`python -m pipelinerl.launch.ray --run-folder RUN --attempt N --node K --address IP`: a node's supervisor, as its actor starts it."""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import sys
from pathlib import Path

from pipelinerl.config.file import load_run
from pipelinerl.launch.supervisor import Supervisor


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.launch.ray", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True, help="number of this start of the run, from 0")
    parser.add_argument("--node", type=int, required=True, help="of the run, from 0")
    parser.add_argument("--address", required=True, help="where other nodes reach this one")
    arguments = parser.parse_args()
    config, address = load_run(arguments.run_folder), str(arguments.address)
    supervisor = Supervisor(
        arguments.run_folder,
        config,
        config.ray,
        attempt=arguments.attempt,
        node=arguments.node,
        title=f"Ray at {address}",
        address=functools.partial(str, address),
    )
    sys.exit(asyncio.run(supervisor.run(until=math.inf)))


if __name__ == "__main__":
    main()

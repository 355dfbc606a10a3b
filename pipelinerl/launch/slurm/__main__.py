"""`python -m pipelinerl.launch.slurm --run-folder RUN`: the supervisor of one node, as srun starts it on every node of a job.

The first node exits with the verdict; the others exit with 0, because srun kills every task as soon as one exits badly, and a checkpoint
may be under way on another node.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from pipelinerl.config.file import load_run
from pipelinerl.launch.slurm.address import address_towards_others
from pipelinerl.launch.supervisor import DONE, Supervisor


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.launch.slurm", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True, help="number of this start of the job, from 0")
    parser.add_argument("--until", type=float, required=True, help="Unix seconds at which the allocation ends")
    arguments = parser.parse_args()
    node = int(os.environ.get("SLURM_PROCID", "0"))
    supervisor = supervisor_of(arguments.run_folder, attempt=arguments.attempt, node=node)
    code = asyncio.run(supervisor.run(until=arguments.until))
    sys.exit(code if node == 0 else DONE)


def supervisor_of(run_folder: Path, *, attempt: int, node: int) -> Supervisor:
    """The part of one node of the job."""
    config = load_run(run_folder)
    title = f"restart {os.environ.get('SLURM_RESTART_COUNT', '0')}, job {os.environ.get('SLURM_JOB_ID', '-')}"
    return Supervisor(run_folder, config, config.slurm, attempt=attempt, node=node, title=title, address=address_towards_others)


if __name__ == "__main__":
    main()

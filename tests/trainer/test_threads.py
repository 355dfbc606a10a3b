"""Each rank keeps to its own core."""

import os
import subprocess
import sys

PROGRAM = """
import os
from trainer.parallel.threads import set_threads
set_threads({cores}, local_rank={rank})
print(os.sched_getaffinity(0), {name})
"""


def _run(cores: tuple[int, ...], *, rank: int) -> str:
    name = "os.environ.get('OMP_NUM_THREADS'), os.environ['OMP_WAIT_POLICY']"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    program = PROGRAM.format(cores=cores, rank=rank, name=name)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_a_rank_is_pinned_to_its_core_with_one_thread() -> None:
    available = sorted(os.sched_getaffinity(0))
    assert _run((available[0], available[-1]), rank=1) == f"{{{available[-1]}}} 1 PASSIVE"


def test_without_cores_the_system_chooses() -> None:
    assert _run((), rank=0) == f"{os.sched_getaffinity(0)} None PASSIVE"

"""Starts the trainer's ranks on one machine and sees them to their end: torchrun's work, without an agent that listens to strangers.

Ranks of one machine meet in a file in anonymous memory, which they alone inherit: there is no listener to reach. The first one that ends
badly ends the others, and its own end becomes that of all, so that a launcher can tell a rank that was killed from one that failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pipelinerl.errors import PeerSilent
from pipelinerl.runtime.network import device_of
from pipelinerl.runtime.process import end_all
from pipelinerl.transport.keys import read_keys
from trainer.parallel.progress import PROGRESS, make_table, silent_ranks

STORE = "PIPELINERL_STORE"
"""Environment variable: where ranks meet, as an `init_method` of torch.distributed: in a file, or, of several machines, by a store at
`rendezvous://<address>:<port><run folder>`. Without it they meet where `MASTER_ADDR` and `MASTER_PORT` say."""
SCHEME = "rendezvous"
END_GRACE_S = 30.0
"""Seconds for the other ranks to end after one has failed, before they are killed. Shorter cuts off what they still have to say of it."""


def run_ranks(module: Sequence[str], *, ranks: range, world_size: int, meeting: Mapping[str, str], inherited: Sequence[int] = ()) -> int:
    """Run `python -m <module>` as each of these ranks of `world_size`, and wait until all have ended.

    `meeting` is added to their environment and says where they find each other. Returns 0 where all ended well; else the code of the first
    that did not, negative for a signal. SIGTERM and SIGINT end all of them. Raises `PeerSilent` where the first ended as NCCL ends a rank
    that waited for another past the deadline, and that other one is here.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    processes: list[subprocess.Popen[bytes]] = []
    table = make_table(len(ranks))
    try:
        for local_rank, rank in enumerate(ranks):
            numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": len(ranks)}
            own = {name: str(value) for name, value in numbers.items()} | {PROGRESS: str(table)}
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **meeting, **own}
            command = (sys.executable, "-m", *module)
            processes.append(subprocess.Popen(command, env=environment, pass_fds=(*inherited, table)))
        code = _first_failure(processes)
        if code == -signal.SIGABRT:
            _name_the_silent(table, ranks=ranks)
        return code
    finally:
        os.close(table)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # asked once more, this process must still see to the rest
        end_all(processes, grace_s=END_GRACE_S)


@contextlib.contextmanager
def meeting_in_memory(extra: Mapping[str, str] | None = None) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Give ranks of this machine alone a place to meet: the environment, with `extra`, and the open file that they inherit."""
    with open(os.memfd_create("ranks"), "wb") as file:
        yield {STORE: f"file:///proc/self/fd/{file.fileno()}", **listening_on("127.0.0.1"), **(extra or {})}, (file.fileno(),)


def listening_on(address: str) -> dict[str, str]:
    """Have gloo and NCCL listen on one address of this machine only; what the user has set stands."""
    return {name: os.environ.get(name, device_of(address)) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


def token_of(run_folder: Path) -> str:
    """Derive the token that lets ranks into the store by which they meet: whoever can read the keys of a run's trainer knows it."""
    return hashlib.blake2b(read_keys(run_folder, "trainer-0").secret, digest_size=32).hexdigest()


def _name_the_silent(table: int, *, ranks: range) -> None:
    """Raise `PeerSilent` where a rank ended by SIGABRT, as NCCL's watchdog ends one, while another of this machine was behind."""
    silent, how = silent_ranks(table, first_rank=ranks.start)
    if silent:
        names = ", ".join(f"trainer rank {rank}" for rank in silent)
        raise PeerSilent(
            f"waited until the deadline of a collective for {names}: {how}. The first rank that waited was ended by SIGABRT, which is how"
            f" NCCL's watchdog ends one. What {names} did then is the thing to look at: the trainer's log, `py-spy dump` where it hangs,"
            " `dmesg` for a GPU that fell off the bus; trainer.silent_after_s is the wait"
        )


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    running = {process.pid: process for process in processes}
    while running:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "it waits until one has ended"
        process = running.pop(ended.si_pid, None)
        if process is None:
            os.waitpid(ended.si_pid, 0)  # a child that another library has started here
        elif code := process.wait():
            return code
    return 0

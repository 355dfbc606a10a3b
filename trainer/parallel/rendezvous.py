"""`python -m trainer.parallel.rendezvous --run-folder RUN [--part K/N]`: ranks of the trainer, all or those of one of N machines.

On one machine no port is opened for them to meet. Over several, the first binds a store to a port that the system picks, on the address at
which the orchestrator listens, and publishes it in `<run>/endpoints/rendezvous.json`; the others read it there. So no port is fixed, and
none can be taken between choosing and binding. Only who can read the run's keys can use that store. The ranks' own connections (gloo, NCCL)
know no authentication: this is for a private network.

When the ranks of one machine end badly those of all do, and the run with them; `--resume`, or the job's next start, goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.config.file import load_run
from pipelinerl.runtime.devices import show_first
from pipelinerl.runtime.network import address_towards
from pipelinerl.runtime.parts import share_of
from pipelinerl.runtime.process import crash_report, die_with_parent, end_alike
from pipelinerl.runtime.watch import wait_for_file
from pipelinerl.transport.endpoint import own_address
from pipelinerl.transport.rendezvous import RendezvousServer
from pipelinerl.weights.network import nccl_settings
from trainer.parallel.ranks import SCHEME, STORE, listening_on, meeting_in_memory, run_ranks, token_of

FILE = Path("endpoints") / "rendezvous.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.parallel.rendezvous", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    parser.add_argument("--part", default="0/1", help="K/N: which of how many machines this is")
    parser.add_argument("--ranks", type=int, help="ranks of all machines, where they are others than trainer.ranks")
    parser.add_argument("--gpus", help="UUIDs of the GPUs of this machine's ranks, in their order, with commas")
    arguments = parser.parse_args()
    number, num_nodes = map(int, arguments.part.split("/"))
    run_folder: Path = arguments.run_folder
    die_with_parent()
    with crash_report(run_folder, f"trainer-node-{number}"):
        config = load_run(run_folder)
        world_size = arguments.ranks or config.trainer.ranks
        mine = share_of(arguments.part, count=world_size)
        if arguments.gpus:
            show_first(arguments.gpus)  # to all ranks alike: rank n of this machine takes the n-th
        deadline_s = config.trainer.ready_deadline_s
        if num_nodes == 1:  # gloo stays on loopback; NCCL is the way of the weights, too
            settings = nccl_settings(config.weights, run_folder, "trainer", deadline_s=deadline_s, environment=os.environ)
            meeting = meeting_in_memory(settings)
        else:
            meeting = _meeting_on_network(run_folder, is_host=number == 0, deadline_s=deadline_s)
        with meeting as (where, files):
            program = ("trainer", "--run-folder", str(run_folder), *(("--ranks", str(arguments.ranks)) if arguments.ranks else ()))
            code = run_ranks(program, ranks=mine, world_size=world_size, meeting=where, inherited=files)
    if code:
        end_alike(code)


@contextlib.contextmanager
def _meeting_on_network(run_folder: Path, *, is_host: bool, deadline_s: float) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """The environment in which ranks of several machines find each other, by way of a store on the first one."""
    with _host(run_folder) if is_host else contextlib.nullcontext():  # it serves as long as its own ranks live
        told = json.loads(wait_for_file(run_folder / FILE, peer="the trainer's first machine", deadline_s=deadline_s))
        store = f"{SCHEME}://{told['host']}:{told['port']}{urllib.parse.quote(str(run_folder.resolve()))}"
        yield {STORE: store, **listening_on(address_towards(told["host"]))}, ()


@contextlib.contextmanager
def _host(run_folder: Path) -> Iterator[None]:
    """Serve the store, and tell where it is."""
    address = own_address(run_folder, "trainer")
    with contextlib.closing(RendezvousServer(address, token_of(run_folder))) as server:
        draft = (run_folder / FILE).with_suffix(".draft")
        draft.write_text(json.dumps({"host": address, "port": server.port}))
        draft.replace(run_folder / FILE)
        yield


if __name__ == "__main__":
    main()

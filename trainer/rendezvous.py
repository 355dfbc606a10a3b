"""`python -m trainer.rendezvous --run-folder RUN --part K/N`: the trainer's ranks on one of N machines, under torchrun.

The first machine binds a store to a port that the system picks, on the address at which the orchestrator listens, and publishes it in
`<run>/endpoints/rendezvous.json`; the others read it there. So no port is fixed, and none can be taken between choosing and binding. The
store and the ranks' own connections (gloo, NCCL) know no authentication: this is for a private network.

When the ranks of one machine end badly those of all do, and the run with them; `--resume`, or the job's next start, goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed.run
from torch.distributed import TCPStore

from pipelinerl.interface import address_towards, device_of
from pipelinerl.process import die_with_parent, last_words, read_config
from pipelinerl.transport.zmq import own_address
from pipelinerl.watch import wait_for_file

FILE = Path("endpoints") / "rendezvous.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.rendezvous", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    parser.add_argument("--part", required=True, help="K/N: which of how many machines this is")
    arguments = parser.parse_args()
    number, num_nodes = map(int, arguments.part.split("/"))
    run_folder: Path = arguments.run_folder
    die_with_parent()
    with last_words(run_folder, f"trainer-node-{number}"):
        config = read_config(run_folder)
        deadline_s = config.trainer.ready_deadline_s
        store = _host(run_folder, deadline_s=deadline_s) if number == 0 else None
        told = json.loads(wait_for_file(run_folder / FILE, peer="the trainer's first machine", deadline_s=deadline_s))
        address = address_towards(told["host"])
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, device_of(address))
        sys.argv = ["torchrun", *_options(told, address=address, num_nodes=num_nodes, ranks=config.trainer.ranks // num_nodes)]
        sys.argv += ["-m", "trainer", "--run-folder", str(run_folder)]
        torch.distributed.run.main()
        del store  # it serves as long as its own ranks live


def _host(run_folder: Path, *, deadline_s: float) -> TCPStore:
    """Bind the store, then tell where it is."""
    address = own_address(run_folder, "trainer")
    # A socket of ours, because by itself the store would listen on every address of the machine.
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=deadline_s)
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach())
    draft = (run_folder / FILE).with_suffix(".draft")
    draft.write_text(json.dumps({"host": address, "port": port}))
    draft.replace(run_folder / FILE)
    return store


def _options(told: dict[str, str], *, address: str, num_nodes: int, ranks: int) -> list[str]:
    return [
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={told['host']}:{told['port']}",
        "--rdzv-conf=is_host=0",
        "--rdzv-id=trainer",
        f"--local-addr={address}",
        "--max-restarts=0",
    ]


if __name__ == "__main__":
    main()

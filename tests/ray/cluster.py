"""A real Ray cluster on this machine: a head without room, and nodes that are `ray start` processes with a token."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.runtime.process import ancestors

START_S = 120.0
"""For a node to join: on a busy machine its five processes import for long."""


@dataclasses.dataclass(slots=True)
class RayCluster:
    """`nodes`: the process of each `ray start`, the head first."""

    address: str
    environment: dict[str, str]
    folder: Path
    nodes: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a node and wait until it says that it runs."""
        log = self.folder / f"node-{len(self.nodes)}.log"
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--object-store-memory=83886080", *options]
        with open(log, "wb") as output:
            node = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output, start_new_session=True)
        self.nodes.append(node)
        end = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < end, f"no node after {START_S:g} s:\n{log.read_text()}"
            assert node.poll() is None, log.read_text()
            time.sleep(0.1)
        return node

    def add_node(self, *, cpus: int, labels: str = "") -> subprocess.Popen[bytes]:
        return self.start(f"--address={self.address}", f"--num-cpus={cpus}", *([f"--labels={labels}"] if labels else []))

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """End a node as a lost machine does: every process that descends from it at once."""
        every = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        for process_id in [node.pid, *(one for one in every if node.pid in ancestors(one))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        node.wait()

    def node_of(self, process_id: int) -> subprocess.Popen[bytes]:
        """The node on which a process runs."""
        return next(node for node in self.nodes if node.pid in ancestors(process_id))


@contextlib.contextmanager
def ray_cluster(*, with_token: bool = True) -> Iterator[RayCluster]:
    """A cluster whose head has no room for anything."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:  # sockets have paths of 107 bytes
        folder = Path(name)
        (folder / "token").write_text(secrets.token_hex(32))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")} if with_token else {"RAY_AUTH_MODE": "disabled"}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", **access}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        made = RayCluster(address=f"127.0.0.1:{port}", environment=environment, folder=folder)
        try:
            made.start(
                "--head",
                f"--port={port}",
                "--node-ip-address=127.0.0.1",
                "--num-cpus=0",
                "--include-dashboard=false",
                f"--temp-dir={folder}",
            )
            yield made
        finally:
            for node in made.nodes:
                made.kill(node)

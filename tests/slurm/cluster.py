"""A real Slurm for tests: munged, slurmctld and some slurmd of one machine, in a folder and on ports of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.slurm import far

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])


def why_not() -> str | None:
    """Why no Slurm can be started here; None where one can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        return f"needs Slurm (Debian: apt-get install slurm-wlm munge): no {', '.join(missing)}"
    return None if os.geteuid() == 0 else "slurmd starts jobs as their owners, which takes root"


@dataclasses.dataclass
class Cluster:
    """A running Slurm; its commands find it through `environment`."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` tells."""
        text = self.run("scontrol", "show", "job", job, "--oneliner")
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def cancel_all(self) -> None:
        """Cancel every job that has not ended, and wait until it has."""
        self.run("scancel", "--user", getpass.getuser())
        end = time.monotonic() + 60
        while self.run("squeue", "-h"):
            assert time.monotonic() < end, f"jobs that were cancelled have not ended:\n{self.run('squeue')}"
            time.sleep(0.2)


@contextlib.contextmanager
def cluster(folder: Path, *, nodes: int = 2, is_apart: bool = False) -> Iterator[Cluster]:
    """Start a Slurm of so many nodes, all on this machine, and end it. `is_apart`: of two nodes, the second on a machine of its own."""
    with far.machine() if is_apart else contextlib.nullcontext([]) as inside:
        places = [(socket.gethostname(), far.HERE if is_apart else "127.0.0.1", [])] * nodes
        if is_apart:
            places[1] = (far.NAME, far.THERE, inside)
        yield from _cluster(folder, places)


def _cluster(folder: Path, places: list[tuple[str, str, list[str]]]) -> Iterator[Cluster]:
    """`places`: host name, address and what to put before a command, of each node."""
    nodes = len(places)
    ports = _free_ports(nodes + 1)
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o711)
    key, socket_path = folder / "munge" / "key", folder / "munge" / "socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={places[0][0]}({places[0][1]})",
        f"SlurmctldPort={ports[0]}",
        f"AuthInfo=socket={socket_path},cred_expire=5",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={folder / 'state'}",
        f"SlurmdSpoolDir={folder / 'spool'}/%n",
        f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder / 'slurmctld.log'}",
        f"SlurmdLogFile={folder}/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,requeue_delay=0",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "JobRequeue=1",
        "KillWait=5",
        "InactiveLimit=0",
        "UnkillableStepTimeout=60",
        *(
            f"NodeName=node{n} NodeHostname={host} NodeAddr={address} Port={ports[n + 1]} CPUs=4"
            for n, (host, address, _) in enumerate(places)
        ),
        f"PartitionName=test Nodes=node[0-{nodes - 1}] Default=YES MaxTime=INFINITE State=UP",
    ]
    config = folder / "slurm.conf"
    config.write_text("\n".join(lines) + "\n")
    environment = os.environ | {"SLURM_CONF": str(config), "PATH": PATH}
    commands = [
        ["munged", "--foreground", "--force", f"--socket={socket_path}", f"--key-file={key}", *_munge_files(folder)],
        ["slurmctld", "-D", "-f", str(config)],
        *([*inside, "slurmd", "-D", "-f", str(config), "-N", f"node{n}"] for n, (_, _, inside) in enumerate(places)),
    ]
    started: list[subprocess.Popen[bytes]] = []
    with open(folder / "daemons.log", "ab") as log:
        try:
            for command in commands:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                time.sleep(0.5)  # munged has no other sign of being ready than that it answers; the others try again by themselves
            found = Cluster(folder, environment)
            _wait_for_nodes(found, nodes)
            yield found
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(30)


def _munge_files(folder: Path) -> list[str]:
    return [f"--{name}-file={folder / 'munge' / name}" for name in ("log", "pid", "seed")]


def _wait_for_nodes(found: Cluster, nodes: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if found.run("sinfo", "-h", "-o", "%T %D").split() == ["idle", str(nodes)]:
                return
        except subprocess.SubprocessError:
            pass
        logs = "\n".join(path.read_text()[-2000:] for path in found.folder.glob("*.log"))
        assert time.monotonic() < end, f"Slurm did not come up:\n{logs}"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    """Ports nobody listens on now. Slurm must be told them beforehand; a test that loses the race fails at its start, by name."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports

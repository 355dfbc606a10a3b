"""Every socket on which a process of a tree can be reached: TCP and UDP, and Unix sockets, those of the abstract name space included."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.runtime.process import ancestors

UNIX = "Unix sockets"
SOCKETS = {
    "ROUTER sockets of ZeroMQ": ("-m orchestrator",),
    "live view": ("-m pipelinerl view",),
    "Prometheus endpoint": ("--to prometheus",),
    "gloo": (
        "-m trainer",
        "-m pipelinerl.engine",
        "VLLM::Worker",
        "-m pipelinerl.rewards.prm.process",
        "-m pipelinerl.rewards.pool.forkserver",  # a reward model is served by a worker
    ),
    UNIX: (),
}
"""By their names in SECURITY.md, who listens there, by what stands in the command line; at a Unix socket in a private folder anybody."""
ELSEWHERE = {
    "rendezvous store": "tests/trainer/test_rendezvous.py::test_ranks_of_two_machines_meet_by_a_store_that_answers_no_stranger",
    "NCCL": "",
    "gateway": "tests/gateway/test_leases.py::test_a_wrong_token_an_old_one_and_that_of_another_episode_are_told_apart",
}
"""What SECURITY.md names and the runs of `e2e/test_listeners.py` do not open: the test that sees it; none where that takes GPUs."""

_TCP_LISTEN, _UNIX_ACCEPTS = "0A", 0x10000
_TCP_TABLES = ("tcp", "tcp6", "udp", "udp6")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One socket of one process."""

    process_id: int
    command: str
    """The command line of its process."""
    kind: str
    """tcp, tcp6, udp, udp6 or unix."""
    where: str
    """`address:port`, or the path of a Unix socket; `@name` in the abstract name space."""

    @property
    def address(self) -> str:
        """Of a TCP or UDP socket, without its port."""
        return self.where.rpartition(":")[0]

    @property
    def is_private_path(self) -> bool:
        """True for a Unix socket that lies in a folder which only its owner may enter, or below one."""
        if self.kind != "unix" or self.where.startswith("@"):
            return False
        folders = Path(self.where).parents
        return any(folder.is_dir() and folder.stat().st_mode & 0o077 == 0 and folder.stat().st_uid == os.geteuid() for folder in folders)


def name_of(one: Listener) -> str:
    """Under which name SECURITY.md tells of a listener of a run on one machine; empty where it must not be."""
    if one.kind == "unix":
        return UNIX if one.is_private_path else ""
    if not ipaddress.ip_address(one.address).is_loopback:
        return ""
    return next((name for name, parts in SOCKETS.items() if any(part in one.command for part in parts)), "")


def answers_as_torchs_store(one: Listener, *, sets: dict[bytes, bytes] | None = None) -> bool:
    """Set keys in what may be a TCPStore of torch, and ask whether it is one: it says back the number that it was sent."""
    host, _, port = one.where.rpartition(":")
    validate, magic, set_key, ping = b"\x00", struct.pack("<I", 0x3C85F7CE), b"\x01", b"\x0d"
    asked = validate + magic
    for key, value in (sets or {}).items():
        asked += set_key + struct.pack("<Q", len(key)) + key + struct.pack("<Q", len(value)) + value
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0) as line:
        line.settimeout(0.5)
        line.sendall(asked + ping + b"1234")
        return line.recv(4) == b"1234"
    return False


def tree_of(process_id: int) -> list[int]:
    """A process and all that descend from it."""
    everybody = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [one for one in everybody if process_id in ancestors(one)]


def listeners_of(process_ids: list[int]) -> list[Listener]:
    """What can be reached from outside each of these processes, from any network name space they are in."""
    found = []
    for process_id in process_ids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            proc = Path("/proc", str(process_id))
            command = (proc / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
            mine = set(_sockets_of(proc))
            for inode, kind, where in _open_sockets(proc):
                if inode in mine:
                    found.append(Listener(process_id=process_id, command=command, kind=kind, where=where))
    return found


def _sockets_of(proc: Path) -> Iterator[int]:
    for path in (proc / "fd").iterdir():
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path)):
                yield int(match[1])


def _open_sockets(proc: Path) -> Iterator[tuple[int, str, str]]:
    """(inode, kind, where) of all sockets of a process's network name space that take what a stranger sends."""
    for kind in _TCP_TABLES:
        for line in (proc / "net" / kind).read_text().splitlines()[1:]:
            words = line.split()
            is_open = words[3] == _TCP_LISTEN if kind.startswith("tcp") else words[2].endswith(":0000")  # UDP: not connected
            if is_open:
                yield int(words[9]), kind, _address(words[1])
    for line in (proc / "net" / "unix").read_text().splitlines()[1:]:
        words = line.split(maxsplit=7)
        is_bound = len(words) == 8
        is_stream = words[4] in ("0001", "0005")
        if is_bound and (int(words[3], 16) & _UNIX_ACCEPTS or not is_stream):
            yield int(words[6]), "unix", words[7]


def _address(text: str) -> str:
    """`0100007F:1F90`, in the kernel's order of bytes, as `127.0.0.1:8080`."""
    number, _, port = text.partition(":")
    words = [int(number[start : start + 8], 16) for start in range(0, len(number), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    address = ipaddress.ip_address(socket.inet_ntop(family, packed))
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or address}:{int(port, 16)}"

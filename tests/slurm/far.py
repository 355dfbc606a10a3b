"""A machine of its own, as far as a run can tell: network, host name and shared memory apart, joined to this one by a cable.

Only kernel and disk are shared, as nodes of a cluster share a file system. What listens on loopback here is not reached from there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

HERE, THERE, BITS = "198.18.213.1", "198.18.213.2", 30
"""Of the range kept for benchmarks (RFC 2544), which nobody routes."""
NAME = "far"


def why_not() -> str | None:
    """Why no such machine can be made here; None where one can."""
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"needs leave to make namespaces: {tried.stderr.strip()}"
    cable = f"plr{os.getpid()}"[:14]
    tried = subprocess.run(["ip", "link", "add", cable, "type", "veth"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"needs leave to lay a virtual cable: {tried.stderr.strip()}"
    subprocess.run(["ip", "link", "del", cable], check=True)
    return None


@contextlib.contextmanager
def machine() -> Iterator[list[str]]:
    """What to put before a command for it to run on the machine, while that lives."""
    make = "mount -t tmpfs none /dev/shm && hostname far && echo ready && exec sleep infinity"
    with subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sh", "-c", make], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the machine did not come up"
            inside = ["nsenter", f"--target={process.pid}", "--net", "--uts", "--mount"]
            near, far = f"plr{process.pid}a"[-14:], f"plr{process.pid}b"[-14:]
            for command in (
                ["ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(process.pid)],
                ["ip", "addr", "add", f"{HERE}/{BITS}", "dev", near],
                ["ip", "link", "set", near, "up"],
                [*inside, "ip", "addr", "add", f"{THERE}/{BITS}", "dev", far],
                [*inside, "ip", "link", "set", far, "up"],
                [*inside, "ip", "link", "set", "lo", "up"],
            ):
                subprocess.run(command, check=True)
            _wait_for_the_other_end(near)
            yield inside
        finally:
            process.kill()  # the cable goes with its far end


def _wait_for_the_other_end(device: str) -> None:
    end = time.monotonic() + 10
    while Path(f"/sys/class/net/{device}/operstate").read_text().strip() != "up":
        assert time.monotonic() < end, f"{device} did not come up"
        time.sleep(0.02)

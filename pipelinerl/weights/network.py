"""On which network interface NCCL listens in a run: the one by which policies travel, where transport nccl may lead to another machine.

NCCL reads its setting once in a process, and one process may have communicators of both kinds: among the ranks of its machine, and of the
transport. What only loopback would do for the first kind would cut off the second; so the transport decides for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipelinerl.config import WeightsSection
from pipelinerl.runtime.network import address_of, device_of
from pipelinerl.transport.endpoint import own_address

VARIABLE = "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


def nccl_settings(
    weights: WeightsSection, run_folder: Path, role: str, *, deadline_s: float, environment: Mapping[str, str], has_gpu: bool | None = None
) -> dict[str, str]:
    """Settings to add to a process's environment before anything in it uses NCCL; none where the user has set it.

    Waits for the orchestrator to say where it listens, where that matters: loopback, for a run of one machine, else what leads there. The
    trainer's own `weights.address` comes first. Without a GPU there is no NCCL. Raises `PeerSilent`, or `ConfigError` for an address that
    none of this machine's interfaces has first.
    """
    if VARIABLE in environment:
        return {}
    may_leave = weights.transport in ("auto", "nccl", "sharded") and (Path("/dev/nvidiactl").exists() if has_gpu is None else has_gpu)
    if not may_leave:
        return {VARIABLE: device_of(LOOPBACK)}
    if role == "trainer" and weights.address is not None:
        return {VARIABLE: device_of(address_of(weights.address))}
    return {VARIABLE: device_of(own_address(run_folder, role, deadline_s=deadline_s))}

"""This rule chooses the weight transport from the trainer to the engines: the shortest one that reaches all of them.

Shared memory copies nothing, so it is taken wherever every engine sees the trainer's; between devices that share a machine, their own
memory is taken. Files are never chosen automatically: it cannot be seen from here whether a folder is shared between machines, and fast.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipelinerl.errors import ConfigError
from pipelinerl.messages import EngineReady

BETWEEN_DEVICES = {"cuda_ipc", "nccl"}
SHARES_MEMORY = {"shared_memory", "cuda_ipc"}
"""Those on which engines read the trainer's own memory."""
BY_CALL = {"gloo", "nccl", "sharded+gloo", "sharded+nccl"}
"""Those on which engines call the trainer."""


def choose_transport(
    wanted: str,
    *,
    trainer: str,
    engines: Mapping[str, str],
    address: str | None,
    device_transports: Collection[str] = (),
    is_colocated: bool = False,
    could_be_sharded: bool = False,
) -> tuple[str, str]:
    """Return the transport, and a sentence that says why. `trainer` and the values of `engines` (by peer) differ only where they share no
    memory.

    `device_transports` are those between devices that every process could take. `address` is the trainer's towards others; None stands for
    the address it uses towards the orchestrator, which the engines reach too. `could_be_sharded`: the trainer's ranks hold a part each, and
    could send it from there; the sentence then says so. Raises `ConfigError` for a transport that does not reach every engine from the
    trainer, or, where `is_colocated`, is not its memory.
    """
    remote = sorted(peer for peer, machine in engines.items() if machine and trainer and machine != trainer)
    apart = f"{len(remote)} of {len(engines)} engines run on another machine than the trainer ({remote[0]})" if remote else ""
    is_reachable = address is None or not address.startswith("127.")
    transport = wanted if wanted != "auto" else _shortest(is_apart=bool(remote), device_transports=device_transports)
    if transport == "sharded":
        transport = "sharded+nccl" if "sharded+nccl" in device_transports else "sharded+gloo"
    if transport in BETWEEN_DEVICES and transport not in device_transports:
        raise ConfigError(
            f"weights.transport = {transport} needs a CUDA device in trainer and engines (nccl: CuPy, too), and not all of them have it"
        )
    if transport in SHARES_MEMORY and remote:
        raise ConfigError(
            f"weights.transport = {transport} cannot reach {', '.join(remote)}: {apart}. Set weights.transport to gloo, nccl or files"
        )
    if is_colocated and transport not in SHARES_MEMORY:
        raise ConfigError(
            f'pipeline.placement is "colocated", and policies would travel by {transport}: {apart or "weights.transport says so"}. Engines'
            ' read the weights where they are trained: start all on one machine, or set it to "apart"'
        )
    if transport in BY_CALL and remote and not is_reachable:
        raise ConfigError(
            f"{apart}, and weights.address is {address}, which only this machine reaches. Leave it out, set it to the trainer's address"
            " on their network, or share the run folder and set weights.transport to files"
        )
    why = "weights.transport says so" if wanted != "auto" else apart or "the engines run on the trainer's machine"
    if wanted == "auto" and transport in BETWEEN_DEVICES:
        why += ", and all have a device"
    if wanted == "auto" and transport in BY_CALL and could_be_sharded:
        why += '. A rank of the trainer gathers each; with weights.transport = "sharded" none does, and engine ranks take what they need'
    return transport, f"policies travel by {transport}: {why}"


def why_unreached(ready: EngineReady, transport: str, *, trainer: str) -> str | None:
    """Say why policies that travel by `transport` from the machine `trainer` do not reach an engine that joins; None where they do."""
    if transport in BETWEEN_DEVICES and transport not in ready.transports:
        return f"policies travel by {transport}, and it has no CUDA device for that"
    if transport in SHARES_MEMORY and ready.machine and trainer and ready.machine != trainer:
        return (
            f"policies travel by {transport}, which does not reach another machine than the trainer's. Start, or resume, the run with"
            " weights.transport=gloo, nccl or files"
        )
    return None


def why_not_ranks(transport: str, num_ranks: int) -> str | None:
    """Say why no engine of so many ranks takes policies that travel by `transport`; None where one does. Those of one rank take any."""
    if num_ranks == 1 or transport not in BETWEEN_DEVICES:
        return None
    return (
        f"policies travel by {transport}, and what fetches them for {num_ranks} ranks of an engine has no device. Start, or resume, the run"
        " with weights.transport=shared_memory, gloo or files, which engines of one and of several ranks take together"
    )


def _shortest(*, is_apart: bool, device_transports: Collection[str]) -> str:
    between_devices, between_hosts = ("nccl", "gloo") if is_apart else ("cuda_ipc", "shared_memory")
    return between_devices if between_devices in device_transports else between_hosts

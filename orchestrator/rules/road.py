"""How do policies travel from the trainer to the engines? By the shortest road that reaches all of them.

Shared memory copies nothing, so it is taken wherever every engine sees the trainer's. Files are never chosen by themselves: whether a
folder is shared between machines, and fast, is not to be seen from here.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipelinerl.errors import ConfigError


def choose_road(wanted: str, *, trainer: str, engines: Mapping[str, str], address: str | None) -> tuple[str, str]:
    """The road, and a sentence that says why. `trainer` and the values of `engines` (by peer) differ only where they share no memory.

    Raises `ConfigError` for a road that does not reach every engine from the trainer, whose address towards others is `address`; None:
    the one on its way to the orchestrator, which the engines reach too.
    """
    remote = sorted(peer for peer, machine in engines.items() if machine and trainer and machine != trainer)
    apart = f"{len(remote)} of {len(engines)} engines run on another machine than the trainer ({remote[0]})" if remote else ""
    road = wanted if wanted != "auto" else "gloo" if remote else "shared_memory"
    if road == "shared_memory" and remote:
        raise ConfigError(f"weights.road = shared_memory cannot reach {', '.join(remote)}: {apart}. Set weights.road to gloo or files")
    if road == "gloo" and remote and address is not None and address.startswith("127."):
        raise ConfigError(
            f"{apart}, and weights.address is {address}, which only this machine reaches. Leave it out, set it to the trainer's address"
            " on their network, or share the run folder and set weights.road to files"
        )
    why = "weights.road says so" if wanted != "auto" else apart or "the engines run on the trainer's machine"
    return road, f"policies travel by {road}: {why}"

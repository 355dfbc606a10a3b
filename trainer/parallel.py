"""The trainer's processes: `ranks` replicas of the whole model, each on rows of its own, which sum their gradients once per step.

Nothing else is shared yet: a config that asks for a sharded model is refused. One replica needs no process group and makes none.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipelinerl.errors import ConfigError, PeerSilent


class Replicas:
    """This process among its equals. Collectives must be called by every rank in the same order."""

    def __init__(self, *, ranks: int, deadline_s: float) -> None:
        """Join the group that the launcher's environment describes; `deadline_s` bounds every collective.

        Raises `ConfigError` where it started another number of processes than `ranks`.
        """
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.size != ranks:
            raise ConfigError(
                f"trainer.ranks is {ranks}, but {self.size} processes were started. The trainer runs {ranks} full replicas of the model,"
                " one for each process, and no sharded layout: start torchrun with --nproc-per-node equal to trainer.ranks"
            )
        self.device = _device(int(os.environ.get("LOCAL_RANK", "0")))
        self._deadline_s = deadline_s
        if self.size > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=deadline_s))

    def sum(self, tensor: torch.Tensor, *, what: str) -> None:
        """Replace `tensor` by its sum over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.SUM, what)

    def maximum(self, tensor: torch.Tensor, *, what: str) -> None:
        """Replace `tensor` by its elementwise maximum over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.MAX, what)

    def all_agree(self, claim: bool, *, what: str) -> bool:
        """True where `claim` holds on every rank: how they decide together, so that none waits in a collective for one that left."""
        if self.size == 1:
            return claim
        disagrees = torch.tensor(0.0 if claim else 1.0, device=self.device)
        self.maximum(disagrees, what=what)
        return float(disagrees) == 0.0

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1:
            dist.destroy_process_group()

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType, what: str) -> None:
        if self.size > 1:
            self._bounded(lambda: dist.all_reduce(tensor, operation), what)

    def _bounded(self, collective: Callable[[], object], what: str) -> None:
        try:
            collective()
        except RuntimeError as error:  # what torch raises for a lost or late rank, whatever the backend
            raise PeerSilent(
                f"trainer rank {self.rank} waited up to {self._deadline_s:g} s for the other {self.size - 1} ranks {what}: {error}."
                " One of them has failed or hangs; its own error is in the run folder's failures"
            ) from error


def _device(local_rank: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    return device

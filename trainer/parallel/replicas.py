"""The trainer's processes, arranged: replicas that take rows of their own, and within a replica the ranks that share a row.

One rank needs no process group and makes none. Ranks are numbered as `pipelinerl.config.layout` says; the mesh has the same order.
"""

from __future__ import annotations

import datetime
import functools
import os
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipelinerl.config.layout import Layout
from pipelinerl.errors import ConfigError, PeerSilent
from pipelinerl.transport.rendezvous import RendezvousClient
from pipelinerl.weights.rendezvous_store import RendezvousStore
from trainer.parallel.objects import refuse_foreign_objects
from trainer.parallel.progress import write_progress
from trainer.parallel.ranks import SCHEME, STORE, token_of
from trainer.rows.packed_row import ContextShard


class Replicas:
    """This process among its equals. Collectives must be called by every rank in the same order."""

    def __init__(self, *, ranks: int, deadline_s: float, layout: Layout | None = None) -> None:
        """Join the group that the launcher's environment describes; `deadline_s` bounds every collective. Default layout: `ranks` copies.

        A process that has joined before stays in its group: torch remembers a mesh by its shape, and its groups must then be there.

        Raises `ConfigError` where it started another number of processes than `ranks`.
        """
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.size != ranks:
            raise ConfigError(
                f"trainer.ranks is {ranks}, but this process is one of {self.size} (WORLD_SIZE): start"
                " `python -m trainer.parallel.rendezvous`, which starts as many as trainer.ranks says"
            )
        self.layout = layout or Layout(ranks=ranks)
        self.device = _device(int(os.environ.get("LOCAL_RANK", "0")))
        self.deadline_s = deadline_s
        self._mesh: DeviceMesh | None = None
        self._peers: dist.ProcessGroup | None = None
        if self.size > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            refuse_foreign_objects()
            if not dist.is_initialized():
                timeout = datetime.timedelta(seconds=deadline_s)
                where = _meeting(os.environ.get(STORE), timeout=timeout)
                dist.init_process_group(backend, **where, rank=self.rank, world_size=self.size, timeout=timeout)
                if backend == "nccl":
                    write_progress(num_collectives)  # its watchdog ends a process that waited, and names nobody
            self._mesh = _mesh_of(self.layout, self.device.type)
            self._peers = self.mesh("copy", "shard").get_group()
        self.ends = self._ends_of_pipeline()
        """The first and the last rank of this one's pipeline, where this is one of them: both hold embeddings that are tied."""

    @property
    def number(self) -> int:
        """The number of the replica that this rank belongs to."""
        return self.place("copy") * self.layout.shard + self.place("shard")

    @property
    def is_leader(self) -> bool:
        """True on one rank of every replica: it takes the replica's rows off the wire."""
        return not (self.place("pipeline") or self.place("context") or self.place("tensor"))

    @property
    def stages(self) -> range:
        """The stages of its pipeline that are this rank's; the one and only without a pipeline."""
        return range(self.place("pipeline"), self.layout.num_stages, self.layout.pipeline)

    @functools.cached_property
    def ranks_of_replicas(self) -> list[list[int]]:
        """The ranks that work on the rows of each replica, its leader first."""
        layout = self.layout
        ranks = torch.arange(layout.ranks).view(layout.pipeline, layout.replicas, -1)
        return ranks.transpose(0, 1).reshape(layout.replicas, -1).tolist()

    @property
    def context_shard(self) -> ContextShard:
        """The part of its replica's rows that is this rank's."""
        return ContextShard(index=self.place("context"), num=self.layout.context)

    @property
    def shares_passes(self) -> bool:
        """True where ranks of different replicas meet in the middle of a row, so that all must run the same number of rows."""
        return self.layout.shard > 1 or self.layout.expert > 1

    def mesh(self, *names: str) -> DeviceMesh:
        """The ranks that differ from this one only in these dimensions, as a mesh of one dimension."""
        assert self._mesh is not None, "one rank has no mesh"
        return self._mesh[names[0]] if len(names) == 1 else self._mesh[names]._flatten("_".join(names))

    @functools.cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks seen from their experts: `expert` are those that hold different ones, `rest` those that hold the same."""
        layout = self.layout
        sizes = {"pipeline": layout.pipeline, "rest": layout.ranks // layout.pipeline // layout.expert, "expert": layout.expert}
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))["rest", "expert"]

    def place(self, name: str) -> int:
        """This rank's place along one dimension of the mesh."""
        return 0 if self._mesh is None else self._mesh.get_local_rank(name)

    def sum(self, tensor: torch.Tensor, *, what: str) -> None:
        """Replace `tensor` by its sum over the replicas; the ranks of one replica all give the same."""
        self.reduce(tensor, dist.ReduceOp.SUM, group=self._peers, what=what)

    def maximum(self, tensor: torch.Tensor, *, what: str) -> None:
        """Replace `tensor` by its elementwise maximum over the replicas."""
        self.reduce(tensor, dist.ReduceOp.MAX, group=self._peers, what=what)

    def all_agree(self, claim: bool, *, what: str) -> bool:
        """True where `claim` holds on every rank: how they decide together, so that none waits in a collective for one that left."""
        if self.size == 1:
            return claim
        disagrees = torch.tensor(0.0 if claim else 1.0, device=self.device)
        self.reduce(disagrees, dist.ReduceOp.MAX, what=what)
        return float(disagrees) == 0.0

    def reduce(
        self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType, *, what: str, group: dist.ProcessGroup | None = None
    ) -> None:
        """Reduce `tensor` in place over `group`, by default over all ranks, by way of the device.

        Raises `PeerSilent` where one of them is lost or late.
        """
        if self.size > 1:
            on_device = tensor.to(self.device)
            self.bounded(lambda: dist.all_reduce(on_device, operation, group=group), what)
            if on_device is not tensor:
                tensor.copy_(on_device)

    def bounded(self, collective: Callable[[], object], what: str) -> None:
        """Run a collective; turn what torch raises for a lost or late rank, whatever the backend, into `PeerSilent`."""
        try:
            collective()
        except RuntimeError as error:
            raise PeerSilent(
                f"trainer rank {self.rank} waited up to {self.deadline_s:g} s for the other {self.size - 1} ranks {what}: {error}."
                " One of them has failed or hangs; its own error is in the run folder's failures"
            ) from error

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1:
            dist.destroy_process_group()

    def _ends_of_pipeline(self) -> dist.ProcessGroup | None:
        layout = self.layout
        if layout.pipeline < 3:
            return self.mesh("pipeline").get_group() if layout.pipeline == 2 else None
        columns = torch.arange(layout.ranks).view(layout.pipeline, -1)[[0, -1]].t().tolist()
        groups: list[Any] = [dist.new_group(ends) for ends in columns]
        return next((group for group, ends in zip(groups, columns, strict=True) if self.rank in ends), None)


def num_collectives() -> int:
    """Count the collectives that this rank has entered, in all the groups that it is in."""
    groups: list[Any] = list(c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


@functools.cache  # and so kept, which torch's C++ does not do with a store of Python's
def _meeting(where: str | None, *, timeout: datetime.timedelta) -> dict[str, Any]:
    """Translate the place that `ranks.STORE` names for torch.distributed."""
    if where is None or not where.startswith(f"{SCHEME}:"):
        return {"init_method": where}
    parts = urllib.parse.urlsplit(where)
    assert parts.hostname is not None
    assert parts.port is not None
    client = RendezvousClient(parts.hostname, parts.port, token_of(Path(urllib.parse.unquote(parts.path))))
    return {"store": RendezvousStore(client, timeout=timeout)}


def _mesh_of(layout: Layout, device_type: str) -> DeviceMesh:
    sizes = {
        "pipeline": layout.pipeline,
        "copy": layout.copies,
        "shard": layout.shard,
        "context": layout.context,
        "tensor": layout.tensor,
    }
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _device(local_rank: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    return device

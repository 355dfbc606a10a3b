"""An engine of one rank takes policies from the shards of the trainer's ranks: a `Receiver`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipelinerl.messages import Tensor
from pipelinerl.weights.manifest import Manifest, compare
from pipelinerl.weights.point_to_point import Connect
from pipelinerl.weights.reshard import Part, whole
from pipelinerl.weights.sharded.digests import texts
from pipelinerl.weights.sharded.target import Save, ShardTarget
from pipelinerl.weights.transport import Payload


class ShardReceiver:
    """Puts every piece where the engine's layout has it, and checks it on the way."""

    def __init__(
        self, connect: Callable[[str], Connect], *, layout: tuple[Tensor, ...], save: Save | None = None, who: str = "an engine"
    ) -> None:
        """`save` writes the policy in force into memory, so that changes can be laid over it; None: policies are taken whole."""
        self._layout = layout
        self._save = save
        parts = {tensor.name: [Part(box=whole(tuple(tensor.shape)), tensor=tensor)] for tensor in layout if tensor.num_bytes}
        self._target = ShardTarget(connect, rank=0, parts=parts, who=who)

    def fetch(self, name: str, digest: str, spare: Callable[[Manifest], torch.Tensor]) -> Payload:
        manifest = self._target.manifest(name, digest)
        memory = spare(manifest)
        _, sums = self._target.fetch(name, memory, save=self._save)
        compare(manifest, texts(sums, self._layout), name=f"number {name.rpartition('/')[2]}")
        return Payload(manifest=manifest, data=memory, is_verified=True)

    def close(self) -> None:
        self._target.close()

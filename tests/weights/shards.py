"""A trainer's ranks and an engine's over the transport from shard to shard, all in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from pipelinerl.messages import Tensor
from pipelinerl.weights import gloo
from pipelinerl.weights.base import num_bytes, plan_layout, view_of
from pipelinerl.weights.manifest import compare, digest_of, encode
from pipelinerl.weights.point_to_point import Connect
from pipelinerl.weights.reshard import Part, Shards
from pipelinerl.weights.sharded.digests import Sums, add_ranks, manifest_of, texts
from pipelinerl.weights.sharded.plan import EngineShards, plan
from pipelinerl.weights.sharded.source import ShardSource
from pipelinerl.weights.sharded.target import ShardTarget, name_of


def slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(first, end) for first, end in box)


def parts_of(shard: Mapping[str, Sequence[tuple[tuple[int, int], ...]]], layout: Sequence[Tensor]) -> dict[str, list[Part]]:
    """Lay a rank's boxes one after the other."""
    kinds = {tensor.name: getattr(torch, tensor.dtype) for tensor in layout}
    boxes = [(name, box) for name, held in shard.items() for box in held]
    empty = {
        f"{number}": torch.empty([end - first for first, end in box], dtype=kinds[name], device="meta")
        for number, (name, box) in enumerate(boxes)
    }
    parts: dict[str, list[Part]] = {}
    for (name, box), tensor in zip(boxes, plan_layout(empty), strict=True):
        parts.setdefault(name, []).append(Part(box=box, tensor=tensor))
    return parts


class TrainerRanks:
    """Publishes whole models from shards."""

    def __init__(
        self,
        layout: tuple[Tensor, ...],
        *,
        sources: Shards,
        targets: EngineShards,
        bucket_bytes: int = 256,
        connect: Callable[[], Connect] = lambda: gloo.connect,
        carrier: str = "gloo",
        deadline_s: float = 20.0,
        sends_changes: bool = False,
    ) -> None:
        self.layout, self._carrier = layout, carrier
        self.plans = plan(layout, sources=sources, targets=targets, bucket_bytes=bucket_bytes)
        self.ranks = [ShardSource(connect(), rank=rank, deadline_s=deadline_s) for rank in range(len(sources))]
        for rank, own in zip(self.ranks, self.plans, strict=True):
            rank.follow(own, layout, sends_changes=sends_changes)
        self.ranks[0].lead([rank.place for rank in self.ranks], self.plans)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], *, number: int = 0, base: int | None = None) -> tuple[str, str]:
        """The weight buffer's name, and the digest to announce."""
        encoded = encode(manifest_of(version, self.fill(number, version, tensors, base=base), self.layout))
        self.ranks[0].offer(number, encoded)
        return name_of(self.ranks[0].place, number, carrier=self._carrier), digest_of(encoded)

    def fill(self, number: int, version: int, tensors: Mapping[str, torch.Tensor], *, base: int | None = None) -> dict[str, int]:
        """Have every rank write and seal its shard; the sums of all digests."""
        sums: list[Sums] = []
        for rank in self.ranks:
            rank.make(number)
            for piece, view in rank.views(number):
                view.copy_(tensors[piece.name][slices(piece.box)])
            sums.append(rank.seal(number, version, base=base))
        return add_ranks(sums)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class EngineRanks:
    """One engine's ranks."""

    def __init__(
        self,
        layout: tuple[Tensor, ...],
        shards: EngineShards,
        *,
        bucket_bytes: int = 256,
        deadline_s: float = 20.0,
        who: str = "engine 0",
        connect: Callable[[], Connect] = lambda: gloo.connect,
        takes_changes: bool = False,
    ) -> None:
        self.layout = layout
        self._takes_changes = takes_changes
        self.parts = [parts_of(shard, layout) for shard in shards]
        self.ranks = [
            ShardTarget(lambda carrier: connect(), rank=rank, parts=parts, who=who, deadline_s=deadline_s, bucket_bytes=bucket_bytes)
            for rank, parts in enumerate(self.parts)
        ]
        self.memory = [
            torch.zeros(num_bytes(part.tensor for held in parts.values() for part in held), dtype=torch.uint8) for parts in self.parts
        ]

    def fetch(self, name: str, digest: str) -> int:
        """Take a policy, and check it as a whole; returns its version."""
        manifest = self.ranks[0].manifest(name, digest)
        spare = [torch.zeros_like(memory) for memory in self.memory] if self._takes_changes else self.memory
        found = [
            rank.fetch(name, memory, save=(lambda to, held=held: to.copy_(held)) if self._takes_changes else None)
            for rank, memory, held in zip(self.ranks, spare, self.memory, strict=True)
        ]
        compare(manifest, texts(add_ranks(sums for _, sums in found), self.layout), name="here")
        self.memory = spare
        assert {version for version, _ in found} == {manifest.version}
        return manifest.version

    def whole(self) -> dict[str, torch.Tensor]:
        """Every tensor, put together from the ranks."""
        made = {tensor.name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in self.layout}
        for parts, memory in zip(self.parts, self.memory, strict=True):
            for name, held in parts.items():
                for part in held:
                    made[name][slices(part.box)] = view_of(memory, part.tensor)
        return made

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(view_of(memory, part.tensor).view(torch.uint8), tensors[name][slices(part.box)].contiguous().view(torch.uint8))
            if part.tensor.shape
            else torch.equal(view_of(memory, part.tensor).view(1).view(torch.uint8), tensors[name].reshape(1).view(torch.uint8))
            for parts, memory in zip(self.parts, self.memory, strict=True)
            for name, held in parts.items()
            for part in held
        )

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

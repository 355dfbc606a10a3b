"""The end of the transport from shard to shard at a trainer's ranks: each holds its own shard of a policy ready, and no rank a whole one.

Rank 0 leads, as in `sharded_weights`: it says which weight buffer to fill, and every other rank follows, in the same order of collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Shards, Tensor
from pipelinerl.transport.endpoint import own_address
from pipelinerl.weights.adapters import are_adapters
from pipelinerl.weights.manifest import Manifest
from pipelinerl.weights.reshard import Box, whole
from pipelinerl.weights.sharded.connections import Place
from pipelinerl.weights.sharded.digests import add_ranks, manifest_of
from pipelinerl.weights.sharded.plan import plan
from pipelinerl.weights.sharded.source import ShardSource
from pipelinerl.weights.sharded.target import name_of
from pipelinerl.weights.transport import WeightBuffer
from pipelinerl.weights.transports import connector
from trainer.model.model import Model
from trainer.parallel.boxes import box_of
from trainer.parallel.replicas import Replicas
from trainer.parallel.sharding import local
from trainer.weights.published import Origin


class ShardCall(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank must know to fill a weight buffer."""

    number: int = 0
    """Of the weight buffer."""
    version: int
    layout: tuple[Tensor, ...]
    shards: Shards
    """Of an engine's ranks; empty: one rank holds everything."""
    transport: str
    sends_changes: bool = False
    """What changed is sent to engine ranks that can use it."""
    base: int | None = None
    """The oldest version that any engine holds; None where one needs a whole policy."""
    rollback_epoch: int = 0


class ShardSender:
    """One rank's end; rank 0's is a `Sender`, whose weight buffers have no memory of their own."""

    def __init__(
        self,
        model: Model,
        *,
        replicas: Replicas,
        run_folder: Path,
        address: str | None,
        lead: Callable[[ShardCall], None],
        gather: Callable[[Any, str], list[Any]],
        origins: Callable[[tuple[Tensor, ...]], Mapping[str, Origin]],
        boxes: Callable[[Mapping[str, Box], Mapping[str, Origin]], Sequence[Mapping[str, Box]]],
    ) -> None:
        """`lead` tells the other ranks; `gather` exchanges a value among all; `origins` says where a layout's tensors lie in the module's,
        and `boxes` what each rank holds of them, by what this one holds of the module's.
        """
        self._model = model
        self._replicas = replicas
        self._run_folder, self._address = run_folder, address
        self._lead, self._gather, self._origins_of, self._boxes = lead, gather, origins, boxes
        self._source: ShardSource | None = None
        self._origins: Mapping[str, Origin] = {}
        self._held: Mapping[str, Box] = {}
        """What this rank holds of the module's tensors."""
        self._carrier = ""
        self._rollback_epoch = 0
        """Of the policy written last."""

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        return WeightBuffer(name=f"shards/{number}", memory=torch.empty(0, dtype=torch.uint8))

    def write(self, buffer: WeightBuffer, call: ShardCall) -> Manifest:
        """Fill a weight buffer at every rank with the present weights; rank 0 calls it.

        Raises `WeightsError` where engines need what no rank holds as it is published, `PeerSilent` where a rank is lost or late.
        """
        call = msgspec.structs.replace(call, number=_number_of(buffer))
        self._lead(call)
        return manifest_of(call.version, self.fill(call), call.layout)

    def fill(self, call: ShardCall) -> dict[str, int]:
        """Fill this rank's weight buffer together with the others; the sums of all their digests."""
        pieces = self._model.pieces()
        source = self._source or self._open(call, pieces)
        source.make(call.number)
        if call.rollback_epoch != self._rollback_epoch:
            source.forget_changes()
            self._rollback_epoch = call.rollback_epoch
        mergers = {} if are_adapters(call.layout) else self._model.mergers()
        for piece, view in source.views(call.number):
            origin = self._origins[piece.name]
            box = origin.outer(piece.box)
            held = zip(box, self._held[origin.name], strict=True)
            part = local(pieces[origin.name])[tuple(slice(first - start, end - start) for (first, end), (start, _) in held)]
            if origin.name in mergers:
                part = mergers[origin.name](part, box)
            view.copy_(part.reshape(view.shape))
        sums = {name: f"{digest:x}" for name, digest in source.seal(call.number, call.version, base=call.base).items()}
        found = self._gather(sums, "to write a policy together")
        return add_ranks({name: int(digest, 16) for name, digest in one.items()} for one in found)

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        assert self._source is not None, "it was written"
        number = _number_of(buffer)
        self._source.offer(number, encoded)
        buffer.name = name_of(self._source.place, number, carrier=self._carrier)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _open(self, call: ShardCall, pieces: Mapping[str, torch.Tensor]) -> ShardSource:
        """Plan who sends what, and listen."""
        self._origins = self._origins_of(call.layout)
        shapes = self._model.shapes | self._model.adapter_shapes
        self._held = {name: box_of(pieces.get(name), tuple(shape)) for name, shape in shapes.items()}
        sources = self._boxes(self._held, self._origins)
        targets = call.shards or ({tensor.name: (whole(tuple(tensor.shape)),) for tensor in call.layout},)
        plans = plan(call.layout, sources=sources, targets=targets)
        rank = self._replicas.rank
        self._carrier = call.transport.partition("+")[2]
        address = self._address or own_address(self._run_folder, "trainer")
        self._source = source = ShardSource(connector(self._carrier), rank=rank, address=address)
        source.follow(plans[rank], call.layout, sends_changes=call.sends_changes)
        places = [msgspec.convert(found, Place) for found in self._gather(source.place, "to say where each sends its shard from")]
        if rank == 0:
            source.lead(places, plans)
        return source


def check_names(layout: tuple[Tensor, ...], plain: Collection[str]) -> None:
    """Raise `WeightsError` naming the tensors that no rank holds as they are published."""
    if wrong := [tensor.name for tensor in layout if tensor.name not in plain]:
        raise WeightsError(
            f"weights.transport is sharded, and {len(wrong)} of {len(layout)} tensors are not held by the trainer's ranks as they are"
            f' published, for example {wrong[0]}: what is more than cut and renamed is gathered. Set weights.transport = "gloo".'
        )


def _number_of(buffer: WeightBuffer) -> int:
    return int(re.split("/", buffer.name)[-1])

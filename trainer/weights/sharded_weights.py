"""Writes a policy that is sharded over ranks without gathering it: every rank writes its own pieces into the buffer, in shared memory.

Which rank writes what is computed once, at the first publication, from the boxes that the ranks hold (`pipelinerl.weights.reshard`); one
of them writes what several hold alike. Tensors that engines know by other names than the trainer (experts in one tensor here, separate
there), and all tensors on a transport whose weight buffers other ranks cannot map, are gathered one at a time and written by rank 0.

Rank 0 leads: it says which buffer to write into, and every other rank follows, in the same order of collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.core_model_loading import revert_weight_conversion

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Shards, Tensor
from pipelinerl.weights.adapters import are_adapters, published_name
from pipelinerl.weights.base import views
from pipelinerl.weights.reshard import Box, Move, index_map, whole
from pipelinerl.weights.sections import Piece, moves_into, pieces_in
from pipelinerl.weights.shared_memory import attach_to_write
from trainer.model.model import Model
from trainer.parallel.boxes import box_of
from trainer.parallel.objects import gathered
from trainer.parallel.replicas import Replicas
from trainer.parallel.sharding import local
from trainer.weights.in_place import Places, is_there
from trainer.weights.published import Origin, origins_in
from trainer.weights.shard_sender import ShardCall, ShardSender, check_names


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    """Message of rank 0 to the others before a publication."""

    name: str = ""
    """Weight buffer to write into; empty: rank 0 writes what is gathered."""
    layout: tuple[Tensor, ...] = ()
    """Empty: nothing is published after all."""
    sections: Shards = ()
    """The boxes of an engine's ranks, where the layout has a section for each."""
    shards: ShardCall | None = None
    """Every rank keeps its own shard ready."""


class ShardedWeights:
    """Sharded weights, written by all ranks together: `lead` on rank 0, `follow` on the others, once each per publication."""

    def __init__(
        self,
        model: Model,
        *,
        replicas: Replicas,
        run_folder: Path = Path(),
        address: str | None = None,
        move: Callable[[Places], None] | None = None,
    ) -> None:
        """`address` is this machine's, where shards are sent from; None: the one on its way to the orchestrator of `run_folder`.

        `move` has what this rank publishes lie in the weight buffer, which then holds every policy in turn.
        """
        self._model = model
        self._replicas = replicas
        self._move = move
        self._moves: list[tuple[str, Move]] | None = None
        """What this rank writes, once computed, each with the name in the layout of where it belongs."""
        self._published: dict[str, Piece] = {}
        """The pieces of a layout of sections."""
        self._gathered: frozenset[str] = frozenset()
        """Names, as the module has them, of what is gathered even where weight buffers can be shared."""
        self._mapped: dict[str, torch.Tensor] = {}
        self._has_led = False
        self.sender = ShardSender(
            model,
            replicas=replicas,
            run_folder=run_folder,
            address=address,
            lead=self._lead,
            gather=self._gather,
            origins=self._origins,
            boxes=self._boxes,
        )

    def described(self) -> dict[str, torch.Tensor]:
        """Every published tensor by its Hugging Face name, without memory: shape and dtype only."""
        return {name: tensor for own in self._model.shapes for name, tensor in self._names_of(own).items()}

    def lead(self, name: str, buffer: torch.Tensor, layout: tuple[Tensor, ...], sections: Shards = ()) -> None:
        """Write the present weights into `buffer` ([bytes] uint8) together with the other ranks; `name` is empty where they cannot map it.

        Raises `PeerSilent` where a rank is lost or late, `WeightsError` where one could not write.
        """
        self._has_led = True
        self._call(call := _Call(name=name, layout=layout, sections=sections))
        self._write(buffer, call)

    def end(self) -> None:
        """Let the others go on where nothing was published; rank 0 calls it after every publication."""
        if not self._has_led:
            self._call(_Call())
        self._has_led = False

    def follow(self) -> None:
        """Take part in a publication that rank 0 leads."""
        call = self._call(None)
        if call.shards is not None:
            self.sender.fill(call.shards)
            return
        if not call.layout:
            return
        if call.name and call.name not in self._mapped:
            self._mapped[call.name] = attach_to_write(call.name)
        self._write(self._mapped.get(call.name), call)

    def close(self) -> None:
        """Stop sending shards; safe to repeat."""
        self.sender.close()

    def _lead(self, shards: ShardCall) -> None:
        self._has_led = True
        self._call(_Call(shards=shards))

    def _origins(self, layout: tuple[Tensor, ...]) -> dict[str, Origin]:
        """Where each tensor of a layout lies in the module's. Raises `WeightsError` where some of it would have to be gathered."""
        wanted = [tensor.name for tensor in layout]
        found: dict[str, Origin] = {}
        if are_adapters(layout):
            shapes = self._model.adapter_shapes.items()
            found = {published_name(name): Origin(name=name, box=whole(tuple(shape))) for name, shape in shapes}
        for name in self._model.shapes:
            published = self._names_of(name)
            shape = tuple(self._model.shapes[name])
            if list(published) == [name]:
                found[name] = Origin(name=name, box=whole(shape))
            elif not published.keys().isdisjoint(wanted):
                found |= origins_in(self._model.module, name, shape)
        check_names(layout, found.keys())
        return {name: found[name] for name in wanted}

    def _boxes(self, held: Mapping[str, Box], origins: Mapping[str, Origin]) -> list[dict[str, Box]]:
        """What each rank holds of published tensors, by what this one holds of the module's."""
        by_rank = self._all_boxes({name: origin.inner(held[origin.name]) for name, origin in origins.items()}, origins)
        return [{name: box for name, box in boxes.items() if all(end > first for first, end in box)} for boxes in by_rank]

    def _write(self, buffer: torch.Tensor | None, call: _Call) -> None:
        layout, is_shared = call.layout, bool(call.name)
        if are_adapters(layout):
            self._write_adapters(buffer, layout)
            return
        if call.sections and not self._published:
            shapes = {name: tuple(tensor.shape) for name, tensor in self.described().items()}
            self._published = pieces_in(layout, call.sections, shapes, optional=self._model.tied_names)
        if is_shared and self._moves is None:
            wanted = {piece.name for piece in self._published.values()} or {tensor.name for tensor in layout}
            self._moves, self._gathered = self._plan(self._model.pieces(), wanted)
        targets = views(buffer, layout) if buffer is not None else {}
        if is_shared and self._move is not None:
            self._move(self._places(targets))
            self._move = None
        for source, view in self._places(targets) if is_shared else ():
            if not is_there(source, view):
                view.copy_(source.to(self._model.dtype))
        for name, tensor in self._model.state([name for name in self._model.shapes if not is_shared or name in self._gathered]):
            if self._replicas.rank == 0:
                self._put(name, tensor, targets)
        if not self._replicas.all_agree(True, what="to write a policy together"):
            raise WeightsError("a rank could not write its part of the policy; its own error is in the run folder's failures")

    def _write_adapters(self, buffer: torch.Tensor | None, layout: tuple[Tensor, ...]) -> None:
        """Adapters are small: they are gathered, and rank 0 writes."""
        tensors = self._model.adapters()
        if self._replicas.rank == 0 and buffer is not None:
            for name, view in views(buffer, layout).items():
                view.copy_(tensors[name])

    def _places(self, targets: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what this rank writes, and where it belongs."""
        pieces = self._model.pieces()
        for name, move in self._moves or ():
            yield local(pieces[move.name])[move.source_slices], targets[name][move.target_slices]

    def _put(self, name: str, tensor: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> None:
        for published, part in revert_weight_conversion(self._model.module, {name: tensor}).items():
            if published in targets:
                targets[published].copy_(part)
            for piece in self._published.values():
                if piece.name == published:
                    targets[piece.published].copy_(part[piece.slices])

    def _plan(self, pieces: Mapping[str, torch.Tensor], wanted: set[str]) -> tuple[list[tuple[str, Move]], frozenset[str]]:
        """This rank's share of the writing, and what must be gathered."""
        plain = [name for name in self._model.shapes if name in wanted and list(self._names_of(name)) == [name]]
        shapes = {name: tuple(self._model.shapes[name]) for name in plain if not self._model.is_adapted(name)}
        by_rank = self._all_boxes({name: box_of(pieces.get(name), shape) for name, shape in shapes.items()}, shapes)
        whole_ones = {name for name, shape in shapes.items() if _is_covered([boxes[name] for boxes in by_rank], shape)}
        shapes = {name: shapes[name] for name in whole_ones}
        held = [{name: box for name, box in boxes.items() if name in whole_ones} for boxes in by_rank]
        if self._published:
            moves = moves_into({name: piece for name, piece in self._published.items() if piece.name in whole_ones}, shapes, held)
        else:
            targets = [{name: whole(shapes[name]) for name in sorted(whole_ones)}]
            moves = [(move.name, move) for move in index_map(shapes, sources=held, targets=targets)]
        gathered = {name for name in self._model.shapes if name not in whole_ones and wanted & self._names_of(name).keys()}
        return [(name, move) for name, move in moves if move.source == self._replicas.rank], frozenset(gathered)

    def _all_boxes(self, boxes: Mapping[str, Box], names: Iterable[str]) -> list[dict[str, Box]]:
        """Every rank's boxes, of tensors that all of them name in the same order."""
        by_rank = self._gather([boxes[name] for name in names], "to say what each holds of the model")
        return [dict(zip(names, msgspec.convert(found, list[Box]), strict=True)) for found in by_rank]

    def _names_of(self, name: str) -> dict[str, torch.Tensor]:
        """The published tensors, without memory, of a tensor of the module."""
        empty: Any = torch.empty(self._model.shapes[name], dtype=self._model.dtype, device="meta")
        return revert_weight_conversion(self._model.module, {name: empty})

    def _gather(self, value: Any, what: str) -> list[Any]:
        """Exchange a value; return every rank's, by rank."""
        found: list[Any] = []
        self._replicas.bounded(lambda: found.extend(gathered(value, group=None, device=self._replicas.device)), what)
        return found

    def _call(self, call: _Call | None) -> _Call:
        """Exchange rank 0's call; the others give None."""
        return msgspec.convert(self._gather(call, "to publish a policy together")[0], _Call)


def _is_covered(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Tell whether the distinct boxes make up the whole."""
    return sum(math.prod(end - first for first, end in box) for box in set(boxes)) == math.prod(shape)

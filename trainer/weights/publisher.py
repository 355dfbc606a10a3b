"""Writes a policy for the engines: its weights, in the engines' own layout, whole, in a shared buffer that nobody reads.

The layout comes from the engines once they have loaded the model; the first publication waits for it. With replicas, rank 0 publishes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from pipelinerl.errors import NoRoom, PeerSilent, WeightsError
from pipelinerl.messages import PolicyPublished, Shards, Tensor
from pipelinerl.weights.adapters import are_adapters
from pipelinerl.weights.base import check_layout, num_bytes, views
from pipelinerl.weights.buffer_pool import WeightBufferPool, num_buffers_for
from pipelinerl.weights.delta_base import DeltaBase
from pipelinerl.weights.manifest import Manifest, seal
from pipelinerl.weights.sections import Piece, pieces_in
from pipelinerl.weights.transport import Sender, WeightBuffer
from pipelinerl.weights.transports import open_sender
from trainer.weights.in_place import Places, is_there
from trainer.weights.shard_sender import ShardCall, ShardSender

Write = Callable[[str, torch.Tensor, tuple[Tensor, ...], Shards], None]
"""Writes the present weights into memory ([bytes] uint8) of this layout; the first argument names it where other ranks may map it, the last
are the boxes of an engine's ranks, where the layout has a section for each.
"""


class Publisher:
    """Writes policies into weight buffers.

    The orchestrator client's thread calls `fix_layout`, `release` and `give_up`, the training loop the rest.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        *,
        tied_names: frozenset[str],
        run_folder: Path,
        deadline_s: float,
        address: str | None = None,
        sends_deltas: bool = False,
        for_devices: bool = False,
        write: Write | None = None,
        shards: ShardSender | None = None,
        adapters: Callable[[], Mapping[str, torch.Tensor]] | None = None,
        training_bytes: int = 0,
        in_place: bool = False,
        move: Callable[[Places], None] | None = None,
    ) -> None:
        """`tensors` gives the present weights by Hugging Face name; `deadline_s` bounds the wait for a layout and for a free buffer.

        `adapters` gives what is trained by itself, for engines that ask for that; None where all weights are trained.
        `training_bytes`: what training holds at once on this rank's device, which buffers there leave to it.
        `write` writes them where they are sharded over ranks; `tensors` and `adapters` then need have shapes only.
        `shards` is the end that sends them from rank to rank, without a whole; None where no rank is cut.

        `in_place`: engines sleep while the weights change, so all policies share one weight buffer; `move` then has the weights themselves
        lie in it, where this rank holds them whole.

        `address` is this machine's, where policies are offered that travel over the network; None: the one on its way to the orchestrator.
        `sends_deltas`: what changed since the oldest policy that any engine holds is sent instead of the whole, where it is less; that
        keeps two more copies of the policy. `for_devices`: engines hold their weights on devices, and prove there what changed.
        """
        self._tensors = tensors
        self._write_together = write
        self._shard_sender = shards
        self._engine_shards: Shards | None = None
        """What each rank of an engine holds, where policies travel from shard to shard."""
        self._transport = ""
        self._sealed: Manifest | None = None
        """Of the policy that every rank has its shard of ready."""
        self._tied_names = tied_names
        self._shapes = _shapes_of(tensors)
        self._adapters = adapters
        self._adapter_shapes = _shapes_of(adapters) if adapters is not None else {}
        self._in_place = in_place
        self._move = move
        self._run_folder = run_folder
        self._address = address
        self._training_bytes = training_bytes
        self._sends_deltas = sends_deltas
        self._for_devices = for_devices
        self._delta_base: DeltaBase | None = None
        """None where whole policies are sent."""
        self._held: int | None = None
        self._rollback_epoch = 0
        self._newest: int | None = None
        """Published last, in this rollback epoch."""
        self._written: tuple[int, torch.Tensor] | None = None
        """The version that sharded weights were written down for, and where, whole: a weight buffer, or other memory for want of one."""
        self._taken: WeightBuffer | None = None
        """The weight buffer that they were written into."""
        self._write_s = 0.0
        self._deadline_s = deadline_s
        self._layout: tuple[Tensor, ...] = ()
        self._sections: Shards = ()
        """What each rank of an engine holds, where the layout has a section for each."""
        self._pieces: Mapping[str, Piece] = {}
        """The pieces that such a layout is made of."""
        self._is_mapped = False
        """Other processes of this machine can write into a buffer."""
        self._pool: WeightBufferPool | None = None
        self._copies: WeightBufferPool | None = None
        """For engines that do not take turns, where others do; None where there are none."""
        self._has_given_up = False
        self._changed = threading.Condition()
        """Guards `_pool`, `_held` and `_has_given_up`."""

    @property
    def newest(self) -> int:
        """The version published last in this rollback epoch; 0 before the first."""
        return self._newest or 0

    def move_in(self, version: int) -> None:
        """Have the weights lie in the weight buffer, before the first of them is published; nobody uses them meanwhile.

        Raises as `publish`, but for `NoRoom`: the next publication is another chance.
        """
        if self._move is None:
            return
        with contextlib.suppress(NoRoom):
            self._taken = self._buffer_for(version)
            if self._taken is not None:
                self._move(self._places(self._taken.memory))
                self._move = None

    def write(self, version: int) -> None:
        """Write the present sharded weights as `version` together with the other ranks, so that `publish` may follow in another thread.

        Raises as `publish`. After `NoRoom` they are written down all the same, and no other rank takes part in `publish` any more.
        """
        assert self._write_together is not None, "weights that one rank holds are written by `publish`"
        started = time.perf_counter()
        self._taken = self._buffer_for(version)
        if self._taken is not None:
            self._fill(version, self._taken)
        self._write_s = time.perf_counter() - started

    def publish(self, version: int) -> PolicyPublished | None:
        """Write the present weights as `version`, or take what `write` has written, and return the announcement; None once `give_up` was
        called.

        Raises `PeerSilent` where no layout arrives, or no buffer becomes free, within the deadline, and `WeightsError` for a version that
        is not newer than the one before: engines would pass over it. To go back takes `roll_back`. After `NoRoom` it may be called again
        for the same version.
        """
        buffer, self._taken = self._taken or self._buffer_for(version), None
        if self._pool is None or buffer is None:
            return None
        started = time.perf_counter()
        manifest = self._write(version, buffer)
        digest = self._pool.publish(buffer, manifest)
        copy = ""
        if self._copies is not None:
            if (taken := self._copies.acquire(self._deadline_s)) is None:
                return None
            taken.memory.copy_(buffer.memory)  # the weights stand still until this returns
            self._copies.publish(taken, manifest)
            copy = taken.name
        seconds, self._write_s = time.perf_counter() - started + self._write_s, 0.0
        self._newest, self._written = version, None
        return PolicyPublished(
            version=version,
            buffer=buffer.name,
            digest=digest,
            num_bytes=manifest.num_bytes,
            publish_s=seconds,
            rollback_epoch=self._rollback_epoch,
            copy=copy,
        )

    def roll_back(self) -> None:
        """Have the next policy begin a rollback epoch, whatever its version: engines that hold a newer one of this epoch go back to it."""
        with self._changed:
            self._rollback_epoch += 1
            self._newest = self._held = self._written = None
            if self._delta_base is not None:
                self._delta_base = DeltaBase(self._layout, for_devices=self._for_devices)

    def fix_layout(
        self,
        tensors: tuple[Tensor, ...],
        *,
        num_engines: int = 1,
        transport: str = "shared_memory",
        rollback_epoch: int = 0,
        shards: Shards = (),
        num_apart: int = 0,
    ) -> None:
        """Take the layout of so many engines, the transport to them, and the newest rollback epoch they may know of.

        `num_apart` of them go on while the weights change in place, and read copies.

        Raises `WeightsError` with everything about the layout that does not fit the model, or where the transport cannot be opened. Said
        again by an orchestrator that takes another's place, it must be the same: what was published stays where it lies.
        """
        if self._pool is not None:
            if tensors != self._layout:
                raise WeightsError("the engines ask for another layout than the one this trainer publishes in; restart the trainer")
            self.held(None, rollback_epoch=self._rollback_epoch)
            return
        is_sharded = transport.startswith("sharded+")
        if shards and not is_sharded:
            self._pieces, self._sections = pieces_in(tensors, shards, self._shapes, optional=self._tied_names), shards
            check_layout({name: piece.shape for name, piece in self._pieces.items()}, tensors)
        elif not are_adapters(tensors):
            check_layout(self._shapes, tensors, optional=self._tied_names)
        elif self._adapters is None:
            raise WeightsError(
                f"the engines ask for adapters alone ({tensors[0].name} and {len(tensors) - 1} more), and this trainer trains all weights:"
                " lora.rank must be the same for both"
            )
        else:
            check_layout(self._adapter_shapes, tensors)
            self._tensors = self._adapters
        self._layout = tensors
        if is_sharded:
            sender = self._shards()
        else:
            sender = open_sender(transport, run_folder=self._run_folder, address=self._address, training_bytes=self._training_bytes)
        with self._changed:
            size = num_bytes(tensors)
            self._engine_shards, self._transport = (shards if is_sharded else None), transport
            self._is_mapped = transport == "shared_memory"
            self._pool = WeightBufferPool(sender, num_bytes=size, max_buffers=num_buffers_for(num_engines), in_place=self._in_place)
            if num_apart:
                most = num_buffers_for(num_apart)
                self._copies = WeightBufferPool(sender, num_bytes=size, max_buffers=most, first_number=1)
            self._rollback_epoch = rollback_epoch
            if self._sends_deltas and not is_sharded:
                self._delta_base = DeltaBase(self._layout, for_devices=self._for_devices)
            self._changed.notify_all()

    def held(self, version: int | None, *, rollback_epoch: int = 0) -> None:
        """Note the oldest policy that any engine holds; None where one needs a whole policy. An earlier rollback epoch is ignored."""
        with self._changed:
            if rollback_epoch == self._rollback_epoch:
                self._held = version

    def _buffer_for(self, version: int) -> WeightBuffer | None:
        """Wait for the layout, and for a buffer; None once `give_up` was called. Raises as `publish`."""
        if self._newest is not None and version <= self._newest:
            raise WeightsError(f"policy {version} was to be published after policy {self._newest}: versions go back only by a rollback")
        with self._changed:
            if not self._changed.wait_for(lambda: self._pool or self._has_given_up, self._deadline_s):
                raise PeerSilent(
                    f"waited {self._deadline_s:g} s for the orchestrator to say which layout the engines want, and policy {version} is"
                    " ready. It does so once every engine has loaded the model: see the engines' logs"
                )
        return self._acquire(self._pool, version) if self._pool is not None else None

    def _acquire(self, pool: WeightBufferPool, version: int) -> WeightBuffer | None:
        """Acquire a buffer. Where there is no room for one, sharded weights are written down all the same: other ranks wait for it."""
        try:
            return pool.acquire(self._deadline_s)
        except NoRoom:
            if self._write_together is not None and not self._is_written(version):
                whole = torch.zeros(pool.num_bytes, dtype=torch.uint8) if self._delta_base is None else self._delta_base.policy
                self._write_whole(version, whole)
            raise

    def _write(self, version: int, buffer: WeightBuffer) -> Manifest:
        """Write into a weight buffer what is to be sent of the present weights."""
        if self._sealed is None:
            self._fill(version, buffer)
        sealed, self._sealed = self._sealed, None
        if sealed is not None:
            return sealed
        if self._delta_base is None:
            return seal(version, buffer.memory, self._layout, is_alone=self._in_place)
        with self._changed:
            self._delta_base.move(self._held)
        return self._delta_base.fill(buffer.memory, version)

    def _fill(self, version: int, buffer: WeightBuffer) -> None:
        """Have the present weights whole in a weight buffer, or where what is sent is made of them; or each rank's shard ready."""
        if self._shard_sender is not None and self._engine_shards is not None:
            with self._changed:
                call = ShardCall(
                    version=version,
                    layout=self._layout,
                    shards=self._engine_shards,
                    transport=self._transport,
                    sends_changes=self._sends_deltas,
                    base=self._held,
                    rollback_epoch=self._rollback_epoch,
                )
            self._sealed = self._shard_sender.write(buffer, call)
            return
        whole = buffer.memory if self._delta_base is None else self._delta_base.policy
        if self._written is None or not self._is_written(version):
            self._write_whole(version, whole, name=buffer.name if self._is_mapped and whole is buffer.memory else "")
        elif self._written[1] is not whole:
            whole.copy_(self._written[1])

    def _write_whole(self, version: int, whole: torch.Tensor, *, name: str = "") -> None:
        """Write the present weights into a buffer; `name`: the weight buffer's, where other ranks may map it."""
        if self._write_together is not None:
            self._write_together(name, whole, self._layout, self._sections)
            self._written = version, whole
            return
        for source, view in self._places(whole):
            if not is_there(source, view):
                view.copy_(source)

    def _places(self, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what is published of the weights that this rank holds, and where it belongs in a buffer."""
        tensors = self._tensors()
        for name, view in views(whole, self._layout).items():
            piece = self._pieces.get(name)
            yield (tensors[name] if piece is None else tensors[piece.name][piece.slices]), view

    def _shards(self) -> Sender:
        """Raises `WeightsError` where no policy of this trainer can travel from shard to shard."""
        if self._shard_sender is None:
            raise WeightsError("weights.transport is sharded, and every rank of this trainer holds the whole model; set it to gloo")
        return self._shard_sender

    def _is_written(self, version: int) -> bool:
        return self._written is not None and self._written[0] == version

    def release(self, name: str) -> None:
        """Note that no engine reads a buffer any more. Raises `WeightsError` for one that was not published."""
        if self._pool is None:
            raise WeightsError(f"release of {name!r}: no buffer was ever published")
        (self._copies if self._copies is not None and self._copies.has(name) else self._pool).release(name)

    def give_up(self) -> None:
        """Have a present or later `publish` return None: the run ends."""
        with self._changed:
            self._has_given_up = True
            self._changed.notify_all()
        for pool in (self._pool, self._copies):
            if pool is not None:
                pool.give_up()

    def close(self) -> None:
        """Remove the shared buffers."""
        if self._pool is not None:
            self._pool.close()


def _shapes_of(tensors: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors().items()}

"""Hands the policy to the engines: its weights, in the engines' own layout, whole, in a shared buffer that nobody reads.

The layout comes from the engines once they have loaded the model; the first publication waits for it. With replicas, rank 0 publishes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from pipelinerl.errors import PeerSilent, WeightsError
from pipelinerl.messages import PolicyPublished, Tensor
from pipelinerl.weights.base import check_layout, num_bytes, views
from pipelinerl.weights.baseline import Baseline, fill
from pipelinerl.weights.files import Files
from pipelinerl.weights.gloo import Gloo
from pipelinerl.weights.manifest import Manifest, seal
from pipelinerl.weights.pool import SlotPool, num_slots_for
from pipelinerl.weights.road import Medium
from pipelinerl.weights.shared_memory import SharedMemory
from pipelinerl.weights.slots import run_token


class Publisher:
    """Writes policies into slots. `fix_layout`, `release` and `give_up` are called by the feed's thread, the rest by the training loop."""

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        *,
        tied_names: frozenset[str],
        run_folder: Path,
        deadline_s: float,
        address: str = "127.0.0.1",
        sends_changes: bool = False,
    ) -> None:
        """`tensors` gives the present weights by Hugging Face name; `deadline_s` bounds the wait for a layout and for a free slot.

        `address` is this machine's, where policies are offered that travel over the network. `sends_changes`: what changed since the
        oldest policy that any engine holds is sent instead of the whole, where it is less; that keeps two more copies of the policy.
        """
        self._tensors = tensors
        self._tied_names = tied_names
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors().items()}
        self._run_folder = run_folder
        self._address = address
        self._sends_changes = sends_changes
        self._baseline: tuple[Baseline, torch.Tensor] | None = None
        """Where changes are sent: what the engines hold, and the present policy, whole."""
        self._held: int | None = None
        self._deadline_s = deadline_s
        self._layout: tuple[Tensor, ...] = ()
        self._pool: SlotPool | None = None
        self._has_given_up = False
        self._changed = threading.Condition()
        """Guards `_pool`, `_held` and `_has_given_up`."""

    def publish(self, version: int) -> PolicyPublished | None:
        """Write the present weights as `version`, and return the announcement; None once `give_up` was called.

        Raises `PeerSilent` where no layout arrives, or no slot becomes free, within the deadline.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._pool or self._has_given_up, self._deadline_s):
                raise PeerSilent(
                    f"waited {self._deadline_s:g} s for the orchestrator to say which layout the engines want, and policy {version} is"
                    " ready. It does so once every engine has loaded the model: see the engines' logs"
                )
        slot = self._pool.acquire(self._deadline_s) if self._pool is not None else None
        if self._pool is None or slot is None:
            return None
        started = time.perf_counter()
        manifest = self._write(version, slot.buffer)
        digest = self._pool.publish(slot, manifest)
        seconds = time.perf_counter() - started
        return PolicyPublished(version=version, slot=slot.name, digest=digest, num_bytes=manifest.num_bytes, publish_s=seconds)

    def fix_layout(self, tensors: tuple[Tensor, ...], *, num_engines: int = 1, road: str = "shared_memory") -> None:
        """Take the layout of so many engines, and the road to them.

        Raises `WeightsError` with everything about the layout that does not fit the model, or where the road cannot be opened. Said again
        by an orchestrator that takes another's place, it must be the same: what was published stays where it lies.
        """
        if self._pool is not None:
            if tensors != self._layout:
                raise WeightsError("the engines ask for another layout than the one this trainer publishes in; restart the trainer")
            self.held(None)
            return
        check_layout(self._shapes, tensors, optional=self._tied_names)
        self._layout = tensors
        with self._changed:
            size = num_bytes(tensors)
            self._pool = SlotPool(self._open(road), num_bytes=size, max_slots=num_slots_for(num_engines))
            if self._sends_changes:
                self._baseline = Baseline(tensors, num_bytes=size), torch.zeros(size, dtype=torch.uint8)
            self._changed.notify_all()

    def held(self, version: int | None) -> None:
        """Note the oldest policy that any engine holds; None where one needs a whole policy."""
        with self._changed:
            self._held = version

    def _write(self, version: int, buffer: torch.Tensor) -> Manifest:
        """Write into a slot's buffer what is to be sent of the present weights."""
        whole = buffer if self._baseline is None else self._baseline[1]
        tensors = self._tensors()
        for name, view in views(whole, self._layout).items():
            view.copy_(tensors[name])
        if self._baseline is None:
            return seal(version, buffer, self._layout)
        baseline = self._baseline[0]
        with self._changed:
            baseline.move(self._held)
        return fill(buffer, whole, baseline=baseline, layout=self._layout, version=version)

    def _open(self, road: str) -> Medium:
        match road:
            case "shared_memory":
                return SharedMemory(run_token(self._run_folder))
            case "files":
                return Files(self._run_folder / "weights")
            case "gloo":
                return Gloo(self._address)
            case _:
                raise WeightsError(f"the orchestrator asks for the road {road!r}; this trainer knows shared_memory, files and gloo")

    def release(self, slot: str) -> None:
        """Note that no engine reads a slot any more. Raises `WeightsError` for one that was not published."""
        if self._pool is None:
            raise WeightsError(f"release of {slot!r}: no slot was ever published")
        self._pool.release(slot)

    def give_up(self) -> None:
        """Have a present or later `publish` return None: the run ends."""
        with self._changed:
            self._has_given_up = True
            self._changed.notify_all()
        if self._pool is not None:
            self._pool.give_up()

    def close(self) -> None:
        """Remove the shared buffers."""
        if self._pool is not None:
            self._pool.close()

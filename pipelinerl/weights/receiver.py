"""An engine's side of the version transaction: fetch, compare with the engine's own layout, verify every tensor, and only then stage.

Every failure before `commit` is a `WeightsError` that leaves the model as it was: nothing that the model reads is ever written. A policy
that arrives as changes is first made whole beside the model (or, for `SparseSwap`, tensor by tensor in passing), and every one of its
tensors must then have the digest that the trainer took of the whole policy: the proof is the same, however few bytes travelled. It is
computed where the policy is made whole: for `SparseSwap` on the model's own device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import StageWeights, Tensor
from pipelinerl.weights.codec import decode
from pipelinerl.weights.delta import Delta, Space
from pipelinerl.weights.manifest import DigestKind, Manifest, check, compare, digest_of_tensor, verify
from pipelinerl.weights.position_sums import sums_of
from pipelinerl.weights.swap import SparseSwap, WeightSwap
from pipelinerl.weights.throttle import throttle
from pipelinerl.weights.timeline import timeline_of
from pipelinerl.weights.transport import Payload, Receiver

_Changed = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""By tensor: its bits in the model, [n] int64 indices and [n] new bits, where the model is."""


class Verify(Protocol):
    """Raises `WeightsError` where a whole policy in a buffer ([bytes] uint8) is not the manifest's; see `manifest.verify`."""

    def __call__(self, manifest: Manifest, buffer: torch.Tensor, *, name: str) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _VersionedDelta:
    """A delta that leads from any version from `base` on to `version`."""

    base: int
    version: int
    changes: Delta


class WeightReceiver:
    """Stages policies in a thread of its own, commits them in the engine's; never both at the same time."""

    def __init__(self, swap: WeightSwap, *, layout: tuple[Tensor, ...], receiver: Receiver, verify: Verify = verify) -> None:
        self._swap = swap
        self._verify = verify
        self._layout = layout
        self._space = Space(layout)
        self._receiver = receiver
        self._held = 0
        self._staged: int | None = None
        self._versions: dict[int, int] = {}
        """The policy that a private buffer holds whole, by the buffer's address."""
        self._last: _VersionedDelta | None = None
        """The changes staged last: they bring the other buffer up to date."""

    def stage(self, order: StageWeights) -> None:
        """Bring a policy in and verify it. Raises `WeightsError`; the model is then as it was, and nothing is staged."""
        self._staged = None

        def check_it(manifest: Manifest) -> None:
            check(manifest, version=order.version, layout=self._layout, name=order.buffer)

        def spare(manifest: Manifest) -> torch.Tensor:
            check_it(manifest)
            buffer = self._swap.spare()
            self._versions.pop(buffer.data_ptr(), None)
            return buffer

        payload = self._receiver.fetch(order.buffer, order.digest, spare)
        check_it(payload.manifest)
        if payload.manifest.base_version is None:
            if not payload.is_verified:
                self._verify(payload.manifest, payload.data, name=order.buffer)
            self._stage_whole(payload.data, order.version)
        else:
            self._stage_changes(payload, name=order.buffer)
        self._staged = order.version

    def commit(self) -> None:
        """Bring the staged policy into force. Raises `WeightsError` where nothing is staged."""
        if self._staged is None:
            raise WeightsError("nothing is staged: commit follows stage")
        version, self._staged = self._staged, None
        self._swap.commit()
        self._held = version

    def _stage_whole(self, buffer: torch.Tensor, version: int) -> None:
        self._last = None
        self._versions[buffer.data_ptr()] = version
        self._swap.stage(buffer)

    def _stage_changes(self, payload: Payload, *, name: str) -> None:
        step = self._open(payload, name=name)
        if isinstance(self._swap, SparseSwap):
            self._stage_sparse(step.changes, self._swap, manifest=payload.manifest, name=name)
            return
        buffer = self._swap.spare()
        self._bring_up(buffer, step)
        self._verify(payload.manifest, buffer, name=name)
        self._versions[buffer.data_ptr()] = step.version
        self._last = step
        self._swap.stage(buffer)

    def _stage_sparse(self, changes: Delta, swap: SparseSwap, *, manifest: Manifest, name: str) -> None:
        changed, kind = self._changed(changes, swap), manifest.kind_on(swap.device)
        compare(manifest, self._digests_with(changed, swap, kind), name=name, kind=kind)
        swap.stage_delta(list(changed.values()))

    def _open(self, payload: Payload, *, name: str) -> _VersionedDelta:
        manifest, data = payload.manifest, payload.data.cpu()  # changes are decoded by the host, wherever a transport has left them
        found = digest_of_tensor(data)
        if found != manifest.payload_digest:
            raise WeightsError(
                f"weight buffer {name}: digest of its {len(data)} bytes of changes is {found}, published was"
                f" {manifest.payload_digest}; not taken"
            )
        base = manifest.base_version
        if base is None or not base <= self._held <= manifest.version:
            raise WeightsError(
                f"weight buffer {name}: changes from policy {base} to {manifest.version} do not fit over policy {self._held}, which this"
                " engine holds; not taken: it needs a whole policy"
            )
        changes = decode(data.numpy().data, most=self._space.num_elements)
        self._space.check(changes)
        return _VersionedDelta(base=base, version=manifest.version, changes=changes)

    def _bring_up(self, buffer: torch.Tensor, step: _VersionedDelta) -> None:
        """Make a private buffer the policy that `step` leads to, from whatever it holds."""
        version = self._versions.pop(buffer.data_ptr(), None)
        last = self._last
        if version is not None and last is not None and last.base <= version < last.version and last.version == self._held:
            self._space.lay_over(buffer, last.changes)
            version = last.version
        if version is None or not step.base <= version <= step.version:
            self._swap.save(buffer)
        self._space.lay_over(buffer, step.changes)

    def _changed(self, changes: Delta, swap: SparseSwap) -> _Changed:
        """By tensor: its bits in the model, indices and new bits, where the model is."""
        tensors = {tensor.name: tensor for tensor in self._layout}
        found = {}
        for name, (positions, values) in self._space.by_tensor(changes).items():
            bits = swap.bits_of(tensors[name])
            new = torch.from_numpy(values.view(f"<i{values.itemsize}"))
            found[name] = bits, torch.from_numpy(positions).to(bits.device), new.to(bits.device)
        return found

    def _digests_with(self, changed: _Changed, swap: SparseSwap, kind: DigestKind) -> Iterator[str]:
        """Every tensor's digest once the changes are in force; takes the memory of the largest tensor, not of the model."""
        if kind is DigestKind.SUMS:
            yield from sums_of((bits.view(torch.uint8) for bits in self._with_changes(changed, swap)), timeline=timeline_of(swap.device))
            return
        for bits in self._with_changes(changed, swap):
            yield digest_of_tensor(bits.cpu())
            throttle()

    def _with_changes(self, changed: _Changed, swap: SparseSwap) -> Iterator[torch.Tensor]:
        """Every tensor's bits once the changes are in force, where the model is."""
        for tensor in self._layout:
            bits = swap.bits_of(tensor)
            if tensor.name in changed:
                _, indices, new = changed[tensor.name]
                bits = bits.clone().index_copy_(0, indices, new)
            yield bits

"""The manifest of a published policy: every tensor's name, shape, dtype, place and digest.

The manifest lies beside the bytes it speaks of, wherever those are; the announcement that travels over the wire carries only the digest
of the manifest. So an announcement has the same few bytes for any model, and one comparison (`open_manifest`) proves the proof. An engine
takes a policy only when the manifest fits its own layout tensor by tensor (`check`) and the bytes fit the manifest (`verify`).
"""

from __future__ import annotations

import concurrent.futures
import enum
import functools
import os
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import torch
import xxhash

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import layout_problems, place_of
from pipelinerl.weights.position_sums import position_sums
from pipelinerl.weights.throttle import throttle

DIGEST_LENGTH = 32
"""Hexadecimal digits."""
MAX_NAMED = 5
"""Problems spelled out in one message; the rest are counted. More would bury the first."""


class DigestKind(enum.StrEnum):
    """The function by which tensors are proved; it is chosen by where the trainer's buffer lies."""

    XXH3 = "xxh3_128"
    """In the host's memory."""
    SUMS = "position_sums"
    """In a device's: see `pipelinerl.weights.position_sums`."""
    PIECES = "piece_sums"
    """In pieces at several ranks, none of which has it whole: see `pipelinerl.weights.sharded.digests`."""


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a policy."""

    tensor: Tensor
    digest: str
    """Of its bytes, hexadecimal."""
    sums: str = ""
    """Of the same bytes, of the kind `SUMS`, for who has them on a device; empty: there is the one digest alone."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a policy but its bytes."""

    version: int
    proofs: tuple[Proof, ...]
    """Every tensor, in the order of the layout."""
    num_bytes: int
    """Bytes that travel: the whole buffer, or the changes alone."""
    base_version: int | None = None
    """None: the bytes are the whole buffer. Else they are the changes since this version, to be laid over it or any later one."""
    digest_kind: DigestKind = DigestKind.XXH3
    """Of the tensors' digests."""
    payload_digest: str = ""
    """xxh3-128 of the bytes that travel where they are changes; empty where the tensors' own digests prove them."""

    def kind_on(self, device: torch.device) -> DigestKind:
        """The kind of digest by which bytes on a device are proved: the one that needs none of them elsewhere, where it is there."""
        has_sums = device.type != "cpu" and all(proof.sums for proof in self.proofs)
        return DigestKind.SUMS if has_sums else self.digest_kind


def seal(version: int, buffer: torch.Tensor, tensors: Iterable[Tensor], *, is_alone: bool = False) -> Manifest:
    """Describe a whole policy that lies in `buffer` ([bytes] uint8); `is_alone` as for `digests`."""
    tensors = tuple(tensors)
    kind = DigestKind.XXH3 if buffer.device.type == "cpu" else DigestKind.SUMS
    found = digests(buffer, tensors, kind=kind, is_alone=is_alone)
    proofs = tuple(Proof(tensor=tensor, digest=digest) for tensor, digest in zip(tensors, found, strict=True))
    return Manifest(version=version, proofs=proofs, num_bytes=len(buffer), digest_kind=kind)


def with_sums(manifest: Manifest, sums: Mapping[str, str]) -> Manifest:
    """The manifest with a second digest of each tensor, by name, for devices."""
    proofs = tuple(msgspec.structs.replace(proof, sums=sums[proof.tensor.name]) for proof in manifest.proofs)
    return msgspec.structs.replace(manifest, proofs=proofs)


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, so that it can be read where it lies; the digest of these bytes is announced."""
    return msgspec.json.encode(manifest)


def digest_of(data: bytes | memoryview) -> str:
    """xxh3-128, hexadecimal. Other threads run on meanwhile: hashing large data holds no interpreter lock."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """The digest of the bytes of a contiguous CPU tensor."""
    return digest_of(tensor.reshape(-1).view(torch.uint8).numpy().data)


def open_manifest(encoded: bytes, *, digest: str, name: str) -> Manifest:
    """Decode a manifest that was found in `buffer`. Raises `WeightsError` unless it is the one that was announced."""
    found = digest_of(encoded)
    if found != digest:
        raise WeightsError(
            f"weight buffer {name}: the digest of its manifest ({len(encoded)} bytes) is {found}, announced was {digest}: it holds another"
            " policy, or is damaged; not taken"
        )
    try:
        return msgspec.json.decode(encoded, type=Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WeightsError(f"weight buffer {name}: its manifest of {len(encoded)} bytes is not one: {error}; not taken") from error


def check(manifest: Manifest, *, version: int, layout: tuple[Tensor, ...], name: str) -> None:
    """Raise `WeightsError` naming everything by which the manifest is not policy `version` of an engine that asked for `layout`."""
    if manifest.version != version:
        raise WeightsError(f"weight buffer {name} holds policy {manifest.version}, announced was policy {version}; not taken")
    sent = tuple(proof.tensor for proof in manifest.proofs)
    if sent == layout:
        return
    expected = {tensor.name: tensor for tensor in layout}
    problems = layout_problems({name: tensor.shape for name, tensor in expected.items()}, sent)
    problems += [
        f"{tensor.name}: got {_place(tensor)}, expected {_place(expected[tensor.name])}"
        for tensor in sent
        if tensor.name in expected and tensor != expected[tensor.name] and tuple(tensor.shape) == tuple(expected[tensor.name].shape)
    ]
    what = _some(problems) or "its tensors are the right ones, in another order"
    raise WeightsError(
        f"weight buffer {name}: policy {version} has {len(sent)} tensors in another layout than the {len(layout)} this engine asked for:"
        f" {what}; not taken"
    )


def verify(manifest: Manifest, buffer: torch.Tensor, *, name: str, is_alone: bool = False) -> None:
    """Raise `WeightsError` naming the tensors whose bytes in `buffer` ([bytes] uint8, whole) are not those of the manifest.

    `is_alone` as for `digests`.
    """
    tensors = [proof.tensor for proof in manifest.proofs]
    kind = manifest.kind_on(buffer.device)
    compare(manifest, digests(buffer, tensors, kind=kind, is_alone=is_alone), name=name, kind=kind)


verify_alone = functools.partial(verify, is_alone=True)
"""The same, by all cores."""


def compare(manifest: Manifest, digests: Iterable[str], *, name: str, kind: DigestKind | None = None) -> None:
    """Raise `WeightsError` naming the tensors whose digest, in the manifest's order, is another than the manifest says.

    They are of the manifest's own kind unless `kind` says otherwise.
    """
    is_second = kind is DigestKind.SUMS and manifest.digest_kind is not DigestKind.SUMS
    wrong = [
        f"{proof.tensor.name} {list(proof.tensor.shape)} {proof.tensor.dtype}: digest is {got}, published was {published}"
        for proof, got in zip(manifest.proofs, digests, strict=True)
        if got != (published := proof.sums if is_second else proof.digest)
    ]
    if wrong:
        raise WeightsError(
            f"weight buffer {name}: {len(wrong)} of {len(manifest.proofs)} tensors of policy {manifest.version}: {_some(wrong)}; not taken"
        )


def digests(
    buffer: torch.Tensor, tensors: Iterable[Tensor], *, kind: DigestKind = DigestKind.XXH3, is_alone: bool = False
) -> Iterator[str]:
    """The digest of each tensor's bytes; for xxh3, what lies in a device's memory is brought to the host, a tensor at a time.

    `is_alone`: nobody else has work meanwhile, so all cores that this process may use hash what lies in the host's memory.
    """
    if kind is DigestKind.SUMS:
        yield from position_sums(buffer, [place_of(tensor, within=len(buffer)) for tensor in tensors])
        return
    # The host's memory without torch: a policy of many small tensors is then hashed in little time.
    memory = buffer.numpy().data if buffer.device.type == "cpu" else None
    if is_alone and memory is not None:
        places = [place_of(tensor, within=len(buffer)) for tensor in tensors]
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            yield from threads.map(lambda place: digest_of(memory[place]), places)
        return
    for tensor in tensors:
        place = place_of(tensor, within=len(buffer))
        yield digest_of(buffer[place].cpu().numpy().data if memory is None else memory[place])
        if memory is not None:
            throttle()


def _place(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} at byte {tensor.offset_bytes}"


def _some(problems: list[str]) -> str:
    more = len(problems) - MAX_NAMED
    return "; ".join(problems[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")

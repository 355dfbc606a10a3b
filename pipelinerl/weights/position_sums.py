"""A digest of bytes that a device computes where they lie: sums over their words, each mixed with its place.

Bytes brought to the host to be hashed cost more than the way between two devices: seconds for 16 GB over PCIe, and a core. A word of 8
bytes is mixed with its place by an invertible function (the finaliser of SplitMix64, Steele et al. 2014), and the results are added up
modulo 2**64, once plainly and once weighted by the place. So one changed word always changes the first sum, however it changed; words that
changed places, or several at once, keep both sums by chance alone. Like xxh3 it proves nothing against somebody who chooses the bytes.

Being sums, they follow a policy of which some words change (`RunningSums`): a host, which computes them a hundred times as slowly as xxh3,
has them for a device that proves a delta, without computing them of the whole again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from pipelinerl.messages import Tensor
from pipelinerl.weights.base import place_of
from pipelinerl.weights.throttle import throttle
from pipelinerl.weights.timeline import Timeline, timeline_of

CHUNK_WORDS = 1 << 23
"""Words mixed at once: eight tables of 64 MiB each at most, for a moment. Smaller ones launch more kernels."""
HOST_CHUNK_WORDS = 1 << 15
"""The same on a host: tables of 256 KiB, which a core's cache holds. Larger ones go through memory eight times; smaller ones cost calls."""
_MASK = (1 << 64) - 1
PLACE, FIRST, SECOND, LENGTH = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
"""Odd numbers: SplitMix64's step and its two factors, and one for the number of bytes."""


def position_sums(buffer: torch.Tensor, places: Iterable[slice], *, timeline: Timeline | None = None) -> Iterator[str]:
    """The digest, 32 hexadecimal digits, of each of these slices of `buffer` ([bytes] uint8), on the device where it lies."""
    yield from sums_of((buffer[place] for place in places), timeline=timeline or timeline_of(buffer.device))


def sums_of(parts: Iterable[torch.Tensor], *, timeline: Timeline) -> Iterator[str]:
    """The digest of each of these ([bytes] uint8, of one device). They are made one after the other, and come to the host all at once."""
    sizes, sums = [], []
    with timeline.beside(timeline.mark()):
        for part in parts:
            sizes.append(len(part))
            sums.append(_sums(part))
        found = torch.stack(sums).tolist() if sums else []
    for size, both in zip(sizes, found, strict=True):
        yield _text(both, size)


class RunningSums:
    """The digest of each tensor of a policy in the host's memory, brought up to date by the words that changed."""

    def __init__(self, layout: Iterable[Tensor], policy: torch.Tensor) -> None:
        """Those of a whole policy ([bytes] uint8), which takes long."""
        self._places = {tensor.name: place_of(tensor, within=len(policy)) for tensor in layout}
        self._sums = {name: _sums(policy[place]) for name, place in self._places.items()}

    def follow(self, changed: Mapping[str, torch.Tensor], *, old: torch.Tensor, new: torch.Tensor) -> None:
        """Go on from the policy `old` to `new` (both [bytes] uint8); `changed` are the words of each tensor that differ, each once."""
        for name, words in changed.items():
            before, after = (_words(policy[self._places[name]])[words] for policy in (old, new))
            self._sums[name] += _weighted(after, words) - _weighted(before, words)
            throttle()

    def digests(self) -> dict[str, str]:
        """By tensor, 32 hexadecimal digits."""
        return {name: _text(both.tolist(), self._places[name].stop - self._places[name].start) for name, both in self._sums.items()}


def _sums(data: torch.Tensor) -> torch.Tensor:
    """Both sums of [bytes] uint8, as [2] int64 whose bits are those of unsigned sums."""
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    chunk_words = min(CHUNK_WORDS, HOST_CHUNK_WORDS) if data.device.type == "cpu" else CHUNK_WORDS
    for number, chunk in enumerate(data.split(8 * chunk_words) if len(data) else ()):
        words, first = _words(chunk), number * chunk_words
        sums += _weighted(words, torch.arange(first, first + len(words), dtype=torch.int64, device=data.device))
        if data.device.type == "cpu":
            throttle()
    return sums


def _weighted(words: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Both sums of words ([n] int64) at these places ([n] int64)."""
    mixed = _mixed(words + (place + 1) * _signed(PLACE))
    return torch.stack((mixed.sum(), (mixed * (2 * place + 1)).sum()))


def _text(both: Iterable[int], num_bytes: int) -> str:
    """Both sums of so many bytes as 32 hexadecimal digits."""
    plain, weighted = both
    return f"{(plain + LENGTH * num_bytes) & _MASK:016x}{weighted & _MASK:016x}"


def _words(data: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8 as words of 8 bytes, little-endian; the last is filled up with zeros."""
    if data.data_ptr() % 8 == 0 and len(data) % 8 == 0:
        return data.view(torch.int64)
    padded = torch.zeros(-(-len(data) // 8) * 8, dtype=torch.uint8, device=data.device)
    padded[: len(data)].copy_(data)
    return padded.view(torch.int64)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, FIRST), (27, SECOND)):
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Words shifted to the right as unsigned ones: torch fills in copies of the sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number

"""A digest of bytes that a device computes where they lie: sums over their words, each mixed with its place.

Bytes brought to the host to be hashed cost more than the way between two devices: seconds for 16 GB over PCIe, and a core. A word of 8
bytes is mixed with its place by an invertible function (the finaliser of SplitMix64, Steele et al. 2014), and the results are added up
modulo 2**64, once plainly and once weighted by the place. So one changed word always changes the first sum, however it changed; words that
changed places, or several at once, keep both sums by chance alone. Like xxh3 it proves nothing against somebody who chooses the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pipelinerl.weights.throttle import throttle
from pipelinerl.weights.timeline import Timeline, timeline_of

CHUNK_WORDS = 1 << 23
"""Words mixed at once: eight tables of 64 MiB each at most, for a moment. Smaller ones launch more kernels."""
_MASK = (1 << 64) - 1
PLACE, FIRST, SECOND, LENGTH = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
"""Odd numbers: SplitMix64's step and its two factors, and one for the number of bytes."""


def position_sums(buffer: torch.Tensor, places: Iterable[slice], *, timeline: Timeline | None = None) -> Iterator[str]:
    """The digest, 32 hexadecimal digits, of each of these slices of `buffer` ([bytes] uint8), on the device where it lies."""
    timeline = timeline or timeline_of(buffer.device)
    places = list(places)
    with timeline.beside(timeline.mark()):
        sums = [_sums(buffer[place]) for place in places]
        found = torch.stack(sums).tolist() if sums else []
    for place, (plain, weighted) in zip(places, found, strict=True):
        yield f"{(plain + LENGTH * len(buffer[place])) & _MASK:016x}{weighted & _MASK:016x}"


def _sums(data: torch.Tensor) -> torch.Tensor:
    """Both sums of [bytes] uint8, as [2] int64 whose bits are those of unsigned sums."""
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for number, chunk in enumerate(data.split(8 * CHUNK_WORDS) if len(data) else ()):
        words, first = _words(chunk), number * CHUNK_WORDS
        place = torch.arange(first, first + len(words), dtype=torch.int64, device=data.device)
        mixed = _mixed(words + (place + 1) * _signed(PLACE))
        sums += torch.stack((mixed.sum(), (mixed * (2 * place + 1)).sum()))
        if data.device.type == "cpu":
            throttle()
    return sums


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

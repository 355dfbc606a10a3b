"""Checksums of what is read back after a crash: XXH3, which runs at the speed of memory and finds any damage that is not made on purpose.

They guard against disks, cables and kills, not against people: whoever can write a run folder can write its checksums, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

_CHUNK_BYTES = 1 << 22
"""Read at once; 4 MiB is far beyond what a system call costs, and nothing beside a checkpoint."""
_POSITIVE = (1 << 63) - 1
"""SQLite's integers are signed: one bit of 64 goes."""


def of_file(path: Path) -> str:
    """Return the XXH3-128 of a file's bytes, as 32 hexadecimal digits. Raises `OSError`."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def of_bytes(data: bytes) -> str:
    """Return the XXH3-128 of bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def of_row(values: Iterable[Any]) -> int:
    """Return 63 bits of the XXH3-64 of a database row: of the `repr` of the tuple of its values (numbers, strings, None), bytes by their
    own."""
    row = tuple(values)
    if bytes in map(type, row):
        row = tuple(xxhash.xxh3_64_intdigest(value) if type(value) is bytes else value for value in row)
    return xxhash.xxh3_64_intdigest(repr(row).encode()) & _POSITIVE

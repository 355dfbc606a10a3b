"""An independent reader of the files W&B writes offline: a LevelDB log of protobuf records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES, HEADER_BYTES, FILE_HEADER_BYTES = 32768, 7, 7


def records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for data in _chunks(path.read_bytes()):
        record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]  # made when it is imported
        record.ParseFromString(data)
        yield record


def history(run_folder: Path) -> list[dict[str, Any]]:
    """Every row of every offline part of a run, in order."""
    found = []
    for path in sorted((run_folder / "tracking" / "wandb").glob("offline-run-*/*.wandb")):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                found.append(row | {"_line": record.history.step.num})
    return found


def _chunks(data: bytes) -> Iterator[bytes]:
    at, parts = FILE_HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            return
        parts += data[at + HEADER_BYTES : at + HEADER_BYTES + length]
        at += HEADER_BYTES + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""

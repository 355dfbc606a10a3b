"""Writes a checkpoint's files and hashes them in the same pass: torch's own writer, over a file system that sees every byte go by.

Each rank hashes the files it writes; the digests travel to the first one with the results that torch gathers anyway.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipelinerl.storage.checkpoint_folder import File

_DIGESTS = "digests of files"
"""No parameter is called so."""


class HashingWriter(dcp.FileSystemWriter):
    """`files`, on the first rank, has every file of the checkpoint once it is written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.fs = _HashingFiles()
        self.files: dict[str, File] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share; its digests are one result more, in types that `trainer.parallel.objects` admits."""
        results = super().write_data(plan, planner).value()
        digests = {name: (file.bytes, file.xxh3) for name, file in self.fs.files.items()}
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(index=MetadataIndex(_DIGESTS), size_in_bytes=0, storage_data=digests)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what says where each tensor lies; on the first rank alone."""
        digests = [result.storage_data for of_rank in results for result in of_rank if result.index.fqn == _DIGESTS]
        super().finish(metadata, [[result for result in of_rank if result.index.fqn != _DIGESTS] for of_rank in results])
        self.files = {name: File(bytes=size, xxh3=xxh3) for of_rank in digests for name, (size, xxh3) in of_rank.items()}
        self.files |= {name.removesuffix(".tmp"): file for name, file in self.fs.files.items() if name.startswith(".metadata")}


class _HashingFiles(FileSystem):
    """torch's file system; `files` has the size and digest of each file that was written."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = _HashingStream(stream)
            yield cast(io.IOBase, hashing)
            self.files[Path(path).name] = File(bytes=hashing.num_bytes, xxh3=hashing.digest.hexdigest())


class _HashingStream:
    """An append-only stream: torch asks no more of a stream it writes to."""

    def __init__(self, stream: Any) -> None:
        self.digest = xxhash.xxh3_128()
        self.num_bytes = 0
        self._stream = stream
        self.fileno, self.flush, self.close = stream.fileno, stream.flush, stream.close

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.num_bytes += memoryview(data).nbytes
        return self._stream.write(data)

    def tell(self) -> int:
        return self.num_bytes

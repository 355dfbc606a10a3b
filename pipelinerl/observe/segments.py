"""A journal in segments: the one being written, and those closed before it, numbered from 1; all but the newest are thinned and compressed.

    orchestrator.jsonl            being written
    orchestrator.000002.jsonl     closed last, whole: who follows the journal a little late still finds every line as it was written
    orchestrator.000001.jsonl.gz  older: thinned and compressed, see `pipelinerl.observe.thinning`

A segment keeps its number and its lines their places (a line that was thinned out leaves an empty one), so the number of a line means the
same for ever: trackers go by it. A reader that is somewhere in a segment goes on from there whatever becomes of the segment meanwhile.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipelinerl.errors import DataError

_CLOSED = re.compile(r"\.(\d{6})\.jsonl(\.gz)?$")
_DAMAGED = b"{\n"
"""Stands for the rest of a compressed segment that cannot be read: a line that is none."""


def journal_folder(run_folder: Path) -> Path:
    """The folder of a run's journals. Raises `DataError` where there is none."""
    folder = run_folder / "journal"
    if not folder.is_dir():
        raise DataError(f"no journal in {folder}: name the folder of a run, the one that holds its journal folder")
    return folder


def journals_of(folder: Path) -> list[Path]:
    """The journals in a run's journal folder, by name: the path of the segment being written, whether or not it is there."""
    return sorted({path.with_name(f"{path.name.split('.', 1)[0]}.jsonl") for path in folder.glob("*.jsonl*") if _is_segment(path)})


def has_lines(journal: Path) -> bool:
    """Whether a journal is there: a segment of it, open or closed."""
    return journal.exists() or bool(closed_numbers(journal))


def closed_numbers(journal: Path) -> list[int]:
    """The numbers of a journal's closed segments, in order."""
    found = (_CLOSED.search(path.name) for path in journal.parent.glob(f"{journal.stem}.[0-9]*.jsonl*"))
    return sorted({int(match[1]) for match in found if match is not None})


def closed_path(journal: Path, number: int) -> Path:
    """The path of a segment that is closed and not yet compressed."""
    return journal.with_name(f"{journal.stem}.{number:06d}.jsonl")


def compressed_path(journal: Path, number: int) -> Path:
    """The path of a segment that is compressed."""
    return journal.with_name(f"{journal.stem}.{number:06d}.jsonl.gz")


@dataclasses.dataclass(slots=True)
class SegmentReader:
    """Reads the whole lines that one journal has gained since the last look, across its segments."""

    journal: Path
    number: int = 0
    """Number of the next line, from 0, empty ones counted."""
    _segment: int = 1
    _num_lines: int = 0
    """Lines read of the segment being read."""
    _offset: int = 0
    """Bytes read of it, which hold while it is not compressed."""

    def new_lines(self) -> Iterator[bytes]:
        """Lines that are not empty, with their ends. A half-written last line waits for the next look; `number` is one past the line."""
        while True:
            file, is_closed = self._open()
            if file is None:
                return
            with file:
                lines = itertools.islice(file, self._num_lines if isinstance(file, gzip.GzipFile) else 0, None)
                try:
                    for raw in lines:
                        if not raw.endswith(b"\n") and not is_closed:
                            return
                        self.number += 1
                        self._num_lines += 1
                        self._offset += len(raw)
                        if raw != b"\n":
                            yield raw
                except (EOFError, gzip.BadGzipFile, zlib.error):
                    yield _DAMAGED
            if not is_closed:
                return
            self._segment, self._num_lines, self._offset = self._segment + 1, 0, 0

    def _open(self) -> tuple[BinaryIO | gzip.GzipFile | None, bool]:
        """The segment, placed at its next line, and whether it is closed; None where it has not begun.

        The open segment is opened before it is looked whether it was closed: it is renamed then, and what was opened remains this one.
        """
        live = _opened(self.journal)
        for path in (
            compressed_path(self.journal, self._segment),
            closed_path(self.journal, self._segment),
            compressed_path(self.journal, self._segment),  # it may have been compressed between these two looks
        ):
            if (file := _opened(path)) is None:
                continue
            if live is not None:
                live.close()
            if path.suffix != ".gz":
                file.seek(self._offset)
            return file, True
        if live is not None:
            live.seek(self._offset)
        return live, False


def _opened(path: Path) -> BinaryIO | gzip.GzipFile | None:
    try:
        return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")
    except FileNotFoundError:
        return None


def _is_segment(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))

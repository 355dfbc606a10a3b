"""Rows of a file, a dataset or a Python function, drawn by number: what `orchestrator.data.sources` makes prompts of.

A table has numbered rows and an order that follows from seed and epoch; a stream can only be read one row after the other. Both give the
row drawn as number `row` of an epoch, so a position in a source is two numbers whatever it reads. A mixture of sources is one more:
which source gives the n-th row follows from the weights and n alone, so its position needs no state of the sources.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from orchestrator.rules.shares import Shares
from pipelinerl.config import DataSection
from pipelinerl.data.hub import dataset_files, is_dataset
from pipelinerl.data.reasoning_gym import GymRows, is_spec
from pipelinerl.errors import DataError
from pipelinerl.runtime.function_errors import error_of
from pipelinerl.runtime.plugin import load_plugin

Draw = tuple[int, int, Any]
"""Epoch of a row's own source, the row's number in it, from 0, and the row."""


def open_rows(section: DataSection, *, seed: int) -> Table | Stream | Mixture:
    """Return the rows that `data.source` stands for. Raises `DataError` where it is no source or cannot be read."""
    if section.source is None:
        raise DataError("data.source is missing: name a file, or `path:name` of something in Python")
    if isinstance(section.source, str):
        return _open(section.source, section, seed=seed)
    sources = [_open(source, section, seed=seed + number) for number, source in enumerate(section.source)]
    return Mixture(sources, weights=list(section.source.values()))


def _open(source: str, section: DataSection, *, seed: int) -> Table | Stream:
    path = Path(source)
    options: dict[str, Any] = {"name": source, "seed": seed, "shuffle": section.shuffle, "limit": section.limit}
    if is_spec(source):
        return Table(GymRows(source, prompt_column=section.prompt_column), **options)
    if path.suffix in (".jsonl", ".ndjson"):
        lines = _JsonLines(path)
        return Table(lines, where=lines.where, **options)
    if path.suffix == ".parquet":
        return Table(_Parquet(path), **options)
    if is_dataset(source):
        return Table(_Files(dataset_files(source)), **options)
    if ":" not in source:
        raise DataError(
            f"{source!r} is no source of prompts: expected a .jsonl or .parquet file, a data set of the Hub (openai/gsm8k:main/train),"
            " reasoning-gym:NAME, or `path:name` of something in Python"
        )
    rows, make = _from_python(source, seed=seed)
    if make is None:
        return Table(rows, **options)
    if section.limit is not None:
        with _user_code(source):
            return Table(list(itertools.islice(make(0), section.limit)), **options)
    return Stream(make, name=source)


class Table:
    """Rows with numbers, drawn in an order that seed and epoch determine."""

    comes_again = True
    """A number is the same row in every epoch."""

    def __init__(
        self, rows: Any, *, name: str, seed: int, shuffle: bool, limit: int | None, where: Callable[[int], str] | None = None
    ) -> None:
        self.name = name
        self.where = where or (lambda number: f"{name} row {number}")
        self._rows = rows
        self._num_rows = len(rows) if limit is None else min(limit, len(rows))
        self._seed = seed if shuffle else None
        self._order: tuple[int, Any] = (-1, None)
        if not self._num_rows:
            raise DataError(f"{name} has no rows")

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> Any:
        with _user_code(self.where(number)):
            return self._rows[number]

    def draw(self, epoch: int, row: int) -> Draw | None:
        """Return the row drawn as number `row` of an epoch; None past the last."""
        if row >= self._num_rows:
            return None
        number = row if self._seed is None else int(self._permutation(self._seed, epoch)[row])
        return epoch, number, self[number]

    def _permutation(self, seed: int, epoch: int) -> Any:
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((seed % 2**63, epoch)).permutation(self._num_rows))
        return self._order[1]


class Stream:
    """Rows that can only be read one after the other; `make` starts an epoch."""

    comes_again = False

    def __init__(self, make: Callable[[int], Iterator[Any]], *, name: str) -> None:
        self.name = name
        self._make = make
        self._rows: Iterator[Any] = iter(())
        self._at = (-1, 0)

    def where(self, number: int) -> str:
        return f"{self.name} row {number}"

    def draw(self, epoch: int, row: int) -> Draw | None:
        """Return the row that comes as number `row` of an epoch, reading over those before it where need be; None past the last."""
        with _user_code(f"{self.name}, after {row} rows"):
            if self._at != (epoch, row):
                self._rows = itertools.islice(self._make(epoch), row, None)
            try:
                drawn = next(self._rows)
            except StopIteration:
                return None
        self._at = (epoch, row + 1)
        return epoch, row, drawn


class Mixture:
    """Rows of several sources, each as often as its weight says, in one endless epoch; each source goes through epochs of its own."""

    def __init__(self, sources: list[Table | Stream], *, weights: list[float]) -> None:
        self.name = " + ".join(source.name for source in sources)
        self.comes_again = all(source.comes_again for source in sources)
        self._sources = sources
        self._shares = Shares(weights)
        self._at = [(0, 0)] * len(sources)
        """(epoch, row) of each source's next draw."""

    def where(self, number: int) -> str:
        row, source = divmod(number, len(self._sources))
        return self._sources[source].where(row)

    def draw(self, epoch: int, row: int) -> Draw | None:
        """Return the row drawn as number `row`; one that does not follow the last is reached by reading over those before it."""
        if row < self._shares.num_given:
            self._shares.restart()
            self._at = [(0, 0)] * len(self._sources)
        while self._shares.num_given < row:
            self._pass(self._shares.give())
        return self._next(self._shares.give())

    def _pass(self, source: int) -> None:
        """Go past a source's next row; a table's need not be read for that."""
        rows, (epoch, row) = self._sources[source], self._at[source]
        if isinstance(rows, Table):
            self._at[source] = (epoch + 1, 1) if row == len(rows) else (epoch, row + 1)
        else:
            self._next(source)

    def _next(self, source: int) -> Draw:
        epoch, row = self._at[source]
        if (drawn := self._sources[source].draw(epoch, row)) is None:
            if not row:
                raise DataError(f"{self._sources[source].name} yields no rows")
            epoch, row = epoch + 1, 0
            if (drawn := self._sources[source].draw(epoch, row)) is None:
                raise DataError(f"{self._sources[source].name} yields no rows in epoch {epoch}")
        self._at[source] = epoch, row + 1
        return epoch, drawn[1] * len(self._sources) + source, drawn[2]


def _from_python(reference: str, *, seed: int) -> tuple[Any, Callable[[int], Iterator[Any]] | None]:
    """Return the rows that a plug-in stands for, and, where they cannot be indexed, what starts an epoch of them."""
    plugin = rows = load_plugin(reference)
    is_function = callable(plugin) and not _is_indexed(plugin)
    if is_function:
        rows = _call(plugin, reference, seed=seed)
    if isinstance(rows, Mapping):
        raise DataError(f"{reference} holds {', '.join(map(repr, rows))}, expected rows: name a function that returns one of them")
    if _is_indexed(rows) and not isinstance(rows, str | bytes):
        return rows, None
    if not isinstance(rows, Iterable):
        raise DataError(f"{reference} is a {type(rows).__name__}, expected a list, a dataset, an iterable, or a function that makes one")
    if not isinstance(rows, Iterator):
        return rows, lambda epoch: iter(rows)
    unread = [rows]

    def make(epoch: int) -> Iterator[Any]:
        if epoch == 0 and unread:
            return unread.pop()
        if not is_function:
            raise DataError(f"{reference} is an iterator, which can be read only once: name a function that makes it")
        return iter(_call(plugin, reference, seed=seed + epoch))

    return rows, make


def _call(function: Callable[..., Any], reference: str, *, seed: int) -> Any:
    with _user_code(reference):
        return function(seed=seed) if "seed" in inspect.signature(function).parameters else function()


def _is_indexed(rows: Any) -> bool:
    return hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, type)


@contextlib.contextmanager
def _user_code(where: str) -> Iterator[None]:
    """Name the source in whatever a user's function or dataset raises. Raises `DataError` with the cause chained."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a user's code may raise anything
        at = f", at {line}" if (line := error_of(error).where) else ""
        raise DataError(f"{where} raised {type(error).__name__}: {error}{at}") from error


class _JsonLines:
    """The objects of a JSON-lines file, checked once and read again when drawn: only where each line begins stays in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array.array("q")
        self._line_numbers = array.array("q")
        try:
            with open(path, "rb") as file:
                self._index(file)
        except OSError as error:
            raise DataError(f"{path} cannot be read (from {Path.cwd()}): {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> Any:
        with open(self._path, "rb") as file:
            file.seek(self._offsets[number])
            return msgspec.json.decode(file.readline())

    def where(self, number: int) -> str:
        return f"{self._path}:{self._line_numbers[number]}"

    def _index(self, file: BinaryIO) -> None:
        offset = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                self._check(line, number)
                self._offsets.append(offset)
                self._line_numbers.append(number)
            offset += len(line)

    def _check(self, line: bytes, number: int) -> None:
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{self._path}:{number}: not a line of JSON: {error}") from None
        if not isinstance(value, dict):
            raise DataError(f"{self._path}:{number}: a {type(value).__name__}, expected an object with a column for each key")


class _Parquet:
    """The rows of a Parquet file."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{path} cannot be read (from {Path.cwd()}): {error}") from None

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, number: int) -> Any:
        return self._table.slice(number, 1).to_pylist()[0]


class _Files:
    """The rows of several files, one after the other."""

    def __init__(self, paths: list[Path]) -> None:
        self._parts = [_Parquet(path) if path.suffix == ".parquet" else _JsonLines(path) for path in paths]
        self._ends = list(itertools.accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Any:
        part = bisect.bisect_right(self._ends, number)
        return self._parts[part][number - (self._ends[part - 1] if part else 0)]

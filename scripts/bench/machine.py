#!/usr/bin/env python
"""How fast is this machine now, beside the reference machine? Fixed work of each kind, timed in a moment in which a bench does nothing.

The reference machine's seconds are stored in `reference.json`. They are set by hand, on an otherwise idle machine, by

    .venv/bin/python scripts/bench/machine.py --store

which repeats each reference for a minute and keeps the tenth of a hundred from the fastest: the machine when nothing else has a part of it.
Without `--store` the machine's present speed is printed, again and again. Another machine needs nothing: its speed is a number beside 1.0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from scripts.bench.verdict import Speeds, Work

REFERENCE = Path(__file__).with_name("reference.json")
SUBTRACTIONS, COPIED_BYTES, DURABLE_WRITES, WRITTEN_BYTES = 600_000, 64 << 20, 8, 4096
REPETITIONS = 5
STORE_S = 60.0
LOOK_S = 0.25
"""Between two looks at a tree of processes; what one does after its last look counts as somebody else's."""
MOST_OTHERS = 0.05
"""Part of the machine's cores that other processes may take during a run; beyond it a run says nothing of a quiet machine."""


def _loop_s() -> float:
    began, left = time.perf_counter(), SUBTRACTIONS
    while left:
        left -= 1
    return time.perf_counter() - began


@functools.cache
def _arrays() -> tuple[np.ndarray, np.ndarray]:
    """What is copied, and where to; larger than any cache."""
    return np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)


def _copy_s() -> float:
    source, target = _arrays()
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began


def _write_s() -> float:
    with tempfile.TemporaryFile() as file:  # where benches keep their ledgers, too
        began = time.perf_counter()
        for _ in range(DURABLE_WRITES):
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - began


_SECONDS: dict[Work, Callable[[], float]] = {Work.CPU: _loop_s, Work.MEMORY: _copy_s, Work.DISK: _write_s}


def measure_s(work: Work) -> float:
    """Seconds of a reference: the median of some repetitions on each core that this process may use, and the mean over those cores."""
    cores = os.sched_getaffinity(0) if work is Work.CPU else (None,)
    return statistics.fmean(statistics.median(_on(core, _SECONDS[work]) for _ in range(REPETITIONS)) for core in cores)


def _on(core: int | None, work: Callable[[], float]) -> float:
    if core is None:
        return work()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
        return work()
    finally:
        os.sched_setaffinity(0, before)


@dataclasses.dataclass(slots=True)
class Watch:
    """The machine's speed during a bench: a mark before, between and after what it measures."""

    works: tuple[Work, ...]
    """Kinds of work that the bench's goals are of: only these are timed."""
    measure_s: Callable[[Work], float] = measure_s
    marks: list[dict[Work, float]] = dataclasses.field(default_factory=list)
    """Speeds, in order of time; without those around what was measured again."""
    num_repeated: int = 0
    """Parts that were measured again, because the machine changed meanwhile."""

    def look(self) -> dict[Work, float]:
        """Time the references now, while nothing of the bench runs, and return the speeds."""
        return {work: reference_s(work) / self.measure_s(work) for work in self.works}

    def mark(self) -> None:
        """Look, and remember."""
        self.marks.append(self.look())

    def speeds(self, work: Work) -> Speeds:
        """Those of one kind of work during the whole bench."""
        return Speeds(tuple(mark[work] for mark in self.marks))

    @property
    def record(self) -> dict[str, Any]:
        """What is stored of it beside a bench's figures."""
        speeds = {work.value: self.speeds(work) for work in self.works if self.marks}
        return {
            "reference": _stored()["machine"],
            "num_repeated": self.num_repeated,
            "speeds": {work: {"marks": one.values, "median": one.median, "drift": one.drift} for work, one in speeds.items()},
        }

    def __str__(self) -> str:
        told = [
            f"{work} {speeds.median:.2f} ({min(speeds.values):.2f} to {max(speeds.values):.2f}, {len(speeds.values)} marks)"
            for work in self.works
            if self.marks and (speeds := self.speeds(work))
        ]
        again = f"; {self.num_repeated} disturbed parts measured again" if self.num_repeated else ""
        return f"machine, of the reference's speed: {', '.join(told)}{again}"


class Others:
    """What other processes take of this machine's cores, from now on until it is asked; Linux.

    Own are this process and all that it starts. Those that nobody waits for at their end, such as killed workers, are in no account of
    their parents, so a thread looks at the tree, too.
    """

    def __init__(self) -> None:
        self._busy_s, self._own_s, self._began_s = _busy_s(), _waited_s(), time.monotonic()
        self._by_process: dict[int, float] = {os.getpid(): 0.0}
        """Seconds of each process of the tree, as last seen."""
        self._has_ended = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def fraction(self) -> float:
        """Return their part of all cores' time."""
        self._has_ended.set()
        self._watching.join()
        own_s = max(_waited_s() - self._own_s, sum(self._by_process.values()))
        return max(0.0, _busy_s() - self._busy_s - own_s) / (time.monotonic() - self._began_s) / (os.cpu_count() or 1)

    def _watch(self) -> None:
        while not self._has_ended.wait(LOOK_S):
            found = dict(filter(None, map(_process, Path("/proc").glob("[0-9]*/stat"))))
            for process_id in sorted(found):
                parent, seconds = found[process_id]
                if process_id != os.getpid() and (parent in self._by_process or process_id in self._by_process):
                    self._by_process[process_id] = seconds


def _process(path: Path) -> tuple[int, tuple[int, float]] | None:
    """Return (id, (parent, seconds of a core)) of a process; None where it has just ended."""
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(path.parent.name), (int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def _busy_s() -> float:
    """Seconds of all cores in which anything ran, since the machine's start."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _waited_s() -> float:
    """Seconds of this process, and of those that it started and waited for."""
    return sum(one.ru_utime + one.ru_stime for one in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def reference_s(work: Work) -> float:
    """Seconds of the reference machine."""
    return _stored()["seconds"][work.value]


@functools.cache
def _stored() -> dict[str, Any]:
    return json.loads(REFERENCE.read_text())


def machine_name() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def _store() -> None:
    found: dict[Work, list[float]] = {work: [] for work in Work}
    for _ in _for(STORE_S):
        for work, seconds in found.items():
            seconds.append(measure_s(work))
    tenths = {work.value: statistics.quantiles(seconds, n=10)[0] for work, seconds in found.items()}
    REFERENCE.write_text(json.dumps({"machine": machine_name(), "date": time.strftime("%Y-%m-%d"), "seconds": tenths}, indent=1) + "\n")


def _for(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="make this machine, as it is now, the reference")
    if parser.parse_args().store:
        _store()
    watch = Watch(tuple(Work))
    with contextlib.suppress(KeyboardInterrupt):
        for _ in _for(STORE_S):
            print("  ".join(f"{work} {speed:.2f}" for work, speed in watch.look().items()), flush=True)


if __name__ == "__main__":
    main()

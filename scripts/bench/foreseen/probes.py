"""How fast each core is while something runs on it: twice a second, some layers of a small model's forward pass on each.

A core of a rented machine is half of one, and whoever has the other half slows it by up to a third, for seconds or minutes, which shows in
no account of this machine. What is timed is the thread's own time on its core, so it does not matter who else waits for it here.

Of seven runs of one setting, 45 s each, an engine's pass lasted 9.9 to 12.1 ms and a token of the trainer 0.49 to 0.60 ms; divided by the
probes of the core they are 1.8 and 2.1 % from each other, in place of 5.6 and 6.6 % (standard deviations; of probes that did not do
the work once before they timed it).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pipelinerl.runtime.process import die_with_parent

EVERY_S, READY_S = 0.5, 60.0
HIDDEN_SIZE, NUM_LAYERS, NUM_SEQUENCES, CONTEXT = 256, 6, 16, 32
ROOT = Path(__file__).resolve().parents[3]


class Probes(contextlib.AbstractContextManager["Probes"]):
    """A process on each core that times the same work there again and again."""

    def __init__(self, cores: Sequence[int]) -> None:
        """Return once all have begun. Raises `RuntimeError` where one does not."""
        self._folder = contextlib.ExitStack()
        home = Path(self._folder.enter_context(tempfile.TemporaryDirectory()))
        self._files = {core: home / str(core) for core in cores}
        self._processes = [self._begun(core, file) for core, file in self._files.items()]
        until_s = time.monotonic() + READY_S
        while silent := [core for core, file in self._files.items() if not file.stat().st_size]:
            if time.monotonic() > until_s or any(process.poll() is not None for process in self._processes):
                self.__exit__()
                raise RuntimeError(f"the probes of the cores {silent} have timed nothing within {READY_S:g} s, or ended")
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()
        self._folder.close()

    def seconds(self, start_s: float, end_s: float) -> dict[int, float]:
        """Return the mean seconds of the work on each core between two moments (Unix seconds).

        Raises `RuntimeError` where a probe has ended.
        """
        if ended := [core for core, process in zip(self._files, self._processes, strict=True) if process.poll() is not None]:
            raise RuntimeError(f"the probes of the cores {ended} ended while they were needed; what they said stands above")
        return {core: _mean_s(file.read_text(), start_s, end_s) for core, file in self._files.items()}

    def _begun(self, core: int, file: Path) -> subprocess.Popen[bytes]:
        with file.open("wb") as lines:
            return subprocess.Popen([sys.executable, "-m", __spec__.name, str(core)], stdout=lines, cwd=ROOT)


def _mean_s(lines: str, start_s: float, end_s: float) -> float:
    timed = [(float(at), float(seconds)) for at, seconds in (line.split() for line in lines.splitlines()[:-1])]
    return statistics.fmean(seconds for at, seconds in timed if start_s <= at <= end_s)


def main() -> None:
    """Time the work on the core that the command line names, and print (Unix seconds, seconds) of each time, until the parent ends."""
    die_with_parent()
    os.sched_setaffinity(0, {int(sys.argv[1])})
    import torch
    from torch.nn.functional import rms_norm, silu

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = ((HIDDEN_SIZE, 3 * HIDDEN_SIZE), (HIDDEN_SIZE, HIDDEN_SIZE), (HIDDEN_SIZE, 4 * HIDDEN_SIZE), (4 * HIDDEN_SIZE, HIDDEN_SIZE))
    layers = [[0.05 * torch.randn(size) for size in sizes] for _ in range(NUM_LAYERS)]
    inputs, cache = torch.randn(NUM_SEQUENCES, HIDDEN_SIZE), torch.randn(NUM_SEQUENCES, CONTEXT, HIDDEN_SIZE)

    def work() -> None:
        hidden = inputs
        for attend, project, up, down in layers:
            query, key, value = (rms_norm(hidden, (HIDDEN_SIZE,)) @ attend).chunk(3, -1)
            scores = torch.einsum("sh,sth->st", query, cache).softmax(-1)
            hidden = hidden + (torch.einsum("st,sth->sh", scores, cache) + key + value) @ project
            hidden = hidden + silu(rms_norm(hidden, (HIDDEN_SIZE,)) @ up) @ down

    with torch.no_grad():
        while True:
            work()  # brings caches back, which other work had: without it the kind of run shows, by 8 %
            began_s = time.thread_time()
            work()
            print(time.time(), time.thread_time() - began_s, flush=True)
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main()

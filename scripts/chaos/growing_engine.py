"""`python -m scripts.chaos.growing_engine ...`: `pipelinerl.engine`, whose stand-in for a model takes time and writes more once it is told.

A pass takes `PASS_S`, and `READ_S` for each token that it reads. Answers have ten tokens in the mean, and 80 from the moment on in which
there is a file `long` in the run's folder.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from pipelinerl.engine.base import Sampled
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.messages import Generate

PASS_S = 12e-3
READ_S = 3e-5
SHORT, LONG = 10, 80


def main() -> None:
    is_long = Path(sys.argv[sys.argv.index("--run-folder") + 1]) / "long"
    submit, step = FakeEngine.submit, FakeEngine.step

    def growing(self: FakeEngine, request: Generate, *, version: int, rollback_epoch: int = 0) -> None:
        self._mean_tokens = LONG if is_long.exists() else SHORT
        submit(self, request, version=version, rollback_epoch=rollback_epoch)

    def paced(self: FakeEngine) -> list[Sampled]:
        read = sum(len(self._requests[name][0].token_ids) + self._positions[name] for name in self.running())
        time.sleep(PASS_S + READ_S * read)
        return step(self)

    FakeEngine.submit, FakeEngine.step = growing, paced
    runpy.run_module("pipelinerl.engine", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""`python -m scripts.bench.paced.engine --run-folder RUN --pass-s S --hold-s S`: an engine without a model that takes its time.

A forward pass takes `--pass-s`; a finished sequence keeps its slot for `--hold-s` more, as one whose reward is called inside the rollout.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from pipelinerl.config.file import load_run
from pipelinerl.engine.base import Sampled
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.engine.server import serve
from pipelinerl.messages import ToEngine
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.process import crash_report
from pipelinerl.transport.zmq import ZmqLink

MEAN_TOKENS = 24


class PacedEngine(FakeEngine):
    """Its forward passes begin at equal distances."""

    def __init__(self, *, pass_s: float, hold_s: float, max_model_tokens: int, max_running: int) -> None:
        super().__init__(max_model_tokens=max_model_tokens, max_running=max_running, mean_tokens=MEAN_TOKENS)
        self._pass_s = pass_s
        self._hold_s = hold_s
        self._num_slots = max_running
        self._next_at = 0.0
        self._held: list[tuple[float, Sampled]] = []
        """When each is given back."""

    def step(self) -> list[Sampled]:
        time.sleep(max(0.0, self._next_at - time.monotonic()))
        now = time.monotonic()
        self._next_at = max(self._next_at, now) + self._pass_s
        decoding = self._num_slots - sum(len(held.rollout_ids) for _, held in self._held)
        (sampled,) = self._pass(decoding)
        if not self._hold_s:
            return [sampled]
        ends = np.array([rollout_id in sampled.finishes for rollout_id in sampled.rollout_ids], bool)
        self._held += [(now + self._hold_s, sampled.only(ends))] if ends.any() else []
        due = [held for at, held in self._held if at <= now]
        self._held = [(at, held) for at, held in self._held if at > now]
        return [sampled.only(~ends), *due]

    def _pass(self, num_slots: int) -> list[Sampled]:
        limits, self.limits = (
            self.limits,
            type(self.limits)(max_model_tokens=self.limits.max_model_tokens, max_running=num_slots, tensors=()),
        )
        try:
            return super().step()
        finally:
            self.limits = limits


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.paced.engine", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--pass-s", type=float, required=True)
    parser.add_argument("--hold-s", type=float, default=0.0)
    given = parser.parse_args()
    with crash_report(given.run_folder, "engines"):
        config = load_run(given.run_folder)
        engine = PacedEngine(pass_s=given.pass_s, hold_s=given.hold_s, max_model_tokens=4096, max_running=config.engine.max_running)
        link = ZmqLink(given.run_folder, "engine", 0, accepts=ToEngine)
        serve(engine, engine_id=0, link=link, journal=Journal(given.run_folder, "engine-0"))


if __name__ == "__main__":
    main()

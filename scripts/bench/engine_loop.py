"""Measures what a forward pass costs the engine's own loop at 256, 512 and 1,024 running sequences: a GPU that waits for it is idle.

A real vLLM engine runs, with its own scheduler; the forward pass alone is a stand-in, which answers at once with random tokens and their
log-probabilities. `loop` is what `EngineLoop.advance` takes less what vLLM takes of it: stamps, columns, completions. The reference is
vLLM's own Python of the very same passes: schedule and update. Both are processor time of the thread. Sequences of 128 to 384 tokens end
and others take their places meanwhile; taking requests is not counted, as it is work for a request and not for a pass.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from scripts.bench import harness

SIZES = (256, 512, 1024)
VOCABULARY = 32_000
LENGTHS = (128, 384)
CONTEXT = 512
CACHE_BYTES = 448 << 20
"""Of 1,024 sequences at their longest, so that none is preempted."""
WARM_PASSES = 20
GOALS = {256: 0.12, 512: 0.12, 1024: 0.12}
"""Half of what lists of Python objects took: 0.240, 0.239 and 0.255."""


def measure(arguments: Any) -> harness.Measured:
    repetitions, num_passes = (3, 60) if arguments.quick else (9, 200)
    from pipelinerl.engine.environment import set_environment

    set_environment()
    bench = _Bench()
    turns = harness.in_turns(repetitions, {str(size): lambda size=size: bench.run(size, num_passes=num_passes) for size in SIZES})
    rows, goals = [], []
    for size in SIZES:
        loops, references = ([found[kind] for found in turns[str(size)]] for kind in ("loop", "vllm"))
        ratio = harness.median_ratio(loops, references)
        rows.append(
            {
                "sequences": size,
                "loop ms a pass": statistics.median(loops),
                "us a sequence": 1e3 * statistics.median(loops) / size,
                "vLLM ms a pass": statistics.median(references),
                "loop / vLLM": ratio,
                "ended a pass": statistics.median(found["ended"] for found in turns[str(size)]),
            }
        )
        goals.append(
            harness.at_most(
                f"loop over vLLM's own Python, {size:,} sequences", ratio, GOALS[size], work=harness.Work.CPU, speeds=turns.speeds
            )
        )
    return harness.Measured(rows=rows, goals=goals, notes=[f"medians of {repetitions} rounds of {num_passes} passes at each size"])


class _InstantPasses:
    """What vLLM's core calls for forward passes: whatever is scheduled is answered with a random token each."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._scheduled: Any = None
        chance = np.random.default_rng(0)
        self._token_ids = chance.integers(3, VOCABULARY, size=(1 << 16, 1), dtype=np.int32)
        self._logprobs = -chance.exponential(size=(1 << 16, 1)).astype(np.float32)
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        self._scheduled = scheduled
        return _future(None) if non_block else None

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        began = time.thread_time()
        names = list(self._scheduled.num_scheduled_tokens)
        start = np.random.randint(len(self._token_ids) - len(names))
        token_ids, logprobs = (table[start : start + len(names)].copy() for table in (self._token_ids, self._logprobs))
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=token_ids.tolist(),
            logprobs=LogprobsLists(token_ids, logprobs, np.zeros(len(names), np.int32)),
        )
        self.seconds += time.thread_time() - began
        return _future(made) if non_block else made


def _future(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _Bench:
    """An engine whose forward passes take no time, kept at a number of running sequences."""

    def __init__(self) -> None:
        from pipelinerl.config import EngineSection, ModelSection, RolloutSection
        from pipelinerl.engine.loop import EngineLoop
        from pipelinerl.engine.vllm.engine import VllmEngine
        from tests.tiny_models import make_qwen2

        with tempfile.TemporaryDirectory() as folder:
            make_qwen2(Path(folder), vocabulary=VOCABULARY)
            engine = VllmEngine(
                model=ModelSection(path=Path(folder), dtype="float32", max_tokens=CONTEXT),  # pyright: ignore[reportCallIssue]
                engine=EngineSection(max_running=max(SIZES), kv_cache_bytes=CACHE_BYTES),  # pyright: ignore[reportCallIssue]
                rollout=RolloutSection(),  # pyright: ignore[reportCallIssue]
                seed=0,
            )
        self.loop = EngineLoop(engine, engine_id=0, stager=lambda order: _future(None))
        self._passes = engine._core.engine_core.model_executor = _InstantPasses(engine._core.engine_core.model_executor)
        self._core_s = 0.0
        self._get_output = engine._core.get_output
        engine._core.get_output = self._timed_output
        self._chance = np.random.default_rng(1)
        self._numbers = itertools.count()
        self._running: dict[str, None] = {}

    def _timed_output(self) -> Any:
        began = time.thread_time()
        try:
            return self._get_output()
        finally:
            self._core_s += time.thread_time() - began

    def run(self, size: int, *, num_passes: int) -> dict[str, float]:
        """Milliseconds of the loop and of vLLM for a pass over so many sequences, and how many ended in one."""
        self._keep(size, shortest=1)
        for _ in range(WARM_PASSES):
            self._pass(size)
        self._core_s = self._passes.seconds = total = 0.0
        ended = 0
        for _ in range(num_passes):
            began = time.thread_time()
            self.loop.advance()
            total += time.thread_time() - began
            ended += self._after(size)
        each = 1e3 / num_passes
        return {
            "loop": each * (total - self._core_s),
            "vllm": each * (self._core_s - self._passes.seconds),
            "ended": ended / num_passes,
        }

    def _pass(self, size: int) -> None:
        self.loop.advance()
        self._after(size)

    def _after(self, size: int) -> int:
        from pipelinerl.messages import Completion

        done = [message.rollout_id for message in self.loop.outbox if isinstance(message, Completion)]
        self.loop.outbox.clear()
        for rollout_id in done:
            del self._running[rollout_id]
        self._keep(size, shortest=LENGTHS[0])
        return len(done)

    def _keep(self, size: int, *, shortest: int) -> None:
        """Have so many run: the first ones of ages of their own, as if they had run for a while."""
        from pipelinerl.messages import Cancel, Generate, Sampling

        while len(self._running) > size:
            rollout_id, _ = self._running.popitem()
            self.loop.handle(Cancel(rollout_id=rollout_id, attempt=0))
            self.loop.outbox.clear()
        while len(self._running) < size:
            rollout_id = f"{next(self._numbers)}/0"
            self._running[rollout_id] = None
            sampling = Sampling(max_tokens=int(self._chance.integers(shortest, LENGTHS[1])))
            self.loop.handle(Generate(rollout_id=rollout_id, attempt=0, token_ids=np.full(1, 5, np.int32), sampling=sampling))


if __name__ == "__main__":
    harness.run("engine_loop", measure)

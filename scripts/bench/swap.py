"""Measures how long a swap keeps an engine from its next forward pass, from 1 M to 1 B parameters, and what staging takes from decoding.

A real vLLM engine decodes; policies lie in shared memory, as the trainer leaves them. `pause` is `Engine.commit` between two forward
passes: everything else, fetching and verifying every tensor, happens before it, in the staging thread. References in the same run and
process: a raw memcpy of the same bytes, and the plain reload path (`model.load_weights`). The engine and its staging thread share one
core, which is the worst case; `on its own core` is the same with a core free for the thread.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import os
import shutil
import statistics
import sys
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import children, harness

FOLDER = Path("runs/bench-swap")
ENGINE_CORE = 0
MODELS = {
    "1 M": {"hidden": 128, "layers": 5, "heads": 4, "vocabulary": 512},
    "10 M": {"hidden": 256, "layers": 9, "heads": 8, "vocabulary": 8192},
    "44 M": {"hidden": 512, "layers": 8, "heads": 8, "vocabulary": 32000},
    "0.5 B": {"hidden": 1024, "layers": 33, "heads": 16, "vocabulary": 32000},
    "1 B": {"hidden": 1536, "layers": 31, "heads": 24, "vocabulary": 32000},
}
"""Qwen3 models with tied embeddings in bfloat16, by their number of parameters."""
ADAPTED = ("1 M", "44 M")
"""Of which adapters of rank 16 on every matrix are served apart, too, four versions side by side."""
NUM_SEQUENCES = 8
MAX_TOKENS = 160
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIN_SWAPS = 15
"""Of a model so large that staging takes seconds: its pauses hardly vary."""


def measure(arguments: Any) -> harness.Measured:
    names = ["1 M", "10 M"] if arguments.quick else list(MODELS)  # the smallest that shows each goal: the larger take most of the time
    full, quick = {"num_swaps": 200, "num_in_a_row": 1000, "seconds": 3.0}, {"num_swaps": 40, "num_in_a_row": 100, "seconds": 1.0}
    from pipelinerl.engine.environment import set_environment

    set_environment()
    from pipelinerl.engine.vllm.imports import import_everything

    import_everything()
    shutil.rmtree(FOLDER, ignore_errors=True)
    rows, num_swaps = [], []
    for name in names:
        if arguments.size not in (None, name.replace(" ", "")):
            rows += [row for row in _stored(arguments) if row["parameters"] == name]
            continue
        children.result_of(_make_model, name)
        for mode in ("pointer", "copy", "adapters") if name in ADAPTED else ("pointer", "copy"):
            settings = quick if arguments.quick else full
            row, count = harness.steadily(functools.partial(children.result_of, _measure, name, mode, settings, cores={ENGINE_CORE}))
            rows.append({column: row.get(column, "") for column in COLUMNS})
            num_swaps.append(f"{name} {mode} {count}")
            print(row, flush=True)
        shutil.rmtree(FOLDER / name.replace(" ", ""))
    pointers = [row for row in rows if row["commit"] in ("pointer", "flip")]
    exchanges = [row for row in rows if row["commit"] == "adapters"]
    # A copy of 2 MB takes no longer than its call.
    copies = [row for row in rows if row["commit"] == "copy" and row["parameters"] != "1 M"]
    return harness.Measured(
        rows=rows,
        goals=[
            harness.at_most("flip pause p50 ms, largest", _most(pointers, "pause p50 ms"), 0.3, **harness.SECONDS),
            harness.at_most("flip pause p99 ms, largest", _most(pointers, "p99 ms"), 2.0, **harness.SECONDS),
            harness.at_most("copy pause over memcpy, largest", _most(copies, "pause / memcpy"), 1.1, work=harness.Work.MEMORY),
            harness.at_most("adapters' pause p50 ms, largest", _most(exchanges, "pause p50 ms"), 0.3, **harness.SECONDS),
            harness.at_least(
                "decode while staging, smallest", min(row["decode while staging"] for row in pointers), 0.95, work=harness.Work.CPU
            ),
            harness.at_most("sequences aborted by many swaps in a row", _most(pointers[:1], "aborted"), 0),
            harness.at_most("MB grown from a fifth of them to the last", _most(pointers[:1], "MB grown"), 4),
            harness.at_most("% of time in swaps at one a second", _most(pointers, "swaps at 1/s, % of time"), 0.3, **harness.SECONDS),
        ],
        notes=[
            f"{NUM_SEQUENCES} sequences decode, bfloat16; engine and staging thread on one core but where it says otherwise",
            *([f"only {arguments.size} was measured at this commit, the other rows before"] if arguments.size else []),
            f"swaps for each pause: {', '.join(num_swaps)}",
        ],
    )


COLUMNS = (
    *("parameters", "MB", "commit", "pause p50 ms", "p99 ms", "memcpy ms", "pause / memcpy", "reload ms", "pass ms", "next pass / usual"),
    *("staging ms", "decode while staging", "on its own core", "swaps at 1/s, % of time", "swaps in a row", "sequences meanwhile"),
    *("aborted", "MB grown"),
)
"""A cell is empty where its figure was not measured: not every model shows every goal."""


def _stored(arguments: Any) -> list[harness.Row]:
    """The rows of the last run."""
    path = harness.stored_at("swap", arguments)
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _most(rows: list[harness.Row], column: str) -> float:
    """The largest value; infinite where none was measured, so that no goal is met by what is not there."""
    return max((row[column] for row in rows if row[column] != ""), default=math.inf)


def _make_model(name: str) -> None:
    """Write random weights; values do not matter to the time they take to move."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3ForCausalLM

    from scripts.bench.qwen3 import qwen3_config

    config = qwen3_config(**MODELS[name])
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    noise = (torch.randn(1 << 22) * 0.02).to(torch.bfloat16)
    tensors = {}
    for key, parameter in model.named_parameters():
        count = parameter.numel()
        tensors[key] = noise.repeat(-(-count // len(noise)))[:count].view(parameter.shape).clone()
    folder = FOLDER / name.replace(" ", "")
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)


def _kv_bytes(name: str) -> int:
    """Room for every sequence at its longest, and a few blocks more."""
    shape = MODELS[name]
    return 4 * shape["layers"] * shape["hidden"] * 256 * (NUM_SEQUENCES + 4)


class _Bench:
    """An engine kept full, and policies in shared memory to swap it to."""

    def __init__(self, name: str, mode: str) -> None:
        from pipelinerl.config import EngineSection, ModelSection, RolloutSection, WeightsSection
        from pipelinerl.engine.loop import EngineLoop
        from pipelinerl.engine.staging import StagingThread
        from pipelinerl.engine.vllm.engine import VllmEngine
        from pipelinerl.weights.adapters import AdapterShape
        from pipelinerl.weights.base import num_bytes, views
        from pipelinerl.weights.buffer_pool import WeightBufferPool
        from pipelinerl.weights.manifest import seal
        from pipelinerl.weights.shared_memory import SharedMemorySender

        self.engine = VllmEngine(
            model=ModelSection(path=FOLDER / name.replace(" ", ""), dtype="bfloat16", max_tokens=256),  # pyright: ignore[reportCallIssue]
            engine=EngineSection(max_running=NUM_SEQUENCES, kv_cache_bytes=_kv_bytes(name)),  # pyright: ignore[reportCallIssue]
            rollout=RolloutSection(),  # pyright: ignore[reportCallIssue]
            seed=0,
            weights=WeightsSection(swap_mode="auto" if mode == "adapters" else mode),  # pyright: ignore
            adapters=AdapterShape(rank=16, alpha=32.0, targets=TARGETS) if mode == "adapters" else None,
        )
        self._new_stager = lambda: StagingThread(self.engine)
        self.stager = self._new_stager()
        self.loop = EngineLoop(self.engine, engine_id=0, stager=lambda order: self.stager(order), clock=time.perf_counter)
        layout = self.engine.limits.tensors
        self.num_bytes = num_bytes(layout)
        self._pool = WeightBufferPool(SharedMemorySender(uuid.uuid4().hex), num_bytes=self.num_bytes)
        self._buffers = [self._pool.acquire(1.0), self._pool.acquire(1.0)]
        self._manifests = []
        model: Any = self.engine.model
        for buffer in self._buffers:
            assert buffer is not None
            for view in views(buffer.memory, layout).values():
                view.normal_(std=0.02)
            self._manifests.append(seal(0, buffer.memory, layout))
        self.reload = lambda: model.load_weights(iter(views(self._buffers[0].memory, layout).items()))  # pyright: ignore
        self._num_asked = 0
        self.num_tokens = 0

    def start_staging_thread(self) -> None:
        """Stage in a new thread from now on, which may run on the cores that this one may."""
        self.stager.__exit__()
        self.stager = self._new_stager()

    def order(self) -> Any:
        """Publish the next version: written before, announced now."""
        import msgspec

        from pipelinerl.messages import StageWeights

        version = self.loop.version + 1
        buffer = self._buffers[version % 2]
        assert buffer is not None
        buffer.is_taken = True
        digest = self._pool.publish(buffer, msgspec.structs.replace(self._manifests[version % 2], version=version))
        return StageWeights(version=version, buffer=buffer.name, digest=digest)

    def step(self) -> list[Any]:
        """One forward pass with every sequence running; what the loop said."""
        import numpy as np

        from pipelinerl.messages import Completion, Generate, Sampling

        while self._num_asked < NUM_SEQUENCES:
            self.num_asked_ever = getattr(self, "num_asked_ever", 0) + 1
            token_ids = np.array([3 + self.num_asked_ever % 400, 5, 6], np.int32)
            self.loop.handle(
                Generate(rollout_id=str(self.num_asked_ever), attempt=0, token_ids=token_ids, sampling=Sampling(max_tokens=MAX_TOKENS))
            )
            self._num_asked += 1
        self.loop.advance()
        said, self.loop.outbox[:] = list(self.loop.outbox), []
        self._num_asked -= sum(isinstance(message, Completion) for message in said)
        self.num_tokens += NUM_SEQUENCES
        return said

    def close(self) -> None:
        self.stager.__exit__()
        self._pool.close()


def _measure(name: str, mode: str, settings: dict[str, Any]) -> tuple[harness.Row, int]:
    """A row of the table without what this model does not show, and how many swaps its pauses are of."""
    bench = _Bench(name, mode)
    try:
        found, num_swaps = _pauses(bench, mode=mode, num_swaps=settings["num_swaps"], seconds=settings["seconds"])
        if mode == "pointer":
            if name == next(iter(MODELS)):
                found |= _many_swaps(bench, settings["num_in_a_row"])
            found |= _beside_decoding(bench, settings["seconds"])
        return {"parameters": name, "MB": bench.num_bytes / 1e6, "commit": mode, **found}, num_swaps
    finally:
        bench.close()


def _pauses(bench: _Bench, *, mode: str, num_swaps: int, seconds: float) -> tuple[harness.Row, int]:
    for _ in range(5):
        bench.step()
    reload_ms = "" if mode == "adapters" else 1e3 * harness.median_s(bench.reload, repetitions=3)[0]
    memcpy_ms = _memcpy_ms(bench)
    usual = _pass_ms(bench, 20)
    pauses, next_passes = [], []
    limit = time.perf_counter() + 3 * seconds
    while len(pauses) < num_swaps and (len(pauses) < MIN_SWAPS or time.perf_counter() < limit):
        bench.engine.stage(order := bench.order())
        before = time.perf_counter()
        bench.engine.commit()
        pauses.append(1e3 * (time.perf_counter() - before))
        bench.loop.version = order.version
        next_passes.append(_pass_ms(bench, 1))
    pauses.sort()
    return {
        "pause p50 ms": statistics.median(pauses),
        "p99 ms": pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))],
        "memcpy ms": memcpy_ms,
        "pause / memcpy": statistics.median(pauses) / memcpy_ms,
        "reload ms": reload_ms,
        "pass ms": usual,
        "next pass / usual": statistics.median(next_passes) / usual,
    }, len(pauses)


def _many_swaps(bench: _Bench, count: int) -> dict[str, float]:
    """Swaps one after another under load: sequences that ended meanwhile, those of them that did not end by themselves, and memory."""
    from pipelinerl.messages import Completion, Finish

    finishes: collections.Counter[Finish] = collections.Counter()
    resident = []
    for _ in range(count):
        bench.loop.handle(bench.order())
        while bench.loop.is_swapping:
            finishes.update(message.finish for message in bench.step() if isinstance(message, Completion))
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
    num_ended = finishes[Finish.LENGTH] + finishes[Finish.STOP]
    return {
        "swaps in a row": count,
        "sequences meanwhile": finishes.total(),
        "aborted": finishes.total() - num_ended,
        "MB grown": resident[-1] - resident[count // 5],
    }


def _beside_decoding(bench: _Bench, seconds: float) -> dict[str, float]:
    """Measure what staging and committing take from decoding; staging is the same for every swap mode."""
    while_staging, staging_ms = _while_staging(bench, 4 * seconds)  # single stagings of a small model differ by a tenth
    percent = _percent_of_time(bench, seconds)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    bench.start_staging_thread()  # where this thread may run now
    own_core, _ = _while_staging(bench, seconds)
    return {
        "staging ms": staging_ms,
        "decode while staging": while_staging,
        "on its own core": own_core,
        "swaps at 1/s, % of time": percent,
    }


def _pass_ms(bench: _Bench, count: int) -> float:
    """Median duration of a forward pass."""
    return 1e3 * harness.median_s(bench.step, repetitions=count)[0]


def _memcpy_ms(bench: _Bench) -> float:
    """Milliseconds of a memcpy of the policy's bytes, as a commit meets them: staged just before, after a forward pass; median."""
    import torch

    target = torch.zeros(bench.num_bytes, dtype=torch.uint8)
    found = []
    for _ in range(7):
        bench.step()
        order = bench.order()
        bench.engine.stage(order)
        buffer = bench._buffers[order.version % 2]
        assert buffer is not None
        before = time.perf_counter()
        target.copy_(buffer.memory)
        found.append(1e3 * (time.perf_counter() - before))
    return statistics.median(found)


def _while_staging(bench: _Bench, seconds: float) -> tuple[float, float]:
    """Decoding speed while a policy is being staged over the mean of just before and just after, and milliseconds of a staging; medians.

    The pass after a commit, whose weights are in no cache, is the swap's and not staging's: the other columns have it.
    """
    quiet = [_tokens_per_s(bench)]
    busy: list[float] = []
    staged: list[float] = []
    end = time.perf_counter() + seconds
    while not busy or time.perf_counter() < end:
        order = bench.order()  # publishing is the trainer's work, and not timed
        tokens = before_tokens = bench.num_tokens
        started = before = last = time.perf_counter()
        bench.loop.handle(order)
        while bench.loop.is_swapping:
            tokens, before = bench.num_tokens, last
            bench.step()
            last = time.perf_counter()
        staged.append(1e3 * (last - started))
        if before > started:  # staged within the first pass: too little to tell
            busy.append((tokens - before_tokens) / (before - started))
            bench.step()
            quiet.append(_tokens_per_s(bench))
    ratios = [2 * speed / (quiet[at] + quiet[at + 1]) for at, speed in enumerate(busy)]
    return statistics.median(ratios), statistics.median(staged)


def _tokens_per_s(bench: _Bench, *, num_passes: int = 10) -> float:
    tokens, before = bench.num_tokens, time.perf_counter()
    for _ in range(num_passes):
        bench.step()
    return (bench.num_tokens - tokens) / (time.perf_counter() - before)


def _percent_of_time(bench: _Bench, seconds: float) -> float:
    """Part of the time that pauses take when a policy comes every second."""
    from pipelinerl.messages import WeightsCommitted

    started = time.perf_counter()
    paused, next_swap = 0.0, started
    while (now := time.perf_counter()) < started + seconds or not paused:
        if now >= next_swap and not bench.loop.is_swapping:
            bench.loop.handle(bench.order())
            next_swap += 1.0
        paused += sum(message.pause_s for message in bench.step() if isinstance(message, WeightsCommitted))
    return 100 * paused / (time.perf_counter() - started)


if __name__ == "__main__":
    sizes = [name.replace(" ", "") for name in MODELS]
    harness.run(
        "swap",
        measure,
        works=(harness.Work.CPU, harness.Work.MEMORY),
        options={"--size": {"choices": sizes, "help": "this one alone; the rest of the table stays"}},
    )

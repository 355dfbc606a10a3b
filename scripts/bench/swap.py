"""Measures how long a swap keeps an engine from its next forward pass, from 1 M to 1 B parameters, and what staging takes from decoding.

A real vLLM engine decodes; policies lie in shared memory, as the trainer leaves them. `pause` is `Engine.commit` between two forward
passes: everything else, fetching and verifying every tensor, happens before it, in the staging thread. References in the same run and
process: a raw memcpy of the same bytes, and the plain reload path (`model.load_weights`). The engine and its staging thread share one
core, which is the worst case; `on its own core` is the same with a core free for the thread.
"""

from __future__ import annotations

import argparse
import collections
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

from scripts.bench import harness

FOLDER = Path("runs/bench-swap")
ENGINE_CORE = 0
MODELS: dict[str, dict[str, Any]] = {
    "1 M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 512},
    "10 M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 9, "num_attention_heads": 8, "vocab_size": 8192},
    "44 M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 32000},
    "0.5 B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 33, "num_attention_heads": 16, "vocab_size": 32000},
    "1 B": {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 31, "num_attention_heads": 24, "vocab_size": 32000},
}
"""Qwen3 models with tied embeddings in bfloat16, by their number of parameters."""
ADAPTED = ("1 M", "44 M")
"""Of which adapters of rank 16 on every matrix are served apart, too, four versions side by side."""
NUM_SEQUENCES = 8
MAX_TOKENS = 160
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIN_SWAPS = 15
"""Of a model so large that staging takes seconds: its pauses hardly vary."""


def main() -> None:
    options = harness.options(__doc__ or "")
    options.add_argument("--size", choices=[name.replace(" ", "") for name in MODELS], help="this one alone; the rest of the table stays")
    arguments = options.parse_args()
    names = ["1 M", "10 M"] if arguments.quick else list(MODELS)  # the smallest that shows each goal: the larger take most of the time
    full, quick = {"num_swaps": 200, "num_in_a_row": 1000, "seconds": 3.0}, {"num_swaps": 40, "num_in_a_row": 100, "seconds": 1.0}
    settings = quick if arguments.quick else full
    from pipelinerl.engine.environment import set_environment

    set_environment()
    from pipelinerl.engine.vllm.engine import import_everything

    import_everything()
    shutil.rmtree(FOLDER, ignore_errors=True)
    columns = [
        "parameters",
        "MB",
        "commit",
        "pause p50 ms",
        "p99 ms",
        "memcpy ms",
        "pause / memcpy",
        "reload ms",
        "pass ms",
        "next pass / usual",
    ]
    columns += ["staging ms", "decode while staging", "on its own core", "swaps at 1/s, % of time"]
    columns += ["swaps in a row", "sequences meanwhile", "aborted", "MB grown"]
    rows, found = [], {}
    for name in names:
        if arguments.size not in (None, name.replace(" ", "")):
            rows += [[row.get(column, "") for column in columns] for row in _stored(arguments) if row["parameters"] == name]
            continue
        _in_child(_make_model, name)
        for mode in ("pointer", "copy", "adapters") if name in ADAPTED else ("pointer", "copy"):
            found[name, mode] = measured = _in_child(_measure, name, mode, settings)
            rows.append([name, measured["mb"], mode, *(measured.get(key, "") for key in KEYS)])
            print(f"{name}, {mode}: {measured}", flush=True)
        shutil.rmtree(FOLDER / name.replace(" ", ""))
    table = [dict(zip(columns, row, strict=True)) for row in rows]
    pointers = [row for row in table if row["commit"] in ("pointer", "flip")]
    exchanges = [row for row in table if row["commit"] == "adapters"]
    copies = [
        row for row in table if row["commit"] == "copy" and row["parameters"] != "1 M"
    ]  # a copy of 2 MB takes no longer than its call
    goal = harness.Goal
    harness.finish(
        "swap",
        arguments=arguments,
        columns=columns,
        rows=rows,
        goals=[
            goal(name="flip pause p50 ms, largest", value=_most(pointers, "pause p50 ms"), goal=0.3, at_least=False),
            goal(name="flip pause p99 ms, largest", value=_most(pointers, "p99 ms"), goal=2.0, at_least=False),
            goal(name="copy pause over memcpy, largest", value=_most(copies, "pause / memcpy"), goal=1.1, at_least=False),
            goal(name="adapters' pause p50 ms, largest", value=_most(exchanges, "pause p50 ms"), goal=0.3, at_least=False),
            goal(name="decode while staging, smallest", value=min(row["decode while staging"] for row in pointers), goal=0.95),
            goal(name="sequences aborted by many swaps in a row", value=_most(pointers[:1], "aborted"), goal=0, at_least=False),
            goal(name="MB grown from a fifth of them to the last", value=_most(pointers[:1], "MB grown"), goal=4, at_least=False),
            goal(name="% of time in swaps at one a second", value=_most(pointers, "swaps at 1/s, % of time"), goal=0.3, at_least=False),
        ],
        notes=[
            f"{NUM_SEQUENCES} sequences decode, bfloat16; engine and staging thread on one core but where it says otherwise",
            *([f"only {arguments.size} was measured at this commit, the other rows before"] if arguments.size else []),
            "swaps for each pause: " + ", ".join(f"{name} {mode} {measured['num_swaps']}" for (name, mode), measured in found.items()),
        ],
    )


KEYS = [
    "pause_p50_ms",
    "pause_p99_ms",
    "memcpy_ms",
    "over_memcpy",
    "reload_ms",
    "pass_ms",
    "next_pass",
    "staging_ms",
    "while_staging",
    "own_core",
]
KEYS += ["percent", "num_in_a_row", "num_finished", "num_aborted", "grown_mb"]


def _stored(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the last run."""
    path = harness.RESULTS / f"swap{'-quick' if arguments.quick else ''}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _most(rows: list[dict[str, Any]], column: str) -> float:
    """The largest value; infinite where none was measured, so that no goal is met by what is not there."""
    return max((row[column] for row in rows if row[column] != ""), default=math.inf)


def _make_model(name: str) -> float:
    """Write random weights; values do not matter to the time they take to move."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = MODELS[name]
    config = Qwen3Config(
        **shape,
        num_key_value_heads=shape["num_attention_heads"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
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
    return 0.0


def _kv_bytes(name: str) -> int:
    """Room for every sequence at its longest, and a few blocks more."""
    shape = MODELS[name]
    return 4 * shape["num_hidden_layers"] * shape["hidden_size"] * 256 * (NUM_SEQUENCES + 4)


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
        self.is_smallest = name == next(iter(MODELS))
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


def _measure(name: str, mode: str, settings: dict[str, Any]) -> dict[str, float]:
    os.sched_setaffinity(0, {ENGINE_CORE})
    bench = _Bench(name, mode)
    try:
        return _measure_with(bench, mode=mode, **settings)
    finally:
        bench.close()


def _measure_with(bench: _Bench, *, mode: str, num_swaps: int, num_in_a_row: int, seconds: float) -> dict[str, Any]:
    for _ in range(5):
        bench.step()
    reload_ms = "" if mode == "adapters" else _reload_ms(bench)
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
    found = {
        "mb": bench.num_bytes / 1e6,
        "pause_p50_ms": statistics.median(pauses),
        "pause_p99_ms": pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))],
        "memcpy_ms": memcpy_ms,
        "over_memcpy": statistics.median(pauses) / memcpy_ms,
        "reload_ms": reload_ms,
        "next_pass": statistics.median(next_passes) / usual,
        "pass_ms": usual,
        "num_swaps": len(pauses),
    }
    if mode != "pointer":
        return found
    in_a_row = _many_swaps(bench, num_in_a_row) if bench.is_smallest else {}
    return found | in_a_row | _beside_decoding(bench, seconds)


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
        "num_in_a_row": count,
        "num_finished": finishes.total(),
        "num_aborted": finishes.total() - num_ended,
        "grown_mb": resident[-1] - resident[count // 5],
    }


def _beside_decoding(bench: _Bench, seconds: float) -> dict[str, float]:
    """Measure what staging and committing take from decoding; staging is the same for every swap mode."""
    while_staging, staging_ms = _while_staging(bench, 4 * seconds)  # single stagings of a small model differ by a tenth
    percent = _percent_of_time(bench, seconds)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    bench.start_staging_thread()  # where this thread may run now
    own_core, _ = _while_staging(bench, seconds)
    return {"staging_ms": staging_ms, "while_staging": while_staging, "own_core": own_core, "percent": percent}


def _pass_ms(bench: _Bench, count: int) -> float:
    """Median duration of a forward pass."""
    times = []
    for _ in range(count):
        before = time.perf_counter()
        bench.step()
        times.append(1e3 * (time.perf_counter() - before))
    return statistics.median(times)


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


def _reload_ms(bench: _Bench) -> float:
    """Milliseconds of loading the policy by vLLM's own loader; median."""
    found = []
    for _ in range(3):
        before = time.perf_counter()
        bench.reload()
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


def _in_child(work: Any, *arguments: Any) -> Any:
    """Run in a fork, so that this process never runs a torch operation and stays safe to fork."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writer, json.dumps(work(*arguments)).encode())
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        text = result.read()
    os.waitpid(child, 0)
    if not text:
        sys.exit(f"{work.__name__} failed; its error stands above")
    return json.loads(text)


if __name__ == "__main__":
    main()

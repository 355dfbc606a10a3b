"""`python -m pipelinerl.engine.vllm.gpu_checks fork|backends|decode|swaps`: an engine on this machine, measured; JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.config import EngineSection, ModelSection, RolloutSection
from pipelinerl.demo.sort_digits import make_model
from pipelinerl.engine.environment import set_environment
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.orders import Stager

if TYPE_CHECKING:  # it imports vLLM, for which the environment has to be set
    from pipelinerl.engine.vllm.engine import VllmEngine

NUM_SWAPS = 20
PASSES_BETWEEN_SWAPS = 6
PROMPT_TOKENS = 8
COUNTS = {"cpu": (4, 16), "cuda": (64, 256, 1024)}
"""Sequences decoded at once."""
NUM_PASSES = {"cpu": 20, "cuda": 200}
WARM_PASSES = 3
MOST_TOKENS = 512
"""Of a completion."""
FORCED = range(4, 14)
"""Tokens that policies force, each another one than the policy before."""
NO_DEVICE = "vLLM's CUDA classes, captured graphs and the second model runner: vLLM runs on the CPU here"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.engine.vllm.gpu_checks", description=__doc__)
    programs: dict[str, Callable[[Path], dict[str, Any]]] = {"fork": fork, "backends": backends, "decode": decode, "swaps": swaps}
    parser.add_argument("check", choices=list(programs))
    parser.add_argument("--model", type=Path, help="a model's folder; default: the demo's, 1 M parameters")
    chosen = parser.parse_args()
    set_environment()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.model is None and chosen.check != "fork":
            make_model(Path(folder), seed=0)
        print(json.dumps(programs[chosen.check](chosen.model or Path(folder))))


def fork(folder: Path) -> dict[str, Any]:
    """Import what an engine imports, fork, and compute on a device in the child, as the parent of engines has its children do.

    `folder`, of a model, is not read: nothing is loaded.
    """
    started = time.perf_counter()
    from pipelinerl.engine.vllm.imports import import_everything

    import_everything()
    import torch

    imported = time.perf_counter()
    read, write = os.pipe()
    device = "cuda" if torch.version.cuda else "cpu"
    if os.fork() == 0:
        try:
            said = str(float(torch.ones(8, device=device).sum()))
        except Exception as error:  # the child's boundary: whatever it cannot do is what is asked here
            said = f"{type(error).__name__}: {error}".splitlines()[0]
        os.write(write, said.encode()[:512])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.wait()
    return {
        "child_computed": said == "8.0",
        "error": "" if said == "8.0" else said or f"it ended with {os.waitstatus_to_exitcode(status)}",
        "device": device,
        "imports_s": imported - started,
        "fork_s": time.perf_counter() - imported,
        "unseen": [] if device == "cuda" else ["a child that enters CUDA: torch is a build for CPUs"],
    }


def backends(folder: Path) -> dict[str, Any]:
    """What vLLM chose for this machine and model."""
    engine = _engine(folder, num_running=4)
    config = engine._llm.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    attention = {type(layer.impl).__module__.rpartition(".")[2] for layer in layers if hasattr(layer, "impl")}
    graphs = config.compilation_config.cudagraph_mode
    return {
        "device": _device(),
        "runner": f"{type(engine._runner).__module__}.{type(engine._runner).__name__}",
        "attention": ", ".join(sorted(attention)),
        "graphs": getattr(graphs, "name", str(graphs)),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "swap": engine.limits.choices[-1],
        "choices": list(engine.limits.choices),
        "unseen": [] if _device() == "cuda" else [NO_DEVICE],
    }


def decode(folder: Path) -> dict[str, Any]:
    """Tokens per second by the number of sequences, and what a forward pass costs outside of vLLM."""
    counts, max_tokens = COUNTS[_device()], _max_tokens(folder)
    engine = _Timed(_engine(folder, num_running=max(counts)))
    speeds: dict[str, float] = {}
    outside_s = 0.0
    for count in counts:
        load = _Load(engine, stager=_no_staging, max_tokens=max_tokens)
        for _ in range(WARM_PASSES):
            load.keep(count)
            load.loop.advance()
        engine.inside_s, before, seconds = 0.0, load.num_tokens, 0.0
        for _ in range(NUM_PASSES[_device()]):
            load.keep(count)
            started = time.perf_counter()
            load.loop.advance()
            seconds += time.perf_counter() - started
        speeds[str(count)] = (load.num_tokens - before) / seconds
        outside_s = (seconds - engine.inside_s) / NUM_PASSES[_device()]
        load.cancel()
    unseen = f"{', '.join(map(str, COUNTS['cuda']))} sequences on a device: {NO_DEVICE}"
    return {
        "tokens_per_s": speeds,
        "loop_ms": 1e3 * outside_s,
        "device": _device(),
        "unseen": [] if _device() == "cuda" else [unseen],
    }


def swaps(folder: Path) -> dict[str, Any]:
    """Swap policies that force a token each under running sequences, and compare every token with the version that it carries."""
    from pipelinerl.engine.staging import StagingThread
    from pipelinerl.messages import Completion, StageWeights, WeightsCommitted
    from pipelinerl.weights.base import num_bytes, views
    from pipelinerl.weights.buffer_pool import WeightBufferPool
    from pipelinerl.weights.manifest import seal
    from pipelinerl.weights.shared_memory import SharedMemorySender

    count = COUNTS[_device()][0]
    engine = _engine(folder, num_running=count)
    layout = engine.limits.tensors
    pool = WeightBufferPool(SharedMemorySender(uuid.uuid4().hex), num_bytes=num_bytes(layout))
    num_tokens = num_wrong = passes = 0
    pauses_ms: list[float] = []
    seconds: dict[bool, list[float]] = {True: [], False: []}
    """Of a forward pass, by whether a policy was being staged beside it."""
    held: str | None = None
    with StagingThread(engine) as stager:
        load = _Load(engine, stager=stager, max_tokens=_max_tokens(folder))
        loop = load.loop
        while len(pauses_ms) < NUM_SWAPS or loop.has_work:
            if len(pauses_ms) < NUM_SWAPS:
                load.keep(count)
                if passes >= PASSES_BETWEEN_SWAPS and not loop.is_swapping:
                    version, passes = loop.version + 1, 0
                    buffer = pool.acquire(5.0)
                    assert buffer is not None
                    _force(views(buffer.memory, layout), _forced(version))
                    digest = pool.publish(buffer, seal(version, buffer.memory, layout))
                    loop.handle(StageWeights(version=version, buffer=buffer.name, digest=digest))
                    if held is not None:
                        pool.release(held)
                    held = buffer.name
            is_staging, started = loop.is_swapping, time.perf_counter()
            loop.advance()
            passes += 1
            seconds[is_staging].append(time.perf_counter() - started)
            for message in loop.outbox:
                if isinstance(message, WeightsCommitted):
                    pauses_ms.append(1e3 * message.pause_s)
                elif isinstance(message, Completion):
                    carried = zip(message.token_ids.tolist(), message.versions.tolist(), strict=True)
                    told = [token == _forced(version) for token, version in carried if version > 0]
                    num_tokens, num_wrong = num_tokens + len(told), num_wrong + told.count(False)
            loop.outbox.clear()
    pool.close()
    usual, staging = (statistics.median(seconds[key]) for key in (False, True))
    return {
        "num_swaps": len(pauses_ms),
        "num_tokens": num_tokens,
        "num_wrong": num_wrong,
        "pause_ms": statistics.median(pauses_ms),
        "max_pause_ms": max(pauses_ms),
        "speed_while_staging": usual / staging,
        "device": _device(),
        "unseen": [] if _device() == "cuda" else ["a copy into parameters of captured graphs, and its pause: vLLM runs on the CPU here"],
    }


def _forced(version: int) -> int:
    return FORCED[version % len(FORCED)]


def _force(tensors: dict[str, Any], token_id: int) -> None:
    """Weights that sample `token_id` greedily after any input: layers add nothing, and one row of the output embedding is the longest."""
    for name, tensor in tensors.items():
        tensor.fill_(1.0 if "norm" in name else 0.0)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensor[:, 0] = 1.0
            tensor[token_id, 0] = 3.0


class _Timed:
    """An engine that adds up the seconds inside its forward passes."""

    def __init__(self, engine: VllmEngine) -> None:
        self.inside_s = 0.0
        self._engine = engine

    def step(self) -> Any:
        started = time.perf_counter()
        try:
            return self._engine.step()
        finally:
            self.inside_s += time.perf_counter() - started

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Load:
    """A loop over an engine, and requests that keep it busy; each runs to its last token."""

    def __init__(self, engine: Any, *, stager: Stager, max_tokens: int) -> None:
        self.loop = EngineLoop(engine, engine_id=0, stager=stager, clock=time.perf_counter)
        self._max_tokens = max_tokens
        self._num_asked = 0

    @property
    def num_tokens(self) -> int:
        """Sampled so far."""
        return self.loop.load(idle_s=0.0).num_tokens

    def keep(self, count: int) -> None:
        """Ask for completions until so many run."""
        import numpy as np

        from pipelinerl.messages import Generate, Sampling

        load = self.loop.load(idle_s=0.0)
        for _ in range(count - load.num_running - load.num_waiting):
            token_ids = np.full(PROMPT_TOKENS, FORCED[self._num_asked % len(FORCED)], np.int32)
            sampling = Sampling(max_tokens=self._max_tokens, temperature=0.0)
            self.loop.handle(Generate(rollout_id=str(self._num_asked), attempt=0, token_ids=token_ids, sampling=sampling))
            self._num_asked += 1

    def cancel(self) -> None:
        """Withdraw all that run."""
        from pipelinerl.messages import Cancel

        for number in range(self._num_asked):
            self.loop.handle(Cancel(rollout_id=str(number), attempt=0))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _engine(folder: Path, *, num_running: int) -> VllmEngine:
    from pipelinerl.engine.vllm.engine import VllmEngine

    is_on_cpu = _device() == "cpu"
    return VllmEngine(
        model=ModelSection(path=folder, dtype="float32" if is_on_cpu else "bfloat16", max_tokens=_max_tokens(folder) + PROMPT_TOKENS),  # pyright: ignore[reportCallIssue]
        engine=EngineSection(max_running=num_running, options={"block_size": 32} if is_on_cpu else {}),  # pyright: ignore[reportCallIssue]
        rollout=RolloutSection(max_tokens=_max_tokens(folder)),  # pyright: ignore[reportCallIssue]
        seed=0,
    )


def _max_tokens(folder: Path) -> int:
    """Of a completion: what the model's positions allow, and no more than a check needs."""
    longest = json.loads((folder / "config.json").read_text()).get("max_position_embeddings", 2048)
    return min(MOST_TOKENS, longest - PROMPT_TOKENS)


def _no_staging(_: object) -> Any:
    raise AssertionError("no policy is ordered here")


if __name__ == "__main__":
    main()

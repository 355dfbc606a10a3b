"""The two processes of `scripts/bench/colocated.py`: a real engine and a real trainer that do what they are told, a line at a time.

`python -m scripts.bench.colocated_peers engine|trainer FOLDER DTYPE KV_BYTES` reads a JSON line from its input, does what it says, and
answers by a line.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROW_TOKENS = 48
NUM_SEQUENCES = 8
MAX_TOKENS = 2000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    role, folder, dtype, kv_bytes = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    calls = engine_calls(folder, dtype, kv_bytes) if role == "engine" else trainer_calls(folder, dtype)
    print(json.dumps(calls["ready"]()), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked.pop("do")
        started = time.perf_counter()
        answer = calls[name](**asked)
        print(json.dumps({"s": time.perf_counter() - started, **(answer or {})}), file=answers)
        if name == "end":
            return


def frame_of(address: int) -> int:
    """The number of the physical page at an address; 0 where the kernel does not tell (it tells root alone)."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(address // PAGE_BYTES * 8)
        return int.from_bytes(pages.read(8), "little") & ((1 << 55) - 1)


def engine_calls(folder: Path, dtype: str, kv_bytes: int) -> dict[str, Callable[..., Any]]:
    from pipelinerl.engine.environment import set_environment

    set_environment()
    from pipelinerl.engine.vllm.imports import import_everything

    import_everything()
    import msgspec
    import numpy as np
    import torch

    from pipelinerl.config import EngineSection, ModelSection, RolloutSection
    from pipelinerl.engine.vllm.engine import VllmEngine
    from pipelinerl.messages import Generate, Sampling, StageWeights

    torch.set_num_threads(1)
    options: dict[str, Any] = {"max_running": NUM_SEQUENCES, "kv_cache_bytes": kv_bytes}
    engine = VllmEngine(
        model=ModelSection.model_validate({"path": folder, "dtype": dtype, "max_tokens": MAX_TOKENS + 100}),
        engine=EngineSection.model_validate(options),
        rollout=RolloutSection.model_validate({"max_tokens": MAX_TOKENS}),
        seed=0,
        is_colocated=True,
    )
    sampled = {"tokens": 0, "version": 0}
    first = max(engine.model.parameters(), key=torch.numel)

    def ask() -> None:
        sampling = Sampling(max_tokens=MAX_TOKENS, ignores_ends=True)
        for number in range(NUM_SEQUENCES):
            engine.submit(
                Generate(rollout_id=f"r{number}", attempt=0, token_ids=np.arange(5, 105, dtype=np.int32), sampling=sampling), version=0
            )

    def passes(count: int) -> dict[str, Any]:
        for _ in range(count):
            sampled["tokens"] += sum(len(one.rollout_ids) for one in engine.step())
        return {"tokens": sampled["tokens"]}

    def take(order: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        engine.stage(msgspec.convert(order, StageWeights))
        staged = time.perf_counter()
        kept = engine.commit()
        return {"stage_s": staged - started, "commit_s": time.perf_counter() - staged, "num_recomputed": len(list(kept))}

    def look() -> dict[str, Any]:
        return {"value": float(first.data.view(-1)[0]), "frame": frame_of(first.data_ptr())}

    return {
        "ready": lambda: {"tensors": msgspec.to_builtins(engine.limits.tensors)},
        "ask": ask,
        "passes": passes,
        "sleep": lambda: {"num_bytes": engine.sleep()},
        "take": take,
        "look": look,
        "end": lambda: None,
    }


def trainer_calls(folder: Path, dtype: str) -> dict[str, Callable[..., Any]]:
    import msgspec
    import numpy as np
    import torch

    from pipelinerl.messages import Tensor
    from pipelinerl.weights.base import num_bytes, views
    from pipelinerl.weights.host_memory import give_back_freed
    from trainer.model.model import Model
    from trainer.optimizer import Optimizer, Schedule
    from trainer.rows.arrange import arrange
    from trainer.weights.in_place import is_there, mover
    from trainer.weights.publisher import Publisher

    torch.set_num_threads(1)
    model = Model(folder, dtype=dtype, temperature=1.0, device=torch.device("cpu"))
    schedule = Schedule(learning_rate=1e-5, num_steps=1000)
    optimizer = Optimizer(model.parameters(), schedule=schedule, betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
    optimizer.give_back(is_new=True)
    publisher = Publisher(
        model.tensors,
        tied_names=model.tied_names,
        run_folder=folder.resolve(),
        deadline_s=60.0,
        in_place=True,
        move=mover(model, optimizer),
    )
    ids = np.random.default_rng(0).integers(0, model.num_words, ROW_TOKENS, dtype=np.int32)
    mask = np.arange(ROW_TOKENS) >= 16
    row = arrange(ids, loss_mask=mask, lengths=np.array([ROW_TOKENS], np.int32), names=["0/0"])
    assert row is not None
    steps = {"count": 0, "version": -1}
    thread = concurrent.futures.ThreadPoolExecutor(1)
    largest = max(model.parameters(), key=torch.numel)

    def layout(tensors: Any) -> dict[str, Any]:
        placed = msgspec.convert(tensors, tuple[Tensor, ...])
        publisher.fix_layout(placed)
        return {"num_bytes": num_bytes(placed)}

    def train() -> dict[str, Any]:
        logprobs, _ = model.logprobs(row)
        (-logprobs.sum()).backward()
        started = time.perf_counter()
        optimizer.collect()
        optimizer.step(steps["count"], denominator=float(mask.sum()))
        steps["count"] += 1
        return {"update_s": time.perf_counter() - started}

    def in_place() -> tuple[int, int]:
        """Bytes of the policy that lie where engines read them, and bytes that had to be copied there."""
        assert publisher._pool is not None
        assert publisher._pool._latest is not None
        found, tensors = [0, 0], model.tensors()
        for name, view in views(publisher._pool._latest.memory, publisher._layout).items():
            found[not is_there(tensors[name], view)] += view.nbytes
        return found[0], found[1]

    def publish() -> dict[str, Any]:
        """As `trainer.loop` does: a thread publishes, and meanwhile memory is given back."""
        started = time.perf_counter()
        steps["version"] += 1
        publisher.move_in(steps["version"])
        publication = thread.submit(publisher.publish, steps["version"])
        resting = time.perf_counter()
        optimizer.give_back()
        give_back_freed()
        rested = time.perf_counter()
        policy = publication.result()
        assert policy is not None
        order = {"version": policy.version, "buffer": policy.buffer, "digest": policy.digest}
        return {"order": order, "rest_s": rested - resting, "publish_s": time.perf_counter() - started, "bytes": in_place()}

    def mark(value: float) -> dict[str, Any]:
        with torch.no_grad():
            before = float(largest.data.view(-1)[0])
            largest.data.view(-1)[0] = value
        return {"before": before, "frame": frame_of(largest.data_ptr())}

    def copy(count: int) -> dict[str, Any]:
        """The time of a memcpy of a policy's bytes, pages and all there: the median of `count`."""
        source = torch.ones(
            sum(tensor.nbytes for tensor in {one.data_ptr(): one for one in model.tensors().values()}.values()), dtype=torch.uint8
        )
        target = torch.zeros_like(source)
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - started)
        return {"memcpy_s": sorted(seconds)[count // 2], "num_bytes": len(source)}

    return {
        "ready": dict,
        "layout": layout,
        "train": train,
        "publish": publish,
        "mark": mark,
        "copy": copy,
        "end": publisher.close,
    }


if __name__ == "__main__":
    main()

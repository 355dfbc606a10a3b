"""Real engines and the trainer's publisher over every transport: a swapped engine samples what one started on the new weights does."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.messages import Completion, Finish, Generate, Sampling, StageWeights, WeightsCommitted, WeightsStaged

if TYPE_CHECKING:
    import torch

    from trainer.weights.publisher import Publisher

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_VERSIONS = 5
NUM_SWAPS = 1000


def ask(loop: EngineLoop, *, count: int, max_tokens: int, name: str) -> None:
    chance = np.random.default_rng(5)
    for number in range(count):
        token_ids = chance.integers(3, 120, size=chance.integers(2, 30), dtype=np.int32)
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, stop_token_ids=())
        loop.handle(Generate(rollout_id=f"{name}/{number}", attempt=0, token_ids=token_ids, sampling=sampling))


def greedy(loop: EngineLoop, name: str) -> list[list[int]]:
    """Greedy completions by what the engine holds now."""
    ask(loop, count=12, max_tokens=40, name=name)
    while loop.has_work:
        loop.advance()
    replies = {message.rollout_id: message.token_ids.tolist() for message in loop.outbox if isinstance(message, Completion)}
    loop.outbox.clear()
    return [replies[key] for key in sorted(replies) if key.startswith(f"{name}/")]


def take(loop: EngineLoop, publisher: Publisher, version: int) -> int:
    """Publish the present weights and have the engine take them; bytes that travelled."""
    policy = publisher.publish(version)
    assert policy is not None
    loop.handle(StageWeights(version=version, buffer=policy.buffer, digest=policy.digest))
    while loop.is_swapping:
        loop.advance()
    kinds = [type(message) for message in loop.outbox if not isinstance(message, Completion)]
    assert kinds == [WeightsStaged, WeightsCommitted], loop.outbox
    loop.outbox.clear()
    publisher.held(version)
    return policy.num_bytes


@contextlib.contextmanager
def swapped(folder: Path, weights: dict[str, torch.Tensor], *, transport: str, swap_mode: str) -> Iterator[tuple[EngineLoop, Publisher]]:
    from pipelinerl.config import WeightsSection
    from tests import real_engine
    from trainer.weights.publisher import Publisher

    section = WeightsSection(swap_mode=swap_mode, delta=True)  # pyright: ignore
    with real_engine.vllm_engine(folder, dtype="bfloat16", weights=section, policies=folder / "weights") as engine:
        publisher = Publisher(
            lambda: weights, tied_names=frozenset(), run_folder=folder, deadline_s=10.0, address="127.0.0.1", sends_deltas=True
        )
        publisher.fix_layout(engine.limits.tensors, num_engines=4, transport=transport)
        with contextlib.closing(publisher), StagingThread(engine) as stager:
            yield EngineLoop(engine, engine_id=0, stager=stager), publisher


def train(weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Change a few of the weights, in place, once for each policy; the same changes every time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_VERSIONS):
        for name, tensor in weights.items():
            moves = torch.rand(tensor.shape, generator=generator) < 0.02
            weights[name] = torch.where(moves, tensor * 1.5, tensor)
        yield


def swapped_tokens(folder: Path, weights: dict[str, torch.Tensor], *, transport: str, swap_mode: str) -> tuple[list[list[int]], list[int]]:
    """Change `weights` a few times under an engine that decodes; what it samples at last, and the bytes of each policy."""
    sizes = []
    with swapped(folder, weights, transport=transport, swap_mode=swap_mode) as (loop, publisher):
        before = greedy(loop, "before")
        for version, _ in enumerate(train(weights), start=1):
            ask(loop, count=2, max_tokens=20, name=f"meanwhile-{version}")
            sizes.append(take(loop, publisher, version))
        after = greedy(loop, "after")
    assert after != before
    return after, sizes


def first_weights(folder: Path) -> dict[str, torch.Tensor]:
    import torch

    from tests import tiny_models

    return {name: tensor.to(torch.bfloat16) for name, tensor in tiny_models.make_qwen2(folder, seed=2).items()}


@pytest.fixture(scope="module")
def fresh_tokens(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What an engine samples that was started on the weights to which every transport leads."""
    from safetensors.torch import save_file

    from tests import real_engine

    folder = tmp_path_factory.mktemp("last")
    weights = first_weights(folder)
    for _ in train(weights):
        pass
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with real_engine.vllm_engine(folder, dtype="bfloat16") as fresh, StagingThread(fresh) as stager:
        return greedy(EngineLoop(fresh, engine_id=0, stager=stager), "after")


@pytest.mark.parametrize(("transport", "swap_mode"), [("shared_memory", "copy"), ("files", "sparse"), ("gloo", "pointer")])
def test_a_swapped_engine_samples_what_a_fresh_one_does(tmp_path: Path, fresh_tokens: list[list[int]], transport: str, swap_mode: str):
    after, sizes = swapped_tokens(tmp_path, first_weights(tmp_path), transport=transport, swap_mode=swap_mode)
    print(f"{transport}, {swap_mode}: {sizes} bytes")
    assert max(sizes[1:]) < sizes[0] / 8, "all but the first travelled as changes"
    assert after == fresh_tokens


def test_a_thousand_swaps_under_load_abort_nothing_and_take_no_memory(tmp_path: Path):
    weights = first_weights(tmp_path)
    with swapped(tmp_path, weights, transport="shared_memory", swap_mode="pointer") as (loop, publisher):
        asked = num_done = 0
        peaks: dict[int, int] = {}
        buffers: list[str] = []
        while loop.version < NUM_SWAPS:
            if len(loop._running) < 12:
                ask(loop, count=6, max_tokens=60, name=str(asked))
                asked += 6
            weights["model.norm.weight"][loop.version % 128] += 0.01
            policy = publisher.publish(loop.version + 1)
            assert policy is not None
            loop.handle(StageWeights(version=loop.version + 1, buffer=policy.buffer, digest=policy.digest))
            buffers.append(policy.buffer)
            while loop.is_swapping:
                loop.advance()
            loop.advance()
            if len(buffers) > 1:
                publisher.release(buffers.pop(0))
            for message in loop.outbox:
                if isinstance(message, Completion):
                    assert (message.finish, len(message.token_ids)) in {(Finish.LENGTH, 60), (Finish.STOP, len(message.token_ids))}
                    num_done += 1
            loop.outbox.clear()
            publisher.held(loop.version)
            peaks[loop.version] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{num_done} sequences over {NUM_SWAPS} swaps; peak memory {peaks[200] >> 10} MiB at 200, {peaks[NUM_SWAPS] >> 10} at the end"
        )
        assert num_done > 100
        assert peaks[NUM_SWAPS] - peaks[200] < 8 << 10, "KiB"

"""Every family of the table, at tiny size with random weights, by the trainer and a real engine: agreement, a swap in flight, export.

Prompts, completions and windows are so sized that every layer with a window leaves tokens out of it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pipelinerl.config.families import FAMILIES
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Completion, Generate, Int32, Sampling, StageWeights, WeightsCommitted, WeightsStaged
from tests import families

if TYPE_CHECKING:
    from trainer.model.model import Model
    from trainer.weights.publisher import Publisher

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

MAX_GAP = 5e-5
"""Nats, of any token, in float32."""
SERVED = [family.model_type for family in FAMILIES if not family.refused]
REFUSED = [family.model_type for family in FAMILIES if family.refused]
PROMPTS = [np.random.default_rng(size).integers(3, 120, size=size, dtype=np.int32) for size in (5, 2 * families.WINDOW)]
Plain = Callable[[Path, list[list[int]]], dict[str, list[list[float]]]]


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    """Log-probabilities of a folder by plain transformers and plain vLLM, by one process for all families."""
    command = [sys.executable, "-P", str(Path(families.__file__).with_name("plain_models.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        tasks, answers = process.stdin, process.stdout

        def ask(folder: Path, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
            print(json.dumps({"folder": str(folder), "sequences": sequences}), file=tasks, flush=True)
            return json.loads(answers.readline())

        yield ask
        tasks.close()


def ask(loop: EngineLoop, *, name: str, count: int = 6, max_tokens: int = 24) -> None:
    """Siblings of two prompts, a short one and one longer than any window."""
    for number in range(count):
        sampling = Sampling(max_tokens=max_tokens, temperature=1.0, stop_token_ids=(), seed=number)
        loop.handle(Generate(rollout_id=f"{name}/{number}", attempt=0, token_ids=PROMPTS[number % 2], sampling=sampling))


def sampled(loop: EngineLoop, *, name: str) -> list[Completion]:
    ask(loop, name=name)
    while loop.has_work:
        loop.advance()
    found = {message.rollout_id: message for message in loop.outbox if isinstance(message, Completion)}
    loop.outbox.clear()
    return [found[f"{name}/{number}"] for number in range(len(found))]


def sequences_of(completions: list[Completion]) -> list[Int32]:
    return [np.concatenate([PROMPTS[number % 2], completion.token_ids]) for number, completion in enumerate(completions)]


def gap(model: Model, completions: list[Completion]) -> float:
    """The largest difference between the trainer's log-probabilities, of one packed row of all siblings, and the engine's."""
    import torch

    from trainer.rows.arrange import arrange

    sequences = sequences_of(completions)
    mask = [np.arange(len(sequence)) >= len(PROMPTS[number % 2]) for number, sequence in enumerate(sequences)]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    row = arrange(np.concatenate(sequences), loss_mask=np.concatenate(mask), lengths=lengths, names=[""] * len(lengths))
    assert row is not None
    with torch.no_grad():
        logprobs, _ = model.logprobs(row)
    return float(np.abs(logprobs.numpy() - np.concatenate([completion.logprobs for completion in completions])).max())


@contextlib.contextmanager
def left_as_it_was(kind: type) -> Iterator[None]:
    """Undo what vLLM does to the class of a model that it serves by transformers' own code: this process is the trainer, too."""
    bases, before = kind.__bases__, dict(vars(kind))
    yield
    kind.__bases__ = bases
    for name in vars(kind).keys() - before.keys():
        delattr(kind, name)
    for name, value in before.items():
        if vars(kind)[name] is not value:
            setattr(kind, name, value)


class Stager:
    """A staging thread that says when it has staged."""

    def __init__(self, thread: StagingThread) -> None:
        self._thread = thread

    def __call__(self, order: StageWeights) -> concurrent.futures.Future[None]:
        self.last = self._thread(order)
        return self.last


def swap(loop: EngineLoop, publisher: Publisher, stager: Stager, *, version: int) -> None:
    """Publish the present weights while sequences are half decoded; nothing of them is lost."""
    ask(loop, name="meanwhile", max_tokens=128)
    for _ in range(3):
        loop.advance()
    policy = publisher.publish(version)
    assert policy is not None
    loop.handle(StageWeights(version=version, buffer=policy.buffer, digest=policy.digest))
    stager.last.result(timeout=60.0)  # else a busy machine could stage until every sequence has ended
    while loop.is_swapping or loop.has_work:
        loop.advance()
    assert [type(message) for message in loop.outbox if not isinstance(message, Completion)] == [WeightsStaged, WeightsCommitted]
    spans = [np.unique(message.versions).tolist() for message in loop.outbox if isinstance(message, Completion)]
    assert spans == [[version - 1, version]] * 6, "the swap fell into every sequence"
    loop.outbox.clear()


@pytest.mark.parametrize("model_type", SERVED)
def test_a_family_agrees_swaps_and_is_exported(tmp_path: Path, plain: Plain, model_type: str) -> None:
    import torch

    from tests import real_engine
    from trainer.checkpoint.model_folder import save_model
    from trainer.model.model import Model
    from trainer.weights.publisher import Publisher

    folder = families.make_folder(tmp_path / "model", model_type=model_type)
    model = Model(folder, dtype="float32", temperature=1.0, device=torch.device("cpu"))
    setattr(model.module.base_model, "do_not_compile", True)  # noqa: B010  # which it knows nothing of
    publisher = Publisher(model.tensors, tied_names=model.tied_names, run_folder=tmp_path, deadline_s=10.0, address="127.0.0.1")
    engine_of = real_engine.vllm_engine(folder, max_running=8)
    with left_as_it_was(type(model.module.base_model)), contextlib.closing(publisher), engine_of as engine, StagingThread(engine) as thread:
        stager = Stager(thread)
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        publisher.fix_layout(engine.limits.tensors)
        first = sampled(loop, name="first")
        assert gap(model, first) <= MAX_GAP
        chance = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=chance) * 0.03
        assert gap(model, first) > 0.1, "a policy that says the same would swap unseen"
        swap(loop, publisher, stager, version=1)
        completions = sampled(loop, name="second")
        gaps = [gap(model, completions)]
    save_model(model, tmp_path / "exported", source=folder)
    found = plain(tmp_path / "exported", [sequence.tolist() for sequence in sequences_of(completions)])
    for of_sequences in found.values():
        ends = [np.array(logprobs, np.float32)[len(PROMPTS[number % 2]) - 1 :] for number, logprobs in enumerate(of_sequences)]
        differences = [np.abs(end - one.logprobs).max() for end, one in zip(ends, completions, strict=True)]
        gaps.append(float(max(differences)))
    print(
        f"{model_type}: largest gap after the swap {gaps[0]:.1e}; of the exported folder "
        + ", ".join(f"{name} {value:.1e}" for name, value in zip(found, gaps[1:], strict=True))
    )
    assert max(gaps) <= MAX_GAP


@pytest.mark.parametrize("model_type", ["phi3", "glm4"])
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # vLLM sends what it has pickled
@pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated:FutureWarning")  # vLLM calls it
def test_fused_tensors_are_cut_by_each_of_their_things_over_two_ranks(tmp_path: Path, model_type: str) -> None:
    """A rank holds its own rows of q, of k and of v, or of gate and of up, which lie apart in the tensor that the trainer publishes."""
    import torch

    from tests import real_engine
    from trainer.model.model import Model
    from trainer.weights.publisher import Publisher

    folder = families.make_folder(tmp_path / "model", model_type=model_type)
    model = Model(folder, dtype="float32", temperature=1.0, device=torch.device("cpu"))
    publisher = Publisher(model.tensors, tied_names=model.tied_names, run_folder=tmp_path, deadline_s=10.0, address="127.0.0.1")
    engine_of = real_engine.vllm_engine(folder, max_running=8, options={"tensor_parallel_size": 2})
    with contextlib.closing(publisher), engine_of as engine, StagingThread(engine) as thread:
        stager = Stager(thread)
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        publisher.fix_layout(engine.limits.tensors)
        first = sampled(loop, name="first")
        assert gap(model, first) <= MAX_GAP
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.03
        assert gap(model, first) > 0.1, "a policy that says the same would swap unseen"
        swap(loop, publisher, stager, version=1)
        assert gap(model, sampled(loop, name="second")) <= MAX_GAP


def test_an_adapter_of_fused_matrices_is_served_as_the_trainer_has_it(tmp_path: Path) -> None:
    """One adapter spans q, k and v of Phi-3, and one gate and up: by vLLM beside the model, and by the trainer in its own layers."""
    import torch

    from pipelinerl.weights.adapters import AdapterShape
    from tests import real_engine
    from trainer.model.lora import Adapters
    from trainer.model.model import Model
    from trainer.weights.publisher import Publisher

    folder = families.make_folder(tmp_path / "model", model_type="phi3")
    targets = tuple(next(family.lora for family in FAMILIES if family.model_type == "phi3").split(", "))
    adapters = Adapters(rank=4, alpha=8.0, targets=targets)
    model = Model(folder, dtype="float32", temperature=1.0, device=torch.device("cpu"), adapters=adapters)
    options = {"tied_names": model.tied_names, "run_folder": tmp_path, "deadline_s": 10.0, "address": "127.0.0.1"}
    publisher = Publisher(model.tensors, adapters=model.adapters, **options)
    shape = AdapterShape(rank=4, alpha=8.0, targets=targets)
    engine_of = real_engine.vllm_engine(folder, max_running=8, adapters=shape)
    with contextlib.closing(publisher), engine_of as engine, StagingThread(engine) as stager:
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        publisher.fix_layout(engine.limits.tensors)
        first = sampled(loop, name="first")
        assert gap(model, first) <= MAX_GAP
        with torch.no_grad():
            for name, parameter in model.named_parameters().items():
                if name.endswith("lora_B"):
                    parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1
        assert gap(model, first) > 0.1
        policy = publisher.publish(1)
        assert policy is not None
        loop.handle(StageWeights(version=1, buffer=policy.buffer, digest=policy.digest))
        while loop.is_swapping:
            loop.advance()
        assert gap(model, sampled(loop, name="second")) <= MAX_GAP


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_is_refused_for_a_reason_that_vllm_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Without our table an engine of it could not take policies either: the day that it can, the table is wrong."""
    from pipelinerl.engine.vllm import engine
    from tests import real_engine

    folder = families.make_folder(tmp_path / "model", model_type=model_type)
    with pytest.raises(ConfigError, match=rf"a {model_type} cannot be served to train it: vLLM"), real_engine.vllm_engine(folder):
        pass
    monkeypatch.setattr(engine, "check_servable", lambda folder: None)
    with pytest.raises(ConfigError, match=r"are not filled.*experts\.routed_experts"), real_engine.vllm_engine(folder):
        pass

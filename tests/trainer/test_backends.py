"""Other libraries' models train what transformers' train, in each layout they have: gradients, policies, checkpoints, exported folders.

Skipped where they are not installed: `pip install -e '.[torchtitan,megatron]'`.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pipelinerl.config.backends import TrainerBackend
from pipelinerl.config.layout import Layout
from pipelinerl.config.trainer_memory import ActivationCheckpointing
from tests.trainer.conductor import make_config
from tests.trainer.ranks import run_jobs
from tests.trainer.test_layouts import train
from tests.trainer.test_parallel import go_through_a_run
from tests.trainer.test_resharding import go_on
from tests.trainer.tiny import make_folder, make_model
from trainer.export import export
from trainer.model.megatron_names import Heads, packed_of, parts_of
from trainer.parallel.replicas import Replicas

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:::megatron"),  # of what it will change, and what is faster on a GPU
]

FSDP2, TITAN, MEGATRON = TrainerBackend
CASES = {
    (TITAN, "qwen3"): [Layout(ranks=2, shard=2), Layout(ranks=2, tensor=2)],
    (TITAN, "llama"): [Layout(ranks=2, shard=2), Layout(ranks=2, tensor=2), Layout(ranks=2, pipeline=2)],
    (MEGATRON, "qwen3"): [Layout(ranks=2), Layout(ranks=2, tensor=2)],
    (MEGATRON, "llama"): [Layout(ranks=2, tensor=2), Layout(ranks=2, pipeline=2)],
}
"""Qwen3 has tied embeddings, which neither's pipelines know. There are 61 words: two ranks do not have as many."""
FOUR_RANKS = {
    "torchtitan, shard 2, tensor 2": (TITAN, Layout(ranks=4, shard=2, tensor=2)),
    "torchtitan, shard 2, pipeline 2": (TITAN, Layout(ranks=4, shard=2, pipeline=2)),
    "torchtitan, 2 copies of shard 2": (TITAN, Layout(ranks=4, shard=2)),
    "megatron, tensor 2, pipeline 2": (MEGATRON, Layout(ranks=4, tensor=2, pipeline=2)),
    "megatron, 2 copies of tensor 2": (MEGATRON, Layout(ranks=4, tensor=2)),
}
CHAINS = {
    TITAN: [(Layout(ranks=2, shard=2), TITAN), (Layout(ranks=2, tensor=2), FSDP2), (Layout(ranks=2, tensor=2), TITAN)],
    MEGATRON: [(Layout(ranks=2, tensor=2), MEGATRON), (Layout(ranks=2, pipeline=2), MEGATRON), (Layout(ranks=2), MEGATRON)],
}
RUNS = [(TITAN, "qwen3", "shard"), (TITAN, "qwen3", "tensor"), (MEGATRON, "qwen3", "tensor"), (MEGATRON, "llama", "pipeline")]


@pytest.fixture(autouse=True)
def needs_its_package(request: pytest.FixtureRequest) -> None:
    package = "torchtitan" if "torchtitan" in request.node.name else "megatron"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[{package}]'")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of four layers."""
    return {family: make_folder(tmp_path_factory.mktemp(family), family=family, num_hidden_layers=4) for family in ("llama", "qwen3")}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("backend", "family"), CASES)
def test_it_trains_what_transformers_trains(deep: dict[str, Path], tmp_path: Path, backend: TrainerBackend, family: str) -> None:
    job = functools.partial(train, folder=deep[family], method="grpo")
    expected = job(Replicas(ranks=1, deadline_s=60))
    theirs = functools.partial(by_name, job, folder=deep[family], backend=backend)
    (alone,) = run_jobs([(Layout(), functools.partial(theirs, activation_checkpointing=ActivationCheckpointing.FULL))], tmp_path)
    for ranks in [alone, *run_jobs([(layout, theirs) for layout in CASES[backend, family]], tmp_path)]:
        for rank in ranks:
            check(rank, expected)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", FOUR_RANKS)
def test_it_does_so_in_layouts_of_four_ranks(deep: dict[str, Path], tmp_path: Path, case: str) -> None:
    backend, layout = FOUR_RANKS[case]
    choice = ActivationCheckpointing.SELECTIVE if backend is TITAN else ActivationCheckpointing.FULL
    job = functools.partial(train, folder=deep["llama"], method="gspo", num_steps=1)
    expected = job(Replicas(ranks=1, deadline_s=60))
    (ranks,) = run_jobs(
        [
            (
                layout,
                functools.partial(by_name, job, folder=deep["llama"], backend=backend, activation_checkpointing=choice),
            )
        ],
        tmp_path,
    )
    for rank in ranks:
        check(rank, expected)


def by_name(job: Callable[..., dict[str, Any]], replicas: Replicas, *, folder: Path, **options: Any) -> dict[str, Any]:
    """What a job gives, with gradients by Hugging Face's names."""
    found = job(replicas, **options)
    if options["backend"] is MEGATRON:
        heads, gradients = Heads.of(AutoConfig.from_pretrained(folder)), found["gradients"]
        found["gradients"] = {}
        for theirs, gradient in gradients.items():
            names = parts_of(theirs)
            whole = gradient if packed_of(theirs) is None else gradient.flatten(0, 1)
            found["gradients"] |= zip(names, heads.split(whole, num=len(names)), strict=True)
    return found


def check(rank: dict[str, Any], expected: dict[str, Any]) -> None:
    metrics = {name: value for name, value in expected["metrics"].items() if name != "num_micro_batches"}
    assert {name: rank["metrics"][name] for name in metrics} == pytest.approx(metrics, rel=2e-4, abs=1e-5)
    assert rank["gradients"]
    for name, gradient in rank["gradients"].items():
        whole = expected["gradients"][name]
        assert float((gradient - whole).norm() / whole.norm()) < 1e-5, f"gradient of {name}"
    assert rank["weights"].keys() == expected["weights"].keys()
    for name, weight in rank["weights"].items():
        assert torch.allclose(weight, expected["weights"][name], atol=2e-4), f"weight {name}"


@pytest.mark.parametrize("backend", CHAINS)
def test_a_checkpoint_is_gone_on_from_in_another_layout_and_exported(
    deep: dict[str, Path], tmp_path: Path, backend: TrainerBackend
) -> None:
    """Either of fsdp2 and torchtitan goes on from the other's; Megatron-Core's have its own names."""
    folder = deep["llama"]
    job = functools.partial(go_on, folder=folder, run_folder=tmp_path, dtype="bfloat16")
    jobs = [(layout, functools.partial(job, version=number, backend=kind)) for number, (layout, kind) in enumerate(CHAINS[backend])]
    found = run_jobs(jobs, tmp_path)
    for earlier, later in itertools.pairwise(found):
        saved = {name: tensor for rank in earlier for name, tensor in rank["after"].items()}
        loaded = {name: tensor for rank in later for name, tensor in rank["before"].items()}
        assert saved.keys() == loaded.keys()
        assert [name for name, tensor in loaded.items() if not torch.equal(tensor, saved[name])] == []
    assert export(make_config(folder, backend=backend), tmp_path, tmp_path / "exported") == len(jobs)
    exported = make_model(tmp_path / "exported").tensors()
    assert exported.keys() == found[-1][0]["tensors"].keys()
    assert [name for name, tensor in found[-1][0]["tensors"].items() if not torch.equal(tensor, exported[name].to(tensor.dtype))] == []


@pytest.mark.parametrize(("backend", "family", "kind"), RUNS)
def test_it_goes_through_a_run_whose_engine_has_the_very_policies(
    deep: dict[str, Path], tmp_path: Path, backend: TrainerBackend, family: str, kind: str
) -> None:
    conductor = go_through_a_run(deep[family], tmp_path, steps=2, parallel={kind: 2}, backend=backend)
    assert [policy.version for policy in conductor.published] == [1, 2]
    assert all(done.metrics["logprob_gap_max"] < 1e-4 for done in conductor.done)
    saved = make_model(tmp_path / "model").tensors()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in conductor.engine.tensors().items())

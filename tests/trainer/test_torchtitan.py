"""torchtitan's models train what transformers' train, in each layout they have: gradients, policies, checkpoints of either by the other.

Skipped where torchtitan is not installed: `pip install -e '.[torchtitan]'`.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.config.backends import TrainerBackend
from pipelinerl.config.layout import Layout
from tests.trainer.ranks import run_jobs
from tests.trainer.test_layouts import train
from tests.trainer.test_parallel import go_through_a_run
from tests.trainer.test_resharding import go_on
from tests.trainer.tiny import make_folder, make_model
from trainer.parallel.replicas import Replicas

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed: pip install -e '.[torchtitan]'"
    ),
]

TITAN = TrainerBackend.TORCHTITAN
CASES = {
    "qwen3": [Layout(ranks=2, shard=2), Layout(ranks=2, tensor=2)],
    "llama": [Layout(ranks=2, shard=2), Layout(ranks=2, tensor=2), Layout(ranks=2, pipeline=2)],
}
"""The first has tied embeddings, which torchtitan's pipelines do not know."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of four layers."""
    return {family: make_folder(tmp_path_factory.mktemp(family), family=family, num_hidden_layers=4) for family in CASES}


@pytest.mark.parametrize("family", CASES)
def test_it_trains_what_transformers_trains(deep: dict[str, Path], tmp_path: Path, family: str) -> None:
    job = functools.partial(train, folder=deep[family], method="grpo")
    expected = job(Replicas(ranks=1, deadline_s=60))
    theirs = functools.partial(job, backend=TITAN)
    (alone,) = run_jobs([(Layout(), functools.partial(theirs, activation_checkpointing=True))], tmp_path)
    for ranks in [alone, *run_jobs([(layout, theirs) for layout in CASES[family]], tmp_path)]:
        assert set().union(*(rank["gradients"] for rank in ranks)) == expected["gradients"].keys()
        for rank in ranks:
            check(rank, expected)


@pytest.mark.parametrize("layout", [Layout(ranks=4, shard=2, tensor=2), Layout(ranks=4, shard=2, pipeline=2), Layout(ranks=4, shard=2)])
def test_it_does_so_in_layouts_of_four_ranks(deep: dict[str, Path], tmp_path: Path, layout: Layout) -> None:
    job = functools.partial(train, folder=deep["llama"], method="gspo", num_steps=1)
    expected = job(Replicas(ranks=1, deadline_s=60))
    (ranks,) = run_jobs([(layout, functools.partial(job, backend=TITAN, activation_checkpointing=True))], tmp_path)
    for rank in ranks:
        check(rank, expected)


def check(rank: dict[str, Any], expected: dict[str, Any]) -> None:
    metrics = {name: value for name, value in expected["metrics"].items() if name != "num_micro_batches"}
    assert {name: rank["metrics"][name] for name in metrics} == pytest.approx(metrics, rel=2e-4, abs=1e-5)
    for name, gradient in rank["gradients"].items():
        whole = expected["gradients"][name]
        assert float((gradient - whole).norm() / whole.norm()) < 1e-5, f"gradient of {name}"
    assert rank["weights"].keys() == expected["weights"].keys()
    for name, weight in rank["weights"].items():
        assert torch.allclose(weight, expected["weights"][name], atol=2e-4), f"weight {name}"


def test_a_checkpoint_of_either_backend_is_gone_on_from_by_the_other(deep: dict[str, Path], tmp_path: Path) -> None:
    chain = [(Layout(ranks=2, shard=2), TITAN), (Layout(ranks=2, tensor=2), TrainerBackend.FSDP2), (Layout(ranks=2, tensor=2), TITAN)]
    job = functools.partial(go_on, folder=deep["qwen3"], run_folder=tmp_path / "run", dtype="bfloat16")
    jobs = [(layout, functools.partial(job, version=number, backend=backend)) for number, (layout, backend) in enumerate(chain)]
    found = run_jobs(jobs, tmp_path)
    for earlier, later in itertools.pairwise(found):
        for rank in later:
            assert rank["before"].keys() == earlier[0]["after"].keys()
            assert all(torch.equal(tensor, earlier[0]["after"][name]) for name, tensor in rank["before"].items())


@pytest.mark.parametrize("parallel", [{"shard": 2}, {"tensor": 2}], ids=str)
def test_it_goes_through_a_run_whose_engine_has_the_very_policies(deep: dict[str, Path], tmp_path: Path, parallel: dict[str, int]) -> None:
    conductor = go_through_a_run(deep["qwen3"], tmp_path, steps=2, parallel=parallel, backend="torchtitan")
    assert [policy.version for policy in conductor.published] == [1, 2]
    assert all(done.metrics["logprob_gap_max"] < 1e-4 for done in conductor.done)
    saved = make_model(tmp_path / "model").tensors()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in conductor.engine.tensors().items())

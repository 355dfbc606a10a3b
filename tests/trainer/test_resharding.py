"""A run goes on in another layout than the one it was saved in, from the very same state: every tensor whole and bit by bit."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from pipelinerl.config.layout import Layout, Schedule
from pipelinerl.messages import CheckpointSaved
from pipelinerl.storage.checkpoint_folder import complete
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_batch, make_folder, make_model, make_sample, make_seal, make_step
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.portable import state_of
from trainer.parallel.replicas import Replicas
from trainer.step import Step

pytestmark = pytest.mark.process

CHAINS = {
    # Experts packed in pairs and cut by tensor parallelism, shared out, sharded by place, in stages.
    "qwen3_moe": [
        Layout(ranks=4, shard=2, tensor=2),
        Layout(ranks=4, pipeline=2, expert=2),
        Layout(ranks=4, shard=4, expert=2),
        Layout(ranks=4, shard=2, pipeline=2, schedule=Schedule.INTERLEAVED),
        Layout(ranks=4, context=2, tensor=2),
    ],
    # Tied embeddings at both ends of a pipeline; bfloat16 with and without weights in float32 beside.
    "qwen3": [
        Layout(ranks=2, pipeline=2),
        Layout(ranks=2, tensor=2),
        Layout(ranks=2, shard=2),
        Layout(ranks=2, pipeline=2, schedule=Schedule.INTERLEAVED),
    ],
}


def go_on(
    replicas: Replicas, *, folder: Path, run_folder: Path, version: int, dtype: str, **options: Any
) -> dict[str, dict[str, torch.Tensor]]:
    """Restore version `version`, if that is not 0; train a step; save. Returns the state before and after, whole, and what is published.

    While the checkpoint is written, training goes on, with all its collectives.
    """
    model = make_model(folder, replicas=replicas, dtype=dtype, **options)
    step, optimizer = make_step(model, replicas=replicas)
    checkpoints = Checkpoints(
        run_folder / "checkpoints", state=lambda: state_of(model, optimizer), rank=replicas.rank, num_ranks=replicas.size, keep=9
    )
    restored = checkpoints.restore()
    assert (0 if restored is None else restored.version) == version
    optimizer.round()
    before = _whole(state_of(model, optimizer))
    _train(step, replicas, version=version)
    checkpoints.begin(version + 1, commit="c", num_samples=0, samples="0")
    after, tensors = _whole(state_of(model, optimizer)), {name: tensor.clone() for name, tensor in model.tensors().items()}
    _train(step, replicas, version=version)
    checkpoints.wait()
    assert all(isinstance(news, CheckpointSaved) for news in checkpoints.take_news())
    assert replicas.all_agree(True, what="to have a checkpoint written")  # the first rank gives it its name
    return {"before": before, "after": after, "tensors": tensors}


def _train(step: Step, replicas: Replicas, *, version: int) -> dict[str, float]:
    generator = np.random.default_rng(version)
    samples = [make_sample(generator, prompt=4, completion=int(generator.integers(1, 8))) for _ in range(8)]
    step.add(make_batch(samples[replicas.number :: replicas.layout.replicas], step=version))
    seal = make_seal(samples, step=version)
    step.train_held(seal)
    return step.finish(seal)


def _whole(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for part, tensors in state.items()
        for name, tensor in tensors.items()
    }


def _of_all(ranks: list[dict[str, Any]], when: str) -> dict[str, torch.Tensor]:
    """The state of a layout: what each rank has of it; what several have is the same."""
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, tensor in rank[when].items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", "float32"), ("qwen3", "bfloat16")])
def test_a_checkpoint_is_read_in_any_layout(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_folder(tmp_path / "model", family=family, num_hidden_layers=4)
    job = functools.partial(go_on, folder=folder, run_folder=tmp_path, dtype=dtype)
    jobs = [(layout, functools.partial(job, version=version)) for version, layout in enumerate(CHAINS[family])]
    results = run_jobs(jobs, tmp_path)
    results.append([job(Replicas(ranks=1, deadline_s=60), version=len(jobs))])
    for saved, loaded in itertools.pairwise(results):
        expected, got = _of_all(saved, "after"), _of_all(loaded, "before")
        assert expected.keys() == got.keys()
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
        assert any(not torch.equal(got[name], tensor) for name, tensor in _of_all(loaded, "after").items())


def fall_back(replicas: Replicas, *, folder: Path, run_folder: Path, name: str) -> dict[str, Any]:
    """Damage a file of the newest checkpoint, which one rank alone reads to check it; return what this rank then started from."""
    if replicas.rank == 0:
        path = complete(run_folder / "checkpoints")[-1] / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    assert replicas.all_agree(True, what="to have a file damaged")
    model = make_model(folder, replicas=replicas)
    _, optimizer = make_step(model, replicas=replicas)
    checkpoints = Checkpoints(
        run_folder / "checkpoints", state=lambda: state_of(model, optimizer), rank=replicas.rank, num_ranks=replicas.size, keep=9
    )
    restored = checkpoints.restore()
    assert replicas.all_agree(True, what="to have restored")
    assert checkpoints.damaged[0].version == (0 if restored is None else restored.version) + 1
    return {"version": torch.tensor(0 if restored is None else restored.version), "before": _whole(state_of(model, optimizer))}


def test_ranks_agree_on_the_checkpoint_to_fall_back_to_whoever_finds_the_damage(tmp_path: Path) -> None:
    folder, layout = make_folder(tmp_path / "model", family="qwen3"), Layout(ranks=2, shard=2)
    save = functools.partial(go_on, folder=folder, run_folder=tmp_path, dtype="float32")
    spoil = functools.partial(fall_back, folder=folder, run_folder=tmp_path)
    jobs = [(layout, functools.partial(save, version=version)) for version in (0, 1, 2)]
    jobs += [(layout, functools.partial(spoil, name=name)) for name in ("__0_0.distcp", "__1_0.distcp")]
    saved, results = (found := run_jobs(jobs, tmp_path))[:3], found[3:]
    for result, version in zip(results, (2, 1), strict=True):
        assert [int(rank["version"]) for rank in result] == [version, version]
        expected, got = _of_all(saved[version - 1], "after"), _of_all(result, "before")
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def step_of(replicas: Replicas, *, folder: Path, run_folder: Path, version: int) -> dict[str, float]:
    """Restore version `version`, if that is not 0, train its step, save, and return its figures."""
    model = make_model(folder, replicas=replicas)
    step, optimizer = make_step(model, replicas=replicas)
    checkpoints = Checkpoints(
        run_folder / "checkpoints", state=lambda: state_of(model, optimizer), rank=replicas.rank, num_ranks=replicas.size, keep=9
    )
    restored = checkpoints.restore()
    assert (0 if restored is None else restored.version) == version
    optimizer.round()
    figures = _train(step, replicas, version=version)
    checkpoints.begin(version + 1, commit="c", num_samples=0, samples="0")
    checkpoints.wait()
    assert replicas.all_agree(True, what="to have a checkpoint written")
    return figures


def test_losses_of_a_trainer_that_gets_a_rank_and_gives_it_back_are_those_of_one_rank(tmp_path: Path) -> None:
    folder, alone = make_folder(tmp_path / "model", family="qwen3"), Replicas(ranks=1, deadline_s=60)
    expected = [step_of(alone, folder=folder, run_folder=tmp_path / "alone", version=version) for version in range(4)]
    job = functools.partial(step_of, folder=folder, run_folder=tmp_path / "changing")
    got = [job(alone, version=0)]
    got += [ranks[0] for ranks in run_jobs([(Layout(ranks=2), functools.partial(job, version=version)) for version in (1, 2)], tmp_path)]
    got.append(job(alone, version=3))
    names = {"loss", "grad_norm"}
    assert names <= expected[0].keys()
    assert len({figures["loss"] for figures in expected}) == 4, "each step has a loss of its own"
    for one, other in zip(expected, got, strict=True):
        assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-4, abs=1e-6)

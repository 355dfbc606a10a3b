"""Two ranks of a trainer train their pieces where the ranks of an engine read them, and copy only what the two cut differently."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.config.layout import Layout
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import plan_layout, views
from pipelinerl.weights.reshard import Box, Part, whole
from pipelinerl.weights.sections import pieces_in, sections_of
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_folder, make_model
from trainer.checkpoint import portable
from trainer.optimizer import Optimizer, Schedule
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import PackedRow
from trainer.weights.in_place import is_there, mover
from trainer.weights.publisher import Publisher
from trainer.weights.sharded_weights import ShardedWeights

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time"),
]
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Cut by its second dimension in an engine, other matrices by their first."""
LEARNING_RATE = 0.01


def box_in_engine(name: str, shape: tuple[int, ...], rank: int) -> Box:
    if len(shape) == 1:
        return whole(shape)
    cut = int(name.endswith(BY_COLUMNS))
    size = shape[cut] // 2
    return tuple((rank * size, (rank + 1) * size) if place == cut else (0, length) for place, length in enumerate(shape))


def sections(shapes: dict[str, tuple[int, ...]]) -> tuple[tuple[Tensor, ...], tuple[dict[str, tuple[Box, ...]], ...]]:
    """The layout of an engine of two ranks, and what each holds."""
    parts: list[dict[str, list[Part]]] = []
    for rank in range(2):
        offset, own = 0, dict[str, list[Part]]()
        for name, shape in shapes.items():
            box = box_in_engine(name, shape, rank)
            size = tuple(end - first for first, end in box)
            num_bytes = 4 * torch.Size(size).numel()
            tensor = Tensor(name=name, shape=size, dtype="float32", offset_bytes=offset, num_bytes=num_bytes)
            own[name], offset = [Part(box=box, tensor=tensor)], offset + -(-num_bytes // 64) * 64
        parts.append(own)
    return sections_of(parts)[0], tuple({name: (own[0].box,) for name, own in rank.items()} for rank in parts)


def take_turns(replicas: Replicas, *, folder: Path, run_folder: Path, is_cut: bool) -> dict[str, Any]:
    """Publish a model, train a step of it where it lies then, and publish again: what is there, and what had to be copied."""
    model = make_model(folder, replicas=replicas)
    schedule, shardings = Schedule(learning_rate=LEARNING_RATE, num_steps=10), model.shardings
    optimizer = Optimizer(
        model.parameters(),
        schedule=schedule,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_grad_norm=1e9,
        shardings=shardings,
        replicas=replicas,
    )
    sharded = ShardedWeights(model, replicas=replicas, move=mover(model, optimizer))
    shapes = {name: tuple(one.shape) for name, one in sharded.described().items() if name not in model.tied_names}
    layout, shards = sections(shapes)
    if not is_cut:
        layout, shards = plan_layout({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}), ()
    publisher = None
    if replicas.rank == 0:
        publisher = Publisher(
            sharded.described, tied_names=model.tied_names, run_folder=run_folder, deadline_s=20.0, write=sharded.lead, in_place=True
        )
        publisher.fix_layout(layout, transport="shared_memory", shards=shards)
    model.logprobs(row())  # FSDP has gathered its pieces from where they were
    published, copied, said = [], [], io.StringIO()
    for version in (0, 1):
        if version:
            optimizer.gradient.fill_(1.0)
            optimizer.step(0, denominator=1.0)
        if publisher is None:
            with contextlib.redirect_stdout(said):
                sharded.follow()
            buffer = next(iter(sharded._mapped.values()))
        else:
            with contextlib.redirect_stdout(said):
                publisher.write(version)
            sharded.end()
            assert publisher.publish(version) is not None
            assert publisher._pool is not None
            assert publisher._pool._latest is not None
            buffer = publisher._pool._latest.memory
        replicas.all_agree(True, what="to read what every rank has written")
        targets = views(buffer, layout)
        published.append({name: view.clone() for name, view in targets.items()})
        copied.append(sum(source.nbytes for source, view in sharded._places(targets) if not is_there(source, view)))
    copy.deepcopy(portable.state_of(model, optimizer))  # a checkpoint begins so
    logprobs, _ = model.logprobs(row())
    replicas.all_agree(True, what="to end together")
    if publisher is not None:
        publisher.close()
    num_all = sum(source.nbytes for source, _ in sharded._places(targets))
    words = f"engines read {num_all - copied[0]} bytes of the weights where they are trained, and {copied[0]} are written for them\n"
    assert said.getvalue() == words
    return {"published": published, "copied": copied, "logprobs": logprobs.detach()}


def row() -> PackedRow:
    ids = np.arange(5, 29, dtype=np.int32)
    found = arrange(ids, loss_mask=ids >= 13, lengths=np.array([24], np.int32), names=["0/0"])
    assert found is not None
    return found


def test_pieces_that_both_cut_alike_are_trained_where_engines_read_them_and_only_the_others_are_copied(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", family="qwen3", vocab_size=64)
    job = functools.partial(take_turns, folder=folder, run_folder=tmp_path / "run", is_cut=True)
    model = make_model(folder)
    untrained = {name: tensor.clone() for name, tensor in model.tensors().items()}
    trained = {name: tensor - LEARNING_RATE for name, tensor in untrained.items()}
    shapes = {name: tuple(one.shape) for name, one in untrained.items() if name not in model.tied_names}
    pieces = pieces_in(*sections(shapes), shapes)
    # Fully sharded weights are cut by their first dimension, as are those matrices of an engine whose outputs its ranks share. Norms,
    # which both ranks of an engine have whole, lie half by half in the section of one, and are copied to the other's.
    otherwise = [piece for piece in pieces.values() if piece.name.endswith(BY_COLUMNS) or (len(piece.shape) == 1 and piece.rank)]
    num_bytes = sum(4 * math.prod(piece.shape) for piece in otherwise)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(LEARNING_RATE)
    expected_logprobs, _ = model.logprobs(row())
    whole_ones = functools.partial(job, is_cut=False)
    jobs = [(Layout(ranks=2, tensor=2), job), (Layout(ranks=2, shard=2), job), (Layout(ranks=2, shard=2), whole_ones)]
    for ranks, (copied, wanted) in zip(run_jobs(jobs, tmp_path), ((0, pieces), (num_bytes, pieces), (0, {})), strict=True):
        assert [sum(rank["copied"][version] for rank in ranks) for version in (0, 1)] == [copied, copied]
        for rank in ranks:
            for version, expected in enumerate((untrained, trained)):
                for name, piece in wanted.items():
                    assert torch.allclose(rank["published"][version][name], expected[piece.name][piece.slices], atol=1e-6), name
                for name in {} if wanted else shapes:
                    assert torch.allclose(rank["published"][version][name], expected[name], atol=1e-6), name
            assert torch.allclose(rank["logprobs"], expected_logprobs.detach(), atol=1e-4)

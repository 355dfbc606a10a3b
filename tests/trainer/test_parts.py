"""An episode that is larger than a packed row: cut into parts, each token trains once, and the gradient is that of the whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.errors import ConfigError
from pipelinerl.messages import MicroBatch, Nodes
from tests.trainer.tiny import make_batch, make_folder, make_model, make_step
from trainer.rows.parts import parts_of


def nodes_of(*nodes: tuple[int, int]) -> Nodes:
    """Nodes of these parents and lengths."""
    return Nodes(parents=np.array([parent for parent, _ in nodes], np.int32), lengths=np.array([length for _, length in nodes], np.int32))


def test_branches_share_a_part_as_long_as_they_fit_and_their_trunk_is_in_each() -> None:
    """A prompt of 4, a turn of 2, and three branches of 3 tokens behind it: two fit 12 tokens, the third has the trunk once more."""
    nodes = nodes_of((-1, 4), (0, 2), (1, 3), (1, 3), (1, 3))
    mask = np.arange(15) >= 4
    first, second = parts_of(nodes, loss_mask=mask, max_tokens=12)
    assert first.columns.tolist() == list(range(12))
    assert first.loss_mask.tolist() == [False] * 4 + [True] * 8
    assert second.columns.tolist() == [*range(6), 12, 13, 14]
    assert second.loss_mask.tolist() == [False] * 6 + [True] * 3, "the turn that both share counts in the first"
    assert (second.nodes.parents.tolist(), second.nodes.lengths.tolist()) == ([-1, 0, 1], [4, 2, 3])


def test_what_no_turn_follows_is_in_no_part_and_nothing_to_learn_makes_none() -> None:
    nodes = nodes_of((-1, 2), (0, 2), (0, 5))
    (only,) = parts_of(nodes, loss_mask=np.array([False, False, True, True] + [False] * 5), max_tokens=4)
    assert only.columns.tolist() == [0, 1, 2, 3]
    assert parts_of(nodes, loss_mask=np.zeros(9, np.bool_), max_tokens=4) == []


def episode(seed: int, *, num_nodes: int = 14) -> tuple[Nodes, np.ndarray]:
    """A random tree behind a prompt, given and sampled nodes in turns; (nodes, [R] what was sampled)."""
    chance = random.Random(seed)
    parents, lengths, sampled = [-1], [6], [False]
    for number in range(1, num_nodes):
        parent = chance.randrange(max(0, number - 4), number)
        parents.append(parent)
        lengths.append(chance.randrange(2, 6))
        sampled.append(not sampled[parent] or chance.random() < 0.3)
    nodes = Nodes(parents=np.array(parents, np.int32), lengths=np.array(lengths, np.int32))
    return nodes, np.repeat(sampled, lengths)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_with_a_loss_is_in_one_part_and_every_part_fits(seed: int) -> None:
    nodes, mask = episode(seed)
    parts = parts_of(nodes, loss_mask=mask, max_tokens=48)
    places = np.concatenate([part.columns[part.loss_mask] for part in parts])
    assert sorted(places.tolist()) == np.flatnonzero(mask).tolist()
    assert len(parts) > 1 or len(mask) <= 48 or sum(len(part.columns) for part in parts) <= 48
    for part in parts:
        assert len(part.columns) == part.nodes.lengths.sum() <= 48
        assert (part.nodes.parents < np.arange(len(part.nodes.parents))).all()


def batch_of(seed: int) -> MicroBatch:
    nodes, mask = episode(seed)
    drawn = np.random.default_rng(seed)
    num = len(mask)
    sample = {
        "token_ids": drawn.integers(3, 60, size=num).astype(np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, drawn.normal(-4.0, 0.3, size=num), 0.0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
        "advantages": np.where(mask, drawn.normal(size=num), 0.0).astype(np.float32),
        "reward": np.array(1.0),
        "truncated": np.array(False),
    }
    return msgspec.structs.replace(make_batch([sample]), nodes=nodes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), family="llama", vocab_size=64)


@pytest.mark.parametrize("method", ["grpo", "gspo", "cispo", "dapo"])
def test_the_gradient_of_the_parts_is_that_of_the_whole(folder: Path, method: str) -> None:
    """GSPO's ratio is of all tokens of an episode, in whichever part: its loss needs them at once."""
    batch = batch_of(3)

    def trained(max_row_tokens: int | None) -> tuple[torch.Tensor, dict[str, float], int]:
        model = make_model(folder)
        step, _ = make_step(model, method=method, overrides={}, max_row_tokens=max_row_tokens)
        row = step.lay_out(batch)
        assert row is not None
        step.add(batch, row)
        step.backend.complete()
        gradients = [parameter.grad.flatten() for parameter in model.module.parameters() if parameter.grad is not None]
        return torch.cat(gradients), {name: float(value) for name, value in step._meters.items()}, len(row.parts)

    expected, meters, num_whole = trained(None)
    got, of_parts, num_parts = trained(40)
    assert num_whole == 0
    assert num_parts >= 2
    assert float(expected.abs().max()) > 0
    assert float((got - expected).abs().max() / expected.abs().max()) <= 2e-6
    assert of_parts == pytest.approx(meters, rel=1e-5, abs=1e-6)


def test_a_row_that_fits_is_laid_out_as_ever(folder: Path) -> None:
    batch = batch_of(3)
    step, _ = make_step(make_model(folder), max_row_tokens=len(batch.token_ids))
    row: Any = step.lay_out(batch)
    assert not row.parts


def test_a_method_that_reads_whole_distributions_of_a_teacher_refuses_parts(folder: Path) -> None:
    model = make_model(folder, divergence_mix=0.5)
    with pytest.raises(ConfigError, match="larger than a packed row is computed in parts, which is not written for whole distributions"):
        make_step(model, method="gkd", overrides={}, reference=make_model(folder), max_row_tokens=40)

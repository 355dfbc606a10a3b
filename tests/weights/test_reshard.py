"""Every layout of a trainer feeds every layout of an engine, bit for bit, and no rank touches more than its own share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipelinerl.errors import WeightsError
from pipelinerl.weights.reshard import Move, index_map, of_rank, whole
from tests.weights.model_parallel import Cut, Grid, shards_of

NUM_LAYERS, NUM_EXPERTS, NUM_KEY_HEADS = 4, 4, 2
SIZES = (1, 2, 4)
GRIDS = [Grid(tensor=tensor, pipeline=pipeline, expert=expert) for tensor, pipeline, expert in itertools.product(SIZES, SIZES, SIZES)]


def tiny_model() -> dict[str, np.ndarray]:
    """Random bits under the names of a mixture of experts, some experts stacked and some alone."""
    chance = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embed": (8, 4), "norm": (4,), "head": (8, 4)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"{layer}.q": (8, 4), f"{layer}.k": (4, 4), f"{layer}.o": (4, 8), f"{layer}.norm": (4,), f"{layer}.scale": ()}
        shapes |= {f"{layer}.experts.up": (NUM_EXPERTS, 8, 4), f"{layer}.experts.down": (NUM_EXPERTS, 4, 8)}
        shapes |= {f"{layer}.alone.{expert}": (8, 4) for expert in range(NUM_EXPERTS)}
    return {name: chance.integers(0, 1 << 16, shape, np.uint16) for name, shape in shapes.items()}


def cuts(name: str) -> Cut:
    layer, _, rest = name.partition(".")
    match rest:
        case "":
            return Cut(dimension=None if name == "norm" else 0, stage=0 if name == "embed" else -1)
        case "q":
            return Cut(layer=int(layer), dimension=0)
        case "k":
            return Cut(layer=int(layer), dimension=0, parts=NUM_KEY_HEADS)
        case "o":
            return Cut(layer=int(layer), dimension=1)
        case "experts.up" | "experts.down":
            return Cut(layer=int(layer), dimension=1 if rest.endswith("up") else 2, experts=0)
        case "norm" | "scale":
            return Cut(layer=int(layer))
        case _:
            return Cut(layer=int(layer), dimension=0, expert=(int(rest.rpartition(".")[2]), NUM_EXPERTS))


MODEL = tiny_model()
SHAPES = {name: value.shape for name, value in MODEL.items()}
SHARDS = {grid: shards_of(SHAPES, grid=grid, cuts=cuts, num_layers=NUM_LAYERS) for grid in GRIDS}


def held(grid: Grid) -> list[dict[str, np.ndarray]]:
    """What each rank has in memory."""
    return [{name: MODEL[name][tuple(slice(*edge) for edge in box)].copy() for name, box in boxes.items()} for boxes in SHARDS[grid]]


def follow(moves: list[Move], source: list[dict[str, np.ndarray]], target: list[dict[str, np.ndarray]]) -> None:
    for move in moves:
        target[move.target][move.name][move.target_slices] = source[move.source][move.name][move.source_slices]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", GRIDS, ids=str)
def test_every_layout_of_an_engine_is_fed_from_every_layout_of_a_trainer_bit_for_bit(trainer: Grid):
    source = held(trainer)
    for engine in GRIDS:
        expected = held(engine)
        target = [{name: np.zeros_like(value) for name, value in boxes.items()} for boxes in expected]
        moves = index_map(SHAPES, sources=SHARDS[trainer], targets=SHARDS[engine])
        follow(moves, source, target)
        for found, wanted in zip(target, expected, strict=True):
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
        for rank, wanted in enumerate(expected):
            assert sum(move.num_elements for move in of_rank(moves, target=rank)) == sum(value.size for value in wanted.values())


def test_no_rank_holds_the_whole_and_replicas_share_the_sending():
    trainer, engine = Grid(tensor=2, pipeline=2, expert=2), Grid(tensor=4)
    count = sum(value.size for value in MODEL.values())
    moves = index_map(SHAPES, sources=SHARDS[trainer], targets=SHARDS[engine])
    sent = [sum(move.num_elements for move in of_rank(moves, source=rank)) for rank in range(trainer.ranks)]
    received = [sum(move.num_elements for move in of_rank(moves, target=rank)) for rank in range(engine.ranks)]
    assert max(received) < count / 2
    assert max(sent) < 1.6 * min(sent), "what two ranks along `expert` hold alike, each sends about half of"


def test_one_overlap_by_hand():
    """[4, 6] in two halves of rows at the trainer, in three thirds of columns at the engine."""
    sources = [{"w": ((0, 2), (0, 6))}, {"w": ((2, 4), (0, 6))}]
    targets = [{"w": ((0, 4), (2 * part, 2 * part + 2))} for part in range(3)]
    moves = index_map({"w": (4, 6)}, sources=sources, targets=targets)
    assert len(moves) == 6
    assert moves[3] == Move(
        name="w",
        source=1,
        target=1,
        source_slices=(slice(0, 2), slice(2, 4)),
        target_slices=(slice(2, 4), slice(0, 2)),
        num_elements=4,
    )


@pytest.mark.parametrize(
    ("sources", "targets", "said"),
    [
        ([{}], [{"w": whole((4,))}], r"do not hold 1 of 1 tensors whole and once, for example w \[4\]: got nothing"),
        ([{"w": ((0, 3),)}], [], r"for example w \[4\]: got \[0:3\]"),
        ([{"w": ((0, 3),)}, {"w": ((2, 4),)}], [], r"for example w \[4\]: got \[0:3\], \[2:4\]"),
        ([{"w": whole((4,))}], [{"w": ((0, 5),)}], r"w: rank 0 of an engine's ranks holds \[0:5\], which is not inside a tensor of \[4\]"),
        ([{"w": whole((4,))}], [{"v": ((0, 5),)}], r"rank 0 of an engine's ranks holds v, and there is no such tensor"),
    ],
    ids=["missing", "part", "overlapping", "outside", "unknown"],
)
def test_layouts_that_do_not_fit_are_refused(sources: list[dict], targets: list[dict], said: str):
    with pytest.raises(WeightsError, match=said):
        index_map({"w": (4,)}, sources=sources, targets=targets)

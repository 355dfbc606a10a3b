"""Layouts of the trainer: how its ranks share one model, which layouts fit a model, and which is nearest to one that does not.

Ranks are numbered with tensor parallelism fastest, then context, shard, copy, and pipeline slowest, so that those who talk most are
neighbours. Expert parallelism takes the ranks of one place in the pipeline in another order: neighbours hold different experts, whatever
else they share.

Imports no torch: a head node can refuse a layout before anything runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from pipelinerl.config.base import PositiveInt, Section
from pipelinerl.errors import ConfigError


class Schedule(StrEnum):
    """The order in which the ranks of a pipeline compute the rows they hold."""

    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    """One stage per rank, which after a start computes one row forward and one backward in turns (arXiv 1806.03377)."""
    INTERLEAVED = "interleaved"
    """Two stages per rank, so that a rank starts and ends with half as much work (arXiv 2104.04473)."""
    ZERO_BUBBLE = "zero_bubble"
    """The same, and the gradients of weights are computed where a rank would wait (ZB1P of arXiv 2401.10241)."""


STAGES_PER_RANK = {Schedule.ONE_FORWARD_ONE_BACKWARD: 1, Schedule.INTERLEAVED: 2, Schedule.ZERO_BUBBLE: 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of every kind of parallelism; data-parallel copies take what the others leave of `ranks`."""

    ranks: int = 1
    shard: int = 1
    """Data-parallel replicas that share one copy of the weights, gradients and optimizer state; each takes rows of its own."""
    context: int = 1
    """Ranks that share the tokens of a row."""
    tensor: int = 1
    """Ranks that share every matrix."""
    pipeline: int = 1
    """Ranks that share the layers."""
    schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
    """In which order a pipeline computes."""
    expert: int = 1
    """Ranks that share the experts; no factor of `ranks`, they are the same ranks seen another way."""
    shards_all: bool = False
    """`shard` is as many replicas as there are, and changes with them."""

    @property
    def num_stages(self) -> int:
        """Runs of layers that a pipeline is cut into; the i-th is on its rank i modulo `pipeline`."""
        return self.pipeline * STAGES_PER_RANK[self.schedule] if self.pipeline > 1 else 1

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on the same row."""
        return self.context * self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """Rows trained at once."""
        return self.ranks // self.ranks_per_replica

    @property
    def copies(self) -> int:
        """Whole copies of the weights."""
        return self.replicas // self.shard

    @property
    def ranks_per_change(self) -> int:
        """Ranks that join and leave a live run together: a copy of the weights, or a replica where all share one copy."""
        return self.ranks_per_replica * (1 if self.shards_all else self.shard)

    def without(self, kind: str) -> Layout:
        """The nearest one to a valid layout that does without one kind of parallelism; valid, too: its ranks become copies."""
        return dataclasses.replace(self, **{kind: 1})

    def __str__(self) -> str:
        chosen: dict[str, object] = {name: getattr(self, name) for name in _KINDS if getattr(self, name) > 1}
        if self.pipeline > 1:
            chosen["schedule"] = f'"{self.schedule}"'
        return ", ".join([f"ranks = {self.ranks}", *(f"parallel.{name} = {size}" for name, size in chosen.items())])


def _number_or_all(value: object) -> object:
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f'trainer.parallel.shard is {value!r}: expected an integer above 0, or "all"')


class ParallelSection(Section):
    shard: Annotated[PositiveInt | Literal["all"], pydantic.BeforeValidator(_number_or_all)] = Field(
        1,
        description="data-parallel replicas that share one copy of weights, gradients and optimizer state; all: as many as there are, also"
        " where ranks join and leave",
    )
    context: PositiveInt = Field(1, description="ranks that share the tokens of a row")
    tensor: PositiveInt = Field(1, description="ranks that share every matrix")
    pipeline: PositiveInt = Field(1, description="ranks that share the layers")
    schedule: Schedule = Field(Schedule.ONE_FORWARD_ONE_BACKWARD, description="of a pipeline: 1f1b, interleaved or zero_bubble")
    expert: PositiveInt = Field(1, description="ranks that share the experts; the same ranks as above, seen another way")

    def layout(self, ranks: int) -> Layout:
        """Return how so many ranks share the model."""
        if self.shard != "all":
            return Layout(ranks=ranks, **self.model_dump())
        alone = Layout(ranks=ranks, **self.model_dump(exclude={"shard"}), shards_all=True)
        return dataclasses.replace(alone, shard=max(1, alone.replicas))


_KINDS = ("shard", "context", "tensor", "pipeline", "expert")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a model that decide how it may be cut; `None` where it has no such thing."""

    model_type: str
    num_heads: int
    num_key_heads: int
    intermediate_size: int
    num_layers: int
    num_experts: int | None = None
    expert_size: int | None = None
    """Inner size of one expert."""

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Read a Hugging Face folder's config.json. Raises `ConfigError` where it says too little to cut the model."""
        path = folder / "config.json"
        try:
            tree: dict[str, Any] = json.loads(path.read_text())
            num_heads = int(tree["num_attention_heads"])
            return cls(
                model_type=str(tree["model_type"]),
                num_heads=num_heads,
                num_key_heads=int(tree.get("num_key_value_heads") or num_heads),
                intermediate_size=int(tree["intermediate_size"]),
                num_layers=int(tree["num_hidden_layers"]),
                num_experts=_optional(tree, "num_experts", "num_local_experts"),
                expert_size=_optional(tree, "moe_intermediate_size"),
            )
        except OSError as error:
            raise ConfigError(f"model.path {folder}: {path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{path} does not describe a model that can be spread over ranks: {type(error).__name__} {error}") from None


def problems_of(layout: Layout, *, shape: ModelShape | None = None) -> list[str]:
    """Everything that is wrong with a layout, for a model where one is given; empty where it is valid."""
    found: list[str] = []
    if layout.ranks % layout.ranks_per_replica:
        found.append(
            f"one replica takes {layout.ranks_per_replica} ranks (context x tensor x pipeline), which do not divide {layout.ranks}"
        )
    elif layout.replicas % layout.shard:
        found.append(
            f"parallel.shard = {layout.shard} does not divide the {layout.replicas} replicas that {layout.ranks} ranks make"
            ' ("all" takes as many as there are)'
        )
    if layout.ranks % layout.pipeline == 0 and layout.ranks // layout.pipeline % layout.expert:
        whose = f" of one of {layout.pipeline} places in the pipeline" if layout.pipeline > 1 else ""
        found.append(f"parallel.expert = {layout.expert} does not divide the {layout.ranks // layout.pipeline} ranks{whose}")
    return found if shape is None else found + list(_problems_of_model(layout, shape))


def check_layout(layout: Layout, folder: Path) -> None:
    """Raise `ConfigError` with every problem a layout has with the model in `folder`, and the nearest layout that has none.

    A model of which every rank holds a copy is not looked at: there is nothing to cut.
    """
    shape = ModelShape.read(folder) if layout.copies < layout.ranks else None
    found = problems_of(layout, shape=shape)
    if found:
        raise ConfigError(f"trainer.{layout}: " + "; ".join(found) + f". The nearest that works: {nearest(layout, shape=shape)}")


def nearest(layout: Layout, *, shape: ModelShape | None = None) -> Layout:
    """The valid layout of as many ranks whose sizes are the fewest doublings and halvings away; plain copies are always one.

    Another schedule is half as far as another size.
    """

    def distance(other: Layout) -> float:
        return sum(abs(math.log2(getattr(layout, kind) / getattr(other, kind))) for kind in _KINDS) + 0.5 * (
            other.schedule is not layout.schedule
        )

    sizes = [size for size in range(1, layout.ranks + 1) if layout.ranks % size == 0]
    candidates = (
        dataclasses.replace(layout, **dict(zip(_KINDS, choice, strict=True)), schedule=schedule)
        for choice in itertools.product(sizes, repeat=len(_KINDS))
        for schedule in dict.fromkeys((layout.schedule, Schedule.ONE_FORWARD_ONE_BACKWARD))
    )
    return min((other for other in candidates if not problems_of(other, shape=shape)), key=distance)


def _problems_of_model(layout: Layout, shape: ModelShape) -> Iterator[str]:
    for what, size in (
        ("attention heads", shape.num_heads),
        ("heads of keys", shape.num_key_heads),
        ("columns of a feed-forward layer", shape.intermediate_size),
        ("columns of an expert", None if layout.expert > 1 else shape.expert_size),
    ):
        if size is not None and size % layout.tensor:
            yield f"parallel.tensor = {layout.tensor} does not divide the model's {size} {what}"
    if layout.num_stages > shape.num_layers:
        yield (
            f'parallel.pipeline = {layout.pipeline} with schedule = "{layout.schedule}" makes {layout.num_stages} stages, and the model has'
            f" {shape.num_layers} layers"
        )
    if layout.expert > 1 and shape.num_experts is None:
        yield f"parallel.expert = {layout.expert}, but a {shape.model_type} has no experts"
    elif layout.expert > 1 and shape.num_experts is not None and shape.num_experts % layout.expert:
        yield f"parallel.expert = {layout.expert} does not divide the model's {shape.num_experts} experts"


def _optional(tree: dict[str, Any], *names: str) -> int | None:
    return next((int(tree[name]) for name in names if tree.get(name) is not None), None)

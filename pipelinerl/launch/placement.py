"""Places the processes of a run on nodes: all on the first, unless more ranks, engines or scorers have nodes of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipelinerl.config import NodesSection


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a job, numbered from 0."""

    trainers: tuple[int, ...]
    engines: tuple[int, ...]
    scorers: tuple[int, ...]

    @property
    def count(self) -> int:
        return len({*self.trainers, *self.engines, *self.scorers})


def nodes_of(section: NodesSection) -> Nodes:
    """The trainer's nodes come first, the orchestrator being on the first of them; then those of engines, then those of scorers."""
    first_engine = section.trainer_nodes
    first_scorer = first_engine + section.engine_nodes
    return Nodes(
        trainers=tuple(range(first_engine)),
        engines=tuple(range(first_engine, first_scorer)) or (0,),
        scorers=tuple(range(first_scorer, first_scorer + section.scorer_nodes)) or (0,),
    )


def node_of(role: str, nodes: Nodes) -> int:
    """The node of a process; `engines-3`, `trainer-3` and `scorer-3` are dealt out in turn."""
    kind, _, number = role.partition("-")
    homes = {"engines": nodes.engines, "scorer": nodes.scorers, "trainer": nodes.trainers}.get(kind, (0,))
    return homes[int(number) % len(homes)] if number.isdigit() else homes[0]


def roles_on(node: int, roles: Sequence[str], nodes: Nodes) -> list[str]:
    """The processes of one node, in the order given."""
    return [role for role in roles if node_of(role, nodes) == node]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes that are asked for alike."""

    name: str
    """`engines` or `scorers`; empty for the first, with the trainer."""
    first_node: int
    count: int
    gpus: int
    """Of each node."""


def groups_of(section: NodesSection, *, are_engines_other: bool = False) -> tuple[Group, ...]:
    """The nodes of a job in groups, in their order. `are_engines_other`: nodes for engines are of another kind than the trainer's, also
    where they have as many GPUs."""
    gpus, own = section.gpus_per_node, section.engine_gpus_per_node
    num_apart = section.engine_nodes if are_engines_other or own not in (None, gpus) else 0
    first = section.trainer_nodes + section.engine_nodes - num_apart
    groups = (
        Group(name="", first_node=0, count=first, gpus=gpus),
        Group(name="engines", first_node=first, count=num_apart, gpus=gpus if own is None else own),
        Group(name="scorers", first_node=first + num_apart, count=section.scorer_nodes, gpus=0),
    )
    return tuple(group for group in groups if group.count)


def gpus_on(node: int, section: NodesSection) -> int:
    """The GPUs of one node."""
    return next(group.gpus for group in groups_of(section) if node < group.first_node + group.count)

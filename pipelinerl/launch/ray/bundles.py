"""Config -> the bundles of a placement group: a pure function, so that what will be asked for can be read and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipelinerl.config import RaySection
from pipelinerl.launch.placement import gpus_on, nodes_of, roles_on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One node's share of the cluster."""

    node: int
    roles: tuple[str, ...]
    """The processes that are started in it."""
    cpus: int
    gpus: int
    labels: dict[str, str]
    """What the cluster's node must say of itself."""

    @property
    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def __str__(self) -> str:
        asked = ", ".join([f"{name} {amount:g}" for name, amount in self.resources.items()] + [f"{k}={v}" for k, v in self.labels.items()])
        return f"node {self.node} ({', '.join(self.roles)}; {asked})"


def bundles_of(section: RaySection, roles: Sequence[str]) -> tuple[Bundle, ...]:
    """One bundle for each node, with the processes of these names that it runs."""
    nodes = nodes_of(section)

    def labels_of(node: int) -> dict[str, str]:
        if node in nodes.trainers:
            return section.trainer_labels
        return section.engine_labels if node in nodes.engines else section.scorer_labels

    return tuple(
        Bundle(
            node=node,
            roles=tuple(roles_on(node, roles, nodes)),
            cpus=section.cpus_per_node,
            gpus=gpus_on(node, section),
            labels=labels_of(node),
        )
        for node in range(nodes.count)
    )

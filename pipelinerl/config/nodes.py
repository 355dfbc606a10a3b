"""The sections of a run over several nodes, one for each system that deals them out, and what engines and trainer have to fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from pipelinerl.config.base import PositiveFloat, PositiveInt, Section
from pipelinerl.config.engines import EngineSection
from pipelinerl.config.sections import TrainerSection

SlurmTime = Annotated[str, pydantic.BeforeValidator(str), Field(pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")]
"""Minutes, hours:minutes:seconds or days-hours. TOML reads the first as a number and the second as a time of day; both are meant."""


class NodesSection(Section):
    """The nodes of a run that has several, whoever deals them out."""

    save_s: PositiveInt = Field(600, description="seconds that a run has to save and end when its nodes are taken: a step and a checkpoint")
    trainer_nodes: PositiveInt = Field(1, description="nodes for the trainer's ranks; the first is also the orchestrator's")
    engine_nodes: Annotated[int, Field(ge=0)] = Field(0, description="nodes for engines alone; 0: they are on the first")
    scorer_nodes: Annotated[int, Field(ge=0)] = Field(0, description="nodes without GPUs for scorers; 0: on the first node")
    gpus_per_node: Annotated[int, Field(ge=0)] = Field(0, description="of the nodes of trainer and engines")
    engine_gpus_per_node: Annotated[int, Field(ge=0)] | None = Field(
        None, description="of the nodes for engines alone, where they have another number; default: gpus_per_node"
    )
    cpus_per_node: PositiveInt = Field(8, description="cores asked for on every node")


class SlurmSection(NodesSection):
    time: SlurmTime = Field("24:00:00", description="limit of one allocation, as sbatch takes it")
    at_limit: Literal["requeue", "chain", "end"] = Field(
        "requeue",
        description="when the time limit ends an allocation: requeue this job, or submit it anew where it is heterogeneous; leave the rest"
        " to the next job of this name (chain); or end",
    )
    memory_per_node: str = Field("0", description="as sbatch takes it; 0: all of the node")
    partition: str | None = Field(None, description="default: the cluster's own")
    account: str | None = Field(None, description="whom the time is billed to; default: the user's own")
    options: tuple[str, ...] = Field((), description="further sbatch options, each as `--name=value`")
    engine_options: tuple[str, ...] = Field(
        (), description="further sbatch options of the nodes for engines alone, such as `--partition=l40s`: a component of their own"
    )
    setup: tuple[str, ...] = Field((), description="shell lines to run first, for example `module load cuda`")


class KubernetesSection(NodesSection):
    image: str = Field("", description="container image with this program in it; scripts/containers builds one")
    claim: str = Field("", description="PersistentVolumeClaim, ReadWriteMany, that every pod mounts at run.folder: the run folder is there")
    namespace: str = Field("default", description="of the Jobs and their settings; the claim is in it")
    memory_per_node: str | None = Field(None, description="asked for in every pod, for example 64Gi; default: the cluster's own")
    gpu_resource: str = Field("nvidia.com/gpu", description="by which the cluster's device plugin names a GPU")
    restarts: Annotated[int, Field(ge=0)] = Field(20, description="pods that may be lost or begin again; then the job has failed")
    pod: dict[str, Any] = Field(
        {}, description='further fields of the pods\' spec, as Kubernetes names them, such as `{ nodeSelector = { pool = "h100" } }`'
    )
    engine_pod: dict[str, Any] = Field({}, description="the same, over those of pod, of the pods for engines alone: a Job of their own")


class RaySection(NodesSection):
    address: str = Field("auto", description="of the cluster's head, as host:port; auto: the cluster that this machine is part of")
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "SPREAD", description="of the placement group, which has a bundle for each node here: the cluster's nodes apart or together"
    )
    wait_s: PositiveFloat = Field(600.0, description="longest wait for room in the cluster, at the start and after a node was lost")
    trainer_labels: dict[str, str] = Field(
        {}, description='of the cluster\'s nodes for the trainer\'s bundles, such as `{ "ray.io/accelerator-type" = "H100" }`'
    )
    engine_labels: dict[str, str] = Field({}, description="of those for bundles of engines")
    scorer_labels: dict[str, str] = Field({}, description="of those for the scorer's bundle")


def nodes_have_work(
    engine: EngineSection, trainer: TrainerSection, slurm: SlurmSection, kubernetes: KubernetesSection, ray: RaySection
) -> Iterator[str]:
    sections: dict[str, NodesSection] = {"slurm": slurm, "kubernetes": kubernetes, "ray": ray}
    for name, nodes in sections.items():
        if nodes.engine_nodes > engine.num_here:
            yield (
                f"{name}.engine_nodes is {nodes.engine_nodes} but engine.count is {engine.count}"
                + (f", {engine.elsewhere} of them elsewhere" if engine.elsewhere else "")
                + ": nodes would idle. Raise engine.count."
            )
        if not nodes.engine_nodes:
            for key in ("engine_gpus_per_node", "engine_options", "engine_pod", "engine_labels"):
                if getattr(nodes, key, None):
                    yield f"{name}.{key} is set, but {name}.engine_nodes is 0: engines are on the first node. Set it, or leave the key out."
        if nodes.scorer_nodes > 1:
            yield f"{name}.scorer_nodes is {nodes.scorer_nodes}, but a run has one scorer, with scorer.slots processes. Set it to 1."
        if trainer.ranks % nodes.trainer_nodes:
            yield f"trainer.ranks is {trainer.ranks}, which {name}.trainer_nodes = {nodes.trainer_nodes} does not divide: each has as many."


def engines_elsewhere_are_the_runs(engine: EngineSection) -> Iterator[str]:
    if engine.elsewhere > engine.count:
        yield f"engine.elsewhere is {engine.elsewhere} but engine.count is {engine.count}, which counts them, too. Raise engine.count."

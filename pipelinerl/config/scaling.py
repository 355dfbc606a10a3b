"""Which runs may get other engines, or another number of trainer ranks, while they are live (`pipelinerl scale`, `pipeline.elastic`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipelinerl.config.engines import EngineSection
from pipelinerl.config.layout import Layout
from pipelinerl.config.modes import Mode, Placement
from pipelinerl.config.scoring import PrmSection, RewardSection
from pipelinerl.config.sections import LoraSection, PipelineSection, TrainerSection, WeightsSection
from pipelinerl.config.tinker import TinkerSection
from pipelinerl.runtime.membership import Kind, reward_kind


def why_fixed(pipeline: PipelineSection, weights: WeightsSection, tinker: TinkerSection | None) -> str | None:
    """Say why a run keeps the engines that it began with; None where they may join and leave."""
    if pipeline.placement is Placement.COLOCATED:
        return 'pipeline.placement is "colocated": engines have the trainer\'s devices, and no others'
    if weights.transport == "sharded":
        return 'weights.transport is "sharded": its engines pass policies along among those that the trainer met at its start'
    if tinker is not None:
        return "`pipelinerl serve` keeps the engines that it begins with"
    return None


def why_trainer_fixed(pipeline: PipelineSection, weights: WeightsSection, tinker: TinkerSection | None, lora: LoraSection) -> str | None:
    """Say why a run's trainer keeps the ranks that it began with; None where it may get others."""
    if lora.rank:
        return f"lora.rank is {lora.rank}: a trainer of adapters keeps its ranks"
    return why_fixed(pipeline, weights, tinker)


def why_width_fixed(engine: EngineSection, pipeline: PipelineSection, size: int) -> str | None:
    """Say why a run's engines cannot get this `tensor_parallel_size`, where they may join and leave; None where they can."""
    if pipeline.elastic and size not in (sizes := elastic_sizes(engine, pipeline)):
        return (
            f"pipeline.elastic is true, whose units of devices hold engines of {', '.join(map(str, sizes))}. Start, or resume, the run with"
            f" pipeline.elastic_tensor_parallel_sizes = [{', '.join(map(str, sorted({*sizes, size})))}], or without pipeline.elastic"
        )
    return None


def elastic_sizes(engine: EngineSection, pipeline: PipelineSection) -> tuple[int, ...]:
    """Return each `tensor_parallel_size` that engines of an elastic run may have."""
    return tuple(sorted({engine.tensor_parallel_size, *pipeline.elastic_tensor_parallel_sizes}))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The devices of a run that change between engines, trainer ranks and a model that scores as a whole: as few as hold whole engines and
    whole copies of the trainer's model.
    """

    devices: int
    """Of a unit."""
    stages: int = 1
    """Ranks of an engine for each of its `tensor_parallel_size` (`pipeline_parallel_size`)."""
    core_ranks: int
    """Ranks that the trainer keeps in any case."""
    ranks_per_replica: int
    """Ranks that work on a row together."""
    scored_by: str = ""
    """What scores on devices that change, too: `prm`, or the key of a reward model's section; empty where nothing does."""
    scorers: int = 0
    """Engines, or processes, of it that a unit holds."""
    core_scorers: int = 0
    """Of these, those that stay in any case."""

    @property
    def replicas(self) -> float:
        """Replicas of the trainer that a unit holds."""
        return self.devices / self.ranks_per_replica

    def engines(self, tensor_parallel_size: int) -> int:
        """Return how many engines of this size a unit holds."""
        return self.devices // (tensor_parallel_size * self.stages)


def scoring_of(prm: PrmSection, rewards: Sequence[RewardSection]) -> dict[str, tuple[int, int]]:
    """Return the models that score on devices: how many engines or processes the run begins with, and the ranks of one."""
    found = {} if prm.path is None else {str(Kind.PRM): (prm.count, prm.num_ranks)}
    models = {reward_kind(index): reward for index, reward in enumerate(rewards) if reward.model is not None}
    return found | {kind: (reward.concurrency or 1, 1) for kind, reward in models.items()}


def units_of(
    engine: EngineSection,
    layout: Layout,
    scoring: Mapping[str, tuple[int, int]] | None = None,
    *,
    least_ranks: int = 1,
    sizes: Sequence[int] = (),
    whole: int = 1,
) -> Units:
    """Return the units of a run with such engines, which may get each `tensor_parallel_size` of `sizes`, a trainer that begins in this
    layout and keeps `least_ranks`, and models that score (`scoring_of`), in multiples of `whole` devices. Of several such models none
    changes: their rates say of each alone how fast it is, and not for which of them a device would do most. Nor does one whose ranks fill
    no unit.
    """
    devices = math.lcm(engine.num_ranks, *(size * engine.num_stages for size in sizes), layout.ranks_per_change, whole)
    scored_by, (count, num_ranks) = next(iter(scoring.items())) if scoring is not None and len(scoring) == 1 else ("", (0, 1))
    scorers = 0 if not scored_by or devices % num_ranks else devices // num_ranks
    return Units(
        devices=devices,
        stages=engine.num_stages,
        core_ranks=layout.ranks - devices * ((layout.ranks - least_ranks) // devices),
        ranks_per_replica=layout.ranks_per_replica,
        scored_by=scored_by if scorers else "",
        scorers=scorers,
        core_scorers=count - scorers * ((count - 1) // scorers) if scorers else 0,
    )


def elastic_goes_with(
    engine: EngineSection,
    trainer: TrainerSection,
    pipeline: PipelineSection,
    weights: WeightsSection,
    tinker: TinkerSection | None,
    lora: LoraSection,
    prm: PrmSection,
    policies: dict[str, dict[str, Any]],
) -> Iterator[str]:
    if not pipeline.elastic:
        return
    if (why := why_trainer_fixed(pipeline, weights, tinker, lora)) is not None:
        yield f"pipeline.elastic is true, and devices cannot change what they do: {why}. Leave it out."
    if pipeline.mode is not Mode.STREAMING:
        yield (
            f'pipeline.elastic is true, and pipeline.mode is "{pipeline.mode}": engines and trainer wait for each other in every step'
            " there, whatever devices they have. Leave one of them out."
        )
    if policies:
        yield "pipeline.elastic is true, and a script's policies keep their engines and ranks. Leave it out."
    if engine.elsewhere:
        yield f"pipeline.elastic is true, but engine.elsewhere is {engine.elsewhere}: no rank can be started there. Leave one of them out."
    for name, cores in (("trainer.cores", trainer.cores), ("engine.cores", engine.cores), ("prm.cores", prm.cores)):
        if cores:
            yield f"pipeline.elastic is true, but {name} names a core for each process of the layout that it begins with. Leave it out."
    sizes = elastic_sizes(engine, pipeline)
    units = units_of(engine, trainer.layout, least_ranks=trainer.least_ranks, sizes=sizes)
    held, ranks = units.engines(engine.tensor_parallel_size), " or ".join(str(size * engine.num_stages) for size in sizes)
    if engine.count % held:
        yield (
            f"pipeline.elastic is true, but engine.count is {engine.count}: {units.devices} devices change together (engines of"
            f" {ranks} ranks, {trainer.layout.ranks_per_change} ranks of the trainer), which hold {held} engines. Set a multiple of {held}."
        )
    if engine.count <= held and trainer.ranks <= units.core_ranks and len(sizes) == 1:
        yield (
            f"pipeline.elastic is true, but engine.count is {engine.count} and trainer.ranks is {trainer.ranks}: neither can give any away."
            " Raise engine.count, or leave it out."
        )


def trainer_may_change(
    trainer: TrainerSection, pipeline: PipelineSection, weights: WeightsSection, tinker: TinkerSection | None, lora: LoraSection
) -> Iterator[str]:
    if trainer.min_ranks is not None and trainer.min_ranks > trainer.ranks:
        yield f"trainer.min_ranks is {trainer.min_ranks} but trainer.ranks is {trainer.ranks}: lower it, or leave it out."
    if trainer.max_ranks is None:
        return
    if trainer.max_ranks < trainer.ranks:
        yield f"trainer.max_ranks is {trainer.max_ranks} but trainer.ranks is {trainer.ranks}: raise it, or leave it out."
    elif trainer.max_ranks > trainer.ranks and (why := why_trainer_fixed(pipeline, weights, tinker, lora)) is not None:
        yield f"trainer.max_ranks is {trainer.max_ranks}, and no rank can join {trainer.ranks}: {why}. Leave it out."


def engines_may_join(
    engine: EngineSection, pipeline: PipelineSection, weights: WeightsSection, tinker: TinkerSection | None
) -> Iterator[str]:
    if engine.max_count is None:
        return
    if engine.max_count < engine.count:
        yield f"engine.max_count is {engine.max_count} but engine.count is {engine.count}: raise it, or leave it out."
    elif engine.max_count > engine.count and (why := why_fixed(pipeline, weights, tinker)) is not None:
        yield f"engine.max_count is {engine.max_count}, and no engine can join {engine.count}: {why}. Leave it out."

"""How many ranks the settings of a run let its trainer have."""

from __future__ import annotations

import functools

from orchestrator.rules.trainer_ranks import TrainerChange
from pipelinerl.config import Config
from pipelinerl.config.file import with_ranks
from pipelinerl.config.scaling import why_trainer_fixed
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.trainer_ranks import TrainerRanks


def trainer_change_of(config: Config, *, earlier: TrainerRanks | None, in_script: bool) -> TrainerChange:
    """Return the ranks of a run's trainer, with what an earlier orchestrator of it has written."""
    return TrainerChange(
        ranks=config.trainer.ranks,
        most=config.trainer.most_ranks,
        per_replica=config.trainer.layout.ranks_per_replica,
        why_not_ranks=functools.partial(_why_not_ranks, config, in_script=in_script),
        earlier=earlier,
    )


def _why_not_ranks(config: Config, ranks: int, *, in_script: bool) -> str | None:
    """Say why a run's trainer cannot have so many ranks; None where it can."""
    if in_script:
        return "the trainer of a script keeps the ranks that it began with"
    if (why := why_trainer_fixed(config.pipeline, config.weights, config.tinker, config.lora)) is not None:
        return why
    try:
        with_ranks(config, ranks)
    except ConfigError as error:
        return str(error)
    return None

"""The dependencies of a run: the hubs of its peers, its prompts, its ledger and journal, and facts about the model and the method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from orchestrator.ledger.ledger import Ledger
from orchestrator.rules.batch import Credit, StepRules
from orchestrator.rules.validation.completions import Experts
from orchestrator.stages.prompts import Source
from pipelinerl.messages import Prompt
from pipelinerl.observe.journal import Journal
from pipelinerl.transport.base import Hub


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything outside that a run depends on. The live run and the simulation differ in this alone."""

    engine_hub: Hub
    scorer_hub: Hub
    trainer_hub: Hub
    source: Source
    held_out: list[Prompt]
    stop_token_ids: tuple[int, ...] = ()
    """The tokens that end a completion, in training and in evaluations, see `pipelinerl.data.stop_tokens`."""
    credit: Credit
    journal: Journal
    ledger: Ledger
    step_rules: StepRules | None = None
    replace: Callable[[str], None] | None = None
    """See `Peers`."""
    vocabulary: int | None = None
    """Tokens that the model knows; None where its folder does not say."""
    experts: Experts | None = None
    """The size of a mixture of experts whose routes travel; None where none do."""

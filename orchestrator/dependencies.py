"""What a run is joined to: the hubs of its peers, its prompts, its ledger and journal, and what the model and the method say."""

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
    """Everything a run is joined to. The live run and the simulation differ in this alone."""

    engine_hub: Hub
    scorer_hub: Hub
    trainer_hub: Hub
    source: Source
    held_out: list[Prompt]
    stop_token_ids: tuple[int, ...] = ()
    """What ends a completion, in training and in evaluations, see `pipelinerl.data.stop_tokens`."""
    credit: Credit
    journal: Journal
    ledger: Ledger
    step_rules: StepRules | None = None
    replace: Callable[[str], None] | None = None
    """See `Peers`."""
    vocabulary: int | None = None
    """Tokens that the model knows; None: its folder does not say."""
    experts: Experts | None = None
    """Of a mixture whose routes travel; None: none do."""

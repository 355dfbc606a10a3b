"""This module replays prompts: the source draws the run's prompts once more."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from orchestrator.data.encoder import encoder_of
from orchestrator.data.sources import prompts_of
from orchestrator.replay.differences import SHOWN
from orchestrator.replay.recorded import RecordedPrompt, RecordedRun, read_prompts
from orchestrator.stages.prompts import Source
from pipelinerl.data.tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RedrawnPrompts:
    """The prompts of a source, compared with those it gave the run."""

    num_drawn: int
    num_passed: int
    """RecordedPrompt prompts that were not admitted, because they are quarantined."""
    differences: list[str]


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield, line by line, how the prompts that the source gives differ from those recorded."""
    config = recorded.config
    encoder = encoder_of(config, load_tokenizer(config.model.path))
    again = replay_prompts(prompts_of(config, encoder=encoder)[0], read_prompts(recorded.ledger_path))
    same = again.num_drawn - len(again.differences)
    yield f"prompts: {again.num_drawn:,} drawn again, {same:,} the same, {len(again.differences):,} differ"
    if again.num_passed:
        yield f"  {again.num_passed:,} between them were not admitted by the run: they rested (data.difficulty), or were quarantined"
    yield from (f"  {line}" for line in again.differences[:SHOWN])


def replay_prompts(source: Source, drawn: list[RecordedPrompt]) -> RedrawnPrompts:
    """Draw until each recorded position. Raises `DataError` where the source ends before."""
    differences: list[str] = []
    num_passed = 0
    for each in drawn:
        prompt = source.next()
        while source.position < each.position:
            num_passed += 1
            prompt = source.next()
        if source.position != each.position or prompt.prompt_id != each.prompt_id:
            differences.append(f"group {each.group_id}: prompt {each.prompt_id} -> {prompt.prompt_id}")
        elif each.prompt is not None and prompt.text != each.prompt.text:
            differences.append(f"prompt {each.prompt_id}: text {each.prompt.text[-60:]!r} -> {prompt.text[-60:]!r}")
        elif each.prompt is not None and prompt.images != each.prompt.images:
            pairs = enumerate(itertools.zip_longest(prompt.images, each.prompt.images))
            numbers = [str(number) for number, (one, other) in pairs if one != other]
            differences.append(f"prompt {each.prompt_id}: image {', '.join(numbers)} is another")
        elif each.prompt is not None and prompt.columns != each.prompt.columns:
            names = sorted(name for name in prompt.columns | each.prompt.columns if _differ(name, prompt.columns, each.prompt.columns))
            differences.append(f"prompt {each.prompt_id}: columns differ: {', '.join(names)}")
    return RedrawnPrompts(num_drawn=len(drawn), num_passed=num_passed, differences=differences)


def _differ(name: str, one: dict[str, object], other: dict[str, object]) -> bool:
    return one.get(name) != other.get(name) or (name in one) != (name in other)

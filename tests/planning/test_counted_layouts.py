"""The planner's memory of a trainer rank, against ranks of up to 1,024 that the trainer's own code was counted on (`trainer.dry_run`)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.algorithms.methods import method_of
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import gpu_inputs, run_inputs
from pipelinerl.planning.shape import read_shape
from pipelinerl.planning.sheet import Values
from scripts.bench import layouts

STATE = ("weights", "gradients", "optimizer")
STATE_ERROR, STEP_ERROR = 0.01, 0.1
"""Largest error of what stays, and of what a step takes beside it."""
LENGTHS = {"prompt_tokens": 256.0, "mean_tokens": 768.0}
"""Of the samples that were counted."""


def runs() -> Iterator[tuple[layouts.Case, list[dict[str, Any]]]]:
    """Each run of the table, and its ranks: of a pipeline the first and the last."""
    stored = {row["name"]: row for row in json.loads(layouts.RESULT.read_text())["rows"]}

    def run(case: layouts.Case) -> tuple[object, ...]:
        return case.model, tuple(case.layout.items()), case.layers, case.checkpointing

    for _, cases in itertools.groupby(layouts.cases(), run):
        found = list(cases)
        yield found[0], [stored[case.name] for case in found]


@pytest.mark.parametrize(("case", "ranks"), list(runs()), ids=lambda value: value.name if isinstance(value, layouts.Case) else "")
def test_the_bill_of_the_fullest_rank_is_what_was_counted(case: layouts.Case, ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    planned = _planned(case, tmp_path)
    for part in STATE:
        assert planned[f"trainer_{part}_bytes"] == pytest.approx(max(row[f"{part}_bytes"] for row in ranks), rel=STATE_ERROR), part
    assert planned["step_bytes"] == pytest.approx(max(row["step_bytes"] for row in ranks), rel=STEP_ERROR)


def _planned(case: layouts.Case, folder: Path) -> Values:
    config = case.config(folder)
    return SHEET.evaluate({**run_inputs(config, read_shape(folder), method=method_of(config)), **gpu_inputs("h100"), **LENGTHS})

"""The planner's formulas, section by section, and the sheet of all of them."""

from __future__ import annotations

from pipelinerl.planning.formulas.engine import ENGINE_MEMORY, GENERATION
from pipelinerl.planning.formulas.run import COST, PLACEMENT, STALENESS, SYNC, TIME
from pipelinerl.planning.formulas.trainer import TRAINER_MEMORY, TRAINING
from pipelinerl.planning.inputs import INPUTS
from pipelinerl.planning.sheet import Row, Sheet

SECTIONS: dict[str, tuple[Row, ...]] = {
    "placement": PLACEMENT,
    "memory of a trainer rank": TRAINER_MEMORY,
    "memory of an engine rank": ENGINE_MEMORY,
    "generation": GENERATION,
    "training": TRAINING,
    "weight sync": SYNC,
    "time": TIME,
    "staleness": STALENESS,
    "cost": COST,
}
"""Rows by section, in the order in which they are computed."""
SHEET = Sheet([row for rows in SECTIONS.values() for row in rows], inputs=INPUTS)

"""Every metric and alarm as one Markdown page, docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipelinerl.observe.alarms.names import ALARMS
from pipelinerl.observe.metrics.gauges import ERRORS, EVALUATION, GAUGES, SWAPS
from pipelinerl.observe.metrics.steps import COUNTED, STEP_METRICS, TRAINER_METRICS
from pipelinerl.observe.metrics.table import Metric

SECTIONS: tuple[tuple[str, str, Sequence[Metric]], ...] = (
    ("Of a step", "Over `progress/step`; journal line `step`.", (*STEP_METRICS, *COUNTED)),
    ("Of a step, by the trainer", "Over `progress/step`; journal line `step`, field `trainer`.", TRAINER_METRICS),
    ("Of the moment", "Over `progress/seconds`; journal lines `status`, `swap` and `function_error`.", (*GAUGES, *SWAPS, ERRORS)),
    ("Of an evaluation", "Over `eval/version`; journal line `evaluation`.", EVALUATION),
)
_HEADINGS = ("Name", "Field", "Unit", "Formula", "What to do about it")
_HEAD = """# Metrics

Every number that a run tells: in Weights & Biases, TensorBoard and Prometheus (`pipelinerl_` before the name, `_` for every other sign)
by its name, in the journal by its field. `pipelinerl report RUN` says which part of a run is the slow one. `<part>` stands for a name of
the run's own. `pipelinerl metrics --markdown` prints this page.
"""
_ALARMS = """
## Alarms of learning

Each is told in the terminal, the live page, the report and the trackers. `run.fatal_alarms` names those that end the run.

"""


def markdown() -> str:
    """The page."""
    parts = [_HEAD]
    for title, words, metrics in SECTIONS:
        rows = [(f"`{one.name}`", one.field and f"`{one.field}`", one.unit, one.formula, one.action) for one in metrics]
        parts += [f"\n## {title}\n\n{words}\n\n", *_table(_HEADINGS, rows)]
    rows = ((f"`{name}`", one.meaning, one.change) for name, one in ALARMS.items())
    return "".join([*parts, _ALARMS, *_table(("Name", "What it means", "What to change"), rows)])


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |\n" for line in lines]

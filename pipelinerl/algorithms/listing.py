"""Printed forms of methods and rules: the tables of `pipelinerl algorithms`, and what a run's method does and does not do.

Everything is read from the tables that the run itself uses, so that no page can say otherwise.
"""

from __future__ import annotations

from pipelinerl.algorithms import methods
from pipelinerl.algorithms.controllers import control_lines
from pipelinerl.algorithms.method import ALWAYS_OFFERED, REFERENCE_OFFERS, TRAINER_OFFERS, Aggregation, Method, Need
from pipelinerl.algorithms.methods import facts_of, method_of
from pipelinerl.algorithms.own import CARRIED
from pipelinerl.algorithms.rules import COLUMNS
from pipelinerl.algorithms.unused import unused_parts
from pipelinerl.algorithms.validation import needs_several_epochs
from pipelinerl.config import Config

SEVERAL_EPOCHS = "needs trainer.epochs of 2 or more"


def describe_run(config: Config) -> str:
    """Every column of the run's method, what follows a measurement, and a line for each part that cannot act in this run.

    Raises `ConfigError` as `method_of`.
    """
    method = method_of(config)
    return method.describe(notes=[*control_lines(method), *unused_parts(method, run=facts_of(config))])


def table_rows() -> list[tuple[str, str, str, str]]:
    """(name, formula, cost, source) of every method, in table order; the cost also says what this system does not supply."""
    return [(method.name, method.formula, _cost(method), method.source) for method in methods.METHODS.values()]


def render_table() -> str:
    """The table as aligned text, one method per line, and what its costs mean."""
    rows = [("method", "what it does", "cost", "source"), *table_rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)) + f"  {row[3]}" for row in rows]
    notes = [f"{need}: {need.cost}." for need in Need if need.cost]
    return "\n".join([*lines, "", *notes, "needs X: refused until the run supplies X; the refusal says how, or which option does without."])


def render_rules() -> str:
    """Every rule a column may be overridden with: formula, options with their defaults, source; one per line, by column."""
    lines = []
    for column, table in COLUMNS.items():
        lines += ["", f"{column}:"]
        width = max(map(len, table))
        for name, spec in table.items():
            options = ", ".join(f"{option}={'to be stated' if value is None else value}" for option, value in spec.options.items())
            parts = (spec.formula, f"({options})" if options else "", f"[{spec.source}]" if spec.source else "")
            lines.append(f"  {name:<{width}}  {'  '.join(filter(None, parts))}")
    return "\n".join([*lines, "", f"aggregation: {', '.join(Aggregation)}", "", *_own_lines()])


def _own_lines() -> list[str]:
    """List what a function of the user's may ask for, by the columns that take one."""
    lines = [
        "A function of yours, `path:name`, stands for a rule in these columns. What its parameters name arrives; options stand after a"
        " bare *, with defaults. T tokens of a row, N sequences or siblings, P positions of a response."
    ]
    for carried in (CARRIED["objective"], CARRIED["advantage"]):
        columns = ", ".join(column for column, has in CARRIED.items() if has is carried)
        is_numpy = "rewards" in carried
        where = "numpy, orchestrator" if is_numpy else "torch, trainer"
        returns = "[N] float array, or N arrays [P]" if is_numpy else "[T] float tensor, a mask [T] bool, true where it trains"
        lines += ["", f"{columns} ({where}; returns {returns}):"]
        width = max(map(len, carried))
        lines += [f"  {name:<{width}}  {what.meaning}{f'; needs {what.need}' if what.need else ''}" for name, what in carried.items()]
    return lines


def _cost(method: Method) -> str:
    missing = sorted(need.value for need in method.needs - ALWAYS_OFFERED - TRAINER_OFFERS - REFERENCE_OFFERS)
    costs = sorted(need.value for need in method.needs if need.cost)
    epochs = [SEVERAL_EPOCHS] if needs_several_epochs(method) else []
    return "; ".join([*costs, *(f"needs {need}" for need in missing), *epochs])

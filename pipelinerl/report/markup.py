"""The report's tables as markup: identity, arithmetic of the diagnosis, waits, steps, configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipelinerl.report.diagnosis import Diagnosis
from pipelinerl.report.headline import Headline
from pipelinerl.report.panels import missing
from pipelinerl.report.reading import Tables
from pipelinerl.report.rows import EXITS
from pipelinerl.report.svg import tag, words
from pipelinerl.report.units import percent, plural, quantity, seconds, whole

MAX_STEP_ROWS = 50
"""Steps listed. The plots show all; more rows make the page heavy and nobody reads them."""
MAX_WAITS = 14

STEP_COLUMNS = (
    ("step", "step"),
    ("version", "version"),
    ("reward_mean", "reward"),
    ("num_samples", "samples"),
    ("num_trained_tokens", "trained tokens"),
    ("length_mean", "length"),
    ("staleness_mean", "staleness"),
    ("staleness_max", "oldest"),
)
STEP_METRICS = (("loss", "loss"), ("grad_norm", "grad norm"), ("wait_s", "wait s"), ("forward_backward_s", "fwd+bwd s"))


def identity_sentence(numbers: Headline) -> str:
    """The conservation identity in words, with a mark that it balances or by how much it does not."""
    if numbers.imbalance is None:
        return missing("The conservation identity")
    parts = " + ".join(f"{whole(numbers.identity.get(name, 0))} {name.replace('_', ' ')}" for name in ("in_flight", *EXITS))
    text = f"{whole(numbers.identity['admitted'])} admitted = {parts}"
    if numbers.imbalance == 0:
        return tag("p", tag("span", "✓ ", css="good") + words(text), css="full")
    off = f"{plural(abs(numbers.imbalance), 'rollout')} {'unaccounted for' if numbers.imbalance > 0 else 'ended more often than admitted'}"
    return tag("p", tag("span", "✗ ", css="bad") + words(text.replace(" = ", " ≠ ", 1) + f": {off}"), css="warning full")


def outcomes(numbers: Headline) -> str:
    """Where the admitted rollouts went, and why those that were not trained were not."""
    admitted = numbers.identity.get("admitted", 0)
    rows = [
        (words(name.replace("_", " ")), whole(value), _bar(value / admitted if admitted else 0.0))
        for name in (*EXITS, "in_flight")
        if (value := numbers.identity.get(name)) is not None
    ]
    if not rows:
        return ""
    reasons = [(words(reason), whole(count)) for reason, count in sorted(numbers.reasons.items(), key=lambda item: -item[1])]
    ways = table(("ended as", "rollouts", ""), rows, name="outcomes")
    return ways + (tag("h3", "Why not trained") + table(("reason", "rollouts"), reasons, name="reasons") if reasons else "")


def arithmetic(diagnosis: Diagnosis) -> str:
    """Every number the diagnosis rests on, with how it came about."""
    rows = [(words(row.what), tag("code", words(row.arithmetic)), words(row.value)) for row in diagnosis.findings]
    return table(("what", "arithmetic", "value"), rows, name="arithmetic") if rows else ""


def waits(tables: Tables) -> str:
    """What every stage waited for over the whole run, longest first."""
    last = tables.last_status
    if last is None or not last.waited_s:
        return missing("Waits of the stages")
    duration_s = tables.duration_s or 0.0
    longest = sorted(last.waited_s.items(), key=lambda item: -item[1])[:MAX_WAITS]
    rows = []
    for name, waited in longest:
        part = waited / duration_s if duration_s else 0.0
        rows.append((words(name), words(seconds(waited)), words(percent(part)), _bar(part)))
    return table(("stage: what it waited for", "waited", "of the run", ""), rows, name="waits")


def waits_under_way(tables: Tables) -> str:
    """What was being waited for when the journal ended: for a run that was killed, the first thing to look at."""
    last = tables.last_status
    if last is None or tables.end is not None or not last.waits:
        return ""
    rows = [(words(name), words(seconds(waited))) for name, waited in last.waits[:MAX_WAITS]]
    return tag("h3", "Waits under way when the journal ends") + table(("stage: what it waits for", "for"), rows, name="waits-under-way")


def steps(tables: Tables) -> str:
    """Numbers of single steps, evenly thinned for a long run."""
    if not tables.steps:
        return missing("Steps")
    stride = -(-len(tables.steps) // MAX_STEP_ROWS)
    picked = [*tables.steps[:-1:stride], tables.steps[-1]]
    rows = []
    for step in picked:
        values = [whole(step.step), whole(step.version)]
        values += [quantity(getattr(step, name), digits=4) if getattr(step, name) is not None else "–" for name, _ in STEP_COLUMNS[2:]]
        values += [quantity(step.trainer.get(name)) if name in step.trainer else "–" for name, _ in STEP_METRICS]
        rows.append([words(value) for value in values])
    headings = [title for _, title in (*STEP_COLUMNS, *STEP_METRICS)]
    note = tag("p", words(f"One step in {stride}, and the last, of {len(tables.steps)}."), css="note") if stride > 1 else ""
    return note + table(headings, rows, name="steps", first_number=0)


def configuration(tables: Tables) -> str:
    """Every setting and what follows from them."""
    if not tables.config:
        return missing("Configuration")
    settings = [(tag("code", words(key)), tag("code", words(_written(value)))) for key, value in flat(tables.config)]
    derived = [(words(str(key)), words(_written(value))) for key, value in tables.derived.items()]
    parts = [
        tag(
            "details",
            tag("summary", words(plural(len(settings), "setting"))) + table(("key", "value"), settings, name="settings", first_number=9),
        )
    ]
    if derived:
        parts.insert(0, table(("derived from the settings", ""), derived, name="derived"))
    return "".join(parts)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, name: str, first_number: int = 1) -> str:
    """A table whose columns from `first_number` on hold numbers; cells are markup."""

    def css(column: int, cell: str) -> str:
        if cell.startswith("<meter"):
            return "bar"
        if cell.startswith("<code"):
            return "arithmetic"
        return "number" if column >= first_number else "name"

    head = "".join(
        tag("th", words(title), css="number" if column >= first_number and title != "arithmetic" else "name")
        for column, title in enumerate(headings)
    )
    body = "".join(tag("tr", "".join(tag("td", cell, css=css(column, cell)) for column, cell in enumerate(row))) for row in rows)
    return tag("div", tag("table", tag("thead", tag("tr", head)) + tag("tbody", body), id=f"{name}-table"), css="scroll")


def _bar(part: float) -> str:
    return tag("meter", value=f"{min(1.0, max(0.0, part)):.4f}", min=0, max=1, aria_label=percent(part))


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            for number, entry in enumerate(value):
                yield from flat(entry, f"{prefix}{key}[{number}].")
        else:
            yield prefix + key, value


def _written(value: Any) -> str:
    return "none" if value is None else str(value)

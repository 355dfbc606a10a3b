"""The report's tables as markup: identity, arithmetic of the diagnosis, waits, steps, configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipelinerl.alarms.rules import WINDOW
from pipelinerl.report.diagnosis import Diagnosis
from pipelinerl.report.headline import Headline
from pipelinerl.report.panels import missing
from pipelinerl.report.reading import Tables
from pipelinerl.report.rows import EXITS, StepRow, is_idle
from pipelinerl.report.svg import tag, words
from pipelinerl.report.units import duration, percent, plural, quantity, seconds, whole

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
MAX_CAUSES = 30
LEARNING: tuple[tuple[str, Callable[[StepRow], float | None]], ...] = (
    ("reward", lambda step: step.reward_mean),
    ("samples cut off, part of one", lambda step: step.truncated_fraction),
    ("groups of equal reward, part of one", lambda step: step.zero_variance_fraction),
    ("entropy, nats per token", lambda step: step.trainer.get("entropy")),
    ("effective sample size, part of one", lambda step: step.trainer.get("ess")),
    ("age of tokens, versions", lambda step: step.staleness_mean),
    ("length, tokens", lambda step: step.length_mean),
    ("4-grams said before, part of one", lambda step: step.repeated_fraction),
    ("KL between engine and trainer, same version", lambda step: step.trainer.get("mismatch_kl_fresh")),
    ("the same over older KV caches", lambda step: step.trainer.get("mismatch_kl_kept")),
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


def learning(tables: Tables) -> str:
    """What stops learning, with the figure and what to change; the figures it is told from, at the run's start and at its end."""
    if not tables.steps:
        return ""
    told = "".join(
        tag(
            "p",
            tag("strong", words(f"{alarm.name}, since step {alarm.began}: ")) + words(f"{alarm.figure}. {alarm.change}"),
            css="warning full",
        )
        for alarm in tables.alarms
    )
    if not told:
        few = f"; alarms need {WINDOW} steps" if len(tables.steps) < WINDOW else ""
        told = tag("p", words(f"Nothing was seen that stops it{few}."))
    over = [f"{alarm.name}, noticed at step {alarm.step}: {alarm.figure}" for alarm in tables.past_alarms]
    told += "".join(tag("p", words(f"Over by now: {words_of}."), css="note") for words_of in over)
    rows = []
    for name, value_of in LEARNING:
        known = [value for step in tables.steps if (value := value_of(step)) is not None]
        if known:
            few = min(WINDOW, len(known))
            rows.append((words(name), words(quantity(sum(known[:few]) / few)), words(quantity(sum(known[-few:]) / few))))
    headings = ("figure", f"first {WINDOW} steps", f"last {WINDOW}")
    return tag("h3", "What stops learning") + tag("div", told, id="learning") + table(headings, rows, name="learning")


def held_out(tables: Tables) -> str:
    """Every evaluation, each reward function apart; nothing where there was none, or only one function."""
    names = list(dict.fromkeys(name for row in tables.evaluations for name in row.components))
    if len(names) < 2:
        return ""
    stride = -(-len(tables.evaluations) // MAX_STEP_ROWS)
    picked = [*tables.evaluations[:-1:stride], tables.evaluations[-1]]
    rows = [
        [words(whole(row.version)), words(quantity(row.reward_mean)), *(words(quantity(row.components.get(name))) for name in names)]
        for row in picked
    ]
    return tag("h3", "Held-out by component") + table(("version", "weighted", *names), rows, name="held-out", first_number=0)


def function_errors(tables: Tables) -> str:
    """Failures of users' functions by cause, the commonest first; nothing where none failed."""
    if not tables.function_errors:
        return ""
    rows = [
        (
            words(f"{row.function} ({row.kind})"),
            tag("code", words(row.cause)),
            tag("code", words(row.where or "unknown")),
            words(whole(row.count)),
            words(f"{duration(tables.since_start(row.t))} after the start"),
        )
        for row in tables.function_errors[:MAX_CAUSES]
    ]
    headings = ("function", "cause", "where", "times", "first seen")
    return tag("h3", "What failed in functions of yours") + table(headings, rows, name="function-errors", first_number=3)


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
    longest = sorted(last.waited_s.items(), key=lambda item: -item[1])
    rows = {True: [], False: []}
    for name, waited in longest:
        part = waited / duration_s if duration_s else 0.0
        rows[is_idle(name)].append((words(name), words(seconds(waited)), words(percent(part)), _bar(part)))
    held = table(("stage: what held it up", "waited", "of the run", ""), rows[False][:MAX_WAITS], name="waits")
    if not rows[True]:
        return held
    note = tag("summary", "Stages that had nothing to do, which says nothing of who is slow")
    return held + tag("details", note + table(("stage: what it waited for", "waited", "of the run", ""), rows[True], name="idle"))


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

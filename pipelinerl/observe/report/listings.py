"""The report's tables as data, which `templates/parts.html` sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipelinerl.observe.alarms.rules import WINDOW
from pipelinerl.observe.fold.rows import EXITS, is_idle
from pipelinerl.observe.metrics.steps import BY_FIELD, step_value
from pipelinerl.observe.report import units
from pipelinerl.observe.report.diagnosis import Diagnosis
from pipelinerl.observe.report.headline import Headline
from pipelinerl.observe.report.reading import Tables
from pipelinerl.observe.report.units import duration, percent, plural, quantity, seconds, whole

MAX_STEP_ROWS = 50
"""Steps listed. The plots show all; more rows make the page heavy and nobody reads them."""
MAX_WAITS = 14
MAX_CAUSES = 30

STEP_COLUMNS = {
    "step": "step",
    "version": "version",
    "reward_mean": "reward",
    "num_samples": "samples",
    "num_trained_tokens": "trained tokens",
    "num_useful_tokens": "useful tokens",
    "length_mean": "length",
    "staleness_mean": "staleness",
    "staleness_max": "oldest",
}
STEP_METRICS = {"loss": "loss", "grad_norm": "grad norm", "wait_s": "wait s", "forward_backward_s": "fwd+bwd s"}
LEARNING = (
    "reward_mean",
    "truncated_fraction",
    "zero_variance_fraction",
    "entropy",
    "ess_fraction",
    "staleness_mean",
    "length_mean",
    "repeated_fraction",
    "mismatch_kl_on_policy",
    "mismatch_kl_stale_kv",
)
"""Fields of a step that the alarms of learning are told from."""

Cell = str | float | tuple[str, str]
"""Text; a part of one, drawn as a bar; or text with a note."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Headings and rows. One without rows is left out of the page."""

    name: str
    headings: Sequence[str]
    kinds: Sequence[str]
    """The kind of each column: `name`, `number`, `code` or `bar`; columns past the end are numbers."""
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""

    @property
    def columns(self) -> list[str]:
        """The kind of every column."""
        return [*self.kinds, *["number"] * (len(self.headings) - len(self.kinds))]


def identity_sentence(numbers: Headline) -> tuple[str, str]:
    """The conservation identity: a mark, ✓ where it balances, and the sentence, which says by how much it does not; empty: not recorded."""
    if numbers.imbalance is None:
        return "", "The conservation identity: not recorded."
    account = units.account(numbers.identity, off=numbers.imbalance)
    if numbers.imbalance == 0:
        return "✓", account
    off = f"{plural(abs(numbers.imbalance), 'rollout')} {'unaccounted for' if numbers.imbalance > 0 else 'ended more often than admitted'}"
    return "✗", f"{account}: {off}"


def outcomes(numbers: Headline) -> list[Table]:
    """The admitted rollouts by how they ended, and the reasons why some were not trained."""
    admitted = numbers.identity.get("admitted", 0)
    ways = [
        (name.replace("_", " "), whole(value), value / admitted if admitted else 0.0)
        for name in (*EXITS, "in_flight")
        if (value := numbers.identity.get(name)) is not None
    ]
    reasons = [(reason, whole(count)) for reason, count in sorted(numbers.reasons.items(), key=lambda item: -item[1])] if ways else []
    return [
        Table(name="outcomes", headings=("ended as", "rollouts", ""), kinds=("name", "number", "bar"), rows=ways),
        Table(name="reasons", headings=("reason", "rollouts"), kinds=("name",), rows=reasons, title="Why not trained"),
    ]


def start_up(tables: Tables) -> Table:
    """Where the seconds went until the first step was trained, process by process; those of the launcher count from its command."""
    rows = tables.start_up
    begins = [row.start for row in rows if row.process == "launcher"] or [row.start for row in rows]
    began = min(begins, default=0.0)
    first = min((step.t for step in tables.steps), default=None)
    shown = [(row.process, row.what, row.start, row.end) for row in rows]
    if first is not None and rows:
        shown.append(("all", "generate, score and train the first step", max(row.end for row in rows), first))
    whole_s = max((end for *_, end in shown), default=0.0) - began
    return Table(
        name="start-up",
        headings=("process", "what it did", "from", "until", "took", ""),
        kinds=("name", "name", "number", "number", "number", "bar"),
        rows=[
            (process, what, seconds(start - began), seconds(end - began), seconds(end - start), min(1.0, (end - start) / whole_s))
            for process, what, start, end in shown
            if whole_s > 0
        ],
        title="Start-up" + (f": {seconds(first - began)} from the command to the first trained step" if first is not None else ""),
        note="Seconds from the command. What several processes did at the same time counts once.",
    )


def learning(tables: Tables) -> Table:
    """The figures that the alarms of learning are told from, at the run's start and at its end."""
    rows = []
    for field in LEARNING:
        known = [value for step in tables.steps if (value := step_value(step, field)) is not None]
        if known:
            few = min(WINDOW, len(known))
            rows.append((BY_FIELD[field].label, quantity(sum(known[:few]) / few), quantity(sum(known[-few:]) / few)))
    return Table(name="learning", headings=("figure", f"first {WINDOW} steps", f"last {WINDOW}"), kinds=("name",), rows=rows)


def members(tables: Tables) -> Table:
    """Engines that joined and left the live run, or were lost, and changes of the trainer's ranks; nothing where there were none."""
    changes = [one for one in tables.trainer_ranks if one.epoch]
    has_changed = bool(changes) or any(one.state != "live" for one in tables.members)
    found = [(one.t, one.name, one.state, one.reason) for one in tables.members]
    found += [(one.t, "trainer", one.words, "") for one in changes]
    rows = [(duration(tables.since_start(t)), *told) for t, *told in sorted(found)] if has_changed else []
    kinds = ("name", "name", "name", "name")
    return Table(name="members", headings=("after", "who", "is", "why"), kinds=kinds, rows=rows, title="Engines and trainer ranks")


def roles(tables: Tables) -> Table:
    """What the rule of elastic roles has decided, window by window; nothing in a run without it."""
    shown = [
        (
            duration(tables.since_start(one.t)),
            one.words,
            *("" if value is None else quantity(value) for value in (one.speed_now, one.speed_then, one.saved_s, one.cost_s)),
        )
        for one in tables.roles
    ]
    headings = ("after", "what", "tokens/s now", "tokens/s then", "s saved", "s it costs")
    note = (
        "By what a window has shown: the speed of the slowest part, now and in the best of the other layouts, and what four windows save."
    )
    return Table(name="roles", headings=headings, kinds=("name", "name"), rows=shown, title="Roles of devices", note=note if shown else "")


def client_models(tables: Tables) -> Table:
    """What a server's clients trained on: tokens by what is known of them, and how old they were."""
    rows = [
        (
            one.model_id,
            whole(one.num_steps),
            whole(one.sampled_tokens),
            f"{one.staleness_mean:.2f}",
            whole(one.staleness_max),
            *(whole(count) for count in (one.repeated_tokens, one.drifted_tokens, one.unknown_tokens, one.foreign_tokens)),
        )
        for one in tables.clients
    ]
    headings = ("model", "steps", "sampled tokens", "staleness", "oldest", "trained again", "drifted", "unknown", "of other models")
    return Table(name="clients", headings=headings, kinds=("code",), rows=rows, title="Models of clients")


def held_out(tables: Tables) -> Table:
    """Evaluations, each reward function apart; nothing where there was none, or only one function."""
    names = list(dict.fromkeys(name for row in tables.evaluations for name in row.components))
    rows = [
        [whole(row.version), quantity(row.reward_mean), *(quantity(row.components.get(name)) for name in names)]
        for row in _thinned(tables.evaluations)[0]
        if len(names) > 1
    ]
    return Table(name="held-out", headings=("version", "weighted", *names), kinds=(), rows=rows, title="Held-out by component")


def function_errors(tables: Tables) -> Table:
    """Failures of users' functions by cause, the commonest first."""
    rows = [
        (
            f"{row.function} ({row.kind})",
            row.cause,
            row.where or "unknown",
            whole(row.count),
            f"{duration(tables.since_start(row.t))} after the start",
        )
        for row in tables.function_errors[:MAX_CAUSES]
    ]
    headings = ("function", "cause", "where", "times", "first seen")
    title = "What failed in functions of yours"
    return Table(name="function-errors", headings=headings, kinds=("name", "code", "code"), rows=rows, title=title)


def arithmetic(diagnosis: Diagnosis) -> Table:
    """Every number the diagnosis rests on, with how it came about."""
    rows = [(row.what, row.arithmetic, row.value) for row in diagnosis.findings]
    return Table(name="arithmetic", headings=("what", "arithmetic", "value"), kinds=("name", "code"), rows=rows)


def waits(tables: Tables) -> list[Table]:
    """The waits of every stage over the whole run, longest first: those that held it up, and apart from them those for work to do."""
    waited = tables.last_status.waited_s if tables.last_status else {}
    rows = {True: [], False: []}
    for name, waited_s in sorted(waited.items(), key=lambda item: -item[1]):
        part = waited_s / tables.duration_s if tables.duration_s else 0.0
        rows[is_idle(name)].append((name, seconds(waited_s), percent(part), part))
    kinds = ("name", "number", "number", "bar")
    return [
        Table(name="waits", headings=("stage: what held it up", "waited", "of the run", ""), kinds=kinds, rows=rows[False][:MAX_WAITS]),
        Table(name="idle", headings=("stage: what it waited for", "waited", "of the run", ""), kinds=kinds, rows=rows[True]),
    ]


def waits_under_way(tables: Tables) -> Table:
    """The waits under way when the journal ended: of a run that was killed, the first thing to look at."""
    under_way = tables.last_status.waits if tables.last_status and tables.end is None else ()
    rows = [(name, seconds(waited)) for name, waited in under_way[:MAX_WAITS]]
    title = "Waits under way when the journal ends"
    return Table(name="waits-under-way", headings=("stage: what it waits for", "for"), kinds=("name",), rows=rows, title=title)


def steps(tables: Tables) -> Table:
    """Numbers of single steps, evenly thinned for a long run."""
    picked, stride = _thinned(tables.steps)
    rows = []
    for step in picked:
        cells = [quantity(value, digits=4) if (value := getattr(step, name)) is not None else "–" for name in list(STEP_COLUMNS)[2:]]
        cells += [quantity(step.trainer[name]) if name in step.trainer else "–" for name in STEP_METRICS]
        rows.append([whole(step.step), whole(step.version), *cells])
    note = f"One step in {stride}, and the last, of {len(tables.steps)}." if stride > 1 else ""
    return Table(name="steps", headings=[*STEP_COLUMNS.values(), *STEP_METRICS.values()], kinds=(), rows=rows, note=note)


def settings(tables: Tables) -> list[Table]:
    """Values derived from the settings, and every setting."""
    derived = [(str(key), written(value)) for key, value in tables.run.derived.items()]
    given = [(key, written(value)) for key, value in flat(tables.run.config)]
    return [
        Table(name="derived", headings=("derived from the settings", ""), kinds=("name",), rows=derived),
        Table(name="settings", headings=("key", "value"), kinds=("code", "code"), rows=given),
    ]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The leaves of nested settings by their path: `reward[0].weight`."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            for number, entry in enumerate(value):
                yield from flat(entry, f"{prefix}{key}[{number}].")
        else:
            yield prefix + key, value


def written(value: Any) -> str:
    """A setting's value as text."""
    return "none" if value is None else str(value)


def _thinned(rows: Sequence[Any]) -> tuple[Sequence[Any], int]:
    """At most about `MAX_STEP_ROWS` of the rows, the last one included, and how many stand for one."""
    stride = max(1, -(-len(rows) // MAX_STEP_ROWS))
    return [*rows[:-1:stride], *rows[-1:]], stride

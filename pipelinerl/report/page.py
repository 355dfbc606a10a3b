"""The report page, section by section. One file: no script, no request, nothing outside it."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from pipelinerl.report import figures, markup
from pipelinerl.report.diagnosis import Diagnosis, diagnose
from pipelinerl.report.headline import Headline, headline
from pipelinerl.report.reading import Tables
from pipelinerl.report.style import STYLE
from pipelinerl.report.svg import tag, words
from pipelinerl.report.timeline import timeline
from pipelinerl.report.units import NOT_RECORDED, duration, milliseconds, percent, plural, quantity, whole


def page(tables: Tables) -> str:
    """The whole page as text."""
    numbers, diagnosis = headline(tables), diagnose(tables)
    sections = (
        ("headline", "Headline", _cards(numbers, diagnosis) + tag("div", markup.identity_sentence(numbers), id="identity-sentence")),
        ("diagnosis", "Diagnosis", markup.learning(tables) + _diagnosis(diagnosis)),
        (
            "reward",
            "Reward",
            _grid(figures.reward_over_time(tables), figures.reward_over_samples(tables), figures.components(tables))
            + markup.held_out(tables),
        ),
        ("timeline", "Timeline", tag("div", timeline(tables), css="stack")),
        ("throughput", "Throughput", _grid(figures.throughput(tables), figures.sequences(tables))),
        ("staleness", "Staleness", _grid(figures.staleness_histogram(tables), figures.staleness_over_time(tables))),
        ("swaps", "Weight swaps", _grid(figures.pause_per_swap(tables), figures.staging_per_swap(tables))),
        ("trainer", "Trainer", tag("div", figures.meters(tables), css="figures small")),
        ("length", "Length", _grid(figures.lengths(tables))),
        (
            "queues",
            "Queues and waits",
            _grid(figures.queues(tables), figures.groups(tables), figures.memory(tables))
            + markup.waits(tables)
            + markup.waits_under_way(tables),
        ),
        ("outcomes", "Outcomes of rollouts", markup.identity_sentence(numbers) + markup.outcomes(numbers) + markup.function_errors(tables)),
        ("steps", "Steps", tag("details", tag("summary", words(plural(len(tables.steps), "step"))) + markup.steps(tables))),
        ("configuration", "Configuration", markup.configuration(tables)),
    )
    contents = tag("nav", "".join(tag("a", words(title), href=f"#{name}") for name, title, _ in sections), aria_label="Sections")
    body = "".join(tag("section", tag("h2", words(title)) + content, id=name) for name, title, content in sections)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        + tag("title", words(f"{tables.name}: run report"))
        + tag("style", STYLE)
    )
    return "<!DOCTYPE html>\n" + tag("html", tag("head", head) + tag("body", _top(tables) + contents + tag("main", body)), lang="en") + "\n"


def _top(tables: Tables) -> str:
    facts = []
    if tables.began is not None:
        began = datetime.datetime.fromtimestamp(tables.began, tz=datetime.UTC)
        facts.append(f"{began:%d %B %Y, %H:%M} UTC")
    start_up = tables.since_start(tables.worked_from) if tables.worked_from else 0.0
    facts.append(f"lasted {duration(tables.duration_s)}" + (f", {duration(start_up)} of it start-up" if start_up >= 1 else ""))
    for path, noun in ((("engine", "count"), "engine"), (("trainer", "ranks"), "trainer rank")):
        value = tables.setting(*path)
        facts += [plural(value, noun)] if isinstance(value, int) else []
    facts += [str(value) for path in (("pipeline", "mode"), ("algorithm", "name"), ("model", "path")) if (value := tables.setting(*path))]
    ended = (
        f"Ended: {tables.end.reason or 'no reason recorded'}."
        if tables.end
        else "The journal holds no end: the run is still going, or was killed."
    )
    warnings = tag("p", words(ended), css="meta" if tables.end else "warning", id="ended")
    for failure in tables.failures:
        warnings += tag("p", tag("strong", words(f"{failure.process} failed: ")) + words(failure.error), css="warning full failure")
    if tables.num_unreadable:
        warnings += tag("p", words(f"{plural(tables.num_unreadable, 'journal line')} could not be read and are left out."), css="warning")
    return tag("header", tag("h1", words(tables.name), id="name") + tag("p", words(" · ".join(facts)), css="meta") + warnings)


def _cards(numbers: Headline, diagnosis: Diagnosis) -> str:
    few = plural(numbers.num_averaged, "step")
    averaged = f"mean of the last {few}; first {few}: {quantity(numbers.first_reward)}" if numbers.num_steps_done else ""
    tokens = f"{whole(numbers.num_trained_tokens)} trained tokens" if numbers.num_trained_tokens is not None else ""
    before, after = numbers.held_out_before, numbers.held_out_after
    held_out = quantity(before.reward_mean if before else None)
    held_out += f" → {quantity(after.reward_mean)}" if after else ""
    asked = (
        (f"version {whole(before.version)}" + (f" → {whole(after.version)}" if after else "") + f", {whole(before.num_prompts)} prompts")
        if before
        else ""
    )
    planned = f" of {whole(numbers.num_steps)}" if numbers.num_steps else ""
    measured = numbers.measured
    over = f"steps {measured.first_step} to {measured.last_step}, {duration(measured.window_s)}" if measured else ""
    cards = (
        ("final-reward", "Final reward", quantity(numbers.final_reward), averaged),
        ("held-out", "Held-out reward", held_out, asked),
        ("num-steps", "Optimizer steps", whole(numbers.num_steps_done) + planned, ""),
        ("num-samples", "Samples trained", whole(numbers.num_samples), tokens),
        ("generated-rate", "Generation", _rate(numbers.generated_tokens_per_s), over),
        ("trained-rate", "Training", _rate(numbers.trained_tokens_per_s), over),
        (
            "pause",
            "Swap pause, p50 / p99",
            _two(numbers.pause_p50_s, numbers.pause_p99_s, milliseconds),
            plural(numbers.num_swaps, "swap"),
        ),
        (
            "staleness-mean",
            "Staleness, mean / oldest",
            NOT_RECORDED if numbers.staleness_mean is None else f"{quantity(numbers.staleness_mean)} / {whole(numbers.staleness_max)}",
            "versions, over trained tokens",
        ),
        (
            "waited",
            "Waited, trainer / engines",
            _two(diagnosis.trainer_wait_fraction, diagnosis.engine_wait_fraction, percent),
            "for micro-batches / without a request",
        ),
        ("identity", "Rollouts admitted", whole(numbers.identity.get("admitted")), _balance(numbers)),
    )
    return tag("dl", "".join(_card(*card) for card in cards), css="cards")


def _card(name: str, title: str, value: str, note: str) -> str:
    mark = {"✓": "good", "✗": "bad"}.get(note[:1], "note")
    return tag(
        "div",
        tag("dt", words(title))
        + tag("dd", words(value), css="value", id=name)
        + tag("dd", words(note), css=f"note {mark}", id=f"{name}-note"),
    )


def _two(first: float | None, second: float | None, write: Callable[[float | None], str]) -> str:
    """Two values of one unit, which is written once."""
    if first is None and second is None:
        return NOT_RECORDED
    left, right = write(first), write(second)
    number, gap, unit = right.rpartition("\N{NO-BREAK SPACE}")
    return f"{left.removesuffix(gap + unit) if number else left} / {right}"


def _balance(numbers: Headline) -> str:
    if numbers.imbalance is None:
        return ""
    return "✓ every one accounted for" if numbers.imbalance == 0 else f"✗ off by {whole(numbers.imbalance)}"


def _rate(value: float | None) -> str:
    return NOT_RECORDED if value is None else f"{quantity(value)} tok/s"


def _diagnosis(diagnosis: Diagnosis) -> str:
    verdict = tag("h3", "What limits its speed") + tag("p", words(diagnosis.verdict), css="verdict", id="verdict")
    advice = tag("p", tag("strong", "What to change: ") + words(diagnosis.advice), id="advice") if diagnosis.advice else ""
    return tag("div", verdict + advice + markup.arithmetic(diagnosis), data_limiter=diagnosis.limiter)


def _grid(*drawn: str) -> str:
    return tag("div", "".join(drawn), css="figures")

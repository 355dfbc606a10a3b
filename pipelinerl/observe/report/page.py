"""The report page: what stands in it, and how it becomes one file that asks for nothing from outside.

The templates escape whatever a run says (jinja2 with autoescape), and the page's Content-Security-Policy lets only our own scripts and
style sheet act, by their digests.
"""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipelinerl.observe.alarms.rules import WINDOW
from pipelinerl.observe.report import listings, units
from pipelinerl.observe.report.diagnosis import diagnose
from pipelinerl.observe.report.figures import figures
from pipelinerl.observe.report.headline import headline
from pipelinerl.observe.report.reading import Tables
from pipelinerl.observe.report.timeline import timeline
from pipelinerl.observe.report.units import NOT_RECORDED, duration, plural
from pipelinerl.observe.report.what_ifs import read_what_ifs

_HERE = Path(__file__).parent
_PLOTS = ("assets/uplot/uPlot.min.css", "assets/uplot/uPlot.iife.min.js", "templates/base.css", "templates/plots.js")
"""What draws the figures of every page, and their colours."""


def page(tables: Tables) -> str:
    """The report as text."""
    numbers, diagnosis = headline(tables), diagnose(tables)
    return render(
        "report.html",
        title=f"{tables.name}: run report",
        tables=tables,
        facts=_facts(tables),
        numbers=numbers,
        diagnosis=diagnosis,
        what_ifs=read_what_ifs(tables.folder),
        figures_of=figures(tables),
        timeline=timeline(tables),
        listings=listings,
        units=units,
        window=WINDOW,
    )


class Parts:
    """The scripts and the style sheet of a page: by its Content-Security-Policy they alone act on it, by their digests."""

    def __init__(self, *names: str, also: str = "", made: str = "") -> None:
        """`names`: files beside those that draw figures; `also`: more of the policy; `made`: a script that is no file, before others."""
        files = (*_PLOTS, *names)
        self.scripts = [*filter(None, [made]), *(_text(name) for name in files if name.endswith(".js"))]
        self.style = "".join(_text(name) for name in files if name.endswith(".css"))
        allowed = " ".join(map(_digest, self.scripts))
        rest = "base-uri 'none'; form-action 'none'"
        self.policy = f"default-src 'none'; script-src {allowed}; style-src {_digest(self.style)}; {also}{rest}"


def render(template: str, parts: Parts | None = None, **values: Any) -> str:
    """A page from its template, with the scripts and the style sheet within it; without `parts` it is one of the report's."""
    parts = parts or Parts("templates/style.css")
    scripts, style = map(Markup, parts.scripts), Markup(parts.style)
    return _environment().get_template(template).render(policy=parts.policy, scripts=scripts, style=style, **values)


def write_whole(path: Path, text: str) -> Path:
    """Write a page, whole or not at all, and return its path."""
    unfinished = path.with_suffix(f".{os.getpid()}.html")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(path)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = (units.whole, units.quantity, units.percent, units.milliseconds, units.duration, units.plural)
    environment.filters |= {write.__name__: write for write in written} | {"two": _two}
    return environment


@functools.cache
def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _facts(tables: Tables) -> list[str]:
    """Facts about the run, in a few words each."""
    facts = []
    if tables.began is not None:
        facts.append(f"{datetime.datetime.fromtimestamp(tables.began, tz=datetime.UTC):%d %B %Y, %H:%M} UTC")
    start_up = tables.since_start(tables.worked_from) if tables.worked_from else 0.0
    facts.append(f"lasted {duration(tables.duration_s)}" + (f", {duration(start_up)} of it start-up" if start_up >= 1 else ""))
    for path, noun in ((("engine", "count"), "engine"), (("trainer", "ranks"), "trainer rank")):
        value = tables.setting(*path)
        facts += [plural(value, noun)] if isinstance(value, int) else []
    return facts + [
        str(value) for path in (("pipeline", "mode"), ("algorithm", "name"), ("model", "path")) if (value := tables.setting(*path))
    ]


def _two(values: tuple[float | None, float | None], write: Callable[[float | None], str]) -> str:
    """Two values of one unit, which is written once."""
    if values == (None, None):
        return NOT_RECORDED
    left, right = map(write, values)
    number, gap, unit = right.rpartition("\N{NO-BREAK SPACE}")
    return f"{left.removesuffix(gap + unit) if number else left} / {right}"

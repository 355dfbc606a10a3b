"""A finding is the result of a check: what was looked at, what was found, what to do.

`pipelinerl doctor`, `pipelinerl run --dry-run` and the start of a run look at different things and tell them in this one form.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from rich.console import Console
from rich.markup import escape

from pipelinerl.errors import ConfigError, DataError


class Level(enum.StrEnum):
    """The consequence of a finding for a run."""

    OK = "ok"
    """A fact or an estimate."""
    NOTE = "note"
    """Worth knowing; a run works without it."""
    WARN = "warn"
    """A run starts, and may fail or be slow later."""
    FAIL = "fail"
    """A run cannot work like this, and is not started."""


NUM_SAID = 3
"""Bad rows of one kind that are named; the others are counted."""
COLOURS = {Level.OK: "green", Level.NOTE: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    level: Level
    what: str
    """The config key, source or part of the machine; empty where `found` names it, as an error does."""
    found: str
    do: str = ""
    """What to do; empty where there is nothing to do."""

    def __str__(self) -> str:
        return (f"{self.what}: " if self.what else "") + self.found + (f"; {self.do}" if self.do else "")


ok, note, warn, fail = (functools.partial(Finding, level) for level in Level)
"""A finding of that level, from `what`, `found` and `do`."""


def expect(is_well: bool, what: str, found: str, *, do: str, otherwise: Level = Level.WARN) -> Finding:
    """State something that is either well, or of level `otherwise` with something to do."""
    return ok(what, found) if is_well else Finding(otherwise, what, found, do)


def bad_rows(problems: Sequence[str], *, of: str, num_named: int = NUM_SAID) -> Iterator[Finding]:
    """Name the first of the bad rows, and count the others among all the rows `of` the source."""
    others = len(problems) - num_named
    for number, problem in enumerate(problems[:num_named], start=1):
        yield fail("", problem + (f"; and {others:,} more of {of} alike" if number == num_named and others > 0 else ""))


def collect(*looks: Iterable[Finding]) -> list[Finding]:
    """Findings of several looks, each told once. An error of ours that a look raises is a finding, and the other looks go on."""
    return list(dict.fromkeys(finding for look in looks for finding in _guarded(look)))


def _guarded(look: Iterable[Finding]) -> Iterator[Finding]:
    try:
        yield from look
    except (ConfigError, DataError) as error:
        yield fail("", str(error))


def sentences(findings: Iterable[Finding], *levels: Level) -> list[str]:
    """Findings of these levels as text."""
    return [str(finding) for finding in findings if finding.level in levels]


def show(findings: Iterable[Finding], console: Console, *levels: Level) -> None:
    """Print findings of these levels, one line each, and what to do below."""
    for finding in findings:
        if finding.level in levels:
            level = f"[{COLOURS[finding.level]}]{finding.level:<5}[/]"
            console.print(f"{level} {escape(f'{finding.what:<11} {finding.found}')}", highlight=False, soft_wrap=True)
            if finding.do:
                console.print(f"{'':<17} -> {escape(finding.do)}", highlight=False, soft_wrap=True)


def refuse(findings: Iterable[Finding]) -> None:
    """Raise `ConfigError` with every failure at once, where there is one."""
    if problems := sentences(findings, Level.FAIL):
        several = f"{len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(problems[0] if len(problems) == 1 else several)

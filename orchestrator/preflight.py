"""`python -m orchestrator.preflight --config FILE --output FILE`: every row of the data, and every function that will be called on it.

A process of its own, because what it imports is the user's. Each row is made into a prompt as the run makes it: its column is there and of
a right type, the chat template renders it, its columns can travel, and it leaves room for a completion. Each reward and the environment is
asked which of the row's columns it would be passed, by the code that passes them, once for every set of columns that occurs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from orchestrator.rows import Table, open_rows
from orchestrator.sources import PromptBuilder, longest_prompt
from pipelinerl.algorithms.method import Need
from pipelinerl.algorithms.methods import method_of
from pipelinerl.algorithms.own import is_own, load_own
from pipelinerl.algorithms.rules import specs_of
from pipelinerl.config import Config, DataSection
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import Finish
from pipelinerl.scorer.calls import Call, Component, component_names
from pipelinerl.scorer.environment import load_environment
from pipelinerl.scorer.rewards import load_rewards
from pipelinerl.stop_tokens import stop_tokens_of
from pipelinerl.tokenizer import ChatOptions, TextEncoder, load_tokenizer

MAX_STREAMED = 1000
"""Rows looked at of a source that can only be read one after the other, and may never end."""
NUM_SAID = 3
"""Rows named for each kind of problem; the others are counted."""
NUM_MEASURED = 256
"""Prompts counted exactly, the first, for the lengths that are told; of the others only whether they fit."""
BYTES_PER_TOKEN = 1 / 3
"""A text of n bytes is taken to have 3 n tokens at most, and is tokenised only where so many would not fit: tokenising every short prompt
would take several times as long. Byte-level vocabularies make n at most, and normalisation rarely more. A text with a character that no
text before it had is tokenised, too: a vocabulary may lack it."""
SAID_EVERY_S = 5.0
"""Without a terminal: between two lines of progress."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.preflight", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved settings, as JSON")
    parser.add_argument("--output", type=Path, required=True, help="where the findings go, as JSON")
    arguments = parser.parse_args()
    config = Config.model_validate_json(arguments.config.read_bytes())
    sys.path.insert(0, os.getcwd())  # as in the processes of a run, modules of the working directory can be imported
    arguments.output.write_text(json.dumps(look(config)))


def look(config: Config) -> dict[str, list[str]]:
    """Problems, notes and facts, each as sentences."""
    found: dict[str, list[str]] = {"problems": [], "notes": [], "facts": []}
    functions = list(_functions(config, found["problems"]))
    _load_advantage(config, found["problems"])
    reader = longest = None
    said: list[str] = []
    if (config.model.path / "config.json").is_file():
        try:
            tokenizer = load_tokenizer(config.model.path)
            stop_tokens = stop_tokens_of(config.model.path, tokenizer=tokenizer, extra=config.rollout.stop_token_ids)
            said.append(str(stop_tokens))
            found["notes"] += stop_tokens.warnings
            reader = PromptBuilder(
                encoder=TextEncoder(tokenizer, options=ChatOptions.of(config.data)), prompt_column=config.data.prompt_column
            )
            longest = longest_prompt(config)
        except ConfigError as error:
            found["problems"].append(str(error))
    sources = [config.data.source] if isinstance(config.data.source, str) else list(config.data.source or ())
    for source in sources:
        _look_at(source, config.data, config, found, functions=functions, reader=reader, longest=longest, must_fit=False)
    if (held_out := config.evaluation.source) is not None:
        section = config.data.model_copy(update={"shuffle": False, "limit": config.evaluation.limit, "difficulty": None})
        _look_at(held_out, section, config, found, functions=functions, reader=reader, longest=longest, must_fit=True)
    found["facts"] += said
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """A reward, or the environment: what is asked of a row's columns."""

    what: str
    arguments: Callable[[Call], object]
    """Raises `DataError` naming a parameter the row has no column for."""


def _functions(config: Config, problems: list[str]) -> Iterator[_Function]:
    names = component_names([reward.function for reward in config.reward])
    for reward, name in zip(config.reward, names, strict=True):
        try:
            (loaded,) = load_rewards([Component(function=reward.function, name=name, options=reward.options)])
        except ConfigError as error:
            problems.append(f"reward.function: {error}")
            continue

        def arguments(call: Call, loaded: Any = loaded) -> object:
            return loaded.arguments(call, completions=[""], max_tokens=config.rollout.max_tokens, decode=lambda token_ids: "")

        yield _Function(what=f"reward {reward.function}", arguments=arguments)
    if (function := config.environment.function) is not None:
        try:
            options = config.environment.options
            environment = load_environment(Component(function=function, name=function, options=options, is_environment=True))
        except ConfigError as error:
            problems.append(f"environment.function: {error}")
            return
        yield _Function(what=f"environment {function}", arguments=lambda call: environment.arguments(call, turns=[""], replies=[]))


def _load_advantage(config: Config, problems: list[str]) -> None:
    """An advantage of the user's runs in the orchestrator; the trainer loads their other rules, which may import torch, at its start."""
    try:
        name = method_of(config).advantage.name
    except ConfigError:  # said by whoever looks at the method
        return
    try:
        if is_own(name):
            load_own(name)
    except ConfigError as error:
        problems.append(f"algorithm.advantage: {error}")


def _look_at(
    source: str,
    section: DataSection,
    config: Config,
    found: dict[str, list[str]],
    *,
    functions: list[_Function],
    reader: PromptBuilder | None,
    longest: int | None,
    must_fit: bool,
) -> None:
    """One source: all of its rows, or the first of one that may not end."""
    key = "evaluation.source" if must_fit else "data.source"
    try:
        rows = open_rows(section.model_copy(update={"source": source}), seed=config.run.seed)
        look = _Look(
            key=f"{key} {source}",
            functions=functions,
            reader=reader,
            longest=longest,
            has_roles=_needs_roles(config),
            teachers=() if must_fit else tuple(config.reference.teachers),
        )
        is_table = isinstance(rows, Table)
        num_rows = len(rows) if is_table else MAX_STREAMED
        for number in _shown(range(num_rows), what=f"rows of {source}"):
            row = rows[number] if is_table else drawn[2] if (drawn := rows.draw(0, number)) is not None else None
            if row is None:
                break
            look.at(row, where=rows.where(number))
        look.say(found, is_whole=is_table, must_fit=must_fit)
    except (ConfigError, DataError) as error:
        found["problems"].append(f"{key}: {error}")


def _needs_roles(config: Config) -> bool:
    try:
        method = method_of(config)
    except ConfigError:  # said by whoever looks at the method
        return False
    return any(Need.ROLES in spec.needs for _, _, spec in specs_of(method))


class _Look:
    """What was seen of one source."""

    def __init__(
        self,
        *,
        key: str,
        functions: list[_Function],
        reader: PromptBuilder | None,
        longest: int | None,
        has_roles: bool,
        teachers: Sequence[str] = (),
    ) -> None:
        self._key = key
        self._functions = functions
        self._reader = reader
        self._longest = longest
        self._has_roles = has_roles
        self._teachers = teachers
        self._num_rows = 0
        self._bad: dict[str, list[str]] = {}
        """By kind: the rows, `NUM_SAID` of them with the problem, the others as empty texts."""
        self._asked: dict[tuple[str, ...], list[str]] = {}
        """By the columns of a row: what functions said of them."""
        self._seen: set[str] = set()
        """Characters of the prompts that were tokenised."""
        self._lengths: list[int] = []
        self._too_long: list[tuple[str, int]] = []

    def at(self, row: Any, *, where: str) -> None:
        """Look at a row."""
        self._num_rows += 1
        columns: Mapping[str, Any] = row if isinstance(row, Mapping) else {}
        if self._reader is not None:
            try:
                columns = self._reader.columns(row, where=where)
                value = row[self._reader.prompt_column]
                self._measure(value, self._reader.text(row, where=where), where)
            except DataError as error:
                self._note("row", str(error))
        if not isinstance(row, Mapping):
            return
        if self._has_roles and not isinstance(columns.get("role"), str):
            self._note("role", f"{where}: column role is {columns.get('role')!r}, expected a text: the method has a baseline for each role")
        if self._teachers and columns.get("teacher") not in self._teachers:
            expected = f"one of {', '.join(self._teachers)} (reference.teachers)"
            self._note("teacher", f"{where}: column teacher is {columns.get('teacher')!r}, expected {expected}")
        self._ask(columns, where)

    def _measure(self, value: Any, text: str, where: str) -> None:
        assert self._reader is not None
        new = set(text) - self._seen
        might_not_fit = self._longest is not None and len(text.encode(errors="surrogatepass")) / BYTES_PER_TOKEN > self._longest
        if text.strip() and not (new or might_not_fit or len(self._lengths) < NUM_MEASURED):
            return
        self._seen |= new
        num_tokens = len(self._reader.token_ids(value, text, where=where))
        if len(self._lengths) < NUM_MEASURED:
            self._lengths.append(num_tokens)
        if self._longest is not None and num_tokens > self._longest:
            self._too_long.append((where, num_tokens))

    def _ask(self, columns: Mapping[str, Any], where: str) -> None:
        """Ask every function for its arguments, once for rows alike."""
        nested = columns.get("reward_model")
        kind = (
            (*sorted(columns), "reward_model.ground_truth") if isinstance(nested, Mapping) and "ground_truth" in nested else tuple(columns)
        )
        if kind not in self._asked:
            nothing = np.zeros(1, np.int32)
            call = Call(ticket_id=0, prompt="", completions=(nothing,), finishes=(Finish.STOP,), columns=dict(columns))
            self._asked[kind] = []
            for function in self._functions:
                try:
                    function.arguments(call)
                except DataError as error:
                    self._asked[kind].append(f"{function.what} {error}")
        for problem in self._asked[kind]:
            self._note(problem, f"{problem} ({where})")

    def _note(self, kind: str, problem: str) -> None:
        known = self._bad.setdefault(kind, [])
        known.append(problem if len(known) < NUM_SAID else "")

    def say(self, found: dict[str, list[str]], *, is_whole: bool, must_fit: bool) -> None:
        """Tell what was seen."""
        for kind, rows in self._bad.items():
            shown = rows[:NUM_SAID] if kind in ("row", "role") else rows[:1]
            others = len(rows) - len(shown)
            found["problems"] += shown
            if others:
                found["problems"][-1] += f"; and {others:,} more of {self._num_rows:,} rows of {self._key.partition(' ')[2]} alike"
        if self._lengths:
            lengths = np.array(self._lengths)
            which = f"the first {len(lengths)}" if self._num_rows > len(lengths) else "all"
            found["facts"].append(
                f"{self._key}: {self._num_rows:,} rows{'' if is_whole else ' looked at, of a source without an end'}; prompts of"
                f" {lengths.min():,} to {lengths.max():,} tokens, median {np.median(lengths):,.0f} ({which}); at most {self._longest:,} fit"
            )
        if self._too_long:
            where, num_tokens = self._too_long[0]
            are_all = is_whole and len(self._too_long) == self._num_rows
            longest = max(num for _, num in self._too_long)
            fate = "no prompt is left" if are_all else "an evaluation passes over none of them" if must_fit else "they will be passed over"
            text = (
                f"{self._key}: {len(self._too_long):,} of {self._num_rows:,} prompts have more than the {self._longest:,} tokens that"
                f" rollout.max_tokens leaves of the context and of batch.max_tokens, first {where} ({num_tokens:,}), longest {longest:,}:"
                f" {fate}. Raise model.max_tokens and batch.max_tokens, or lower rollout.max_tokens."
            )
            found["problems" if are_all or must_fit else "notes"].append(text)


def _shown(numbers: range, *, what: str) -> Iterator[int]:
    """Go through rows with a bar on a terminal; with a line every few seconds without one."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=len(numbers))
            for number in numbers:
                yield number
                if number % 64 == 0:
                    bar.update(task, completed=number)
        return
    said_at = time.monotonic()
    for number in numbers:
        yield number
        if number % 64 == 0 and time.monotonic() - said_at > SAID_EVERY_S:
            said_at = time.monotonic()
            print(f"{what}: {number:,} of {len(numbers):,}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

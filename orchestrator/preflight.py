"""`python -m orchestrator.preflight --config FILE --output FILE`: every row of the data, and every function that will be called on it.

A process of its own, because what it imports is the user's. Each row is made into a prompt as the run makes it: its column is there and of
a right type, the chat template renders it, its columns can travel, and it leaves room for a completion. Each reward and the environment is
asked which of the row's columns it would be passed, by the code that passes them, once for every set of columns that occurs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from orchestrator.advantages import role_of
from orchestrator.data.encoder import encoder_of
from orchestrator.data.rows import Table, open_rows
from orchestrator.data.sources import PromptBuilder, longest_prompt
from orchestrator.rollouts.micro_batch import teacher_of
from pipelinerl.algorithms.declare import load_rule
from pipelinerl.algorithms.method import Method, Need
from pipelinerl.algorithms.methods import method_of
from pipelinerl.algorithms.own import is_own
from pipelinerl.algorithms.rules import specs_of
from pipelinerl.config import Config, DataSection, RewardSection
from pipelinerl.data.chat import ChatTemplate
from pipelinerl.data.images import num_images, read_images
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.launch.preflight import answer
from pipelinerl.messages import Finish, Prompt, RequestKind, ScorerTask
from pipelinerl.rewards.calls import Component, component_names
from pipelinerl.rewards.environment import load_environment
from pipelinerl.rewards.pool.plan import environment_component
from pipelinerl.rewards.reward import load_rewards
from pipelinerl.rewards.reward_model.folder import problem_of, problem_of_tokenizer
from pipelinerl.rewards.stateful import load_stateful
from pipelinerl.runtime.findings import NUM_SAID, Finding, Level, bad_rows, fail, note, ok

MAX_STREAMED = 1000
"""Rows checked of a source that can only be read one after the other, and may never end."""
NUM_MEASURED = 256
"""The first prompts, so many of which are counted exactly for the reported lengths; of the others it is only checked that they fit."""
BYTES_PER_TOKEN = 1 / 3
"""A text of n bytes is taken to have 3 n tokens at most, and is tokenised only where so many would not fit: tokenising every short prompt
would take several times as long. Byte-level vocabularies make n at most, and normalisation rarely more. A text with a character that no
text before it had is tokenised, too: a vocabulary may lack it."""
SAID_EVERY_S = 5.0
"""Seconds between two lines of progress, without a terminal."""


def look(config: Config) -> Iterator[Finding]:
    """Check the user's functions and the tokenizer, and with both every row."""
    problems: list[Finding] = []
    functions = list(_functions(config, problems))
    yield from problems
    needs_roles = False
    with contextlib.suppress(ConfigError):  # pipelinerl.launch.preflight tells it
        method = method_of(config)
        yield from _advantage(method)
        needs_roles = any(Need.ROLES in spec.needs for _, _, spec in specs_of(method))
    reader = longest = stop_tokens = None
    if (config.model.path / "config.json").is_file():
        try:
            tokenizer = load_tokenizer(config.model.path)
            stop_tokens = stop_tokens_of(config.model.path, tokenizer=tokenizer, extra=config.rollout.stop_token_ids)
            yield from (note("", warning) for warning in stop_tokens.warnings)
            encoder = encoder_of(config, tokenizer)
            yield from _turns(config, tokenizer, ends=stop_tokens.of_model)
            reader = PromptBuilder(encoder=encoder, prompt_column=config.data.prompt_column)
            longest = longest_prompt(config)
        except ConfigError as error:
            if str(error) not in (problem.found for problem in problems):  # the environment's class, which the encoder needs, too
                yield fail("", str(error))
    sources = [config.data.source] if isinstance(config.data.source, str) else list(config.data.source or ())
    sections = [config.data.model_copy(update={"source": source}) for source in sources]
    if (held_out := config.evaluation.source) is not None:
        rest = {"source": held_out, "shuffle": False, "limit": config.evaluation.limit, "difficulty": None}
        sections.append(config.data.model_copy(update=rest))
    trained: set[int] = set()
    for number, section in enumerate(sections):
        key = "data.source" if number < len(sources) else "evaluation.source"
        seen = _Source(
            key=f"{key} {section.source}",
            functions=functions,
            reader=reader,
            longest=longest,
            has_roles=needs_roles,
            teachers=tuple(config.reference.teachers) if key == "data.source" else (),
            must_fit=key == "evaluation.source",
        )
        yield from _rows_of(section, seed=config.run.seed, seen=seen, key=key)
        if key == "data.source":
            trained |= seen.texts
        elif shared := len(seen.texts & trained):
            found = (
                f"{shared:,} of its {len(seen.texts):,} prompts are among those of data.source, too: their scores say what was memorised"
            )
            yield note(seen.key, found, do="hold other rows out")
    if stop_tokens is not None:
        yield ok("", str(stop_tokens))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """A reward, or the environment, and the columns that it asks of a row."""

    what: str
    arguments: Callable[[ScorerTask], object]
    """The callback returns the arguments of the function. Raises `DataError` naming a parameter the row has no column for."""


def _functions(config: Config, problems: list[Finding]) -> Iterator[_Function]:
    names = component_names([reward.reference for reward in config.reward])
    for reward, name in zip(config.reward, names, strict=True):
        if reward.function is None:
            problems += _reward_model(reward)
            continue
        try:
            (loaded,) = load_rewards([Component(function=reward.function, name=name, options=reward.options)])
        except ConfigError as error:
            problems.append(fail("reward.function", str(error)))
            continue

        def arguments(task: ScorerTask, loaded: Any = loaded) -> object:
            return loaded.arguments(task, completions=[""], max_tokens=config.rollout.max_tokens, decode=lambda token_ids: "")

        yield _Function(what=f"reward {reward.function}", arguments=arguments)
    if (component := environment_component(config.environment)) is None:
        return
    try:
        if component.is_stateful:
            (stateful := load_stateful(component)).end()
            yield _Function(what=f"environment {component.function}: reset", arguments=stateful.arguments)
            return
        environment = load_environment(component)
    except ConfigError as error:
        problems.append(fail(config.environment.key, str(error)))
        return
    yield _Function(
        what=f"environment {component.function}", arguments=lambda task: environment.arguments(task, decode=lambda token_ids: "")
    )


def _reward_model(reward: RewardSection) -> Iterator[Finding]:
    """Check that a reward model's folder is one, and that its tokenizer writes what it reads; it asks nothing of a row."""
    folder = reward.model
    if folder is None or not (folder / "config.json").is_file():
        return  # pipelinerl.launch.preflight tells it
    try:
        problem = problem_of(folder) or problem_of_tokenizer(folder, load_tokenizer(folder), form=reward.format)
    except ConfigError as error:
        problem = str(error)
    if problem:
        yield fail("reward.model", problem)


def _turns(config: Config, tokenizer: Any, *, ends: Collection[int]) -> Iterator[Finding]:
    """Check that a chat template can say what follows a turn, for an environment with state."""
    if config.environment.cls is None or tokenizer.chat_template is None:
        return
    template = ChatTemplate(tokenizer, options=config.data.chat_template_kwargs, ends=ends)
    if template.continuation([{"role": "user", "content": "-"}], sampled=[]) is None:
        found = "its chat template cannot say what follows a turn of the model: an episode of chat messages ends after the first"
        yield note("model.path", found, do="take a template that writes every message, or prompts of plain text")


def _advantage(method: Method) -> Iterator[Finding]:
    """Check an advantage of the user's, which runs in the orchestrator; the trainer loads their other rules, which may import torch, at its
    start.
    """
    try:
        if is_own(method.advantage.name):
            load_rule(method.advantage.name)
    except ConfigError as error:
        yield fail("algorithm.advantage", str(error))


def _rows_of(section: DataSection, *, seed: int, seen: _Source, key: str) -> Iterator[Finding]:
    """Yield all rows of a source, or the first of one that may not end."""
    try:
        rows = open_rows(section, seed=seed)
        is_table = isinstance(rows, Table)
        for number in _shown(range(len(rows) if is_table else MAX_STREAMED), what=f"rows of {section.source}"):
            row = rows[number] if is_table else drawn[2] if (drawn := rows.draw(0, number)) is not None else None
            if row is None:
                break
            seen.look_at(row, where=rows.where(number))
        yield from seen.findings(is_whole=is_table)
    except (ConfigError, DataError) as error:
        yield fail(key, str(error).removeprefix("data.source: "))


@dataclasses.dataclass(kw_only=True)
class _Source:
    """The findings about one source."""

    key: str
    functions: list[_Function]
    reader: PromptBuilder | None
    longest: int | None
    """The most tokens of a prompt."""
    has_roles: bool
    teachers: Sequence[str]
    must_fit: bool
    """True where no prompt may be passed over."""
    num_rows: int = 0
    bad: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """The bad rows by kind: the first `NUM_SAID` with their problem, the others as empty texts."""
    asked: dict[tuple[str, ...], list[str]] = dataclasses.field(default_factory=dict)
    """The complaints of functions, by the columns of a row."""
    characters: set[str] = dataclasses.field(default_factory=set)
    """The characters of the prompts that were tokenised."""
    lengths: list[int] = dataclasses.field(default_factory=list)
    too_long: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    texts: set[int] = dataclasses.field(default_factory=set)
    """Hashes of the prompts."""

    def look_at(self, row: Any, *, where: str) -> None:
        """Check a row."""
        self.num_rows += 1
        columns: Mapping[str, Any] = row if isinstance(row, Mapping) else {}
        if self.reader is not None:
            try:
                columns = self.reader.columns(row, where=where)
                value = row[self.reader.prompt_column]
                images = read_images(row, num=num_images(value), where=where)
                text = self.reader.text(row, where=where, images=images)
                self.texts.add(hash((text, images)))
                self._measure(value, text, where)
            except DataError as error:
                self._note("row", str(error))
        if not isinstance(row, Mapping):
            return
        if self.has_roles:
            self._try("role", lambda: role_of(columns, where=where))
        if self.teachers:
            self._try("teacher", lambda: teacher_of(columns, self.teachers, where=where))
        self._ask(columns, where)

    def _measure(self, value: Any, text: str, where: str) -> None:
        assert self.reader is not None
        new = set(text) - self.characters
        might_not_fit = self.longest is not None and len(text.encode(errors="surrogatepass")) / BYTES_PER_TOKEN > self.longest
        if text.strip() and not (new or might_not_fit or len(self.lengths) < NUM_MEASURED):
            return
        self.characters |= new
        num_tokens = len(self.reader.token_ids(value, text, where=where))
        if len(self.lengths) < NUM_MEASURED:
            self.lengths.append(num_tokens)
        if self.longest is not None and num_tokens > self.longest:
            self.too_long.append((where, num_tokens))

    def _ask(self, columns: Mapping[str, Any], where: str) -> None:
        """Ask every function for its arguments, once for rows with the same columns."""
        nested = columns.get("reward_model")
        kind = (
            (*sorted(columns), "reward_model.ground_truth") if isinstance(nested, Mapping) and "ground_truth" in nested else tuple(columns)
        )
        if kind not in self.asked:
            nothing = np.zeros(1, np.int32)
            prompt = Prompt(prompt_id="", text="", token_ids=nothing, columns=dict(columns))
            task = ScorerTask(
                kind=RequestKind.REWARD,
                rollout_id="",
                attempt=0,
                prompt=prompt,
                completions=(nothing,),
                finishes=(Finish.STOP,),
                turns=(None,),
            )
            self.asked[kind] = []
            for function in self.functions:
                try:
                    function.arguments(task)
                except DataError as error:
                    self.asked[kind].append(f"{function.what} {error}")
        for problem in self.asked[kind]:
            self._note(problem, f"{problem} ({where})")

    def _try(self, kind: str, read: Callable[[], object]) -> None:
        try:
            read()
        except DataError as error:
            self._note(kind, str(error))

    def _note(self, kind: str, problem: str) -> None:
        known = self.bad.setdefault(kind, [])
        known.append(problem if len(known) < NUM_SAID else "")

    def findings(self, *, is_whole: bool) -> Iterator[Finding]:
        """Yield the findings; `is_whole` says that they are about every row."""
        of = f"{self.num_rows:,} rows of {self.key.partition(' ')[2]}"
        for kind, rows in self.bad.items():
            yield from bad_rows(rows, of=of, num_named=NUM_SAID if kind in ("row", "role") else 1)
        if self.lengths:
            lengths = np.array(self.lengths)
            which = f"the first {len(lengths)}" if self.num_rows > len(lengths) else "all"
            yield ok(
                self.key,
                f"{self.num_rows:,} rows{'' if is_whole else ' looked at, of a source without an end'}; prompts of {lengths.min():,} to"
                f" {lengths.max():,} tokens, median {np.median(lengths):,.0f} ({which}); at most {self.longest:,} fit",
            )
        if self.too_long:
            where, num_tokens = self.too_long[0]
            are_all = is_whole and len(self.too_long) == self.num_rows
            fate = (
                "no prompt is left"
                if are_all
                else "an evaluation passes over none of them"
                if self.must_fit
                else "they will be passed over"
            )
            yield Finding(
                Level.FAIL if are_all or self.must_fit else Level.NOTE,
                self.key,
                f"{len(self.too_long):,} of {self.num_rows:,} prompts have more than the {self.longest:,} tokens that rollout.max_tokens"
                f" leaves of the context and of batch.max_tokens, first {where} ({num_tokens:,}), longest"
                f" {max(num for _, num in self.too_long):,}: {fate}",
                "raise model.max_tokens and batch.max_tokens, or lower rollout.max_tokens",
            )


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
    answer(look, module="orchestrator.preflight", description=__doc__)

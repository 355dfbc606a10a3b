"""Completions to score come from four places: typed, a column of the data, a recorded run, or the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from orchestrator.data.rows import Table, open_rows
from orchestrator.data.sources import PromptBuilder
from orchestrator.replay.recorded import read_recording
from orchestrator.rescore.scorers import CallReport, settings_file
from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rollouts.rollout import Rollout, unanswered
from orchestrator.rollouts.scorer_tasks import environment_task
from pipelinerl.config import Config
from pipelinerl.data.tokenizer import TextEncoder
from pipelinerl.errors import ConfigError, DataError, EngineError, PeerGone
from pipelinerl.messages import Completion, Failed, Finish, Generate, Prompt, Result, Sampling, ScorerTask, Trajectory
from pipelinerl.transport.codec import Decoder
from pipelinerl.transport.stream import Frames, frame

Write = Callable[[Sequence[Generate]], list[Completion]]
"""Completes these, in their order: the next turn of as many rollouts."""
Answer = Callable[[ScorerTask], tuple[Result, CallReport]]
"""Has the environment reply."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RescoredRow:
    """A row of the data, and the completions to score on it."""

    where: str
    """File and line, or the group of a run."""
    prompt: Prompt
    members: tuple[Trajectory, ...]
    replies: tuple[tuple[CallReport, ...], ...] = ()
    """Of each member, the calls of the environment; empty without one, and of what was recorded."""
    is_announced: bool = False
    """Its prompt was shown already, to whoever typed."""


def read_prompts(config: Config, *, encoder: TextEncoder, first: int, num: int) -> Iterator[tuple[str, Prompt]]:
    """Yield rows of the data in their own order, the first source's where there are several: where each stands, and its prompt."""
    assert config.data.source is not None, "settings for a run name one"
    source = config.data.source if isinstance(config.data.source, str) else next(iter(config.data.source))
    rows = open_rows(config.data.model_copy(update={"source": source, "shuffle": False, "difficulty": None}), seed=config.run.seed)
    builder = PromptBuilder(prompt_column=config.data.prompt_column, encoder=encoder)
    for number in range(first, first + num):
        if isinstance(rows, Table):
            row = rows[number] if number < len(rows) else None
        else:
            row = drawn[2] if (drawn := rows.draw(0, number)) is not None else None
        if row is None:
            if number == first:
                raise DataError(f"{rows.name} has no row {first}; the first is 0")
            return
        where = rows.where(number)
        yield where, builder.prompt(number, row, epoch=0, where=where)


def recorded(run_folder: Path, *, num: int) -> Iterator[RescoredRow]:
    """Yield the newest groups of a run, as they were sampled. Raises `LedgerError`, `DataError`."""
    groups = read_recording(run_folder / "ledger.sqlite").groups[-num:]
    if not groups:
        raise DataError(f"{run_folder} has no recorded group: none was settled yet, or run.record_groups was 0")
    for group in groups:
        members = tuple(member.trajectory for member in group.members)
        yield RescoredRow(
            where=f"{run_folder}, group {group.group_id}, prompt {group.prompt.prompt_id}", prompt=group.prompt, members=members
        )


def play(
    config: Config,
    prompt: Prompt,
    *,
    where: str,
    group_id: int,
    num: int,
    write: Write,
    reply: Answer,
    end: Callable[[str], None] = lambda _: None,
) -> RescoredRow:
    """Have `num` siblings of a prompt written, turn by turn where there is an environment; `end` is called with each whose episode is over.

    Raises `ConfigError` where an environment with state has not room for all of them.
    """
    environment = config.environment
    if environment.cls is not None and num > environment.max_alive:
        raise ConfigError(f"environment.concurrency is {environment.max_alive}: no {num} episodes live at once. Raise it.")
    episode = None
    if environment.is_used:
        is_stateful = environment.cls is not None
        episode = Episode(prompt=prompt, max_tokens=config.rollout.max_tokens, max_turns=environment.max_turns, is_stateful=is_stateful)
    rollouts = [
        Rollout(
            rollout_id=f"{group_id}/{sibling}",
            group_id=group_id,
            sibling=sibling,
            attempt=0,
            prompt=prompt,
            version=0,
            admitted_at=0.0,
            is_greedy=False,
            episode=episode,
        )
        for sibling in range(num)
    ]
    rollout = config.rollout
    sampling = Sampling(max_tokens=rollout.max_tokens, temperature=rollout.temperature, stop=rollout.stop)
    last: dict[str, Completion] = {}
    reports: dict[str, list[CallReport]] = {rollout.rollout_id: [] for rollout in rollouts}
    if environment.cls is not None:
        rollouts = [_after(rollout, reply, reports[rollout.rollout_id]) for rollout in rollouts]
    open_ones = [rollout for rollout in rollouts if rollout.episode is None or not rollout.episode.is_over]
    while open_ones:
        written = write([rollout.request(sampling, chunk_tokens=0) for rollout in open_ones])
        went_on: dict[str, Rollout] = {}
        for rollout, completion in zip(open_ones, written, strict=True):
            last[rollout.rollout_id] = completion
            went_on[rollout.rollout_id] = _after(rollout.said(completion), reply, reports[rollout.rollout_id])
        rollouts = [went_on.get(rollout.rollout_id, rollout) for rollout in rollouts]
        open_ones = [one for one in went_on.values() if one.episode is not None and not one.episode.is_over]
    for one in rollouts:
        end(one.rollout_id)
    members = tuple(one.trajectory(last.get(one.rollout_id) or _unwritten(one), engine_id=0, finished_at=0.0) for one in rollouts)
    return RescoredRow(where=where, prompt=prompt, members=members, replies=tuple(map(tuple, reports.values())))


def _unwritten(rollout: Rollout) -> Completion:
    """Return what stands for the answer to a rollout whose environment could not begin."""
    return unanswered(rollout.rollout_id, attempt=0, error="" if rollout.episode is None else rollout.episode.error)


def _after(rollout: Rollout, reply: Answer, reports: list[CallReport]) -> Rollout:
    """Return the rollout once the environment has replied, where it is to be asked."""
    if rollout.episode is None or rollout.episode.is_over:
        return rollout
    result, report = reply(environment_task(rollout.rollout_id, attempt=0, episode=rollout.episode))
    reports.append(report)
    return dataclasses.replace(rollout, episode=rollout.episode.observe(result))


class TypedCompletions:
    """Texts that were typed: of a run with an environment, one for each turn. What is wanted beyond them ends the episode."""

    def __init__(self, texts: Iterator[str], *, encoder: TextEncoder) -> None:
        self._texts = texts
        self._encoder = encoder

    def __call__(self, requests: Sequence[Generate]) -> list[Completion]:
        return [self._next(request) for request in requests]

    def _next(self, request: Generate) -> Completion:
        text = next(self._texts, None)
        token_ids = [] if text is None else self._encoder.continuation(text)
        is_cut = len(token_ids) > request.sampling.max_tokens
        token_ids = token_ids[: request.sampling.max_tokens]
        return Completion(
            rollout_id=request.rollout_id,
            attempt=request.attempt,
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.zeros(len(token_ids), np.float32),
            versions=np.zeros(len(token_ids), np.int32),
            finish=Finish.LENGTH if is_cut else Finish.STOP,
            turn=request.turn,
        )


def column_of(prompt: Prompt, column: str, *, where: str) -> str:
    """Return the text in a row's column. Raises `DataError`."""
    if column not in prompt.columns:
        raise DataError(f"{where} has no column {column!r}; it has {', '.join(prompt.columns) or 'none beside the prompt'}")
    value = prompt.columns[column]
    return value if isinstance(value, str) else str(value)


def typed_texts(prompt: str) -> Iterator[str]:
    """Yield the texts that a person types, one after the other, each ended by an empty line; an empty one ends them."""
    while True:
        print(prompt, end="", file=sys.stderr, flush=True)
        lines = list(itertools.takewhile(str.strip, iter(sys.stdin.readline, "")))
        if not lines:
            return
        yield "".join(lines).removesuffix("\n")


class SampledCompletions:
    """The run's engine, in a process of its own."""

    def __init__(self, config: Config, *, stop_token_ids: tuple[int, ...]) -> None:
        self._stop_token_ids = stop_token_ids
        self._decoder: Decoder[Completion | Failed] = Decoder(Completion | Failed)
        self._open = contextlib.ExitStack()
        ours, theirs = socket.socketpair()
        self._channel = self._open.enter_context(contextlib.closing(ours))
        self._frames = Frames(ours)
        settings = self._open.enter_context(settings_file(config))
        command = [sys.executable, "-m", "pipelinerl.engine.sampling", "--config", str(settings), "--channel", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=sys.stderr)

    def __enter__(self) -> SampledCompletions:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)
        self._open.close()
        self._process.wait()

    def __call__(self, requests: Sequence[Generate]) -> list[Completion]:
        """Have the engine complete these. Raises `ConfigError` where it cannot serve the model, `EngineError` and `PeerGone`."""
        self._channel.sendall(b"".join(frame(self._with_stops(request)) for request in requests))
        found: dict[str, Completion] = {}
        while len(found) < len(requests):
            bodies = self._frames.receive()
            if bodies is None:
                raise PeerGone(f"the engine ended with code {self._process.wait()}; its last words stand above")
            for body in bodies:
                answer = self._decoder.decode(body)
                if isinstance(answer, Failed):
                    raise ConfigError(answer.error)
                if answer.finish is Finish.ERROR:
                    raise EngineError(answer.error)
                found[answer.rollout_id] = answer
        return [found[request.rollout_id] for request in requests]

    def _with_stops(self, request: Generate) -> Generate:
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, stop_token_ids=self._stop_token_ids))

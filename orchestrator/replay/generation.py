"""This module replays generation: it admits the recorded groups once more, to engines that answer when they did.

An attempt that is asked for at its recorded time is answered at its recorded time; any other is answered after its recorded duration.
Everything else, such as steps that fill and policies that are published, happens at its recorded time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.replay.clock import simulate
from orchestrator.replay.differences import SHOWN, write_lines
from orchestrator.replay.events import Event, in_turns, read_events
from orchestrator.replay.recorded import read_drawn
from orchestrator.replay.recorded_peers import ENGINE_KINDS, RecordedEngines, needed, run_recorded
from orchestrator.replay.recorded_run import RecordedRun
from orchestrator.rules.quarantine import Quarantine
from orchestrator.stages.generation import Generation
from orchestrator.stages.prompts import Drawn
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Completion, Finish, Generate, Message, Prompt, Sampling
from pipelinerl.observe.journal import Journal

SAME_TIME_S = 1.0
"""An attempt that is asked for within this much of its recorded time is answered at its recorded time. A smaller value lets the
milliseconds by which a busy loop is late add up; a larger one gives an engine that is asked earlier or later, under other settings, an
answer that did not take its time.
"""
WORTH_SAYING_S = 0.05
_STATUSES = ("assigned", "filtered", "stale", "failed")
_SAID = ("admitted", "issued", "lost")
"""Entries that generation writes itself. It admits and issues at once, so no event that it hears lies between."""
_NOTHING = np.zeros(0, np.int32)

Attempt = tuple[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """An attempt that an engine was asked for."""

    t: float
    peer: str
    version: int

    def __str__(self) -> str:
        return f"{self.peer} at version {self.version}"


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield, line by line, the engine that each attempt goes to, beside the recorded one."""
    config, run_folder, folder = recorded.config, recorded.run_folder, recorded.folder
    if config.environment.function is not None:
        raise ConfigError(
            "generation cannot be replayed: this run has an environment, and of its episodes only the end is recorded, not when each turn"
            " was asked for. The other stages can."
        )
    kinds = ENGINE_KINDS | {*_STATUSES, *_SAID, "generated", "limit", "evaluation"}
    events = needed(read_events(run_folder, kinds=kinds), run_folder=run_folder)
    old = {_attempt(event): _issue(event) for event in events if event.kind == "issued"}
    with contextlib.closing(Journal(folder, "orchestrator")) as journal, contextlib.closing(Ledger(None)) as ledger:
        simulate(_run(config, events, old=old, drawn=_drawn(run_folder, events), ledger=ledger, journal=journal))
        query = "SELECT rollout_id, attempt, t, peer, version FROM events WHERE kind = 'issued' ORDER BY seq"
        new = {(name, attempt): Issue(t=t, peer=peer, version=version) for name, attempt, t, peer, version in ledger.store.read(query)}
    yield from _say(old, new, path=folder / "generation.jsonl")
    yield from _not_recorded(config, events)


async def _run(
    config: Config, events: list[Event], *, old: dict[Attempt, Issue], drawn: collections.deque[Drawn], ledger: Ledger, journal: Journal
) -> None:
    heard = list(in_turns([event for event in events if event.kind not in ("evaluation", "admitted", "lost")], answers=("issued",)))
    engines = _Answers(old, {_attempt(event): event for event in heard if event.kind == "generated"})
    side = RecordedEngines(config, journal=journal, told=engines.asked)
    engines.say = side.engine_hub.say
    num_siblings = 1 + max((int(name.partition("/")[2]) for name, _ in old), default=0)  # a greedy one included
    generation = Generation(
        prompts=side.channels.prompts,
        completions=side.channels.completions,
        trajectories=side.channels.generated,
        engines=side.engines,
        admission=side.admission,
        credits=side.credits,
        ledger=ledger,
        watch=side.watch,
        sampling=Sampling(max_tokens=config.rollout.max_tokens, temperature=1.0, stop_token_ids=()),
        group_size=num_siblings,
        quarantine=Quarantine({}),
        next_group_id=min((int(name.partition("/")[0]) for name, _ in old), default=0),
    )

    def begin(event: Event) -> None:
        """Begin the stages when all peers are there. The time of each draw is not recorded; there are as many prompts as in the run."""
        side.hear(event)
        while drawn:
            side.channels.prompts.put_now(drawn.popleft())

    steps = _Steps(events, side, num_siblings=num_siblings)
    around = {
        "generated": lambda event: None,
        "limit": functools.partial(_limit, side),
        "trainer": begin,
        **dict.fromkeys(_STATUSES, steps.completed),
    }
    await run_recorded(
        heard,
        hear=lambda event: around.get(event.kind, side.hear)(event),
        stages=(*side.peers, side.weight_sync, generation, steps),
        rest_s=1.0,
    )


class _Answers:
    """The recorded answers of the engines."""

    def __init__(self, issued: dict[Attempt, Issue], answers: dict[Attempt, Event]) -> None:
        self.say = lambda peer, message: None
        self._issued = issued
        self._answers = answers
        self._last = {name: attempt for name, attempt in sorted(answers)}
        """The attempt that was answered, by rollout."""

    def asked(self, peer: str, message: Message) -> None:
        if not isinstance(message, Generate):
            return
        loop = asyncio.get_running_loop()
        attempt = (message.rollout_id, message.attempt)
        issued = self._issued.get(attempt)
        answer = self._answers.get(attempt)
        if answer is None and (issued is None or issued.peer != peer):  # another engine was asked, which did not end
            attempt = (message.rollout_id, self._last.get(message.rollout_id, -1))
            issued, answer = self._issued.get(attempt), self._answers.get(attempt)
        if issued is None or answer is None:
            return
        is_same = abs(issued.t - loop.time()) < SAME_TIME_S
        at_s = answer.t if is_same else loop.time() + answer.t - issued.t
        nothing = Completion(
            rollout_id=message.rollout_id,
            attempt=message.attempt,
            token_ids=_NOTHING,
            logprobs=np.zeros(0, np.float32),
            versions=_NOTHING,
            finish=Finish(answer.fields["reason"]),
        )
        loop.call_at(at_s, self.say, peer, nothing)


class _Steps:
    """A stage in the place of batching: it gives a group's credit back when the group was completed, or once it is complete."""

    name = "steps"

    def __init__(self, events: list[Event], side: RecordedEngines, *, num_siblings: int) -> None:
        placed = {_group_of(event) for event in events if event.kind == "assigned"}
        self._placed = placed
        self._side = side
        self._num_siblings = num_siblings
        self._num_whole: collections.Counter[int] = collections.Counter()
        self._due: set[int] = set()
        self._over: set[int] = set()

    async def run(self) -> None:
        async for trajectory in self._side.channels.generated:
            self._num_whole[trajectory.group_id] += 1
            self._complete(trajectory.group_id)

    def completed(self, event: Event) -> None:
        self._due.add(_group_of(event))
        self._complete(_group_of(event))

    def _complete(self, group_id: int) -> None:
        if group_id not in self._due or group_id in self._over or self._num_whole[group_id] < self._num_siblings:
            return
        self._over.add(group_id)
        admission = self._side.admission
        (admission.assigned if group_id in self._placed else admission.dropped)()
        self._side.credits.set()


def _limit(side: RecordedEngines, event: Event) -> None:
    """Apply the limit that adaptive concurrency had set."""
    if side.config.pipeline.adaptive_concurrency:
        side.admission.max_running = event.fields["max_running"]
        side.credits.set()


def _drawn(run_folder: Path, events: list[Event]) -> collections.deque[Drawn]:
    """Return the prompts of the recorded groups, without the columns that generation does not read."""
    groups = {_group_of(event) for event in events if event.kind == "issued"}
    return collections.deque(
        Drawn(prompt=Prompt(prompt_id=each.prompt_id, text="", token_ids=_NOTHING), position=each.position)
        for each in read_drawn(run_folder / "ledger.sqlite")
        if each.group_id in groups
    )


def _say(old: dict[Attempt, Issue], new: dict[Attempt, Issue], *, path: Path) -> Iterator[str]:
    both = [attempt for attempt in old if attempt in new]
    moved = [attempt for attempt in both if (old[attempt].peer, old[attempt].version) != (new[attempt].peer, new[attempt].version)]
    write_lines(
        path,
        ({"rollout_id": each[0], "attempt": each[1], "old": _plain(old.get(each)), "new": _plain(new.get(each))} for each in old | new),
    )
    same_order = list(filter(set(both).__contains__, old)) == list(filter(set(both).__contains__, new))
    yield (
        f"generation: {len(old):,} attempts, {len(both) - len(moved):,} of the recorded engine at the recorded version, {len(moved):,} of"
        f" another, {len(old) - len(both):,} not asked for, {len(new) - len(both):,} that the run did not ask for;"
        f" {'in the recorded order' if same_order else 'in another order'}"
    )
    for name, attempt in sorted(moved, key=lambda each: old[each].t)[:SHOWN]:
        yield f"  rollout {name}, attempt {attempt}: {old[name, attempt]} -> {new[name, attempt]}"
    gaps = np.array([new[attempt].t - old[attempt].t for attempt in both] or [0.0])
    late, early = np.count_nonzero(gaps > WORTH_SAYING_S), np.count_nonzero(gaps < -WORTH_SAYING_S)
    yield (
        f"  asked for {late:,} later and {early:,} earlier than recorded, by more than {1000 * WORTH_SAYING_S:g} ms;"
        f" median {1000 * np.median(gaps):+.3g} ms, from {gaps.min():+.3g} to {gaps.max():+.3g} s"
    )


def _not_recorded(config: Config, events: list[Event]) -> Iterator[str]:
    num_evaluations = sum(event.kind == "evaluation" for event in events)
    if num_evaluations:
        yield f"  not recorded: when engines answered {num_evaluations} evaluations, which fill slots here and there"
    if config.prm.is_used:
        yield "  not recorded: when the process reward model held admission back"


def _group_of(event: Event) -> int:
    return int(event.fields["rollout_id"].partition("/")[0])


def _attempt(event: Event) -> Attempt:
    return event.fields["rollout_id"], event.fields["attempt"]


def _issue(event: Event) -> Issue:
    return Issue(t=event.t, peer=event.fields["peer"], version=event.fields["version"])


def _plain(issue: Issue | None) -> dict[str, object] | None:
    return None if issue is None else dataclasses.asdict(issue)

"""This module replays generation: it admits the recorded groups once more, to engines that answer when they did.

An attempt that is asked for at its recorded time is answered at its recorded time; any other is answered after its recorded duration.
Everything else, such as steps that fill and policies that are published, happens at its recorded time.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.replay.clock import simulate
from orchestrator.replay.differences import SHOWN, write_lines
from orchestrator.replay.events import Event, in_turns
from orchestrator.replay.harness import Harness, as_scored, changed, empty_completion, records
from orchestrator.replay.recorded import RecordedRun, read_prompts
from orchestrator.replay.recorded_engines import read_policies, repeat, say
from orchestrator.stages.generation import Generation
from orchestrator.stages.prompts import Drawn
from orchestrator.stages.weight_sync import WeightSync
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Finish, Generate, Message, Prompt
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
    if recorded.config.environment.is_used:
        raise ConfigError(
            "generation cannot be replayed: this run has an environment, and of its episodes only the end is recorded, not when each turn"
            " was asked for. The other stages can."
        )
    if recorded.config.dispatches_rollouts or recorded.config.pipeline.migration != "off":
        raise ConfigError(
            "generation cannot be replayed: in this run rollouts went to engines one by one, by lengths and by what engines said and nobody"
            " recorded (pipeline.dispatch, pipeline.routing, pipeline.kv_admission, pipeline.migration). The other stages can."
        )
    events = read_policies(recorded.run_folder, kinds=(*_STATUSES, *_SAID, "generated", "limit", "evaluation"))
    with records(recorded.folder) as (ledger, journal):
        replay = _Replay(recorded, events)
        simulate(replay.run(ledger, journal))
        query = "SELECT rollout_id, attempt, t, peer, version FROM events WHERE kind = 'issued' ORDER BY seq"
        new = {(name, attempt): Issue(t=t, peer=peer, version=version) for name, attempt, t, peer, version in ledger.store.read(query)}
    yield from _say(replay.issued, new, path=recorded.folder / "generation.jsonl")
    num_evaluations = sum(event.kind == "evaluation" for event in events)
    if num_evaluations:
        yield f"  not recorded: when engines answered {num_evaluations} evaluations, which fill slots here and there"
    if recorded.config.prm.is_used:
        yield "  not recorded: when the process reward model held admission back"


class _Replay:
    """The stage, between recorded engines and what stands in the place of batching: it gives each group's credit back when the group was
    completed, or once it is complete.
    """

    def __init__(self, recorded: RecordedRun, events: list[Event]) -> None:
        self._recorded = recorded
        self.issued = {_attempt(event): _issue(event) for event in events if event.kind == "issued"}
        self._events = list(
            in_turns([event for event in events if event.kind not in ("evaluation", "admitted", "lost")], answers=("issued",))
        )
        self._answers = {_attempt(event): event for event in self._events if event.kind == "generated"}
        self._last = {name: attempt for name, attempt in sorted(self._answers)}
        """The attempt that was answered, by rollout."""
        self._assigned = {_group_of(event.fields["rollout_id"]) for event in events if event.kind == "assigned"}
        self._num_siblings = 1 + max((int(name.partition("/")[2]) for name, _ in self.issued), default=0)  # a greedy one included
        self._missing: dict[int, int] = collections.defaultdict(lambda: self._num_siblings)
        """The siblings of each group that are not generated yet."""
        self._due: set[int] = set()
        """Groups that were completed in the run."""
        self._over: set[int] = set()

    async def run(self, ledger: Ledger, journal: Journal) -> None:
        config = as_scored(changed(self._recorded.config, pipeline={"adaptive_concurrency": False}))
        self._harness = Harness(config, ledger=ledger, journal=journal, num_siblings=self._num_siblings)
        self._harness.engine_hub.told = self._asked
        self._generation = self._harness.stage(Generation)
        async with asyncio.TaskGroup() as group:
            collecting = group.create_task(self._collect())
            await self._harness.run(self._harness.stage(WeightSync), self._generation, script=repeat(self._events, hear=self._hear))
            collecting.cancel()

    def _hear(self, event: Event) -> None:
        parts = self._harness.parts
        match event.kind:
            case "generated":
                pass  # it answers what generation asks
            case "limit":  # adaptive concurrency set it
                if self._recorded.config.pipeline.adaptive_concurrency:
                    parts.admission.max_running = event.fields["max_running"]
                    parts.credits.set()
            case "assigned" | "filtered" | "stale" | "failed":
                group_id = _group_of(event.fields["rollout_id"])
                self._due.add(group_id)
                self._give_back(group_id)
            case _:
                say(self._harness, event)
        if event.kind == "trainer":  # it comes last. When each prompt was drawn is not recorded; there are as many as in the run
            self._draw()

    def _draw(self) -> None:
        """Give generation the prompts of the recorded groups, without the columns that it does not read."""
        groups = {_group_of(name) for name, _ in self.issued}
        for each in read_prompts(self._recorded.run_folder / "ledger.sqlite"):
            if each.group_id in groups:
                prompt = Prompt(prompt_id=each.prompt_id, text="", token_ids=np.zeros(0, np.int32))
                self._generation.prompts.put_now(Drawn(prompt=prompt, position=each.position))

    def _asked(self, peer: str, message: Message) -> None:
        """Have an engine answer when it did."""
        if not isinstance(message, Generate):
            return
        loop = asyncio.get_running_loop()
        attempt = (message.rollout_id, message.attempt)
        issued, answer = self.issued.get(attempt), self._answers.get(attempt)
        if answer is None and (issued is None or issued.peer != peer):  # another engine was asked, which did not end
            attempt = (message.rollout_id, self._last.get(message.rollout_id, -1))
            issued, answer = self.issued.get(attempt), self._answers.get(attempt)
        if issued is None or answer is None:
            return
        is_same = abs(issued.t - loop.time()) < SAME_TIME_S
        at_s = answer.t if is_same else loop.time() + answer.t - issued.t
        loop.call_at(at_s, self._harness.engine_hub.say, peer, empty_completion(message, finish=Finish(answer.fields["reason"])))

    async def _collect(self) -> None:
        async for trajectory in self._generation.trajectories:
            self._missing[trajectory.group_id] -= 1
            self._give_back(trajectory.group_id)

    def _give_back(self, group_id: int) -> None:
        if group_id not in self._due or group_id in self._over or self._missing[group_id] > 0:
            return
        self._over.add(group_id)
        admission = self._harness.parts.admission
        (admission.assigned if group_id in self._assigned else admission.dropped)()
        self._harness.parts.credits.set()


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


def _group_of(rollout_id: str) -> int:
    return int(rollout_id.partition("/")[0])


def _attempt(event: Event) -> Attempt:
    return event.fields["rollout_id"], event.fields["attempt"]


def _issue(event: Event) -> Issue:
    return Issue(t=event.t, peer=event.fields["peer"], version=event.fields["version"])


def _plain(issue: Issue | None) -> dict[str, object] | None:
    return None if issue is None else dataclasses.asdict(issue)

"""What became of every prompt, group, rollout and attempt, with reasons and times; and the conservation counts:

    admitted = in flight + trained + filtered + stale + failed + cancelled

**The ledger and the checkpoint are one transaction.** Two files must never disagree about what is trained: `ledger.sqlite`, which the
orchestrator writes, and `checkpoints/step-N/`, which the trainer writes. One of them decides. It is the checkpoint: *a sample is trained
exactly when a whole checkpoint of a later version stands on disk*. Until then its step can be done again from here. In order:

    who           writes                                                                           before
    orchestrator  `admitted`, `issued`, `generated`, `scored` and the sample itself                 (as they happen, in batches)
    orchestrator  `placed`, `packed`: the step, row and place of each sample                        a row is offered to the trainer
    orchestrator  `sealed`, durably; its number is the step's *commit*                              the seal is offered to the trainer
    trainer       a draft of checkpoint N: weights, optimizer, the commit of step N - 1,            it takes its name
                  a digest of every sample it has ever trained
    trainer       renames the draft: the commit point                                               it says `CheckpointSaved`
    orchestrator  `saved` with the checkpoint's version and commit; the samples of its steps go     (nothing waits for it)

So the checkpoint names the ledger's commit, the ledger names the checkpoint, and a row exists here before any weight has seen it. What each
crash leaves, whoever dies:

    before `packed`            the trainer never saw the row: its samples are scored and untrained, and are packed again, maybe otherwise
    before `sealed` is durable no checkpoint of the next version can exist: the step's rows are offered again, the rest of it is filled anew
    before the rename          the checkpoint before rules: the steps since are trained again, from the same rows in the same order
    before `saved`             the new checkpoint rules: its commit is found here, `trained` is booked for what it proves, `saved` too
    power fails                the file loses its last entries, but none up to the last `sealed`: no checkpoint names one that is lost

**Resume.** The trainer starts from the newest checkpoint that is still whole and says its version and commit (`TrainerReady`). Where that
is not the newest that was `saved`, because that one was damaged on the disk or taken away, the newer ones are booked as `discarded`, and
the steps since the older one are undone as after any restart. So rows stay for as long as a trainer may have to fall back to before them:
from the oldest of the `checkpoint.keep` checkpoints on; while there are fewer, from the model that the run began with. A commit that this
ledger does not hold means that the two are of different runs, and is refused. Steps from that version on are *replayed*: what came after
the checkpoint is undone together with the weights, its samples return to the queue, and leave it again in the very rows they had. On a
machine that computes the same sums twice, the same policies come out, bit by bit, so versions that engines hold keep their meaning and no
token loses its provenance; whether the trainer alone died or everything did is no difference. What was scored and not placed is grouped
again; what was in engines or scorers is issued again with the next attempt, which fences whatever the old one may still deliver.

Every entry is `t` (seconds on the clock of its life, see `began`), a kind, and what it is about:

    began       a life of the run; `reason` is its settings and its clock in Unix seconds, as JSON
    admitted    a rollout, its group and prompt                     issued      an attempt of it, of `peer` at version `newest`
    lost        the attempt, and why                                generated   the attempt: tokens, versions, how it finished
    replied     the environment, to turn `place` of the attempt, which `peer` wrote; `reason`: ok, over, or how it failed
    flagged     the attempt, hopeless after step `place` by its score `reward`; `reason`, JSON: whether it stops, probability of going on
    scored      the attempt: outcome and reward                     followed    its steps have scores, or it cannot train
    compared    with its siblings: outcome and reward that count    placed      in a step
    packed      in a row and place of it
    trained, filtered, stale, failed, cancelled: its fate           revived     cancelled when the run ended, which goes on
    sealed      a step: rows (`row`), samples (`place`), tokens     done        a step is in the policy
    replayed    it is once more, after a restart from a checkpoint  restarted   the trainer, from version `step`
    saved       a checkpoint of version `step`; `reason`: commit    unsaved     a checkpoint could not be written
    discarded   a checkpoint of version `step` that was saved cannot be used any more; `reason`: its damage, or that it is gone
    suspected   a prompt was there when `peer` died                 cleared     it came through
    quarantined it was there twice: it is not sampled again         skipped     a quarantined prompt was drawn
                (of the trainer: `reason` is a row, `step/row`, which is sent no more; its samples fail)
    outlived    the trainer, at `step`, the orchestrator before     adopted     an attempt that an engine had outlive it
    ended       the run: why, and the counts, as JSON               evaluated   a version (`step`), with the mean `reward`
    baselines   of a method that has a memory, as JSON
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from orchestrator.ledger.store import PRUNING, Store, changing, writing
from orchestrator.rules.curriculum import Rest
from pipelinerl.messages import EarlyStopDecision, Prompt, Sample, Scored, ScoredTrajectory, TerminalStatus, Trajectory

RUN_ENDED = "the run ended"
"""Reason of a rollout that was in flight when its run ended; it is revived when the run goes on."""

_NO_PROMPT = Prompt(prompt_id="", text="", token_ids=np.zeros(0, np.int32))
"""Stands in a recorded trajectory: siblings share their prompt, which is recorded with the group."""


@dataclasses.dataclass(slots=True, kw_only=True)
class InFlight:
    """A rollout in flight."""

    group_id: int
    prompt_id: str
    attempt: int = -1
    """The last that was issued."""
    version: int = 0
    """The newest that an attempt of it was asked of."""
    flag: str | None = None
    """JSON: how the coin of its last attempt fell, see `Ledger.flag`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """What is known of a rollout when it ends; None where it never got that far."""

    step: int | None = None
    """Step it was trained in, or counts in as one that was stopped early."""
    reward: float | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    num_tokens: int = 0
    """Tokens sampled for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The six counts of the conservation counts."""

    admitted: int
    in_flight: int
    trained: int
    filtered: int
    stale: int
    failed: int
    cancelled: int

    @property
    def holds(self) -> bool:
        return self.admitted == self.in_flight + self.trained + self.filtered + self.stale + self.failed + self.cancelled

    def __str__(self) -> str:
        right = f"{self.in_flight} in flight + {self.trained} trained + {self.filtered} filtered + {self.stale} stale"
        sign = "=" if self.holds else "IS NOT"
        return f"{self.admitted} admitted {sign} {right} + {self.failed} failed + {self.cancelled} cancelled"


class Ledger:
    """Counts in memory, books to the store. `path` None keeps it all in memory.

    `keep_groups` settled ones, the newest, stay recorded whole although nothing needs them any more.
    """

    def __init__(self, path: Path | None, *, keep_groups: int = 0, fence: Callable[[], None] = lambda: None) -> None:
        self.store = Store(path, fence=fence)
        self._keep_groups = keep_groups
        self.reasons: collections.Counter[str] = collections.Counter()
        """Rollouts that were not trained, by `fate: reason`."""
        self._counts: collections.Counter[TerminalStatus] = collections.Counter()
        self._ends: collections.Counter[tuple[str, str]] = collections.Counter()
        """By fate and reason."""
        self._changed: set[tuple[str, str]] = set()
        """Those that were not written since."""
        self._changed_state: dict[str, Any] = {}
        """What the state is to hold by key, and was not written since."""
        self._in_flight: dict[str, InFlight] = {}
        self._sequence = itertools.count(1 + self.store.last_seq)
        with self.store.readable():
            self._read_state()
        self.store.before_flush = self._write_changed

    # --- the run ---

    def begin(self, settings: dict[str, Any], *, now_s: float, unix_s: float) -> None:
        """A life of the run begins; what an earlier one cancelled when it ended is in flight again."""
        self.record("began", now_s=now_s, reason=json.dumps({"settings": settings, "unix_s": unix_s}))
        revived = self.store.rows("in_flight", "revives ORDER BY rowid")
        for name, group_id, prompt_id, attempt, version, flag, _ in revived:
            self.record("revived", now_s=now_s, rollout_id=name)
            self._in_flight[name] = InFlight(group_id=group_id, prompt_id=prompt_id, attempt=attempt, version=version, flag=flag)
            self._update(name, self._in_flight[name])
        self._count(TerminalStatus.CANCELLED, RUN_ENDED, -len(revived))
        self.flush()

    def finish(self, reason: str, *, now_s: float) -> Counts:
        """End everything still in flight as cancelled, and the run with it; return the final counts."""
        for rollout_id in list(self._in_flight):
            self.end(rollout_id, TerminalStatus.CANCELLED, now_s=now_s, reason=RUN_ENDED)
        counts = self.counts()
        self.record("ended", now_s=now_s, reason=json.dumps({"reason": reason, "counts": dataclasses.asdict(counts)}))
        self.flush(durably=True)
        return counts

    def record(
        self,
        kind: str,
        *,
        now_s: float,
        rollout_id: str | None = None,
        group_id: int | None = None,
        prompt_id: str | None = None,
        attempt: int | None = None,
        step: int | None = None,
        row: int | None = None,
        place: int | None = None,
        peer: str | None = None,
        reason: str | None = None,
        reward: float | None = None,
        oldest: int | None = None,
        newest: int | None = None,
        num_tokens: int | None = None,
    ) -> int:
        """Append an entry of any kind; return its number."""
        sequence = next(self._sequence)
        rollout = (rollout_id, group_id, prompt_id, attempt)
        said = None if reward is None or math.isnan(reward) else float(reward)  # SQLite has no NaN
        with self.transaction():
            self.store.append((sequence, float(now_s), kind, *rollout, step, row, place, peer, reason, said, oldest, newest, num_tokens))
            match kind:
                case "done":
                    self._set_state("done", (step or 0) + 1)
                case "suspected" | "cleared":
                    count_death(self._deaths, kind, peer=peer or "", row=reason or "")
                    self._set_state("deaths", self._deaths)
                case "evaluated":
                    self.store.put(_EVALUATED, step, said)
        return sequence

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Have everything booked in the block be written by one flush, or none of it."""
        return self.store.transaction()

    # --- a rollout's way, in order ---

    def admit(self, group_id: int, prompt: Prompt, *, group_size: int, position: tuple[int, int], now_s: float) -> list[str]:
        """A group is sent to engines for the first time; return its rollouts' names. `position` is the source's after the draw."""
        rollout_ids = [f"{group_id}/{sibling}" for sibling in range(group_size)]
        with self.transaction():
            self.store.put(_GROUP, group_id, prompt, None, None, None)
            self.store.put(_DRAWN, group_id, prompt.prompt_id, *position)
            self._set_state("drawn", [group_id, *position])
            for rollout_id in rollout_ids:
                assert rollout_id not in self._in_flight, f"rollout {rollout_id} was admitted twice"
                self._in_flight[rollout_id] = InFlight(group_id=group_id, prompt_id=prompt.prompt_id)
                self.store.put(_IN_FLIGHT, rollout_id, group_id, prompt.prompt_id, -1, 0, None, 0)
                self.record("admitted", now_s=now_s, rollout_id=rollout_id, group_id=group_id, prompt_id=prompt.prompt_id)
        return rollout_ids

    def issue(self, rollout_id: str, *, attempt: int, engine_id: int, version: int, now_s: float) -> None:
        """An engine that samples under `version` was asked for an attempt."""
        with self.transaction():
            self.record("issued", now_s=now_s, rollout_id=rollout_id, attempt=attempt, peer=f"engine-{engine_id}", newest=version)
            if (rollout := self._in_flight.get(rollout_id)) is not None:
                rollout.attempt, rollout.version, rollout.flag = attempt, max(version, rollout.version), None
                self._update(rollout_id, rollout)

    def reattach(self, rollout_id: str, *, attempt: int, engine_id: int, now_s: float) -> None:
        """An attempt of an earlier life is still in its engine, and its answer is awaited."""
        self.record("adopted", now_s=now_s, rollout_id=rollout_id, attempt=attempt, peer=f"engine-{engine_id}")

    def lose(self, rollout_id: str, *, attempt: int, engine_id: int, reason: str, now_s: float) -> None:
        """An attempt will not be answered, or its answer cannot be true (`refused: <kind>`)."""
        self.record("lost", now_s=now_s, rollout_id=rollout_id, attempt=attempt, peer=f"engine-{engine_id}", reason=reason)

    def record_early_stop(self, rollout_id: str, *, attempt: int, flag: EarlyStopDecision, now_s: float) -> None:
        """A coin has fallen about an attempt that is being written."""
        reason = json.dumps({"stops": flag.stops, "probability": flag.probability})
        with self.transaction():
            self.record(
                "flagged", now_s=now_s, rollout_id=rollout_id, attempt=attempt, place=flag.step, reward=flag.predicted, reason=reason
            )
            if (rollout := self._in_flight.get(rollout_id)) is not None:
                rollout.flag = msgspec.json.encode([attempt, flag]).decode()
                self._update(rollout_id, rollout)

    def record_observation(self, rollout_id: str, *, attempt: int, turn: int, engine_id: int, reason: str, now_s: float) -> None:
        """The environment has replied to a turn (from 0) that an engine wrote: `reason` is ok, over, or how it failed."""
        self.record("replied", now_s=now_s, rollout_id=rollout_id, attempt=attempt, place=turn, peer=f"engine-{engine_id}", reason=reason)

    def record_completion(self, trajectory: Trajectory, *, now_s: float) -> None:
        """An engine has answered."""
        summary = summary_of(trajectory)
        self.record(
            "generated",
            now_s=now_s,
            rollout_id=trajectory.rollout_id,
            attempt=trajectory.attempt,
            peer=f"engine-{trajectory.engine_id}" if trajectory.engine_id >= 0 else None,
            reason=str(trajectory.finish),
            oldest=summary.oldest_version,
            newest=summary.newest_version,
            num_tokens=summary.num_tokens,
        )

    def record_score(self, scored: ScoredTrajectory, *, now_s: float) -> None:
        """A scorer has answered, or could not: from here on the rollout survives a restart."""
        trajectory, score = scored.trajectory, scored.score
        name, group_id, attempt = trajectory.rollout_id, trajectory.group_id, trajectory.attempt
        with self.transaction():
            self.record("scored", now_s=now_s, rollout_id=name, attempt=attempt, reason=_reason(score), reward=score.reward)
            self.store.put(_SAMPLE, name, group_id, *[None] * 5, 0, 0)
            self.store.put(_TRAJECTORY, name, _without_prompt(scored))

    def update_scores(self, kind: str, members: Sequence[ScoredTrajectory], *, now_s: float) -> None:
        """Scores have changed: by `followed`, each has its step scores, or by `compared`, its part of what compares siblings."""
        with self.transaction():
            for member in members:
                name, attempt, score = member.trajectory.rollout_id, member.trajectory.attempt, member.score
                self.record(kind, now_s=now_s, rollout_id=name, attempt=attempt, reason=_reason(score), reward=score.reward)
                self.store.put(_SCORED_ANEW, _without_prompt(member), name)
                self.store.put(_AMENDED[kind], 1, name)

    def assign(self, group_id: int, samples: Iterable[Sample], *, step: int, now_s: float) -> None:
        """A group becomes part of a step."""
        self._complete(group_id, step=step, is_assigned=True)
        for sample in samples:
            rollout_id = sample.trajectory.rollout_id
            self.record("placed", now_s=now_s, rollout_id=rollout_id, step=step)
            self.store.put(_PLACED, step, sample.advantages.tobytes(), rollout_id)

    def set_advantages(self, samples: Iterable[Sample]) -> None:
        """Samples placed before have got their final advantages: a rule over the whole step gives them when it closes."""
        for sample in samples:
            self.store.put(_CREDITED, sample.advantages.tobytes(), sample.trajectory.rollout_id)

    def drop(self, group_id: int, *, step: int) -> None:
        """No rollout of a group will be trained; it came while `step` was being filled."""
        self._complete(group_id, step=step, is_assigned=False)

    def pack(self, samples: Sequence[Sample], *, step: int, row: int, now_s: float) -> None:
        """A row is whole. It must be written, by `flush`, before the trainer may have it."""
        for place, sample in enumerate(samples):
            rollout_id = sample.trajectory.rollout_id
            self.record("packed", now_s=now_s, rollout_id=rollout_id, step=step, row=row, place=place)
            self.store.put(_PACKED, row, place, rollout_id)

    def end(self, rollout_id: str, fate: TerminalStatus, *, now_s: float, reason: str = "", summary: RolloutSummary | None = None) -> None:
        """A rollout ended. Raises `KeyError` where it is not in flight: it was never admitted, or ended before."""
        rollout = self._in_flight.pop(rollout_id)
        known = summary or RolloutSummary()
        with self.transaction():
            self.record(
                str(fate),
                now_s=now_s,
                rollout_id=rollout_id,
                step=known.step,
                reason=reason,
                reward=known.reward,
                oldest=known.oldest_version,
                newest=known.newest_version,
                num_tokens=known.num_tokens,
            )
            self._count(fate, reason, 1)
            if fate is TerminalStatus.CANCELLED and reason == RUN_ENDED:
                self._update(rollout_id, rollout, revives=True)
            else:
                self.store.put("DELETE FROM in_flight WHERE rollout_id = ?", rollout_id)
            if fate is TerminalStatus.FILTERED and known.step is not None:
                self.store.put(_STOPPED, known.step, rollout_id)

    # --- a step's way ---

    def quarantine_row(self, step: int, row: int, samples: Sequence[Sample], *, now_s: float) -> None:
        """A row killed the trainer twice: it is sent no more, and its samples end as failed. What the step is divided by stays."""
        key = f"{step}/{row}"
        with self.transaction():
            self.record("quarantined", now_s=now_s, peer="trainer", reason=key, step=step, row=row)
            for sample in samples:
                trajectory = sample.trajectory
                reason = f"its row killed the trainer twice: row {row} of step {step}"
                self.end(
                    trajectory.rollout_id,
                    TerminalStatus.FAILED,
                    now_s=now_s,
                    reason=reason,
                    summary=summary_of(trajectory, reward=sample.reward),
                )
            self._quarantined_rows = sorted({*self._quarantined_rows, key})
            self._set_state("refused", self._quarantined_rows)

    def quarantined_rows(self, step: int) -> frozenset[int]:
        """Rows of a step that are sent no more."""
        keys = (key.partition("/") for key in self._quarantined_rows)
        return frozenset(int(row) for of_step, _, row in keys if int(of_step) == step)

    def close_step(self, step: int, *, num_rows: int, num_tokens: int, num_samples: int, now_s: float) -> str:
        """A step has all its rows; return its commit. It must be written, durably, before the trainer may have the seal."""
        with self.transaction():
            sequence = self.record("sealed", now_s=now_s, step=step, row=num_rows, place=num_samples, num_tokens=num_tokens)
            self.store.put(_SEALED, step, num_rows, num_tokens, num_samples, sequence)
        return f"{self.store.ledger_id}:{sequence}"

    def record_checkpoint(self, version: int, commit: str, *, now_s: float, oldest: int | None = None) -> None:
        """A checkpoint of `version` stands, and no trainer starts from before `oldest`: rows of the steps before that may go."""
        oldest = version if oldest is None else max(0, min(oldest, version))
        with self.transaction():
            self.record("saved", now_s=now_s, step=version, reason=commit)
            self.store.put(_SAVED, version, commit)
            self._set_state("oldest", oldest)
            self._quarantined_rows = [key for key in self._quarantined_rows if int(key.partition("/")[0]) >= oldest]
            self._set_state("refused", self._quarantined_rows)
            self.store.put(f"{PRUNING}saves WHERE version < ?", oldest)
            self.store.put(f"{PRUNING}steps WHERE step < ?", oldest - 1)
            is_over = "number <= ? AND (NOT is_placed OR step < ?)"
            newest_over = self._num_completed - self._keep_groups
            self.store.put(f"{PRUNING}samples WHERE group_id IN (SELECT group_id FROM groups WHERE {is_over})", newest_over, oldest)
            self.store.put(f"{PRUNING}groups WHERE {is_over}", newest_over, oldest)

    def discard_checkpoint(self, version: int, reason: str, *, now_s: float) -> None:
        """A checkpoint that was saved cannot be used any more: the steps since the one before are undone with it."""
        with self.transaction():
            self.record("discarded", now_s=now_s, step=version, reason=reason)
            self.store.put(f"{PRUNING}saves WHERE version = ?", version)

    def store_baselines(self, baselines: Mapping[str, float], *, now_s: float) -> None:
        """What a method's baselines are after one more group; a crash before the group is placed has it counted twice."""
        with self.transaction():
            self.record("baselines", now_s=now_s, reason=json.dumps(dict(baselines)))
            self._set_state("baselines", dict(baselines))

    def store_rest(self, number: int | None, rest: Rest | None) -> None:
        """The group that was settled last was measured, or could not be (`number` None): the prompt of that number rests, or does not."""
        with self.transaction():
            if number is not None:
                self._set_state(f"{REST_KEY}{number}", None if rest is None else (rest.length, rest.measured_in))
            self._set_state("measured", self._num_completed)

    # --- asking ---

    def baselines(self) -> dict[str, float]:
        """What was remembered last; empty where nothing was."""
        return self.read_state("baselines", {})

    def read_state(self, key: str, default: Any) -> Any:
        """What stands in the state under a key, see `_remember`."""
        found = self.store.rows("state", "key = ?", key)
        return json.loads(found[0][1]) if found else default

    def is_in_flight(self, rollout_id: str) -> bool:
        """True while a rollout is in flight."""
        return rollout_id in self._in_flight

    def rollouts_in_flight(self) -> dict[str, InFlight]:
        """Every rollout in flight, by name."""
        return dict(self._in_flight)

    def counts(self) -> Counts:
        """The counts of this moment."""
        return Counts(
            admitted=len(self._in_flight) + sum(self._counts.values()),
            in_flight=len(self._in_flight),
            trained=self._counts[TerminalStatus.TRAINED],
            filtered=self._counts[TerminalStatus.FILTERED],
            stale=self._counts[TerminalStatus.STALE],
            failed=self._counts[TerminalStatus.FAILED],
            cancelled=self._counts[TerminalStatus.CANCELLED],
        )

    def terminal_statuses(self) -> list[tuple[object, ...]]:
        """Every fate, in the order in which the rollouts ended; for tests and reports."""
        return self.store.read("SELECT * FROM fates")

    def flush(self, *, durably: bool = False) -> None:
        """Write everything booked so far; any thread may. Raises `LedgerError`."""
        self.store.flush(durably=durably)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.store.close()

    def _read_state(self) -> None:
        """Take over what an earlier life has booked, from the state alone."""
        for fate, reason, number in self.store.rows("counts"):
            self._count(TerminalStatus(fate), reason, number)
        for name, group_id, prompt_id, attempt, version, flag, _ in self.store.rows("in_flight", "NOT revives ORDER BY rowid"):
            self._in_flight[name] = InFlight(group_id=group_id, prompt_id=prompt_id, attempt=attempt, version=version, flag=flag)
        self._num_completed = int(self.read_state("settled", 0))
        self._num_assigned = int(self.read_state("placed", 0))
        self._deaths: dict[str, dict[str, int]] = self.read_state("deaths", {})
        self._quarantined_rows: list[str] = self.read_state("refused", [])
        """Rows that are sent no more, as `step/row`."""

    def _count(self, fate: TerminalStatus, reason: str, number: int) -> None:
        self._counts[fate] += number
        self._ends[str(fate), reason] += number
        self._changed.add((str(fate), reason))
        if fate is not TerminalStatus.TRAINED:
            self.reasons[f"{fate}: {reason}"] += number

    def _write_changed(self) -> None:
        changed, self._changed = self._changed, set()
        for fate, reason in sorted(changed):
            self.store.put(_COUNT, fate, reason, self._ends[fate, reason])
        remembered, self._changed_state = self._changed_state, {}
        for key, value in remembered.items():
            self.store.put(_STATE, key, json.dumps(value))

    def _update(self, rollout_id: str, rollout: InFlight, *, revives: bool = False) -> None:
        """Have what changed of a rollout stand in the state; `revives`: it has ended, and is in flight again when the run goes on."""
        self.store.put(_IN_FLIGHT_CHANGED, rollout.attempt, rollout.version, rollout.flag, int(revives), rollout_id)

    def _complete(self, group_id: int, *, step: int, is_assigned: bool) -> None:
        self._num_completed += 1
        self._num_assigned += is_assigned
        with self.transaction():
            self.store.put(_SETTLED, self._num_completed, group_id, step, int(is_assigned))
            self.store.put(_GROUP_SETTLED, self._num_completed, step, int(is_assigned), group_id)
            self._set_state("settled", self._num_completed)
            self._set_state("placed", self._num_assigned)

    def _set_state(self, key: str, value: Any) -> None:
        self._changed_state[key] = value


REST_KEY = "rest "
"""How the keys begin under which the state has how long each prompt rests, for the curriculum; its number follows."""
_STATE, _COUNT, _IN_FLIGHT, _GROUP, _SAMPLE = map(writing, ("state", "counts", "in_flight", "groups", "samples"))
_TRAJECTORY, _SEALED, _SAVED, _EVALUATED = map(writing, ("trajectories", "steps", "saves", "evaluations"))
_IN_FLIGHT_CHANGED = changing("in_flight", "attempt", "version", "flag", "revives")
_DRAWN, _SETTLED = map(writing, ("drawn", "settled"))
_GROUP_SETTLED = changing("groups", "number", "step", "is_placed")
_PLACED, _CREDITED = changing("samples", "step", "advantages"), changing("samples", "advantages")
_PACKED, _STOPPED = changing("samples", "row", "place"), changing("samples", "stopped")
_SCORED_ANEW = changing("trajectories", "scored")
_AMENDED = {"followed": changing("samples", "is_followed"), "compared": changing("samples", "is_compared")}


def count_death(deaths: dict[str, dict[str, int]], kind: str, *, peer: str, row: str) -> None:
    """Count an entry of the kind `suspected` or `cleared`, by role and row of the source."""
    of_role = deaths.setdefault(peer.partition("-")[0], {})
    if kind == "suspected":
        of_role[row] = of_role.get(row, 0) + 1
    else:
        of_role.pop(row, None)


def _reason(score: Scored) -> str:
    return f"{score.outcome}: {score.error}" if score.error else str(score.outcome)


def _without_prompt(scored: ScoredTrajectory) -> ScoredTrajectory:
    return msgspec.structs.replace(scored, trajectory=msgspec.structs.replace(scored.trajectory, prompt=_NO_PROMPT))


def summary_of(trajectory: Trajectory, *, reward: float | None = None, step: int | None = None) -> RolloutSummary:
    """What the ledger records of a trajectory."""
    sampled = trajectory.versions[trajectory.loss_mask]
    return RolloutSummary(
        step=step,
        reward=reward,
        oldest_version=int(sampled[0]) if len(sampled) else None,
        newest_version=int(sampled[-1]) if len(sampled) else None,
        num_tokens=len(sampled),
    )

"""What became of every prompt, group, rollout and attempt, with reasons and times; and the conservation identity:

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

**Resume.** The trainer starts from the newest whole checkpoint and says its version and commit (`TrainerReady`). A commit that this ledger
does not hold means that the two are of different runs, and is refused. Steps from that version on are *replayed*: what came after the
checkpoint is undone together with the weights, its samples return to the queue, and leave it again in the very rows they had. On a machine
that computes the same sums twice, the same policies come out, bit by bit, so versions that engines hold keep their meaning and no token
loses its provenance; whether the trainer alone died or everything did is no difference. What was scored and not placed is grouped again;
what was in engines or scorers is issued again with the next attempt, which fences whatever the old one may still deliver.

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
    suspected   a prompt was there when `peer` died                 cleared     it came through
    quarantined it was there twice: it is not sampled again         skipped     a quarantined prompt was drawn
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from orchestrator.state.store import Store
from pipelinerl.messages import Fate, Flag, Prompt, Sample, Scored, ScoredTrajectory, Trajectory

RUN_ENDED = "the run ended"
"""Reason of a rollout that was in flight when its run ended; it is revived when the run goes on."""

_NO_PROMPT = Prompt(prompt_id="", text="", token_ids=np.zeros(0, np.int32))
"""Stands in a recorded trajectory: siblings share their prompt, which is recorded with the group."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A rollout in flight."""

    group_id: int
    prompt_id: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a rollout when it ends; None where it never got that far."""

    step: int | None = None
    """Step it was trained in, or counts in as one that was stopped early."""
    reward: float | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    num_tokens: int = 0
    """Tokens sampled for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The six counts of the conservation identity."""

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

    def __init__(self, path: Path | None, *, keep_groups: int = 0) -> None:
        self.store = Store(path)
        self._keep_groups = keep_groups
        self.reasons: collections.Counter[str] = collections.Counter()
        """Rollouts that were not trained, by `fate: reason`."""
        self._counts: collections.Counter[Fate] = collections.Counter()
        self._open: dict[str, Admitted] = {}
        self._sequence = itertools.count(1 + (self.store.read("SELECT max(seq) FROM events")[0][0] or 0))
        self._recall()

    # --- the run ---

    def begin(self, settings: dict[str, Any], *, now_s: float, unix_s: float) -> None:
        """A life of the run begins; what an earlier one cancelled when it ended is in flight again."""
        self.book("began", now_s=now_s, reason=json.dumps({"settings": settings, "unix_s": unix_s}))
        revived = self.store.read("SELECT rollout_id, group_id, prompt_id FROM fates WHERE fate = 'cancelled' AND reason = ?", RUN_ENDED)
        for rollout_id, group_id, prompt_id in revived:
            self.book("revived", now_s=now_s, rollout_id=rollout_id)
            self._open[rollout_id] = Admitted(group_id=group_id, prompt_id=prompt_id)
        self._counts[Fate.CANCELLED] -= len(revived)
        self.reasons[f"{Fate.CANCELLED}: {RUN_ENDED}"] -= len(revived)
        self.flush()

    def finish(self, reason: str, *, now_s: float) -> Identity:
        """End everything still in flight as cancelled, and the run with it; return the final counts."""
        for rollout_id in list(self._open):
            self.end(rollout_id, Fate.CANCELLED, now_s=now_s, reason=RUN_ENDED)
        identity = self.identity()
        self.book("ended", now_s=now_s, reason=json.dumps({"reason": reason, "counts": dataclasses.asdict(identity)}))
        self.flush(durably=True)
        return identity

    def book(
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
        self.store.append((sequence, now_s, kind, *rollout, step, row, place, peer, reason, reward, oldest, newest, num_tokens))
        return sequence

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Have everything booked in the block be written by one flush, or none of it."""
        return self.store.together()

    # --- a rollout's way, in order ---

    def admit(self, group_id: int, prompt: Prompt, *, group_size: int, position: tuple[int, int], now_s: float) -> list[str]:
        """A group is sent to engines for the first time; return its rollouts' names. `position` is the source's after the draw."""
        rollout_ids = [f"{group_id}/{sibling}" for sibling in range(group_size)]
        with self.together():
            self.store.put("INSERT INTO groups VALUES (?, ?, ?, ?, ?, NULL)", group_id, prompt.prompt_id, prompt, *position)
            for rollout_id in rollout_ids:
                assert rollout_id not in self._open, f"rollout {rollout_id} was admitted twice"
                self._open[rollout_id] = Admitted(group_id=group_id, prompt_id=prompt.prompt_id)
                self.book("admitted", now_s=now_s, rollout_id=rollout_id, group_id=group_id, prompt_id=prompt.prompt_id)
        return rollout_ids

    def issue(self, rollout_id: str, *, attempt: int, engine_id: int, version: int, now_s: float) -> None:
        """An engine that samples under `version` was asked for an attempt."""
        self.book("issued", now_s=now_s, rollout_id=rollout_id, attempt=attempt, peer=f"engine-{engine_id}", newest=version)

    def adopt(self, rollout_id: str, *, attempt: int, engine_id: int, now_s: float) -> None:
        """An attempt of an earlier life is still in its engine, and its answer is awaited."""
        self.book("adopted", now_s=now_s, rollout_id=rollout_id, attempt=attempt, peer=f"engine-{engine_id}")

    def lose(self, rollout_id: str, *, attempt: int, reason: str, now_s: float) -> None:
        """An attempt will not be answered, or its answer not be used."""
        self.book("lost", now_s=now_s, rollout_id=rollout_id, attempt=attempt, reason=reason)

    def flag(self, rollout_id: str, *, attempt: int, flag: Flag, now_s: float) -> None:
        """A coin has fallen about an attempt that is being written."""
        reason = json.dumps({"stops": flag.stops, "probability": flag.probability})
        self.book("flagged", now_s=now_s, rollout_id=rollout_id, attempt=attempt, place=flag.step, reward=flag.predicted, reason=reason)

    def reply(self, rollout_id: str, *, attempt: int, turn: int, engine_id: int, reason: str, now_s: float) -> None:
        """The environment has replied to a turn (from 0) that an engine wrote: `reason` is ok, over, or how it failed."""
        self.book("replied", now_s=now_s, rollout_id=rollout_id, attempt=attempt, place=turn, peer=f"engine-{engine_id}", reason=reason)

    def generate(self, trajectory: Trajectory, *, now_s: float) -> None:
        """An engine has answered."""
        facts = facts_of(trajectory)
        self.book(
            "generated",
            now_s=now_s,
            rollout_id=trajectory.rollout_id,
            attempt=trajectory.attempt,
            peer=f"engine-{trajectory.engine_id}" if trajectory.engine_id >= 0 else None,
            reason=str(trajectory.finish),
            oldest=facts.oldest_version,
            newest=facts.newest_version,
            num_tokens=facts.num_tokens,
        )

    def score(self, scored: ScoredTrajectory, *, now_s: float) -> None:
        """A scorer has answered, or could not: from here on the rollout survives a restart."""
        trajectory, score = scored.trajectory, scored.score
        name, group_id, attempt = trajectory.rollout_id, trajectory.group_id, trajectory.attempt
        with self.together():
            self.book("scored", now_s=now_s, rollout_id=name, attempt=attempt, reason=_reason(score), reward=score.reward)
            self.store.put("INSERT INTO samples (rollout_id, group_id) VALUES (?, ?)", name, group_id)
            self.store.put("INSERT INTO trajectories VALUES (?, ?)", name, _without_prompt(scored))

    def amend(self, kind: str, members: Sequence[ScoredTrajectory], *, now_s: float) -> None:
        """Scores have changed: by `followed`, each has its step scores, or by `compared`, its part of what compares siblings."""
        with self.together():
            for member in members:
                name, attempt, score = member.trajectory.rollout_id, member.trajectory.attempt, member.score
                self.book(kind, now_s=now_s, rollout_id=name, attempt=attempt, reason=_reason(score), reward=score.reward)
                self.store.put("UPDATE trajectories SET scored = ? WHERE rollout_id = ?", _without_prompt(member), name)

    def place(self, group_id: int, samples: Iterable[Sample], *, step: int, now_s: float) -> None:
        """A group becomes part of a step."""
        self.store.put("UPDATE groups SET step = ? WHERE group_id = ?", step, group_id)
        self.store.put("INSERT INTO settled (group_id, step, is_placed) VALUES (?, ?, 1)", group_id, step)
        for sample in samples:
            rollout_id = sample.trajectory.rollout_id
            self.book("placed", now_s=now_s, rollout_id=rollout_id, step=step)
            advantages = sample.advantages.tobytes()
            self.store.put("UPDATE samples SET step = ?, advantages = ? WHERE rollout_id = ?", step, advantages, rollout_id)

    def credit(self, samples: Iterable[Sample]) -> None:
        """Samples placed before have got their final advantages: a rule over the whole step gives them when it closes."""
        for sample in samples:
            self.store.put(
                "UPDATE samples SET advantages = ? WHERE rollout_id = ?", sample.advantages.tobytes(), sample.trajectory.rollout_id
            )

    def give_up(self, group_id: int, *, step: int) -> None:
        """No rollout of a group will be trained; it came while `step` was being filled."""
        self.store.put("INSERT INTO settled (group_id, step, is_placed) VALUES (?, ?, 0)", group_id, step)

    def pack(self, samples: Sequence[Sample], *, step: int, row: int, now_s: float) -> None:
        """A row is whole. It must be written, by `flush`, before the trainer may have it."""
        for place, sample in enumerate(samples):
            rollout_id = sample.trajectory.rollout_id
            self.book("packed", now_s=now_s, rollout_id=rollout_id, step=step, row=row, place=place)
            self.store.put("UPDATE samples SET row = ?, place = ? WHERE rollout_id = ?", row, place, rollout_id)

    def end(self, rollout_id: str, fate: Fate, *, now_s: float, reason: str = "", facts: Facts | None = None) -> None:
        """A rollout ended. Raises `KeyError` where it is not in flight: it was never admitted, or ended before."""
        del self._open[rollout_id]
        self._counts[fate] += 1
        if fate is not Fate.TRAINED:
            self.reasons[f"{fate}: {reason}"] += 1
        known = facts or Facts()
        self.book(
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

    # --- a step's way ---

    def seal(self, step: int, *, num_rows: int, num_tokens: int, num_samples: int, now_s: float) -> str:
        """A step has all its rows; return its commit. It must be written, durably, before the trainer may have the seal."""
        sequence = self.book("sealed", now_s=now_s, step=step, row=num_rows, place=num_samples, num_tokens=num_tokens)
        return f"{self.store.ledger_id}:{sequence}"

    def saved(self, version: int, commit: str, *, now_s: float) -> None:
        """A checkpoint of `version` stands: the samples of the steps before can never be asked for again."""
        self.book("saved", now_s=now_s, step=version, reason=commit)
        self.store.put(f"DELETE FROM samples WHERE {_is_over('samples')}", version, self._keep_groups)
        self.store.put(f"UPDATE groups SET prompt = NULL WHERE prompt IS NOT NULL AND {_is_over('groups')}", version, self._keep_groups)

    def remember(self, baselines: Mapping[str, float], *, now_s: float) -> None:
        """What a method's baselines are after one more group; a crash before the group is placed has it counted twice."""
        self.book("baselines", now_s=now_s, reason=json.dumps(dict(baselines)))

    # --- asking ---

    def baselines(self) -> dict[str, float]:
        """What was remembered last; empty where nothing was."""
        found = self.store.read("SELECT reason FROM events WHERE kind = 'baselines' ORDER BY seq DESC LIMIT 1")
        return json.loads(found[0][0]) if found else {}

    def is_open(self, rollout_id: str) -> bool:
        """True while a rollout is in flight."""
        return rollout_id in self._open

    def open_rollouts(self) -> dict[str, Admitted]:
        """Every rollout in flight, by name."""
        return dict(self._open)

    def identity(self) -> Identity:
        """The counts of this moment."""
        return Identity(
            admitted=len(self._open) + sum(self._counts.values()),
            in_flight=len(self._open),
            trained=self._counts[Fate.TRAINED],
            filtered=self._counts[Fate.FILTERED],
            stale=self._counts[Fate.STALE],
            failed=self._counts[Fate.FAILED],
            cancelled=self._counts[Fate.CANCELLED],
        )

    def rows(self) -> list[tuple[object, ...]]:
        """Every fate, in the order in which the rollouts ended; for tests and reports."""
        return self.store.read("SELECT * FROM fates")

    def flush(self, *, durably: bool = False) -> None:
        """Write everything booked so far; any thread may. Raises `LedgerError`."""
        self.store.flush(durably=durably)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.store.close()

    def _recall(self) -> None:
        """Count what an earlier life has booked."""
        for fate, reason, count in self.store.read("SELECT fate, reason, count(*) FROM fates GROUP BY fate, reason"):
            self._counts[Fate(fate)] += count
            if fate != Fate.TRAINED:
                self.reasons[f"{fate}: {reason}"] += count
        in_flight = "SELECT rollout_id, group_id, prompt_id FROM events WHERE kind = 'admitted' AND rollout_id IS NOT NULL"
        for rollout_id, group_id, prompt_id in self.store.read(f"{in_flight} AND rollout_id NOT IN (SELECT rollout_id FROM fates)"):
            self._open[rollout_id] = Admitted(group_id=group_id, prompt_id=prompt_id)


def _is_over(table: str) -> str:
    """That nothing asks for the group of a row any more: (version of the checkpoint, newest groups that stay all the same)."""
    number = f"SELECT number FROM settled WHERE settled.group_id = {table}.group_id AND (NOT is_placed OR settled.step < ?)"
    return f"({number}) <= (SELECT max(number) FROM settled) - ?"


def _reason(score: Scored) -> str:
    return f"{score.outcome}: {score.error}" if score.error else str(score.outcome)


def _without_prompt(scored: ScoredTrajectory) -> ScoredTrajectory:
    return msgspec.structs.replace(scored, trajectory=msgspec.structs.replace(scored.trajectory, prompt=_NO_PROMPT))


def facts_of(trajectory: Trajectory, *, reward: float | None = None, step: int | None = None) -> Facts:
    """What the ledger records of a trajectory."""
    sampled = trajectory.versions[trajectory.trains]
    return Facts(
        step=step,
        reward=reward,
        oldest_version=int(sampled[0]) if len(sampled) else None,
        newest_version=int(sampled[-1]) if len(sampled) else None,
        num_tokens=len(sampled),
    )

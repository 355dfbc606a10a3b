"""The ledger records what becomes of every prompt, group, rollout and attempt, with reasons and times, and holds the conservation identity:

    admitted = in flight + trained + filtered + stale + failed + cancelled

**The ledger and the checkpoint are one transaction.** Two files must never disagree about what is trained: `ledger.sqlite`, which the
orchestrator writes, and `checkpoints/step-N/`, which the trainer writes. One of them decides. It is the checkpoint: *a sample is trained
exactly when a whole checkpoint of a later version stands on disk*. Until then its step can be done again from here. In order:

    who           writes                                                                           before
    orchestrator  `admitted`, `issued`, `generated`, `scored` and the sample itself                 (as they happen, in batches)
    orchestrator  `assigned`, `packed`: the step, row and position of each sample                   a row is offered to the trainer
    orchestrator  `closed`, durably; its number is the step's *commit*                              the trainer hears that it is closed
    trainer       a draft of checkpoint N: weights, optimizer, the commit of step N - 1,            it takes its name
                  a digest of every sample it has ever trained
    trainer       renames the draft: the commit point                                               it says `CheckpointSaved`
    orchestrator  `saved` with the checkpoint's version and commit; the samples of its steps go     (nothing waits for it)

So the checkpoint names the ledger's commit, the ledger names the checkpoint, and a row exists here before any weight has seen it. What each
crash leaves, whoever dies:

    before `packed`            the trainer never saw the row: its samples are scored and untrained, and are packed again, maybe otherwise
    before `closed` is durable no checkpoint of the next version can exist: the step's rows are offered again, the rest of it is filled anew
    before the rename          the checkpoint before rules: the steps since are trained again, from the same rows in the same order
    before `saved`             the new checkpoint rules: its commit is found here, `trained` is recorded for what it proves, `saved` too
    power fails                the file loses its last entries, but none up to the last `closed`: no checkpoint names one that is lost

**Resume.** The trainer starts from the newest checkpoint that is still whole and says its version and commit (`TrainerReady`). Where that
is not the newest that was `saved`, because that one was damaged on the disk or taken away, the newer ones are recorded as `discarded`, and
the steps since the older one are undone as after any restart. So rows stay for as long as a trainer may have to fall back to before them:
from the oldest of the `checkpoint.keep` checkpoints on; while there are fewer, from the model that the run began with. A commit that this
ledger does not hold means that the two are of different runs, and is refused. Steps from that version on are *trained again*: what came
after the checkpoint is undone together with the weights, its samples return to the queue, and leave it again in the very rows they had. On
a machine that computes the same sums twice, the same policies come out, bit by bit, so versions that engines hold keep their meaning and no
token loses its provenance; whether the trainer alone died or everything did is no difference. What was scored and not assigned is grouped
again; what was in engines or scorers is issued again with the next attempt, which fences whatever the old one may still deliver.

What each entry says is listed in `orchestrator.ledger.events`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec
import numpy as np

from orchestrator.ledger.events import Columns, count_death, number_or_null, values_of
from orchestrator.ledger.rollouts import RUN_ENDED, Counts, InFlight, Rollouts, RolloutSummary, summary_of
from orchestrator.ledger.step_losses import OWN_LOSS, StepLoss, StepLosses
from orchestrator.ledger.store import PRUNING, Store, changing, writing
from orchestrator.rules.curriculum import Rest
from pipelinerl.messages import EarlyStopDecision, Prompt, Sample, ScoredTrajectory, TerminalStatus, Trajectory

_NO_PROMPT = Prompt(prompt_id="", text="", token_ids=np.zeros(0, np.int32))
"""The prompt that stands in a recorded trajectory: siblings share theirs, which is recorded with the group."""


class Ledger:
    """Records what becomes of rollouts and steps. `path` None keeps it all in memory.

    The newest `keep_groups` completed groups stay recorded whole although nothing needs them any more.
    """

    def __init__(self, path: Path | None, *, keep_groups: int = 0, fence: Callable[[], None] = lambda: None) -> None:
        self.store = Store(path, fence=fence)
        self._keep_groups = keep_groups
        self._changed_state: dict[str, Any] = {}
        """Values of the state that were not written since they changed, by key."""
        self._sequence = itertools.count(1 + self.store.last_seq)
        with self.store.readable():
            self._rollouts = Rollouts(self.store)
            self.losses = StepLosses(self.store)
            self._num_completed = int(self.read_state("num_completed", 0))
            self._num_assigned = int(self.read_state("num_assigned", 0))
            self._deaths: dict[str, dict[str, int]] = self.read_state("deaths", {})
            self._quarantined_rows: list[str] = self.read_state("quarantined_rows", [])
            """Rows that are not sent again, as `step/row`."""
        self.store.before_flush = self._write_changed

    # --- the run ---

    def begin(self, settings: dict[str, Any], *, now_s: float, unix_s: float) -> None:
        """Note that the orchestrator starts; rollouts that were cancelled when the run ended before are in flight again."""
        self.record("began", now_s=now_s, data=json.dumps({"settings": settings, "unix_s": unix_s}))
        with self.transaction():
            for rollout_id in self._rollouts.revive():
                self.record("revived", now_s=now_s, rollout_id=rollout_id)
        self.flush()

    def finish(self, reason: str, *, now_s: float) -> Counts:
        """End everything still in flight as cancelled, and the run with it; return the final counts."""
        for rollout_id in list(self._rollouts.in_flight):
            self.end(rollout_id, TerminalStatus.CANCELLED, now_s=now_s, reason=RUN_ENDED)
        counts = self.counts()
        self.record("ended", now_s=now_s, reason=reason, data=json.dumps(dataclasses.asdict(counts)))
        self.flush(durably=True)
        return counts

    def record(self, kind: str, *, now_s: float, **columns: Unpack[Columns]) -> int:
        """Append an entry of any kind; return its number."""
        sequence = next(self._sequence)
        with self.transaction():
            self.store.append((sequence, float(now_s), kind, *values_of(columns)))
            match kind:
                case "done":
                    self._set_state("num_done", (columns.get("step") or 0) + 1)
                case "suspected" | "cleared":
                    count_death(self._deaths, kind, peer=columns.get("peer") or "", suspect=columns.get("suspect") or "")
                    self._set_state("deaths", self._deaths)
                case "evaluated":
                    self.store.put(_EVALUATED, columns.get("version"), number_or_null(columns.get("reward")))
        return sequence

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Have everything recorded in the block be written by one flush, or none of it."""
        return self.store.transaction()

    # --- a rollout, from its admission to its end ---

    def admit(self, group_id: int, prompt: Prompt, *, group_size: int, position: tuple[int, int], now_s: float) -> list[str]:
        """Note that a group is sent to engines for the first time; return its rollouts' names. `position` is the source's after the
        draw.
        """
        rollout_ids = [f"{group_id}/{sibling}" for sibling in range(group_size)]
        with self.transaction():
            self.store.put(_GROUP, group_id, prompt, None, None, None)
            self.store.put(_DRAWN, group_id, prompt.prompt_id, *position)
            self._set_state("drawn", [group_id, *position])
            for rollout_id in rollout_ids:
                self._rollouts.admit(rollout_id, group_id=group_id, prompt_id=prompt.prompt_id)
                self.record("admitted", now_s=now_s, rollout_id=rollout_id, group_id=group_id, prompt_id=prompt.prompt_id)
        return rollout_ids

    def issue(self, rollout_id: str, *, attempt: int, engine_id: int | None, version: int, now_s: float) -> None:
        """Note that an attempt is sent to an engine that samples under `version`; None: it is lent to an agent."""
        with self.transaction():
            self.record("issued", now_s=now_s, rollout_id=rollout_id, attempt=attempt, peer=_peer(engine_id), version=version)
            self._rollouts.issue(rollout_id, attempt=attempt, version=version)

    def reattach(self, rollout_id: str, *, attempt: int, engine_id: int, now_s: float) -> None:
        """Note that an attempt from before the restart is still in its engine, and that its answer is awaited."""
        self.record("reattached", now_s=now_s, rollout_id=rollout_id, attempt=attempt, peer=f"engine-{engine_id}")

    def hold(self, trajectory: Trajectory, *, now_s: float) -> None:
        """Note that the script that goes on holds the answer to an attempt from before the restart, which was not scored."""
        self.record("held", now_s=now_s, rollout_id=trajectory.rollout_id, attempt=trajectory.attempt)

    def lose(self, rollout_id: str, *, attempt: int, engine_id: int | None, reason: str, now_s: float) -> None:
        """Note that an attempt will not be answered, or that its answer is impossible (`refused: <kind>`); None: its agent has failed."""
        self.record("lost", now_s=now_s, rollout_id=rollout_id, attempt=attempt, peer=_peer(engine_id), reason=reason)

    def record_early_stop(self, rollout_id: str, *, attempt: int, decision: EarlyStopDecision, now_s: float) -> None:
        """Note an early-stop decision about an attempt that is being written."""
        data = json.dumps({"stops": decision.stops, "probability": decision.probability})
        with self.transaction():
            self.record(
                "early_stop",
                now_s=now_s,
                rollout_id=rollout_id,
                attempt=attempt,
                prm_step=decision.step,
                score=decision.predicted,
                data=data,
            )
            self._rollouts.decide(rollout_id, msgspec.json.encode([attempt, decision]).decode())

    def record_observation(self, rollout_id: str, *, attempt: int, turn: int, engine_id: int, reason: str, now_s: float) -> None:
        """Note that the environment has answered a turn (from 0) that an engine wrote: `reason` is ok, over, or how it failed."""
        self.record("observed", now_s=now_s, rollout_id=rollout_id, attempt=attempt, turn=turn, peer=f"engine-{engine_id}", reason=reason)

    def record_reset(self, rollout_id: str, *, attempt: int, reason: str, now_s: float) -> None:
        """Note that an environment with state begins an episode, before the attempt is issued: `reason` is ok, or how it failed."""
        self.record("reset", now_s=now_s, rollout_id=rollout_id, attempt=attempt, reason=reason)

    def record_completion(self, trajectory: Trajectory, *, now_s: float) -> None:
        """Note that an engine has answered."""
        summary = summary_of(trajectory)
        self.record(
            "generated",
            now_s=now_s,
            rollout_id=trajectory.rollout_id,
            attempt=trajectory.attempt,
            peer=f"engine-{trajectory.engine_id}" if trajectory.engine_id >= 0 else None,
            reason=str(trajectory.finish),
            oldest_version=summary.oldest_version,
            newest_version=summary.newest_version,
            num_tokens=summary.num_tokens,
        )

    def record_score(self, scored: ScoredTrajectory, *, now_s: float, by: str | None = None) -> None:
        """Note that a scorer has answered, or could not: from here on the rollout survives a restart. `by`: who gave it in its place."""
        name = scored.trajectory.rollout_id
        with self.transaction():
            self._record_outcome("scored", scored, now_s=now_s, by=by)
            self.store.put(_SAMPLE, name, scored.trajectory.group_id, *[None] * 5, 0, 0)
            self.store.put(_TRAJECTORY, name, _without_prompt(scored))

    def update_scores(self, kind: str, members: Sequence[ScoredTrajectory], *, now_s: float) -> None:
        """Note new scores: with `prm_scored` each member has its step scores, with `group_scored` the comparison of its siblings."""
        with self.transaction():
            for member in members:
                self._record_outcome(kind, member, now_s=now_s)
                self.store.put(_RESCORED, _without_prompt(member), member.trajectory.rollout_id)
                self.store.put(_IS_RESCORED[kind], 1, member.trajectory.rollout_id)

    def decide(self, step: int, loss: StepLoss = OWN_LOSS) -> None:
        """Note that a script has decided upon a step, and how it is trained. It stands in one transaction with all the step's groups, so a
        crash leaves no half of a step.
        """
        self.losses.say(step, loss)
        self._set_state("num_decided", step + 1)

    def assign(self, group_id: int, samples: Iterable[Sample], *, step: int, now_s: float) -> None:
        """Note that a group becomes part of a step."""
        self._complete(group_id, step=step, is_assigned=True)
        for sample in samples:
            rollout_id = sample.trajectory.rollout_id
            self.record("assigned", now_s=now_s, rollout_id=rollout_id, step=step)
            self.store.put(_ASSIGNED, step, sample.advantages.tobytes(), rollout_id)

    def set_advantages(self, samples: Iterable[Sample]) -> None:
        """Note the final advantages of samples that were assigned before: a rule over the whole step gives them when it closes."""
        for sample in samples:
            self.store.put(_CREDITED, sample.advantages.tobytes(), sample.trajectory.rollout_id)

    def drop(self, group_id: int, *, step: int) -> None:
        """Note that no rollout of a group will be trained; the group was completed while `step` was being filled."""
        self._complete(group_id, step=step, is_assigned=False)

    def pack(self, samples: Sequence[Sample], *, step: int, row: int, now_s: float) -> None:
        """Note that a row is complete. It must be written, by `flush`, before the trainer may have it."""
        for position, sample in enumerate(samples):
            rollout_id = sample.trajectory.rollout_id
            self.record("packed", now_s=now_s, rollout_id=rollout_id, step=step, row=row, position=position)
            self.store.put(_PACKED, row, position, rollout_id)

    def end(
        self, rollout_id: str, status: TerminalStatus, *, now_s: float, reason: str = "", summary: RolloutSummary | None = None
    ) -> None:
        """Note that a rollout ended. Raises `KeyError` where it is not in flight: it was never admitted, or ended before."""
        known = dataclasses.asdict(summary or RolloutSummary())
        with self.transaction():
            self._rollouts.end(rollout_id, status, reason)
            self.record(str(status), now_s=now_s, rollout_id=rollout_id, reason=reason, **known)
            if status is TerminalStatus.FILTERED and known["step"] is not None:
                self.store.put(_STOPPED, known["step"], rollout_id)

    # --- a step, from its last row to its checkpoint ---

    def quarantine_row(self, step: int, row: int, samples: Sequence[Sample], *, now_s: float) -> None:
        """Note that a row killed the trainer twice: it is not sent again, and its samples end as failed. The step's divisor stays the
        same.
        """
        key = f"{step}/{row}"
        with self.transaction():
            self.record("quarantined", now_s=now_s, peer="trainer", suspect=key, step=step, row=row)
            for sample in samples:
                reason = f"its row killed the trainer twice: row {row} of step {step}"
                summary = summary_of(sample.trajectory, reward=sample.reward)
                self.end(sample.trajectory.rollout_id, TerminalStatus.FAILED, now_s=now_s, reason=reason, summary=summary)
            self._quarantined_rows = sorted({*self._quarantined_rows, key})
            self._set_state("quarantined_rows", self._quarantined_rows)

    def quarantined_rows(self, step: int) -> frozenset[int]:
        """Return the rows of a step that are not sent again."""
        keys = (key.partition("/") for key in self._quarantined_rows)
        return frozenset(int(row) for of_step, _, row in keys if int(of_step) == step)

    def close_step(self, step: int, *, num_rows: int, num_tokens: int, num_samples: int, now_s: float) -> str:
        """Note that a step has all its rows; return its commit. It must be written, durably, before the trainer may hear that the step is
        closed.
        """
        with self.transaction():
            counts = Columns(num_rows=num_rows, num_samples=num_samples, num_tokens=num_tokens)
            sequence = self.record("closed", now_s=now_s, **counts | {"step": step, "data": self.losses.of(step).record})
            self.store.put(_CLOSED, step, num_rows, num_tokens, num_samples, sequence)
        return f"{self.store.ledger_id}:{sequence}"

    def record_checkpoint(self, version: int, commit: str, *, now_s: float, oldest: int | None = None) -> None:
        """Note that a checkpoint of `version` stands. No trainer starts from before `oldest`, so rows of the steps before that may go."""
        oldest = version if oldest is None else max(0, min(oldest, version))
        with self.transaction():
            self.record("saved", now_s=now_s, version=version, commit_id=commit)
            self.store.put(_CHECKPOINT, version, commit)
            self._set_state("oldest_version", oldest)
            self.losses.forget(oldest)
            self._quarantined_rows = [key for key in self._quarantined_rows if int(key.partition("/")[0]) >= oldest]
            self._set_state("quarantined_rows", self._quarantined_rows)
            self.store.put(f"{PRUNING}checkpoints WHERE version < ?", oldest)
            self.store.put(f"{PRUNING}steps WHERE step < ?", oldest - 1)
            is_over = "number <= ? AND (NOT is_assigned OR step < ?)"
            newest_over = self._num_completed - self._keep_groups
            self.store.put(f"{PRUNING}samples WHERE group_id IN (SELECT group_id FROM groups WHERE {is_over})", newest_over, oldest)
            self.store.put(f"{PRUNING}groups WHERE {is_over}", newest_over, oldest)

    def discard_checkpoint(self, version: int, reason: str, *, now_s: float) -> None:
        """Note that a saved checkpoint cannot be used any more: the steps since the one before are undone with it."""
        with self.transaction():
            self.record("discarded", now_s=now_s, version=version, reason=reason)
            self.store.put(f"{PRUNING}checkpoints WHERE version = ?", version)

    def store_baselines(self, baselines: Mapping[str, float], *, now_s: float) -> None:
        """Keep a method's baselines after one more group; a crash before the group is assigned has it counted twice."""
        with self.transaction():
            self.record("baselines", now_s=now_s, data=json.dumps(dict(baselines)))
            self._set_state("baselines", dict(baselines))

    def store_rest(self, number: int | None, rest: Rest | None) -> None:
        """Note that the group that completed last was measured, or could not be (`number` None), and whether its prompt rests."""
        with self.transaction():
            if number is not None:
                self._set_state(f"{REST_KEY}{number}", None if rest is None else (rest.length, rest.measured_in))
            self._set_state("num_measured", self._num_completed)

    # --- queries ---

    def baselines(self) -> dict[str, float]:
        """Return the baselines that were stored last; empty where none were."""
        return self.read_state("baselines", {})

    def read_state(self, key: str, default: Any) -> Any:
        """Return the value of a key of the state; `default` where it has none."""
        found = self.store.rows("state", "key = ?", key)
        return json.loads(found[0][1]) if found else default

    def rollouts_in_flight(self) -> dict[str, InFlight]:
        """Return every rollout in flight, by name."""
        return dict(self._rollouts.in_flight)

    def counts(self) -> Counts:
        """Return the counts of this moment."""
        return self._rollouts.counts()

    @property
    def reasons(self) -> collections.Counter[str]:
        """Rollouts that were not trained, by `status: reason`."""
        return self._rollouts.reasons

    def terminal_statuses(self) -> list[tuple[object, ...]]:
        """Return every rollout that ended, in that order; for tests and reports."""
        return self.store.read("SELECT * FROM ended_rollouts")

    def flush(self, *, durably: bool = False) -> None:
        """Write everything recorded so far; any thread may. Raises `LedgerError`."""
        self.store.flush(durably=durably)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.store.close()

    def _record_outcome(self, kind: str, scored: ScoredTrajectory, *, now_s: float, by: str | None = None) -> None:
        trajectory, score = scored.trajectory, scored.score
        reason = f"{score.outcome}: {score.error}" if score.error else str(score.outcome)
        about = Columns(rollout_id=trajectory.rollout_id, attempt=trajectory.attempt)
        self.record(kind, now_s=now_s, **about | {"peer": by, "reason": reason, "reward": score.reward})

    def _complete(self, group_id: int, *, step: int, is_assigned: bool) -> None:
        self._num_completed += 1
        self._num_assigned += is_assigned
        with self.transaction():
            self.store.put(_COMPLETED, self._num_completed, group_id, step, int(is_assigned))
            self.store.put(_GROUP_COMPLETED, self._num_completed, step, int(is_assigned), group_id)
            self._set_state("num_completed", self._num_completed)
            self._set_state("num_assigned", self._num_assigned)

    def _set_state(self, key: str, value: Any) -> None:
        """Have the state hold a value; what changes several times between two flushes is written once."""
        self._changed_state[key] = value

    def _write_changed(self) -> None:
        self._rollouts.write_counts()
        changed, self._changed_state = self._changed_state, {}
        for key, value in changed.items():
            self.store.put(_STATE, key, json.dumps(value))


REST_KEY = "rest "
"""The prefix of the state's keys for rests of prompts, for the curriculum; the prompt's number follows."""
_STATE, _GROUP, _SAMPLE, _TRAJECTORY = map(writing, ("state", "groups", "samples", "trajectories"))
_DRAWN, _COMPLETED, _CLOSED, _CHECKPOINT, _EVALUATED = map(writing, ("drawn", "completed", "steps", "checkpoints", "evaluations"))
_GROUP_COMPLETED = changing("groups", "number", "step", "is_assigned")
_ASSIGNED, _CREDITED = changing("samples", "step", "advantages"), changing("samples", "advantages")
_PACKED, _STOPPED = changing("samples", "row", "position"), changing("samples", "stopped_step")
_RESCORED = changing("trajectories", "scored")
_IS_RESCORED = {"prm_scored": changing("samples", "is_prm_scored"), "group_scored": changing("samples", "is_group_scored")}


def _peer(engine_id: int | None) -> str:
    return "gateway-0" if engine_id is None else f"engine-{engine_id}"


def _without_prompt(scored: ScoredTrajectory) -> ScoredTrajectory:
    return msgspec.structs.replace(scored, trajectory=msgspec.structs.replace(scored.trajectory, prompt=_NO_PROMPT))

"""The promises. The history is read once, in order, and whatever breaks one is written down as a sentence.

conservation   a rollout is admitted once and ends once; what ended stays ended, but what was cancelled with its run may be revived
attempts       count up from 0; the next one only once the last is lost; an answer counts only for the attempt that is out
steps          where steps are scored, a sample's are so once, after its own score, and before it is compared or assigned
turns          an environment answers each turn once, in order, anew only after a restart, while the attempt is out; nothing more is
               asked after the last, or where it said that the episode is over or failed
early stop     where rollouts may be stopped, an attempt is decided about once, while it is out, as seed and names say; a stopped rollout
               has no reward, is never assigned, and counts among the samples of the step of its group
baseline       where groups have a greedy sibling, it is never assigned, ends as filtered by that reason where it has a reward, and no
               sibling of one without a reward is assigned
comparison     where siblings are compared, each is so once, after its own score, and none is assigned before; as with steps, but for a
               sample whose reward the script itself gave
exactly once   a sample is assigned to one step, packed in one position of one row, and trained in that step, with as many sampled tokens
               as were generated, each once whatever the shape of its episode; a step is done once and in turn, and is done again only
               after the trainer started from a checkpoint that does not hold it; a trainer that survives the orchestrator goes on at
               a step it has not done
staleness      no trained token is more than K versions older than the step that trains it, none is newer
batches        a closed step has its B groups, each whole, and the rows, samples and tokens that its entry says
checkpoints    name the commit under which their last step was closed, and hold exactly the samples of the steps before them; one that is
               discarded was the newest that was saved; what a run says when it ends is what its newest checkpoint holds
bytes          are those that were written: every row of the ledger and every file of a checkpoint has its checksum
quarantine     a prompt that was there at two deaths is never asked for again; a row of samples that was is trained no more, and its samples
               fail: alone of those that were assigned
"""

from __future__ import annotations

from collections.abc import Iterable

from pipelinerl.checker.history import Entry, History
from pipelinerl.checker.rollouts import RolloutInvariants
from pipelinerl.checker.state import RunState
from pipelinerl.checker.steps import RunInvariants


def check_history(history: History, *, with_checkpoints: bool = True) -> RunState:
    """Read a history, and hold the checkpoints on disk against it."""
    run = RunState(history.ledger_id)
    invariants = RunInvariants(run)
    _read(history.entries, run, of_run=invariants, of_rollouts=RolloutInvariants(run))
    if with_checkpoints:
        invariants.check_checkpoints(history.checkpoints)
    run.problems += history.damage
    return run


def _read(entries: Iterable[Entry], run: RunState, *, of_run: RunInvariants, of_rollouts: RolloutInvariants) -> None:
    last = 0
    for entry in entries:
        run.entry = entry
        run.require(entry.seq > last, f"comes after number {last}")
        last = entry.seq
        run.num_entries += 1
        is_of_run = entry.rollout_id is None or entry.kind == "admitted"
        handler = getattr(of_run if is_of_run else of_rollouts, f"on_{entry.kind}", None)
        if handler is None:
            run.problems.append(f"entry {entry.seq} is of the unknown kind {entry.kind!r}")
        elif is_of_run:
            handler(entry)
        elif (rollout := run.rollouts.get(entry.rollout_id or "")) is None:
            run.require(False, "speaks of a rollout that was never admitted")
        else:
            handler(entry, rollout)

"""The ledger: every rollout ends once, the counts add up, what is written is a prefix of what happened, and a new life goes on from it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import random
import re
import resource
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.rollouts import RUN_ENDED, Counts, RolloutSummary
from orchestrator.ledger.snapshot import commit_of, first_kept_step, read_resting, read_snapshot, read_steps, read_successes, saved_versions
from orchestrator.rules.curriculum import Rest
from pipelinerl.checker import history as checked_history
from pipelinerl.checker.history import open_history
from pipelinerl.errors import LedgerError
from pipelinerl.messages import EarlyStopDecision, Outcome, Sample, TerminalStatus
from tests.orchestrator import handmade


def sample_of(group_id: int, sibling: int, *, reward: float = 1.0, versions: tuple[int, ...] = (0, 0, 0)) -> Sample:
    trajectory = handmade.trajectory(versions, group_id=group_id, sibling=sibling)
    return Sample(trajectory=trajectory, reward=reward, advantages=np.arange(trajectory.num_tokens, dtype=np.float32))


def score(ledger: Ledger, *samples: Sample) -> None:
    for sample in samples:
        ledger.record_score(handmade.scored(sample.trajectory, sample.reward), now_s=2.0)


# --- counting ------------------------------------------------------------------------------------------------------------------------


def test_every_terminal_status_is_counted_apart_and_the_identity_holds_at_every_moment():
    ledger = Ledger(None)
    handmade.admit(ledger, 0, group_size=12)
    assert ledger.counts() == Counts(admitted=12, in_flight=12, trained=0, filtered=0, stale=0, failed=0, cancelled=0)
    for number, fate in enumerate(
        [TerminalStatus.TRAINED] * 4 + [TerminalStatus.FILTERED] * 3 + [TerminalStatus.STALE] * 2 + [TerminalStatus.FAILED]
    ):
        ledger.end(f"0/{number}", fate, now_s=2.0)
        assert ledger.counts().holds
    assert ledger.counts() == Counts(admitted=12, in_flight=2, trained=4, filtered=3, stale=2, failed=1, cancelled=0)
    final = ledger.finish("finished", now_s=3.0)
    assert final == Counts(admitted=12, in_flight=0, trained=4, filtered=3, stale=2, failed=1, cancelled=2)


def test_the_identity_can_be_broken_and_says_so():
    whole = Counts(admitted=6, in_flight=1, trained=1, filtered=1, stale=1, failed=1, cancelled=1)
    lost = Counts(admitted=7, in_flight=1, trained=1, filtered=1, stale=1, failed=1, cancelled=1)
    assert whole.holds
    assert not lost.holds
    assert str(whole) == "6 admitted = 1 in flight + 1 trained + 1 filtered + 1 stale + 1 failed + 1 cancelled"
    assert str(lost) == "7 admitted IS NOT 1 in flight + 1 trained + 1 filtered + 1 stale + 1 failed + 1 cancelled"


def test_what_was_not_trained_is_counted_by_reason():
    ledger = Ledger(None)
    handmade.admit(ledger, 0, group_size=4)
    ledger.end("0/0", TerminalStatus.TRAINED, now_s=2.0)
    ledger.end("0/1", TerminalStatus.FAILED, now_s=2.0, reason="timeout")
    ledger.end("0/2", TerminalStatus.FAILED, now_s=2.0, reason="timeout")
    ledger.end("0/3", TerminalStatus.FILTERED, now_s=2.0, reason="zero_variance")
    assert ledger.reasons == {"failed: timeout": 2, "filtered: zero_variance": 1}


def test_nothing_ends_twice_or_without_having_been_admitted():
    ledger = Ledger(None)
    handmade.admit(ledger, 0)
    ledger.end("0/0", TerminalStatus.TRAINED, now_s=2.0)
    with pytest.raises(KeyError):
        ledger.end("0/0", TerminalStatus.FAILED, now_s=3.0)
    with pytest.raises(KeyError):
        ledger.end("9/9", TerminalStatus.FAILED, now_s=3.0)
    assert ledger.counts() == Counts(admitted=1, in_flight=0, trained=1, filtered=0, stale=0, failed=0, cancelled=0)
    assert len(ledger.terminal_statuses()) == 1


# --- the file ------------------------------------------------------------------------------------------------------------------------


def test_flushed_statuses_are_read_by_a_plain_sqlite3_connection_while_the_run_goes_on(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    handmade.admit(ledger, 7, group_size=4, at_s=1.5)
    ledger.end(
        "7/3",
        TerminalStatus.TRAINED,
        now_s=4.5,
        summary=RolloutSummary(step=2, reward=0.25, oldest_version=1, newest_version=3, num_tokens=40),
    )
    ledger.flush()
    handmade.admit(ledger, 8, at_s=5.0)
    ledger.end("8/0", TerminalStatus.FAILED, now_s=6.0, reason="timeout")
    query = (
        "SELECT rollout_id, group_id, prompt_id, status, reason, step, reward, oldest_version, newest_version, num_tokens,"
        " admitted_s, ended_s FROM ended_rollouts ORDER BY rollout_id"
    )
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute(query).fetchall() == [("7/3", 7, "0:7", "trained", "", 2, 0.25, 1, 3, 40, 1.5, 4.5)]
        ledger.close()
        assert database.execute(query).fetchall()[1] == ("8/0", 8, "0:8", "failed", "timeout", None, None, None, None, 0, 5.0, 6.0)


def test_what_is_booked_while_another_thread_writes_is_written_once_and_in_order():
    """The pipeline writes in a thread, while its own thread goes on booking."""
    ledger = Ledger(None)
    handmade.admit(ledger, 0, group_size=300)
    numbers = iter(range(300))
    with concurrent.futures.ThreadPoolExecutor(2) as writers:
        for _ in range(30):
            for number in itertools.islice(numbers, 5):
                ledger.end(f"0/{number}", TerminalStatus.TRAINED, now_s=2.0)
            writing = [writers.submit(ledger.flush) for _ in range(2)]
            for number in itertools.islice(numbers, 5):
                ledger.end(f"0/{number}", TerminalStatus.TRAINED, now_s=2.0)
            concurrent.futures.wait(writing)
    assert [row[0] for row in ledger.terminal_statuses()] == [f"0/{number}" for number in range(300)]


def test_what_belongs_together_is_not_torn_apart_by_a_flush():
    ledger = Ledger(None)
    handmade.admit(ledger, 0, group_size=2)
    ledger.flush()
    with concurrent.futures.ThreadPoolExecutor(1) as writer:
        with ledger.transaction():
            ledger.end("0/0", TerminalStatus.TRAINED, now_s=2.0)
            writing = writer.submit(ledger.flush)
            assert not concurrent.futures.wait([writing], timeout=0.2).done, "it takes neither, or both"
            ledger.end("0/1", TerminalStatus.TRAINED, now_s=2.0)
        writing.result(5.0)
    assert len(ledger.terminal_statuses()) == 2


def test_a_ledger_that_cannot_be_written_says_so(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other:
        other.execute("DROP TABLE events")
    handmade.admit(ledger, 0)
    with pytest.raises(LedgerError, match=r"cannot write \d entries to .*ledger.sqlite: no such table"):
        ledger.flush()


# --- another life --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(memory_path: Path) -> Path:
    return memory_path / "ledger.sqlite"


def killed(ledger: Ledger) -> None:
    """End the process after a flush."""
    ledger.flush()
    ledger.store.abandon()


def test_a_fresh_ledger_gives_a_run_from_the_start():
    snapshot = read_snapshot(Ledger(None))
    assert (snapshot.num_done, snapshot.next_group_id, snapshot.position, snapshot.open_step) == (0, 0, (0, 0), 0)
    assert (snapshot.interrupted, snapshot.scored, snapshot.steps, snapshot.running_groups) == ((), (), {}, frozenset())


def test_what_was_not_flushed_never_happened(path: Path):
    ledger = Ledger(path)
    handmade.admit(ledger, 0)
    ledger.flush()
    handmade.admit(ledger, 1)
    ledger.store.abandon()
    again = Ledger(path)
    assert again.counts().admitted == 1
    assert read_snapshot(again).next_group_id == 1


def test_the_source_goes_on_behind_the_last_prompt_admitted(path: Path):
    ledger = Ledger(path)
    for group_id in range(3):
        handmade.admit(ledger, group_id)
    killed(ledger)
    assert read_snapshot(Ledger(path)).position == (0, 3)


def test_what_had_no_score_is_issued_again_with_the_next_attempt_and_its_prompt(path: Path):
    ledger = Ledger(path)
    handmade.admit(ledger, 4, group_size=3)
    ledger.issue("4/0", attempt=0, engine_id=0, version=2, now_s=1.0)
    ledger.issue("4/1", attempt=0, engine_id=0, version=2, now_s=1.0)
    ledger.lose("4/1", attempt=0, engine_id=0, reason="engine-0 ended", now_s=1.5)
    ledger.issue("4/1", attempt=1, engine_id=1, version=3, now_s=1.6)
    score(ledger, sample_of(4, 0))
    killed(ledger)
    snapshot = read_snapshot(Ledger(path))
    (group,) = snapshot.interrupted
    assert group.prompt.prompt_id == "0:4"
    assert group.prompt.token_ids.tolist() == [100, 101]
    assert [(one.rollout_id, one.sibling, one.attempt, one.version) for one in group.rollouts] == [("4/1", 1, 2, 3), ("4/2", 2, 0, 0)]
    assert [one.trajectory.rollout_id for one in snapshot.scored] == ["4/0"]
    assert snapshot.running_groups == {4}


def test_a_scored_rollout_comes_back_to_the_last_column(path: Path):
    sample = sample_of(0, 0, reward=0.25, versions=(3, 3, 4))
    ledger = Ledger(path)
    handmade.admit(ledger, 0)
    score(ledger, sample)
    killed(ledger)
    (back,) = read_snapshot(Ledger(path)).scored
    assert back.score.reward == 0.25
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        assert getattr(back.trajectory, name).tolist() == getattr(sample.trajectory, name).tolist()
    assert back.trajectory.prompt.token_ids.tolist() == sample.trajectory.prompt.token_ids.tolist()


def test_a_step_comes_back_row_by_row_with_its_advantages_and_its_seal(path: Path):
    ledger = Ledger(path)
    samples = [sample_of(group_id, sibling) for group_id in range(2) for sibling in range(2)]
    for group_id in range(2):
        handmade.admit(ledger, group_id, group_size=2)
        score(ledger, *samples[2 * group_id : 2 * group_id + 2])
        ledger.assign(group_id, samples[2 * group_id : 2 * group_id + 2], step=0, now_s=3.0)
    ledger.pack([samples[2], samples[0]], step=0, row=0, now_s=3.0)
    ledger.pack([samples[1], samples[3]], step=0, row=1, now_s=3.0)
    commit = ledger.close_step(0, num_rows=2, num_tokens=12, num_samples=4, now_s=3.0)
    killed(ledger)
    again = Ledger(path)
    step = read_steps(again, first=0)[0]
    assert [[sample.trajectory.rollout_id for sample in row] for row in step.rows] == [["1/0", "0/0"], ["0/1", "1/1"]]
    assert step.rows[0][0].advantages.tolist() == [0, 1, 2, 3, 4]
    assert (step.unpacked, step.num_groups, step.closed) == ((), 2, (12, 4, commit))
    assert commit_of(again, 0) == commit
    assert read_snapshot(again).open_step == 1


def test_a_step_being_filled_comes_back_with_what_is_not_packed_yet(path: Path):
    ledger = Ledger(path)
    samples = [sample_of(0, sibling) for sibling in range(3)]
    handmade.admit(ledger, 0, group_size=3)
    score(ledger, *samples)
    ledger.assign(0, samples, step=0, now_s=3.0)
    ledger.pack([samples[1]], step=0, row=0, now_s=3.0)
    killed(ledger)
    snapshot = read_snapshot(Ledger(path))
    assert snapshot.open_step == 0
    assert [sample.trajectory.rollout_id for sample in snapshot.steps[0].rows[0]] == ["0/1"]
    assert [sample.trajectory.rollout_id for sample in snapshot.steps[0].unpacked] == ["0/0", "0/2"]
    assert snapshot.steps[0].num_groups == snapshot.num_assigned_groups == 1
    assert snapshot.running_groups == frozenset()


def test_a_step_that_lost_a_row_is_refused(path: Path):
    ledger = Ledger(path)
    handmade.admit(ledger, 0)
    ledger.close_step(0, num_rows=1, num_tokens=3, num_samples=1, now_s=3.0)
    with pytest.raises(LedgerError, match="step 0 was closed with 1 rows, but the ledger holds 0"):
        read_steps(ledger, first=0)


def test_samples_go_once_a_checkpoint_holds_them_and_not_before(path: Path):
    ledger = Ledger(path)
    for group_id in range(2):
        sample = sample_of(group_id, 0)
        handmade.admit(ledger, group_id)
        score(ledger, sample)
        ledger.assign(group_id, [sample], step=group_id, now_s=3.0)
        ledger.pack([sample], step=group_id, row=0, now_s=3.0)
        ledger.close_step(group_id, num_rows=1, num_tokens=3, num_samples=1, now_s=3.0)
        ledger.end(f"{group_id}/0", TerminalStatus.TRAINED, now_s=4.0)
    assert sorted(read_steps(ledger, first=0)) == [0, 1]
    ledger.record_checkpoint(1, "the commit", now_s=5.0)
    assert ledger.store.read("SELECT group_id FROM groups") == [(1,)]
    assert ledger.store.read("SELECT rollout_id FROM samples") == [("1/0",)]
    assert len(ledger.terminal_statuses()) == 2, "what became of them stays known"


def test_what_was_cancelled_when_the_run_ended_is_in_flight_again_when_it_goes_on(path: Path):
    ledger = Ledger(path)
    handmade.admit(ledger, 0, group_size=3)
    score(ledger, sample_of(0, 1))
    ledger.end("0/2", TerminalStatus.CANCELLED, now_s=2.0, reason="withdrawn")
    assert ledger.finish("stopped", now_s=3.0).cancelled == 3
    ledger.close()
    again = Ledger(path)
    assert again.reasons == {f"cancelled: {RUN_ENDED}": 2, "cancelled: withdrawn": 1}
    again.begin({}, now_s=4.0, unix_s=0.0)
    assert again.counts() == Counts(admitted=3, in_flight=2, trained=0, filtered=0, stale=0, failed=0, cancelled=1)
    snapshot = read_snapshot(again)
    assert [one.rollout_id for group in snapshot.interrupted for one in group.rollouts] == ["0/0"]
    assert [one.trajectory.rollout_id for one in snapshot.scored] == ["0/1"]


def test_a_failed_sibling_needs_no_second_score(path: Path):
    ledger = Ledger(path)
    handmade.admit(ledger, 0, group_size=2)
    ledger.record_score(handmade.scored(handmade.trajectory(group_id=0), outcome=Outcome.TIMEOUT), now_s=2.0)
    killed(ledger)
    snapshot = read_snapshot(Ledger(path))
    assert [one.score.outcome for one in snapshot.scored] == [Outcome.TIMEOUT]
    assert [one.rollout_id for group in snapshot.interrupted for one in group.rollouts] == ["0/1"]


def test_deaths_are_remembered_by_role_and_prompt_until_it_came_through(path: Path):
    ledger = Ledger(path)
    for kind, peer, row in (
        ("suspected", "engine-0", "7"),
        ("suspected", "engine-1", "8"),
        ("suspected", "scorer-0", "7"),
        ("suspected", "engine-1", "7"),
        ("cleared", "engine-1", "8"),
    ):
        ledger.record(kind, now_s=1.0, peer=peer, suspect=row)
    killed(ledger)
    assert read_snapshot(Ledger(path)).deaths == {"engine": {"7": 2}, "scorer": {"7": 1}}


# --- a full disk ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("makes_room", [True, False])
def test_a_full_disk_is_told_and_leaves_a_prefix_even_where_there_is_room_again_before_the_end(tmp_path: Path, makes_room: bool):
    """Files may not grow past 40 kB, as on a disk without room; the 100 groups that follow take more."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    handmade.admit(ledger, 0)
    ledger.flush(durably=True)
    (tmp_path / "ledger.sqlite-wal").stat()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        for group_id in range(1, 101):
            handmade.admit(ledger, group_id)
        with pytest.raises(LedgerError, match=r"cannot write \d+ entries to .*ledger.sqlite: .*make room on the disk, and resume the run"):
            ledger.flush()
        if makes_room:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        handmade.admit(ledger, 101)
        with pytest.raises(LedgerError, match="make room on the disk"):
            ledger.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with contextlib.closing(Ledger(path)) as again:
        assert list(again.rollouts_in_flight()) == ["0/0"], "entry 101 must not be there without those before it"
        handmade.admit(again, 1)


def test_success_rates_come_back_in_the_order_in_which_groups_completed(path: Path):
    ledger = Ledger(path)
    for group_id, rewards in ((0, (1.0, 0.0)), (1, (1.0, Outcome.TIMEOUT)), (2, (0.0, 0.5)), (3, (1.0, 1.0))):
        handmade.admit(ledger, group_id, group_size=3)
        for member in handmade.plain_group(group_id, (*rewards, 0.0)).members:  # the third is greedy, and does not count
            ledger.record_score(member, now_s=1.0)
    ledger.update_scores("group_scored", [handmade.scored(handmade.trajectory(group_id=2, sibling=1), 2.0)], now_s=2.0)
    for group_id in (2, 0, 1):
        ledger.drop(group_id, step=0)
    killed(ledger)
    assert read_successes(Ledger(path), correct_reward=1.0, group_size=2) == [
        ("0:2", 0.5),
        ("0:0", 0.5),
        ("0:1", 1.0),
    ], "group 3 is not completed"


def test_which_prompts_rest_comes_back_and_the_history_is_read_only_where_it_was_not_kept(path: Path):
    ledger = Ledger(path)
    kept = {0: Rest(length=2, measured_in=3), 1: None, 17: Rest(length=8, measured_in=5)}
    for group_id in range(5):
        handmade.admit(ledger, group_id)
        ledger.record_score(handmade.plain_group(group_id, (1.0,)).members[0], now_s=1.0)
    for group_id, (number, rest) in enumerate(kept.items()):
        ledger.drop(group_id, step=0)
        ledger.store_rest(number, rest)
    ledger.drop(3, step=0)
    ledger.store_rest(None, None)
    killed(ledger)
    again = Ledger(path)
    read: list[str] = []
    again.store._database.set_trace_callback(read.append)
    assert read_resting(again) == {number: rest for number, rest in kept.items() if rest is not None}
    assert read_successes(again, correct_reward=1.0, group_size=2) == []
    assert not [statement for statement in read if "events" in statement or "drawn" in statement], "however long the run was"
    again.store._database.set_trace_callback(None)
    again.drop(4, step=0)
    assert read_successes(again, correct_reward=1.0, group_size=2) == [("0:4", 1.0)], "only what was completed since"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (1, "schema is 1, and `pipelinerl migrate` knows the way from 2 on"),
        (2, "schema is 2, this one reads 4. Bring the run folder up to date: `pipelinerl migrate RUN`"),
        (3, "schema is 3, this one reads 4. Bring the run folder up to date: `pipelinerl migrate RUN`"),
        (5, r"schema is 5, this version \(0.1.0\) reads 4. Use the version that wrote it"),
    ],
)
def test_a_ledger_of_another_schema_is_refused_before_anything_is_lost(path: Path, schema: int, says: str) -> None:
    Ledger(path).close()
    Ledger(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {schema}")
    with pytest.raises(LedgerError, match=says):
        Ledger(path)


# --- checkpoints to fall back to -----------------------------------------------------------------------------------------------------


def train(ledger: Ledger, *steps: int) -> list[str]:
    """Have each step filled by one group, sealed and done; return the commits."""
    commits = []
    for step in steps:
        sample = sample_of(step, 0)
        handmade.admit(ledger, step)
        score(ledger, sample)
        ledger.assign(step, [sample], step=step, now_s=3.0)
        ledger.pack([sample], step=step, row=0, now_s=3.0)
        commits.append(ledger.close_step(step, num_rows=1, num_tokens=3, num_samples=1, now_s=3.0))
        ledger.end(f"{step}/0", TerminalStatus.TRAINED, now_s=4.0)
        ledger.record("done", now_s=4.0, step=step)
    return commits


def test_a_ledger_that_cannot_be_read_is_not_held(path: Path) -> None:
    """Not even while somebody looks at the error: who restores the file would otherwise find it locked."""
    Ledger(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO state VALUES ('seq', '7', 0)")
    with pytest.raises(LedgerError, match="its last entry is number 0, expected 7") as refused:
        Ledger(path)
    with contextlib.closing(sqlite3.connect(path, timeout=0.0)) as database:
        assert database.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",), refused


def test_rows_stay_for_as_long_as_a_trainer_may_fall_back_to_before_them(path: Path):
    ledger = Ledger(path)
    commits = train(ledger, 0, 1, 2, 3, 4, 5)
    ledger.record_checkpoint(2, commits[1], oldest=0, now_s=5.0)
    assert sorted(read_steps(ledger, first=0)) == [0, 1, 2, 3, 4, 5], "from the model the run began with"
    ledger.record_checkpoint(4, commits[3], oldest=2, now_s=5.0)
    killed(ledger)
    again = Ledger(path)
    assert sorted(read_steps(again, first=2)) == [2, 3, 4, 5]
    assert [sample.trajectory.rollout_id for sample in read_steps(again, first=2)[2].samples] == ["2/0"]
    assert [commit_of(again, step) for step in (0, 1, 3)] == [None, commits[1], commits[3]]
    assert (saved_versions(again), first_kept_step(again)) == ([2, 4], 2)
    assert again.store.read("SELECT group_id FROM groups ORDER BY group_id") == [(2,), (3,), (4,), (5,)]


def test_a_discarded_checkpoint_counts_no_more_and_may_be_saved_again(path: Path):
    ledger = Ledger(path)
    commits = train(ledger, 0, 1, 2, 3)
    ledger.record_checkpoint(2, commits[1], oldest=0, now_s=5.0)
    ledger.record_checkpoint(4, commits[3], oldest=2, now_s=5.0)
    ledger.discard_checkpoint(4, "it is not there any more", now_s=6.0)
    killed(ledger)
    again = Ledger(path)
    assert saved_versions(again) == [2]
    again.record_checkpoint(4, commits[3], oldest=2, now_s=7.0)
    assert saved_versions(again) == [2, 4]


# --- damage --------------------------------------------------------------------------------------------------------------------------


def busy_ledger(path: Path) -> None:
    """One with a row of every kind of table, closed."""
    ledger = Ledger(path)
    ledger.begin({"group_size": 1}, now_s=0.0, unix_s=0.0)
    commits = train(ledger, *range(6))
    ledger.record_checkpoint(2, commits[1], oldest=0, now_s=5.0)
    ledger.record_checkpoint(4, commits[3], oldest=2, now_s=5.0)
    ledger.record("evaluated", now_s=5.0, version=3, reward=0.5)
    ledger.record("suspected", now_s=5.0, peer="engine-0", suspect="7")
    ledger.store_baselines({"3": 0.25}, now_s=5.0)
    handmade.admit(ledger, 6, group_size=4)
    for sibling in range(3):
        ledger.issue(f"6/{sibling}", attempt=0, engine_id=0, version=4, now_s=6.0)
    ledger.record_early_stop("6/1", attempt=0, decision=EarlyStopDecision(step=1, predicted=0.1, probability=0.5, stops=False), now_s=6.0)
    score(ledger, sample_of(6, 0))
    ledger.end("6/2", TerminalStatus.FAILED, now_s=6.0, reason="timeout")
    ledger.finish("stopped", now_s=7.0)
    ledger.close()


def read_all(path: Path) -> str:
    """All that a resumed run takes from a ledger."""
    with contextlib.closing(Ledger(path)) as ledger:
        said = (ledger.store.ledger_id, ledger.store.last_seq, ledger.counts(), sorted(ledger.reasons.items()), ledger.baselines())
        revived = ledger.store.rows("in_flight", "revives")
        commits = [commit_of(ledger, step) for step in range(7)]
        kept = (saved_versions(ledger), first_kept_step(ledger))
        return repr((said, revived, commits, kept, read_steps(ledger, first=2), read_snapshot(ledger)))


@pytest.mark.slow
def test_no_bit_of_a_ledger_flips_in_silence(path: Path):
    """One bit in each of 400 places of its pages in use: a resumed run or the checker finds it, or both read what was written."""
    busy_ledger(path)
    written, expected = path.read_bytes(), read_all(path)
    assert problems_of(path) == []
    chance, found, silent = random.Random(0), 0, []
    for _ in range(400):
        while True:
            place = chance.randrange(8 * len(written))
            if any(written[max(0, place // 8 - 32) : place // 8 + 32]):  # most of a young file is empty pages
                break
        content = bytearray(written)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            is_same = read_all(path) == expected
        except LedgerError:
            found += 1
            continue
        if problems_of(path):
            found += 1
        elif not is_same:
            silent.append(place)
    assert silent == []
    assert found > 250, "but for bytes that nothing reads"


def problems_of(path: Path) -> list[str]:
    """What the independent checker finds wrong with the bytes of a ledger."""
    try:
        with open_history(path.parent) as history:
            list(history.entries)
            return history.damage
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        return [str(error)]


def test_the_checker_reads_the_checkpoints_of_a_run_under_way_before_the_ledger_which_then_has_their_steps(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    busy_ledger(path)
    (path.parent / "checkpoints" / "step-000001").mkdir(parents=True)
    (path.parent / "checkpoints" / "step-000001" / "manifest.json").write_text("{}")

    def goes_on(path: Path) -> dict[str, dict[str, object]]:
        """The run writes to its ledger, and removes the checkpoint, while its manifest is read."""
        with contextlib.closing(sqlite3.connect(path.parents[2] / "ledger.sqlite")) as database:
            database.execute("UPDATE events SET reward = 0.5 WHERE kind = 'scored' AND rollout_id = '3/0'")
            database.commit()
        path.unlink()
        return {"files": {"gone": {}}}

    monkeypatch.setattr(checked_history, "_read_manifest", goes_on)
    monkeypatch.setattr(checked_history, "_is_as_written", lambda path, file: False)
    with open_history(path.parent) as found:
        list(found.entries)
    assert found.checkpoints == (), "one that was removed lacks no files"
    assert len(found.damage) == 1, "what was written while the checkpoints were read is seen"


def test_the_checker_finds_an_entry_of_the_history_that_was_changed(path: Path):
    busy_ledger(path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE events SET reward = 0.5 WHERE kind = 'scored' AND rollout_id = '3/0'")
        database.commit()
    (problem,) = problems_of(path)
    assert re.fullmatch(r"entry \d+ was damaged", problem)


@pytest.mark.parametrize("table", ["samples", "trajectories", "groups", "steps", "in_flight", "counts", "state"])
def test_a_row_that_was_damaged_is_named(path: Path, table: str):
    busy_ledger(path)
    column = {"samples": "row", "trajectories": "checksum", "groups": "step", "steps": "num_tokens", "counts": "number"}.get(table)
    column = column or {"in_flight": "attempt", "state": "checksum"}[table]
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"UPDATE {table} SET {column} = {column} + 1")
        database.commit()
    with pytest.raises(LedgerError, match=rf"ledger.sqlite was damaged after it was written: the row .* of {table} has the checksum"):
        read_all(path)

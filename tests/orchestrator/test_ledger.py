"""The ledger: every rollout ends once, the counts add up, and the rows are there for anyone with sqlite3."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import sqlite3
from pathlib import Path

import pytest

from orchestrator.state.ledger import Admitted, Facts, Identity, Ledger
from pipelinerl.messages import Fate


def admit(ledger: Ledger, *rollout_ids: str, at_s: float = 1.0) -> None:
    for rollout_id in rollout_ids:
        group_id = int(rollout_id.split("/")[0])
        ledger.admit(Admitted(rollout_id=rollout_id, group_id=group_id, prompt_id=f"0:{group_id}", admitted_s=at_s))


def test_every_fate_is_counted_apart_and_the_identity_holds_at_every_moment():
    ledger = Ledger(None)
    admit(ledger, *(f"0/{number}" for number in range(12)))
    assert ledger.identity() == Identity(admitted=12, in_flight=12, trained=0, filtered=0, stale=0, failed=0, cancelled=0)
    for number, fate in enumerate([Fate.TRAINED] * 4 + [Fate.FILTERED] * 3 + [Fate.STALE] * 2 + [Fate.FAILED]):
        ledger.end(f"0/{number}", fate, now_s=2.0)
        assert ledger.identity().holds
    assert ledger.identity() == Identity(admitted=12, in_flight=2, trained=4, filtered=3, stale=2, failed=1, cancelled=0)
    ledger.cancel_rest(now_s=3.0, reason="the run ended")
    assert ledger.identity() == Identity(admitted=12, in_flight=0, trained=4, filtered=3, stale=2, failed=1, cancelled=2)


def test_the_identity_can_be_broken_and_says_so():
    whole = Identity(admitted=6, in_flight=1, trained=1, filtered=1, stale=1, failed=1, cancelled=1)
    lost = Identity(admitted=7, in_flight=1, trained=1, filtered=1, stale=1, failed=1, cancelled=1)
    assert whole.holds
    assert not lost.holds
    assert str(whole) == "6 admitted = 1 in flight + 1 trained + 1 filtered + 1 stale + 1 failed + 1 cancelled"
    assert str(lost) == "7 admitted IS NOT 1 in flight + 1 trained + 1 filtered + 1 stale + 1 failed + 1 cancelled"


def test_what_was_not_trained_is_counted_by_reason():
    ledger = Ledger(None)
    admit(ledger, "0/0", "0/1", "0/2", "0/3")
    ledger.end("0/0", Fate.TRAINED, now_s=2.0)
    ledger.end("0/1", Fate.FAILED, now_s=2.0, reason="timeout")
    ledger.end("0/2", Fate.FAILED, now_s=2.0, reason="timeout")
    ledger.end("0/3", Fate.FILTERED, now_s=2.0, reason="zero_variance")
    assert ledger.reasons == {"failed: timeout": 2, "filtered: zero_variance": 1}


def test_nothing_ends_twice_or_without_having_been_admitted():
    ledger = Ledger(None)
    admit(ledger, "0/0")
    ledger.end("0/0", Fate.TRAINED, now_s=2.0)
    with pytest.raises(KeyError):
        ledger.end("0/0", Fate.FAILED, now_s=3.0)
    with pytest.raises(KeyError):
        ledger.end("9/9", Fate.FAILED, now_s=3.0)
    assert ledger.identity() == Identity(admitted=1, in_flight=0, trained=1, filtered=0, stale=0, failed=0, cancelled=0)
    assert len(ledger.rows()) == 1


def test_nothing_is_admitted_twice():
    ledger = Ledger(None)
    admit(ledger, "0/0")
    with pytest.raises(AssertionError, match="admitted twice"):
        admit(ledger, "0/0")


def test_flushed_rows_are_read_by_a_plain_sqlite3_connection_while_the_run_goes_on(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    admit(ledger, "7/3", "7/4", at_s=1.5)
    ledger.end("7/3", Fate.TRAINED, now_s=4.5, facts=Facts(step=2, reward=0.25, oldest_version=1, newest_version=3, num_tokens=40))
    ledger.flush()
    admit(ledger, "8/0", at_s=5.0)
    ledger.end("8/0", Fate.FAILED, now_s=6.0, reason="timeout")
    query = (
        "SELECT rollout_id, group_id, prompt_id, fate, reason, step, reward, oldest_version, newest_version, num_tokens,"
        " admitted_s, ended_s FROM fates ORDER BY rollout_id"
    )
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute(query).fetchall() == [("7/3", 7, "0:7", "trained", "", 2, 0.25, 1, 3, 40, 1.5, 4.5)]
        ledger.close()
        assert database.execute(query).fetchall()[1] == ("8/0", 8, "0:8", "failed", "timeout", None, None, None, None, 0, 5.0, 6.0)


def test_a_second_flush_writes_nothing_again():
    ledger = Ledger(None)
    admit(ledger, "0/0")
    ledger.end("0/0", Fate.TRAINED, now_s=2.0)
    ledger.flush()
    ledger.flush()
    assert len(ledger.rows()) == 1


def test_rows_that_end_while_another_thread_writes_are_not_lost():
    """The pipeline writes in a thread, twice a second, while its own thread ends rollouts."""
    ledger = Ledger(None)
    admit(ledger, *(f"0/{number}" for number in range(300)))
    numbers = iter(range(300))
    with concurrent.futures.ThreadPoolExecutor(1) as writer:
        for _ in range(30):
            for number in itertools.islice(numbers, 5):
                ledger.end(f"0/{number}", Fate.TRAINED, now_s=2.0)
            writing = writer.submit(ledger.write, ledger.take_rows())
            for number in itertools.islice(numbers, 5):
                ledger.end(f"0/{number}", Fate.TRAINED, now_s=2.0)
            writing.result()
    assert [row[0] for row in ledger.rows()] == [f"0/{number}" for number in range(300)]
    assert ledger.take_rows() == []

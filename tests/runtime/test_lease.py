"""One run folder has one launcher: refused at once, with who holds it; taken over only from a machine that is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from orchestrator.ledger.ledger import Ledger
from pipelinerl.errors import LeaseError
from pipelinerl.runtime import lease
from pipelinerl.runtime.lease import EPOCH, FILE, LEASE_S, Holder, Lease, fence_of, held, holder_of
from tests import processes

HOLDS = """
    import os, pathlib, time
    from pipelinerl.runtime.lease import held
    with held(pathlib.Path(folder)) as lease:
        pathlib.Path(folder, "holds").write_text(f"{os.getpid()}\\n")
        time.sleep(100)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the folder."""
    process = subprocess.Popen(processes.program(HOLDS, folder=tmp_path))
    processes.read_when_written(tmp_path / "holds")
    yield process
    process.kill()
    process.wait()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def of_another_machine(folder: Path, *, epoch: int = 3, age_s: float = 0.0, has_ended: bool = False) -> None:
    """A lease that a launcher on another machine took, and renewed so long ago; that machine's lock is not seen here."""
    holder = Holder(epoch=epoch, host="far", boot_id="another", process_id=7, since_s=1e9, has_ended=has_ended)
    (folder / FILE).write_bytes(msgspec.json.encode(holder))
    then = (folder / FILE).stat().st_mtime - age_s
    os.utime(folder / FILE, (then, then))


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_folder_that_is_held_is_refused_at_once_with_who_holds_it_and_nothing_is_touched(
    tmp_path: Path, launcher: subprocess.Popen[bytes], takes_over: bool
):
    before = contents(tmp_path)
    with (
        pytest.raises(LeaseError, match=rf"is held by process {launcher.pid} on .*, since 20\d\d-.*: one run folder has one launcher"),
        held(tmp_path, takes_over=takes_over),
    ):
        pass
    assert contents(tmp_path) == before


def test_a_launcher_that_was_killed_holds_nothing(tmp_path: Path, launcher: subprocess.Popen[bytes]):
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    with held(tmp_path) as mine:
        assert mine.epoch == 2


def test_each_launcher_has_the_next_epoch(tmp_path: Path):
    epochs = []
    for _ in range(3):
        with held(tmp_path) as mine:
            epochs.append(mine.epoch)
    assert epochs == [1, 2, 3]


def test_the_lease_of_another_machine_is_refused_until_it_has_lapsed(tmp_path: Path):
    of_another_machine(tmp_path, age_s=20.0)
    with (
        pytest.raises(LeaseError, match=r"held by process 7 on far, .* renewed its lease 20 s ago.* wait 40 s, or say --take-over"),
        held(tmp_path),
    ):
        pass
    held_before = holder_of(tmp_path)
    assert held_before is not None
    assert held_before.host == "far"
    of_another_machine(tmp_path, age_s=LEASE_S)
    with held(tmp_path) as mine:
        assert mine.epoch == 4


def test_the_lease_of_another_machine_is_taken_over_by_who_says_so_or_when_it_has_ended(tmp_path: Path):
    of_another_machine(tmp_path)
    with held(tmp_path, takes_over=True) as mine:
        assert mine.epoch == 4
    of_another_machine(tmp_path, epoch=8, has_ended=True)
    with held(tmp_path) as mine:
        assert mine.epoch == 9


def test_the_lock_of_another_machine_is_passed_over_only_by_who_says_so(tmp_path: Path):
    """Over NFS the lock of a machine that is gone stands until the server gives it up."""
    of_another_machine(tmp_path, age_s=LEASE_S)
    with open(tmp_path / lease.LOCK, "w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(LeaseError, match="held by process 7 on far"), held(tmp_path):
            pass
        with held(tmp_path, takes_over=True) as mine:
            assert mine.epoch == 4


def test_of_two_who_take_an_epoch_at_the_same_moment_one_is_refused(tmp_path: Path):
    """Where locks do not reach: the other has claimed the epoch, and not yet written its lease."""
    of_another_machine(tmp_path, age_s=LEASE_S)
    claim = tmp_path / "lease-4.claim"
    claim.touch()
    with pytest.raises(LeaseError, match="is being taken by another launcher this very moment"), held(tmp_path):
        pass
    then = claim.stat().st_mtime - LEASE_S
    os.utime(claim, (then, then))
    with held(tmp_path) as mine:
        assert mine.epoch == 5, "who claimed it and got no further is dead"


def test_a_lease_is_renewed_and_a_launcher_that_was_superseded_learns_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.0)
    with held(tmp_path) as mine:
        os.utime(tmp_path / FILE, (0, 0))
        mine.renew_if_due()
        assert (tmp_path / FILE).stat().st_mtime > 0
        of_another_machine(tmp_path, epoch=2)
        with pytest.raises(LeaseError, match=r"was taken over by process 7 on far.*epoch 2, this is epoch 1"):
            mine.renew_if_due()
    after = holder_of(tmp_path)
    assert after is not None
    assert (after.epoch, after.has_ended) == (2, False), "who lost a lease does not end it"


def test_an_orchestrator_of_an_older_epoch_stops_before_it_writes(tmp_path: Path):
    of_another_machine(tmp_path, epoch=5)
    ledger = Ledger(tmp_path / "ledger.sqlite", fence=fence_of(tmp_path, {EPOCH: "5"}))
    ledger.begin({}, now_s=0.0, unix_s=0.0)
    of_another_machine(tmp_path, epoch=6)
    ledger.record("saved", now_s=1.0, version=1, commit_id="commit")
    with pytest.raises(LeaseError, match=re.escape("this process writes nothing more")):
        ledger.flush(durably=True)
    ledger.store.abandon()
    assert Ledger(tmp_path / "ledger.sqlite").store.read("SELECT kind FROM events") == [("began",)]


def test_a_process_that_nobody_launched_has_no_fence(tmp_path: Path):
    of_another_machine(tmp_path, epoch=5)
    fence_of(tmp_path, {})()
    with contextlib.suppress(LeaseError):
        fence_of(tmp_path, {EPOCH: "4"})()
        pytest.fail("an older epoch passed")


def test_a_damaged_lease_holds_nobody_up(tmp_path: Path):
    (tmp_path / FILE).write_text("{")
    with held(tmp_path) as mine:
        assert isinstance(mine, Lease)

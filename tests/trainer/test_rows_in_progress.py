"""A row is noted while it is worked on, and left noted only where it may be what ended the work."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.errors import MismatchError, PeerGone, PeerSilent
from pipelinerl.messages import MicroBatch
from tests.trainer.tiny import make_batch, make_sample
from trainer.data.rows_in_progress import RowsInProgress, interrupted_rows


def row(index: int, *, step: int = 12) -> MicroBatch:
    return make_batch([make_sample(np.random.default_rng(0), prompt=2, completion=3)], step=step, index=index)


def test_a_row_whose_rank_is_killed_is_left_behind_and_told_once(tmp_path: Path):
    in_progress = RowsInProgress(tmp_path, rank=1, replica=1, num_replicas=2)
    with in_progress(row(0)):
        pass
    child = os.fork()
    if not child:
        with in_progress(row(3)):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert interrupted_rows(tmp_path) == ("12/7",), "row 3 of replica 1 of 2"
    assert interrupted_rows(tmp_path) == ()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (IndexError, ("12/4",)),
        (MemoryError, ("12/4",)),
        (PeerSilent, ()),
        (PeerGone, ()),
        (MismatchError, ()),
        (SystemExit, ()),
        (KeyboardInterrupt, ()),
    ],
)
def test_only_an_error_of_its_own_blames_the_row(tmp_path: Path, error: type[BaseException], expected: tuple[str, ...]):
    with pytest.raises(error), RowsInProgress(tmp_path, rank=0, replica=0, num_replicas=1)(row(4)):
        raise error
    assert interrupted_rows(tmp_path) == expected


def test_the_zero_loss_row_blames_nobody(tmp_path: Path):
    with pytest.raises(IndexError), RowsInProgress(tmp_path, rank=0, replica=0, num_replicas=1)(make_batch([], step=1)):
        raise IndexError
    assert interrupted_rows(tmp_path) == ()

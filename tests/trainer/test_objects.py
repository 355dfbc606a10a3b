"""What ranks take from each other as objects: a checkpoint's plans and errors, and nothing that runs."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from pipelinerl.config.layout import Layout
from pipelinerl.errors import WireError
from tests.trainer.ranks import run_jobs
from trainer.parallel.objects import PlainUnpickler
from trainer.parallel.replicas import Replicas


class Runs:
    """An object that, where it is unpickled, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def taken(payload: object, *, protocol: int = pickle.DEFAULT_PROTOCOL) -> Any:
    return PlainUnpickler(io.BytesIO(pickle.dumps(payload, protocol=protocol))).load()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_object_that_would_run_code_is_refused(tmp_path: Path, protocol: int):
    with pytest.raises(WireError, match=r"a rank sent an object of posix.mkdir, which is not a checkpoint's: refused"):
        taken({"plan": [Runs(tmp_path / "ran")]}, protocol=protocol)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [b"cbuiltins\neval\n.", b"ctorch\nload\n.", b"ctorch.serialization\nload\n.", b"ctorch.distributed.checkpoint.filesystem\nos\n."],
)
def test_what_these_modules_hold_beside_plain_classes_is_refused(name: bytes):
    with pytest.raises(WireError):
        PlainUnpickler(io.BytesIO(name)).load()


def test_a_way_through_a_class_to_what_its_module_imported_is_refused():
    dotted = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0aos.system_\x93."
    with pytest.raises(WireError):
        PlainUnpickler(io.BytesIO(dotted)).load()


@pytest.mark.parametrize(
    "plain",
    [
        MetadataIndex("weight", torch.Size([3])),
        TensorProperties(dtype=torch.bfloat16),
        {"of": [1, 2.0, "x", None]},
        pathlib.PosixPath("a"),
    ],
)
def test_what_checkpoints_send_arrives(plain: object):
    assert taken(plain) == plain


def test_an_error_of_a_rank_arrives_with_its_traceback():
    try:
        raise OSError(28, "No space left on device")
    except OSError as error:
        sent = CheckpointException("saving", {1: (error, traceback.extract_tb(error.__traceback__))})
    arrived = taken(sent.failures)
    assert isinstance(arrived[1][0], OSError)
    assert arrived[1][0].errno == 28
    assert arrived[1][1][0].name == "test_an_error_of_a_rank_arrives_with_its_traceback"


def _send_what_runs(replicas: Replicas, path: Path) -> list[str]:
    assert c10d._unpickler is PlainUnpickler
    try:
        dist.broadcast_object_list([Runs(path) if replicas.rank == 0 else None], src=0)
    except WireError as error:
        return [str(error)]
    return []


def test_a_rank_that_sends_what_runs_is_refused_by_the_others(tmp_path: Path):
    """Over a real collective of real ranks; the sender stands for who took a rank's place."""
    (sent, refused), *_ = run_jobs([(Layout(ranks=2), lambda replicas: _send_what_runs(replicas, tmp_path / "ran"))], tmp_path)
    assert (len(sent), len(refused)) == (0, 1)
    assert not (tmp_path / "ran").exists()

"""Rows of adapters on a device: one is not written while a forward pass under way may still read it. In pretence; no device is here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Noted:
    """A timeline whose marks are numbers."""

    def __init__(self) -> None:
        self.num_marks = 0
        self.asked: list[str] = []

    def mark(self) -> object:
        self.num_marks += 1
        return self.num_marks

    @contextlib.contextmanager
    def beside(self, after: object = None) -> Iterator[None]:
        self.asked.append(f"after {after}")
        yield
        self.asked.append("written")

    def finish(self) -> None:
        self.asked.append("finished")

    def pinned(self, num_bytes: int) -> Any:
        raise NotImplementedError


def test_the_row_that_a_commit_left_is_written_after_the_passes_launched_before_it(monkeypatch: pytest.MonkeyPatch):
    """With asynchronous scheduling one may be under way; so may the one that reads the row of a policy which a rollback undoes."""
    import torch

    from pipelinerl.engine.vllm.adapters import AdapterRows
    from pipelinerl.weights.adapters import AdapterShape

    written: list[int] = []
    layer = SimpleNamespace(set_lora=lambda row, a, b: written.append(row))
    manager = SimpleNamespace(
        lora_index_to_id=[1, 2, 3],
        modules={"layer": layer},
        add_adapter=lambda model: None,
        activate_adapter=lambda place: None,
        _create_merged_loras_inplace=lambda model: None,
        _get_lora_layer_weights=lambda model, name: SimpleNamespace(lora_a=None, lora_b=None),
    )
    monkeypatch.setattr(AdapterRows, "_model_in", lambda self, buffer, *, place: place)
    timeline, buffer = Noted(), torch.zeros(0, dtype=torch.uint8)
    shape = AdapterShape(rank=2, alpha=2.0, targets=("q_proj",), num_versions=2)
    rows = AdapterRows(manager, layout=(), shape=shape, device=torch.device("cpu"), timeline=timeline)
    rows.stage(buffer, place=3)
    rows.commit(place=1, staged_at=3, undone=())
    rows.stage(buffer, place=3)
    rows.commit(place=2, staged_at=3, undone=(1,))
    assert written == [2, 0, 2], "the row behind a place changes with each commit"
    assert timeline.asked == ["after None", "written", "after 1", "written", "after 2", "written"]

"""A model is read in the dtype that its files have, so that ranks which share it copy none of it that they do not keep."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.tiny import make_folder
from tests.trainer.zeros import make_zeros
from trainer.model.loading import dtype_on_disk, language_model


def own_bytes() -> int:
    """Memory of this process that it shares with nobody: no pages of files, nor what tests before have freed and the allocator kept."""
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = (line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Private_Dirty"))
    return int(line.split()[1]) << 10


@pytest.mark.slow
def test_a_model_read_in_the_dtype_of_its_files_takes_no_memory_of_the_process(tmp_path: Path) -> None:
    """In float32, as every rank read it before, the same weights take a copy of 64 MB; here they stay pages of the file."""
    whole = make_zeros(tmp_path, vocab_size=512, intermediate_size=1536, num_hidden_layers=5)
    on_disk = torch.bfloat16
    assert dtype_on_disk(tmp_path) == on_disk
    language_model(tmp_path, dtype=on_disk)  # what is imported at the first time is not the model's
    taken = []
    for dtype in (on_disk, torch.float32):
        before = own_bytes()
        module = language_model(tmp_path, dtype=dtype)
        taken.append(own_bytes() - before)
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert taken[0] < whole / 4
    assert taken[1] > whole / 2


def test_the_dtype_of_a_folder_is_that_of_all_its_tensors(tmp_path: Path) -> None:
    make_folder(tmp_path, family="qwen3")
    assert dtype_on_disk(tmp_path) == torch.float32
    tensors = load_file(tmp_path / "model.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(halves, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert dtype_on_disk(tmp_path) == torch.bfloat16
    mixed = {name: tensor.float() if "norm" in name else tensor for name, tensor in halves.items()}
    save_file(mixed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert dtype_on_disk(tmp_path) is None, "bfloat16 would round the norms"
    (tmp_path / "model.safetensors").unlink()
    assert dtype_on_disk(tmp_path) is None


def test_files_of_one_index_are_all_looked_at(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    index: dict[str, Any] = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert dtype_on_disk(tmp_path) is None

"""Compiled parts of layers: as few compilations as there are kinds of parts, and the gradients of what is not compiled."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from pipelinerl.errors import ConfigError
from tests.trainer.tiny import make_model, make_sample, packed_logprobs
from trainer.model import compiling


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's own, while it traces
def test_rows_of_all_lengths_share_the_compilations_of_norms_and_of_feed_forward_layers(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once with gradient and once without; traced and differentiated as for a compiler, which alone is left out."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    found: list[list[torch.Tensor]] = []
    counters.clear()
    with torch._dynamo.config.patch(disable=False):
        for is_compiled in (False, True):
            model = make_model(folders["llama"], is_compiled=is_compiled)
            for num in (1, 2, 3, 5):
                generator = np.random.default_rng(num)
                row = [make_sample(generator, prompt=3, completion=4 + 7 * number) for number in range(num)]
                with torch.no_grad() if num == 2 else contextlib.nullcontext():
                    logprobs = packed_logprobs(model, row).sum()
                if num != 2:
                    logprobs.backward()
            found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
            assert counters["stats"].get("unique_graphs", 0) == 4 * is_compiled
    torch._dynamo.reset()
    for plain, compiled in zip(*found, strict=True):
        assert float((plain - compiled).norm() / plain.norm()) < 1e-5


def test_a_machine_without_a_compiler_is_told_so(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"trainer.compile is set, and a C\+\+ compiler .* is not installed"):
        make_model(folders["llama"], is_compiled=True)
    monkeypatch.setattr(compiling, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="and triton is not installed"):
        compiling.check_compiler(torch.device("cuda"))

"""torch.compile of the parts of a layer that come between its attention: norms and feed-forward layers (`trainer.compile`).

Rows differ in length, and samples in number; compiled code is for any length, so each kind of part is compiled once for training and once
for passes without gradient, however many layers and rows there are. Attention stays as it is: what it is told of a row's samples would make
one compilation of every row. Beyond torch's own limit of compilations for a part (8), torch says so and computes it as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from os import environ

import torch

from pipelinerl.errors import ConfigError

BACKEND = "inductor"
_KINDS = ("MLP", "Norm")
"""Ends of the names of classes that are compiled. Experts are not: their products are grouped, and their sizes depend on the data."""


def compile_parts(layers: Iterable[torch.nn.Module], *, device: torch.device) -> None:
    """Have each layer's parts compiled when they are first called. Raises `ConfigError` where there is nothing to compile with."""
    check_compiler(device)
    for layer in layers:
        for part in layer.children():
            if type(part).__name__.endswith(_KINDS):
                part.compile(dynamic=True, fullgraph=True, backend=BACKEND)


def check_compiler(device: torch.device) -> None:
    """Raise `ConfigError` where what compiles for this kind of device is not installed."""
    if device.type == "cuda":
        what, is_there = "triton", find_spec("triton") is not None
    else:
        what, is_there = "a C++ compiler (g++ or clang++)", any(map(shutil.which, (environ.get("CXX", "g++"), "g++", "clang++")))
    if not is_there:
        raise ConfigError(
            f"trainer.compile is set, and {what} is not installed, which it takes on this device. Install it, or leave it out"
        )

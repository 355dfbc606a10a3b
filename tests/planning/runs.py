"""Inputs of runs on GPUs, for the tests of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import gpu_inputs, run_inputs
from pipelinerl.planning.shape import Shape, read_shape
from pipelinerl.planning.sheet import Values


def config_of(path: str, **sections: Any) -> Config:
    """A run's settings that name no data: the planner reads none."""
    return parse({"model": {"path": path, **sections.pop("model", {})}, **sections}, origin="my.toml", for_run=False)


def shape_of(model: str) -> Shape:
    return read_shape(Path(model))


def inputs_of(path: str, *, gpu: str = "h100", given: Mapping[str, float] | None = None, **sections: Any) -> Values:
    config = config_of(path, **sections)
    return {**run_inputs(config, shape_of(path), method=method_of(config)), **gpu_inputs(gpu), **(given or {})}


def figures_of(path: str, *, fixed: Mapping[str, float] | None = None, **keywords: Any) -> Values:
    return SHEET.evaluate(inputs_of(path, **keywords), fixed=fixed)

"""The layouts that the planner finds for a run on a cluster, the lengths of whose prompts and answers change: of `roles`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import DIRECT, gpu_inputs, mode_of, run_inputs
from pipelinerl.planning.plan import model_of
from pipelinerl.planning.search import Candidate, judge, search, trainers_of
from pipelinerl.planning.shape import Shape
from scripts.bench.scheduled.loads import LONGEST, Load

MODEL, GPU, NODE = "Qwen/Qwen2.5-14B", "h800", 8
WIDTHS = (1, 2, 4, 8)
CORE_NODES = (1, 2, 4)
"""Nodes that a trainer may keep in any case."""
SLOTS = 32
"""Sequences for each device of an engine."""
NUM_SIMULATED = 8
"""Static layouts that are simulated of those that the planner finds: its formulas rank them, and are off by a quarter."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster, and the run on it."""

    num_gpus: int
    groups: int
    steps: int
    load: Load

    def lengths(self) -> list[dict[str, float]]:
        """Mean lengths of prompts and answers at the middle of every step, as the planner's inputs."""
        middles = (np.arange(self.steps) + 0.5) / self.steps

        def means(mean: float, factors: tuple[float, ...]) -> list[float]:
            return (mean * np.exp(np.interp(middles, np.linspace(0.0, 1.0, len(factors)), np.log(factors)))).tolist()

        load = self.load
        pairs = zip(means(load.prompt, load.prompt_factors), means(load.mean, load.factors), strict=True)
        return [{"prompt_tokens": prompt, "mean_tokens": mean} for prompt, mean in pairs]

    @property
    def given(self) -> dict[str, float]:
        """What the planner is told of the first step."""
        return {**self.lengths()[0], "length_cv": self.load.cv}


@functools.cache
def _inputs(case: Case, *, is_colocated: bool = False) -> tuple[Mapping[str, float], Shape]:
    config = settings(case, {})
    shape, adapters = model_of(config)
    inputs = run_inputs(config, shape, method=method_of(config), adapter_parameters=adapters)
    given = {**case.given, "transport": float(DIRECT)}
    mode = {"mode": float(mode_of(config.pipeline.mode, is_colocated=is_colocated))}
    return {**inputs, **gpu_inputs(GPU), **given, **mode}, shape


def found_by_planner(case: Case, *, is_colocated: bool = False) -> list[Candidate]:
    """What the planner finds at lengths of the drift, and its trainers with engines of every other width: the fastest of the whole run
    first, by its formulas.
    """
    inputs, shape = _inputs(case, is_colocated=is_colocated)
    lengths, every = sorted(case.lengths(), key=lambda each: each["mean_tokens"]), dict[str, Candidate]()
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        for one in search({**inputs, **lengths[round(part * (len(lengths) - 1))]}, shape, num_gpus=case.num_gpus):
            for other in (one,) if is_colocated else (one, *(_widened(one, shape, width) for width in WIDTHS)):
                if not other.problems:
                    every.setdefault(said(other), other)
    if not is_colocated:
        for num, width in itertools.product(range(1, case.num_gpus // NODE), WIDTHS):
            one = of_nodes(case, num, width)
            every.setdefault(said(one), one)

    def run_s(one: Candidate) -> float:
        return sum(num * SHEET.evaluate({**one.inputs, **dict(each)})["step_s"] for each, num in counts.items())

    counts = collections.Counter(tuple(each.items()) for each in lengths)
    return sorted(every.values(), key=run_s)


def static_layouts(case: Case, *, quick: bool) -> list[Candidate]:
    """The layouts that are simulated: the planner's first, and evenly spaced splits by whole nodes with the wider engines."""
    first = found_by_planner(case)[: 4 if quick else NUM_SIMULATED]
    num_nodes = case.num_gpus // NODE
    splits = sorted({max(1, round(num_nodes * part / 8)) for part in range(1, 8)})
    others = [of_nodes(case, nodes, width) for nodes in splits for width in WIDTHS[-2:]]
    every = first if quick else [*first, *(one for one in others if not one.problems)]
    return list({said(one): one for one in every}.values())


def width_of(one: Candidate) -> int:
    """Return the GPUs of an engine."""
    return int(one.inputs["engine_tensor"] * one.inputs["engine_pipeline"])


def _widened(one: Candidate, shape: Shape, width: int) -> Candidate:
    """The same GPUs as engines of another width."""
    num_gpus = one.inputs["engines"] * width_of(one)
    engines = {"engine_tensor": width, "engine_pipeline": 1, "engines": num_gpus // width, "max_running": SLOTS * width}
    return judge({**one.inputs, **engines}, shape)


def of_nodes(case: Case, num_nodes: int, width: int) -> Candidate:
    """A layout whose trainer is so many nodes, in the planner's fastest way to share one copy of the model."""
    inputs, shape = _inputs(case)
    ranks = NODE * num_nodes
    engines = {"engines": (case.num_gpus - ranks) // width, "engine_tensor": width, "max_running": SLOTS * width}
    trainer, _ = _trainer(case, ranks)
    return judge({**inputs, **trainer, **engines, "ranks": float(ranks), "transport": float(DIRECT)}, shape)


@functools.cache
def _trainer(case: Case, ranks: int) -> tuple[Mapping[str, float], float]:
    """Return the planner's fastest layout of so many ranks that share one copy, of those within a hundredth the one of the fewest
    replicas; and the speed of the fastest for each GPU.
    """
    inputs, shape = _inputs(case)
    ways = [(own, values["trained_rate"]) for own, values in trainers_of(ranks, inputs, shape) if own["shard"] * own["context"] == ranks]
    best = max(rate for _, rate in ways)
    return max((own for own, rate in ways if rate > 0.99 * best), key=lambda own: own["context"]), best / ranks


@functools.cache
def core_of(case: Case) -> int:
    """Return the GPUs that the trainer keeps: those of the fewest nodes that train about as fast, for each GPU, as any.

    Fewer hold more of the model each, and have less room for activations, which they must compute again.
    """
    speeds = {nodes * NODE: _trainer(case, nodes * NODE)[1] for nodes in CORE_NODES}
    return min(ranks for ranks, speed in speeds.items() if speed > 0.99 * max(speeds.values()))


def elastic_layout(case: Case) -> Candidate:
    """The fastest layout of whole nodes at the first lengths, by the planner's formulas."""
    nodes = range(core_of(case) // NODE, case.num_gpus // NODE)
    every = [one for num in nodes for width in WIDTHS if can_change(case, one := of_nodes(case, num, width))]
    return max(every, key=lambda one: SHEET.evaluate({**one.inputs, **case.given})["run_rate"])


def can_change(case: Case, one: Candidate) -> bool:
    """Return whether the trainer has whole nodes, the core's at least, and shares one copy as the core does."""
    layout, core = one.layout, _trainer(case, core_of(case))[0]
    is_whole = layout.ranks % NODE == 0 and layout.ranks >= core_of(case)
    return not one.problems and is_whole and layout.context == core["context"] and layout.shard * layout.context == layout.ranks


def limit(case: Case) -> float:
    """Return how much sooner a run would end than with the best static layout, by the planner's formulas, were each step made in the best
    layout that it can change to for the step's lengths, and no change took any time.
    """
    lengths = collections.Counter(tuple(each.items()) for each in case.lengths())
    every = found_by_planner(case)
    step_s = np.array([[SHEET.evaluate({**one.inputs, **dict(each)})["step_s"] for each in lengths] for one in every])
    nums, may_be = np.array([*lengths.values()]), [can_change(case, one) for one in every]
    return float((step_s @ nums).min() / (step_s[may_be].min(0) @ nums))


def said(one: Candidate) -> str:
    """Name a layout."""
    inputs, layout = one.inputs, one.layout
    kinds = [f"{kind} {size}" for kind in ("shard", "context", "tensor", "pipeline") if (size := getattr(layout, kind)) > 1]
    engines = f"{inputs['engines']:.0f} engines of {width_of(one)}"
    return f"{layout.ranks} train ({', '.join(kinds) or 'data'}), {engines}"


def settings(case: Case, changed: Mapping[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": MODEL, "max_tokens": case.load.row_tokens},
        "data": {"source": "unused"},
        "reward": [{"function": "unused:reward"}],
        "rollout": {"group_size": 8, "max_tokens": LONGEST},
        "engine": {"count": 1, **changed.get("engine", {})},
        "batch": {"groups_per_step": case.groups, "max_tokens": case.load.row_tokens},
        "pipeline": {"max_staleness": case.load.staleness, "queue_bytes": 1 << 40, **changed.get("pipeline", {})},
        "trainer": {"steps": case.steps, **changed.get("trainer", {})},
        "scorer": {"slots": 4096},
        "checkpoint": {"every": 1 << 20},
    }
    return parse(tree, origin="ablation")

"""A plan of a run: its settings as they stand, the best placement found on so many GPUs, and what would be better if it could be run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import ASSUMED, CHOSEN, DIRECT, TRANSPORTS, gpu_inputs, gpus, mode_of, origin_of, run_inputs
from pipelinerl.planning.memory import adapter_parameters, read_weights
from pipelinerl.planning.search import Candidate, judge, search
from pipelinerl.planning.shape import Shape, read_shape, shape_of
from pipelinerl.planning.sheet import Values

CONFIGURED, BEST = "as configured", "best found"
UNPROVEN = (
    "Nothing here was measured on a GPU: memory is counted from tensors, times are rooflines with assumed efficiencies. Expect memory"
    " within about 10 %, times within a factor of two until measured values stand in for the assumed ones (--set)."
)
"""What stands below every plan."""
KEY_FIGURES = ("step_s", "run_rate", "gpu_hours", "expected_staleness", "trainer_rank_bytes", "engine_rank_room")
"""Figures whose strongest inputs are always told."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `pipelinerl plan` shows."""

    model: str
    shape: Shape
    gpu: str
    """Short name in the table."""
    num_gpus: int
    given: Mapping[str, float]
    """Inputs that `--set` gave."""
    placements: Mapping[str, Candidate]
    """By name: as configured, the best found, and what-ifs."""
    splits: tuple[Candidate, ...]
    """The best placement of each split between trainer and engines, in order of the trainer's GPUs."""

    @property
    def chosen(self) -> Candidate:
        """The placement that figures are shown of: the best found, else the run as configured."""
        return self.placements.get(BEST) or self.placements[CONFIGURED]

    def hangs_on(self, figure: str, *, num: int = 3) -> list[tuple[str, float, float]]:
        """The inputs of which a figure of the chosen placement changes most, when each is 10 % lower or higher."""
        return SHEET.sensitivity(figure, self.chosen.inputs, of=_CHANGED)[:num]

    def data(self) -> dict[str, Any]:
        """The plan for machines."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "gpus": self.num_gpus,
            "placements": {name: _data(one) for name, one in self.placements.items()},
            "splits": [_data(one) for one in self.splits],
            "hangs_on": {name: [list(each) for each in self.hangs_on(name)] for name in KEY_FIGURES},
            "assumed": {name: origin_of(name, given=self.given) for name in ASSUMED if name not in self.given},
            "note": UNPROVEN,
        }


_CHANGED = ("engines", "ranks", "max_running", "row_tokens", "groups_per_step", "group_size", "max_tokens", "max_staleness", *CHOSEN)
"""Inputs of which ten per cent more or less means something: no layout, and nothing of the model, whose numbers hang together."""


def make_plan(config: Config, *, gpu: str, num_gpus: int | None, given: Mapping[str, float]) -> Plan:
    """Plan a run on GPUs; without `num_gpus`, on as many as its settings name. Raises `ConfigError`."""
    shape, adapters = model_of(config)
    prm = 0 if config.prm.path is None else parameters_of(config.prm.path)
    run = run_inputs(config, shape, method=method_of(config), adapter_parameters=adapters, prm_parameters=prm)
    inputs = {**run, **gpu_inputs(gpu), **given}
    wanted = int(SHEET.evaluate(inputs)["used_gpus"])
    total = wanted if num_gpus is None else num_gpus
    is_shared = config.is_colocated and not config.is_mixed
    least = (1 if is_shared else 2) + inputs["prm_gpus"]
    if total < least:
        raise ConfigError(f"--gpus {total}: a run takes at least {least:.0f}, for its trainer and an engine{'' if is_shared else ' each'}")
    placements = {CONFIGURED: judge(inputs, shape, num_gpus=total)}
    found = search(inputs, shape, num_gpus=total)
    if found:
        placements[BEST] = found[0]
    name = "what if apart, each with its own" if config.is_colocated else "what if colocated, in turns"
    what_ifs = {name: {"mode": float(mode_of(config.pipeline.mode, is_colocated=not config.is_colocated))}}
    if total > inputs["gpus_per_node"]:
        what_ifs["what if all cards sent policies"] = {"transport": float(DIRECT)}
    for name, changed in what_ifs.items():
        if others := search({**inputs, **changed}, shape, num_gpus=total):
            placements[name] = others[0]
    splits = tuple(sorted(found, key=lambda each: each.inputs["ranks"]))
    return Plan(
        model=config.model.path.name, shape=shape, gpu=gpu.lower(), num_gpus=total, given=given, placements=placements, splits=splits
    )


def model_of(config: Config) -> tuple[Shape, int]:
    """The shape of a run's model, and the parameters of its adapters. A folder's own weights tell its parameters, whatever its family."""
    folder = config.model.path
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        weights = read_weights(folder)
        shape = shape_of(_tree(folder), origin=str(folder), parameters=weights.num_parameters)
        return shape, adapter_parameters(config, weights) if config.lora.rank else 0
    shape = read_shape(folder)
    return shape, _adapters(config, shape)


def parameters_of(folder: Path) -> int:
    """The parameters of a model, by its weights where they are here, else by its shape."""
    return read_weights(folder).num_parameters if any(folder.glob("*.safetensors")) else read_shape(folder).parameters


def settings_of(candidate: Candidate) -> list[str]:
    """The lines of a config that make a run of a placement, as overrides."""
    inputs, layout = candidate.inputs, candidate.layout
    lines = [f"trainer.ranks={layout.ranks}"]
    kinds = ("shard", "context", "tensor", "pipeline", "expert")
    lines += [f"trainer.parallel.{kind}={size}" for kind in kinds if (size := getattr(layout, kind)) > 1]
    if inputs["is_checkpointed"]:
        lines.append(f'trainer.activation_checkpointing="{"selective" if inputs["keeps_products"] else "full"}"')
    lines += [f"engine.apart={inputs['engines_apart']:.0f}"] if inputs["engines_apart"] else []
    lines += [f"engine.count={inputs['engines']:.0f}", f"engine.max_running={inputs['max_running']:.0f}"]
    for key, name in (("tensor_parallel_size", "engine_tensor"), ("pipeline_parallel_size", "engine_pipeline")):
        lines += [f"engine.options.{key}={inputs[name]:.0f}"] if inputs[name] > 1 else []
    if 0 <= inputs["transport"] < len(TRANSPORTS):
        lines.append(f'weights.transport="{TRANSPORTS[int(inputs["transport"])]}"')
    return lines


def gpu_name(gpu: str) -> str:
    """A GPU's name for people."""
    return str(gpus()[gpu]["name"])


def _data(candidate: Candidate) -> dict[str, Any]:
    figures: Values = {name: candidate.values[name] for name in SHEET.rows}
    return {
        "is_runnable": candidate.is_runnable,
        "problems": candidate.problems,
        "obstacles": candidate.obstacles,
        "settings": settings_of(candidate),
        "inputs": candidate.inputs,
        "figures": figures,
    }


def _tree(folder: Path) -> dict[str, Any]:
    tree = json.loads((folder / "config.json").read_text())
    return tree | (tree.get("text_config") or {})


def _adapters(config: Config, shape: Shape) -> int:
    """Parameters of adapters on the matrices of a dense model; of a mixture those of its attention."""
    keys, inner = shape.cache_width // 2, 0 if shape.experts else shape.intermediate
    sums = {"q_proj": shape.query_width, "k_proj": keys, "v_proj": keys, "o_proj": shape.value_width}
    sums |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), inner)
    wide = [width + shape.hidden for name in config.lora.targets if (width := sums.get(name, 0))]
    return config.lora.rank * shape.layers * sum(wide)

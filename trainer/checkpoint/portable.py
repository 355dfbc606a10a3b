"""The state of a model and its optimizer in a checkpoint, in a form that knows no layout: any other layout can read it.

Every tensor is named after the model's parameter and is the whole of it, of which each rank offers its piece in use, at its place
(`DTensor`). Weights are those that take the updates, in float32. Where a parameter is two matrices packed into one, of which tensor
parallelism gives each rank a part of both, a rank's piece is no box in the whole: here such a parameter has one dimension more, 2 long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from trainer.model.model import Model
from trainer.optimizer import Optimizer
from trainer.parallel.sharding import whole_of

_PACKED = {"packed_colwise": -2, "packed_rowwise": -1}
"""Styles of transformers' plans for two matrices in one, and the dimension along which they are packed."""


def state_of(model: Model, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint: those in use, so that loading one writes into them. `Optimizer.round` is then due."""
    states = dict(zip(model.named_parameters(), optimizer.state(), strict=True))
    kinds = {kind: {name: state[kind] for name, state in states.items()} for kind in ("weight", "exp_avg", "exp_avg_sq")}
    whole = {kind: portable(pieces, model=model) for kind, pieces in kinds.items()}
    moments = {f"{name}.{kind}": whole[kind][name] for kind in ("exp_avg", "exp_avg_sq") for name in states}
    return {"model": whole["weight"], "optimizer": moments | {f"{name}.step": state["step"] for name, state in states.items()}}


def portable(pieces: Mapping[str, torch.Tensor], *, model: Model) -> dict[str, torch.Tensor]:
    """This rank's `pieces` of tensors that are spread as the parameters of these names: the same memory, at its place in the whole."""
    parameters, packed = model.named_parameters(), _packed(model.module)
    return {name: _placed(piece, parameter=parameters[name].detach(), packed=packed(name)) for name, piece in pieces.items()}


def _placed(piece: torch.Tensor, *, parameter: torch.Tensor, packed: int | None) -> torch.Tensor:
    split = None if packed is None else parameter.ndim + packed
    view = piece if split is None else piece.unflatten(split, (2, -1))
    if not isinstance(parameter, DTensor):
        return view
    shape, placements = list(parameter.shape), list(parameter.placements)
    if split is not None:
        shape[split : split + 1] = [2, shape[split] // 2]
        placements = [_beside(placement, split=split, num_dimensions=parameter.ndim) for placement in placements]
    return whole_of(view, mesh=parameter.device_mesh, placements=placements, shape=shape)


def _beside(placement: Any, *, split: int, num_dimensions: int) -> Any:
    """A placement after dimension `split` has become two: 2 matrices, which no rank parts, and the dimension of each."""
    if placement.is_replicate() or placement.dim % num_dimensions < split:
        return placement
    return Shard(placement.dim % num_dimensions + 1)


def _packed(module: PreTrainedModel) -> Any:
    """A function from a parameter's name to the dimension along which two are packed in it, or None."""
    module.init_parallel_plans()
    plan = {name: _PACKED[style] for name, style in module.tp_plan.items() if style in _PACKED}
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), dimension) for name, dimension in plan.items()]
    return lambda name: next((dimension for pattern, dimension in patterns if pattern.fullmatch(name)), None)

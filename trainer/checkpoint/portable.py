"""The state of a model and its optimizer in a checkpoint, in a form that knows no layout: any other layout can read it.

Every tensor is named after the model's parameter and is the whole of it, of which each rank offers its piece in use, at its place
(`DTensor`). Weights are those that take the updates, in float32. Where a parameter is two matrices packed into one, of which tensor
parallelism gives each rank a part of both, a rank's piece is no box in the whole: here such a parameter has one dimension more, 2 long.
"""

from __future__ import annotations

import torch

from trainer.model.model import Model
from trainer.optimizer import Optimizer


def state_of(model: Model, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint: those in use, so that loading one writes into them. `Optimizer.round` is then due."""
    states = dict(zip(model.named_parameters(), optimizer.state(), strict=True))
    kinds = {kind: {name: state[kind] for name, state in states.items()} for kind in ("weight", "exp_avg", "exp_avg_sq")}
    whole = {kind: model.placed(pieces) for kind, pieces in kinds.items()}
    moments = {f"{name}.{kind}": whole[kind][name] for kind in ("exp_avg", "exp_avg_sq") for name in states}
    return {"model": whole["weight"], "optimizer": moments | {f"{name}.step": state["step"] for name, state in states.items()}}

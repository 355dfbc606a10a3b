"""Trains the weights where engines read them: the parameters lie in the weight buffer, each where the engines' layout has it.

Only where engines and trainer take turns (`pipeline.placement = "colocated"`): nobody reads what the optimizer changes. A tensor that is
published as the trainer holds it, in shape, order and dtype, is then published without a copy. Others (fused or converted ones) are
written into the same buffer by each publication, at their own place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from trainer.model.model import Model
from trainer.optimizer import Optimizer


def mover(model: Model, optimizer: Optimizer) -> Callable[[Mapping[str, torch.Tensor]], None]:
    """Return what moves parameters that are published as they are into their places, and says how many bytes."""

    def move(places: Mapping[str, torch.Tensor]) -> None:
        tensors = model.tensors()
        owners = {parameter.data_ptr(): parameter for parameter in model.parameters()}
        num_moved = num_others = 0
        for name, view in places.items():
            owner = owners.get(tensors[name].data_ptr())
            if owner is None or not is_alike(owner, view):
                num_others += view.nbytes
                continue
            view.copy_(owner.detach())
            owner.data = view
            num_moved += view.nbytes
        optimizer.follow()
        print(f"engines read {num_moved} bytes of the weights where they are trained, and {num_others} are written for them", flush=True)

    return move


def is_alike(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """True where a tensor's bytes could lie where the view is."""
    same = (tensor.shape, tensor.dtype, tensor.device) == (view.shape, view.dtype, view.device)
    return same and tensor.is_contiguous()


def is_there(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """True where a tensor lies where the view is: nothing is to be written."""
    return tensor.data_ptr() == view.data_ptr() and is_alike(tensor, view)

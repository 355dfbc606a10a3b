"""Trains the weights where engines read them: the parameters lie in the weight buffer, each where the engines' layout has it.

Only where engines and trainer take turns (`pipeline.placement = "colocated"`): nobody reads what the optimizer changes. A piece that is
published as this rank holds it, in shape, order and dtype, is then published without a copy. Others (fused or converted ones, and what
engines cut in another way) are written into the same buffer by each publication, at their own place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

from trainer.model.model import Model
from trainer.optimizer import Optimizer
from trainer.parallel.sharding import local

Places = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of what this rank publishes, and the view into the weight buffer where that belongs."""


def mover(model: Model, optimizer: Optimizer) -> Callable[[Places], None]:
    """Return what moves parameters that are published as they are into their places, and says how many bytes."""

    def move(places: Places) -> None:
        sharded = [(held, held.sharded_param) for held in model.fsdp_parameters()]
        # FSDP gathers what it has padded from a copy, which would not follow.
        padded = {id(parameter) for held, parameter in sharded if parameter._local_tensor.size() != held.padded_sharded_param_size}
        owners = {local(one.detach()).data_ptr(): one for one in model.parameters() if id(one) not in padded}
        num_moved = num_others = 0
        for source, view in places:
            owner = owners.get(source.data_ptr())
            if owner is None or not is_alike(piece := local(owner.detach()), view):
                num_others += view.nbytes
                continue
            view.copy_(piece)
            _lie_at(owner, view)
            del owners[source.data_ptr()]  # it lies in one place
            num_moved += view.nbytes
        for held, parameter in sharded:
            if id(parameter) not in padded:
                held._sharded_param_data = parameter._local_tensor.view(-1)
        optimizer.follow()
        print(f"engines read {num_moved} bytes of the weights where they are trained, and {num_others} are written for them", flush=True)

    return move


def _lie_at(parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Have this rank's piece of a parameter lie in other memory."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor.data = _at_its_start(view)
    else:
        parameter.data = view


def _at_its_start(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: a `DTensor` over a tensor with a storage offset cannot be copied for a checkpoint."""
    return torch.from_numpy(view.view(-1).view(torch.uint8).numpy()).view(view.dtype).view(view.shape)


def is_alike(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """True where a tensor's bytes could lie where the view is."""
    same = (tensor.shape, tensor.dtype, tensor.device) == (view.shape, view.dtype, view.device)
    return same and tensor.is_contiguous() and view.is_contiguous()


def is_there(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """True where a tensor lies where the view is: nothing is to be written."""
    return tensor.data_ptr() == view.data_ptr() and is_alike(tensor, view)

"""AdamW over float32 weights, with the raw gradient sums of a whole step in one flat float32 buffer.

Rows add raw sums; nothing is divided before the step is sealed. Then the buffer is summed over the ranks that share its pieces, scaled once
by one over the denominator, clipped by its global norm, and applied. Where the model computes in bfloat16, a float32 master copy of every
weight takes the update and is rounded back: with a learning rate of 1e-6 most updates are smaller than bfloat16 can express, and would be
lost. Of a parameter that is spread over ranks, everything here is about this rank's piece.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pipelinerl.errors import PipelineError
from pipelinerl.weights.host_memory import give_back, offer_zeros
from trainer.parallel.replicas import Replicas
from trainer.parallel.sharding import ParameterSharding, local, whole_of

_Key = TypeVar("_Key")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over a run: linear from 0 during the warm-up, and linear down to `final_fraction` of the peak at the last step."""

    learning_rate: float
    """Peak."""
    num_steps: int
    warmup_steps: int = 0
    final_fraction: float = 1.0

    def at(self, step: int) -> float:
        """The learning rate of step 0 .. `num_steps` - 1."""
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        done = step / (self.num_steps - 1) if self.num_steps > 1 else 0.0
        return self.learning_rate * warmup * (1 - (1 - self.final_fraction) * done)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """The settings of one step, where a schedule does not give them."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Of matrices alone."""
    max_grad_norm: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The numbers of one optimizer step."""

    grad_norm: float
    """Global norm of the gradient after division by the denominator, before clipping."""
    learning_rate: float


class Optimizer:
    """Collects the gradients of a model's parameters and applies them."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        schedule: Schedule,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        shardings: Sequence[ParameterSharding] | None = None,
        replicas: Replicas | None = None,
        is_offloaded: bool = False,
    ) -> None:
        """`shardings` say how each parameter is spread over the ranks of `replicas`; by default each is this process's own.

        With `is_offloaded`, the weights that take the updates and their moments are on the host, and updates are computed there: of 16
        bytes a weight, the device keeps the 4 of its gradient and those that the model computes with.
        """
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._replicas = replicas
        self._rounded: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pieces of parameters that are a rounded copy of their master."""
        self._in_place: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """Parameters whose gradient autograd adds up in a part of `gradient` by itself."""
        self._pieces: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """Every parameter, and its piece as it is known here: a tensor of its own over the same memory."""
        shardings = [ParameterSharding()] * len(parameters) if shardings is None else shardings
        # Pieces that are summed over the same ranks lie side by side, so that each sum is one collective; the order of the sums is that of
        # the parameters, so that all ranks keep to the same.
        pairs = list(zip(parameters, shardings, strict=True))
        kinds: dict[tuple[dist.ProcessGroup, ...], int] = {}
        places = [kinds.setdefault(holding.sums, len(kinds)) for holding in shardings]
        self._order = sorted(range(len(pairs)), key=places.__getitem__)
        """The number of the parameter that is first in the buffer, of the next, and so on."""
        held = [pairs[index] for index in self._order]
        sizes = [local(parameter.detach()).numel() for parameter, _ in held]
        self.gradient = torch.zeros(sum(sizes), device=local(held[0][0].detach()).device)
        """[weights of this rank] float32: raw sums, over the rows since the last `step`."""
        parts = self.gradient.split(sizes)
        self._on_host = torch.zeros_like(self.gradient, device="cpu", pin_memory=self.gradient.is_cuda) if is_offloaded else None
        """The same, once a step, where updates are computed on the host."""
        updates_from = self.gradient if self._on_host is None else self._on_host
        masters = [
            self._collect(parameter, part, update_from)
            for (parameter, _), part, update_from in zip(held, parts, updates_from.split(sizes), strict=True)
        ]
        self._sums = _alike(parts, [holding.sums for _, holding in held])
        self._holders = _alike(parts, [holding.num_copies for _, holding in held])
        # Decay acts on matrices only: pulling norms and biases towards 0 does not regularise, it changes the function.
        groups = [
            {"params": [master for master in masters if master.ndim >= 2], "weight_decay": weight_decay},
            {"params": [master for master in masters if master.ndim < 2], "weight_decay": 0.0},
        ]
        self._masters = masters
        self._adamw = torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, fused=True)
        for master in masters:  # made now, as AdamW would at its first step: a checkpoint is loaded into tensors that are there
            zeros = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            self._adamw.state[master] = {"step": torch.zeros((), device=master.device), **zeros}

    def step(self, index: int, *, denominator: float) -> Update:
        """Apply the gradient as optimizer step `index`, and start collecting anew. Raises `PipelineError` where it is not finite."""
        norm = self._sum_over_ranks(f"to sum the gradients of step {index}") / denominator
        if not math.isfinite(norm):
            raise PipelineError(
                f"step {index}: the gradient's norm is {norm}; expected a finite number. The policy has diverged, or a row holds numbers"
                " that are not finite: lower trainer.learning_rate, or look at the last steps' ratio_max and logprob_gap_max"
            )
        learning_rate = self._schedule.at(index)
        self.gradient.mul_(min(1.0, self._max_grad_norm / norm if norm else 1.0) / denominator)
        if self._on_host is not None:
            self._on_host.copy_(self.gradient)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.round()
        self.drop()
        return Update(grad_norm=norm, learning_rate=learning_rate)

    def use(self, settings: AdamSettings) -> None:
        """Have the steps from now on follow these settings, in place of those that it was made with."""
        self._schedule = Schedule(learning_rate=settings.learning_rate, num_steps=1)
        self._max_grad_norm = settings.max_grad_norm
        for group in self._adamw.param_groups:
            decay = settings.weight_decay if group["params"][0].ndim >= 2 else 0.0
            group.update(betas=settings.betas, eps=settings.eps, weight_decay=decay)

    def state(self) -> list[dict[str, torch.Tensor]]:
        """For every parameter, in the order in which they were given, the tensors in use, for a checkpoint to save and to load into.

        They are this rank's pieces: `weight`, which takes the updates, float32; `exp_avg`, `exp_avg_sq`, and `step`, a scalar.
        """
        states = {
            index: {"weight": master.detach(), **self._adamw.state[master]}
            for index, master in zip(self._order, self._masters, strict=True)
        }
        return [states[index] for index in sorted(states)]

    def round(self) -> None:
        """Have the weights that are a rounded copy of those that take the updates be one again."""
        with torch.no_grad():
            for piece, master in self._rounded:
                piece.copy_(master)

    def follow(self) -> None:
        """Go on with parameters that were moved: each lies where its memory is now."""
        for parameter, piece in self._pieces:
            piece.data = local(parameter.detach())

    def give_back(self, *, is_new: bool = False) -> int:
        """Give the memory of what holds zeros back to the host, where it is the host's; return the bytes.

        Between two steps that is the gradient, whose pages the system takes as it needs them; of an optimizer that has taken none
        (`is_new`), all of it and of the moments.
        """
        if self.gradient.device.type != "cpu":
            return 0
        if not is_new:
            return offer_zeros(self.gradient)
        moments = [state[kind] for state in self._adamw.state.values() for kind in ("exp_avg", "exp_avg_sq")]
        return sum(give_back(tensor) for tensor in (self.gradient, *moments) if tensor.is_contiguous())

    def take_weights(self) -> None:
        """Have those that take the updates be the weights as they are, where another has written the latter."""
        with torch.no_grad():
            for piece, master in self._rounded:
                master.copy_(piece)

    def collect(self) -> None:
        """Add up gradients that came another way than autograd's adding in place, which a pipeline over sharded weights takes from them."""
        for parameter, gradient in self._in_place:
            if parameter.grad is not gradient:
                if parameter.grad is not None:
                    local(gradient).add_(local(parameter.grad))
                parameter.grad = gradient

    def drop(self) -> None:
        """Forget the gradient collected so far."""
        self.gradient.zero_()

    def _sum_over_ranks(self, what: str) -> float:
        """Add up what other ranks know of this rank's pieces; return the norm over all pieces of all ranks, each counted once."""
        for groups, part in self._sums:
            for group in groups:
                assert self._replicas is not None
                self._replicas.reduce(part, dist.ReduceOp.SUM, group=group, what=what)
        squares = [torch.linalg.vector_norm(part, dtype=torch.float64).square() / num_copies for num_copies, part in self._holders]
        square = torch.stack(squares).sum()
        if self._replicas is not None:
            self._replicas.reduce(square, dist.ReduceOp.SUM, what=what)
        return float(square.sqrt())

    def _collect(self, parameter: torch.nn.Parameter, part: torch.Tensor, update_from: torch.Tensor) -> torch.Tensor:
        """Have a parameter's gradients add up in `part`; return the float32 piece that takes the updates, from `update_from`."""
        piece = local(parameter.detach())
        self._pieces.append((parameter, piece))
        if parameter.dtype == torch.float32:
            parameter.grad = _like(parameter, part.view(piece.shape))  # autograd adds to a gradient that is there, in place
            self._in_place.append((parameter, parameter.grad))
        else:
            parameter.register_post_accumulate_grad_hook(_add_to(part.view(piece.shape)))
        master = piece
        if parameter.dtype != torch.float32 or self._on_host is not None:
            master = torch.empty_like(piece, dtype=torch.float32, device=update_from.device).copy_(piece)
            self._rounded.append((piece, master))
        master.requires_grad_().grad = update_from.view(piece.shape)
        return master


def _alike(parts: Sequence[torch.Tensor], keys: Sequence[_Key]) -> list[tuple[_Key, torch.Tensor]]:
    """Join neighbouring parts of one buffer that have the same key: (key, the joined part)."""
    joined: list[tuple[_Key, torch.Tensor]] = []
    for key, group in itertools.groupby(zip(keys, parts, strict=True), key=lambda pair: pair[0]):
        members = [part for _, part in group]
        joined.append((key, members[0].as_strided((sum(part.numel() for part in members),), (1,))))
    return joined


def _like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter whose piece on this rank is `part`."""
    if not isinstance(parameter, DTensor):
        return part
    return whole_of(part, mesh=parameter.device_mesh, placements=parameter.placements, shape=parameter.shape)


def _add_to(part: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # of a whole matrix beside a cut one, a rank may know a part
            gradient = gradient.redistribute(placements=parameter.placements)
        part.add_(local(gradient))
        parameter.grad = None

    return hook

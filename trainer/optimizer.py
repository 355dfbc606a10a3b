"""AdamW over float32 weights, with the raw gradient sums of a whole step in one flat float32 buffer.

Rows add raw sums; nothing is divided before the step is sealed. Then the buffer is summed over the replicas, scaled once by one over the
denominator, clipped by its global norm, and applied. Where the model computes in bfloat16, a float32 master copy of every weight takes the
update and is rounded back: with a learning rate of 1e-6 most updates are smaller than bfloat16 can express, and would be lost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from pipelinerl.errors import PipelineError


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
class Update:
    """What one optimizer step did."""

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
    ) -> None:
        self.gradient = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
        """[number of weights] float32: raw sums, over the rows since the last `step`."""
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._rounded: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """Parameters that are a rounded copy of their master."""
        masters: list[torch.Tensor] = []
        parts = self.gradient.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            masters.append(self._collect(parameter, part.view(parameter.shape)))
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
        norm = float(torch.linalg.vector_norm(self.gradient)) / denominator
        if not math.isfinite(norm):
            raise PipelineError(
                f"step {index}: the gradient's norm is {norm}; expected a finite number. The policy has diverged, or a row holds numbers"
                " that are not finite: lower trainer.learning_rate, or look at the last steps' ratio_max and logprob_gap_max"
            )
        learning_rate = self._schedule.at(index)
        self.gradient.mul_(min(1.0, self._max_grad_norm / norm if norm else 1.0) / denominator)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in self._rounded:
                parameter.copy_(master)
        self.drop()
        return Update(grad_norm=norm, learning_rate=learning_rate)

    def tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors in use, for a checkpoint to save and to load into, given the parameters' names: moments, step counts, masters."""
        tensors: dict[str, torch.Tensor] = {}
        rounded = {id(master) for _, master in self._rounded}
        for name, master in zip(names, self._masters, strict=True):
            tensors |= {f"{name}.{kind}": tensor for kind, tensor in self._adamw.state[master].items()}
            if id(master) in rounded:
                tensors[f"{name}.master"] = master.detach()
        return tensors

    def drop(self) -> None:
        """Forget the gradient collected so far."""
        self.gradient.zero_()

    def _collect(self, parameter: torch.nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        """Have a parameter's gradients add up in `part`; return the float32 weight that takes the updates."""
        if parameter.dtype == torch.float32:
            parameter.grad = part  # autograd adds to a gradient that is there, in place
            return parameter
        parameter.register_post_accumulate_grad_hook(_add_to(part))
        master = parameter.detach().float().requires_grad_()
        master.grad = part
        self._rounded.append((parameter, master))
        return master


def _add_to(part: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        part.add_(parameter.grad)
        parameter.grad = None

    return hook

"""Rules of a user's own, for whole runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def loss(ratio: torch.Tensor, advantages: torch.Tensor, *, width: float = 0.2) -> torch.Tensor:
    """A clip."""
    return -(ratio * advantages).minimum(ratio.clamp(1 - width, 1 + width) * advantages)


def mask(rho: torch.Tensor, *, most: float = 5.0) -> torch.Tensor:
    """What the policy has not left too far behind."""
    return rho <= most


def advantage(rewards: np.ndarray) -> np.ndarray:
    """Reward over the mean of the group."""
    return rewards - rewards.mean()

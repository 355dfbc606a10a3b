"""What the trainer keeps of a step's work, and where it keeps its state."""

from __future__ import annotations

import enum


class Offload(enum.StrEnum):
    """The part of the trainer's state that is kept on the host and not on the device."""

    NOTHING = "nothing"
    OPTIMIZER = "optimizer"
    """Moments and, where the model computes in another dtype, the weights that take the updates; updates are computed on the host."""
    WEIGHTS = "weights"
    """These and all weights, but for those of the layer that computes. They have to be sharded."""


class ActivationCheckpointing(enum.StrEnum):
    """The part of a layer's forward pass that is computed again in the backward pass, so that it need not be kept until then."""

    NONE = "none"
    """Nothing: everything that the backward pass reads is kept."""
    SELECTIVE = "selective"
    """All but matrix products and attention, whose outputs are kept: about half the memory, for little work."""
    FULL = "full"
    """Everything: the layer's input alone is kept, for a third more work."""

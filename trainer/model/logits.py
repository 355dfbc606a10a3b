"""What a family does to its logits beside the product of hidden states and output embedding: a factor, and a soft cap."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedModel

from pipelinerl.errors import ConfigError

_UNKNOWN = ("lm_head_multiplier",)
"""Settings of models that do more to a logit than is known here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogitRule:
    """A logit is softcap * tanh(z / softcap), or z without a cap, of z = factor * (hidden state x row of the output embedding)."""

    factor: float = 1.0
    """Applied to the hidden state, so that whoever makes logits of states, a teacher's too, has it in them."""
    softcap: float | None = None


def logit_rule_of(module: PreTrainedModel) -> LogitRule:
    """Read the rule of a language model. Raises `ConfigError` for one whose logits are made in a way not known here."""
    config: Any = module.config.get_text_config()
    name = type(module).__name__
    if changed := [key for key in _UNKNOWN if getattr(config, key, None) not in (None, 1.0)]:
        raise _refused(name, f"it sets {', '.join(changed)}")
    head: Any = module.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise _refused(name, "its output layer is no plain matrix")
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return LogitRule(factor=factor, softcap=getattr(config, "final_logit_softcapping", None))


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{name} computes logits in a way that is not trained here: {reason}. Choose another model")

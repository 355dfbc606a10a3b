"""The coefficients that follow a measurement, as state of a run: in every checkpoint, the same on every rank.

The rules are in `pipelinerl.algorithms.controllers`. A step is trained with the method as it is for that step, coefficients filled in; once
it is finished, they follow what was measured in its first epoch, which saw the policy that the step began with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch

from pipelinerl.algorithms.controllers import controlled_entropy, controlled_kl, next_entropy_coefficient, next_kl_coefficient
from pipelinerl.algorithms.method import Method, Rule

KL, ENTROPY, LAST_ENTROPY = "kl", "entropy", "last_entropy"


class Controllers:
    """The controlled coefficients of one method; empty where all of its coefficients are fixed."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._kl, self._entropy = controlled_kl(method), controlled_entropy(method)
        self._state: dict[str, torch.Tensor] = {}
        if self._kl is not None:
            self._state[KL] = _float64(_number(self._kl, "beta"))
        if self._entropy is not None:
            # No bonus before an entropy was measured, as in TRL.
            self._state |= {ENTROPY: _float64(_number(self._entropy, "coef")), LAST_ENTROPY: _float64(math.inf)}

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors in use, float64, for a checkpoint to save and to load into; nothing where nothing is controlled."""
        return {"coefficients": self._state} if self._state else {}

    def method(self) -> Method:
        """The method with the coefficients of the step to come."""
        changed = self._method
        in_force = self.in_force()
        if self._kl is not None:
            changed = dataclasses.replace(changed, kl=_with(self._kl, beta=in_force["kl_coef"]))
        if self._entropy is not None:
            bonus = _with(self._entropy, coef=in_force["entropy_coef"])
            terms = tuple(bonus if rule.name == bonus.name else rule for rule in changed.auxiliary)
            changed = dataclasses.replace(changed, auxiliary=terms)
        return changed

    def in_force(self) -> dict[str, float]:
        """The coefficients of the step to come, by the name of their metric."""
        found: dict[str, float] = {}
        if self._kl is not None:
            found["kl_coef"] = float(self._state[KL])
        if self._entropy is not None:
            acts = float(self._state[LAST_ENTROPY]) <= _number(self._entropy, "target")
            found["entropy_coef"] = float(self._state[ENTROPY]) if acts else 0.0
        return found

    def follow(self, numbers: Mapping[str, float], *, agree: Callable[[torch.Tensor], None]) -> None:
        """Follow what a step measured; `agree` has all ranks hold the same tensor. A step without a token changes nothing.

        Ranks that share a row may add up its tokens in another order, and a threshold would make of the last bit two coefficients.
        """
        if not self._state:
            return
        measured = _float64([numbers.get(name, math.nan) for name in ("kl_penalty", "entropy", "sequences")])
        agree(measured)
        kl, entropy, num_sequences = measured.tolist()
        if self._kl is not None and math.isfinite(kl):
            options = {name: _number(self._kl, name) for name in ("target", "horizon")}
            self._state[KL].fill_(next_kl_coefficient(float(self._state[KL]), measured=kl, num_sequences=num_sequences, **options))
        if self._entropy is not None and math.isfinite(entropy):
            options = {name: _number(self._entropy, name) for name in ("target", "delta", "min_coef", "max_coef")}
            self._state[ENTROPY].fill_(next_entropy_coefficient(float(self._state[ENTROPY]), measured=entropy, **options))
            self._state[LAST_ENTROPY].fill_(entropy)


def _with(rule: Rule, **options: float) -> Rule:
    return Rule(name=rule.name, options={**rule.options, **options})


def _number(rule: Rule, option: str) -> float:
    value = rule.options[option]
    assert isinstance(value, int | float), f"{rule} was not resolved"
    return float(value)


def _float64(values: float | list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)

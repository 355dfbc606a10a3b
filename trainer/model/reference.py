"""A frozen model that says how likely each token is to it: the policy a run is held near, or the teacher it is distilled from."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from trainer.model.lora import switched_off
from trainer.model.model import Model
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import empty_row
from trainer.rows.packed_row import PackedRow, TeacherStates


class Reference:
    """A `Model` without gradients, on the same ranks as the policy. Every rank calls it for the same rows.

    Of a policy that trains adapters it may be the policy itself: it is computed with them switched off.
    """

    def __init__(self, model: Model, *, replicas: Replicas, offloads: bool = False, gives_states: bool = False) -> None:
        """`offloads` leaves the weights on the host but while a row is computed; for a model that is not spread.

        `gives_states` where the policy is compared with the reference's whole distributions.
        """
        self._model = model
        self._gives_states = gives_states
        self._shares_passes = replicas.shares_passes
        self._context_shard = replicas.context_shard
        self._device = replicas.device
        self._on_host: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """Parameters that live on the host, with their weights there."""
        if offloads:
            self._on_host = [(parameter, _host_copy(parameter)) for parameter in model.module.parameters()]
            for parameter, weights in self._on_host:
                parameter.data = weights

    def judge(self, row: PackedRow | None) -> tuple[torch.Tensor | None, PackedRow | None]:
        """Return ([K] float32 log-probability of every trained token, the row), both None for a zero-loss row.

        The log-probabilities are those at the policy's temperature. With `gives_states` the row has what the reference's whole
        distributions over it are made of.
        """
        if row is None and not self._shares_passes:
            return None, None
        given = row or empty_row(self._device, context_shard=self._context_shard)
        with torch.no_grad(), self._on_device(), switched_off(self._model.module):
            logprobs, found = self._model.states(given) if self._gives_states else self._model.logprobs(given)
        if row is None:
            return None, None
        return logprobs, dataclasses.replace(row, teachers=(found,)) if isinstance(found, TeacherStates) else row

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        for parameter, weights in self._on_host:
            parameter.data = weights.to(self._device, non_blocking=True)
        try:
            yield
        finally:
            for parameter, weights in self._on_host:
                parameter.data = weights


def _host_copy(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The weights on the host, in memory that a device can read by itself where there is one."""
    weights = parameter.detach().cpu()
    return weights.pin_memory() if parameter.device.type != "cpu" else weights

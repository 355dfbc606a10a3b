"""An engine's side of the version transaction: fetch, compare with the engine's own layout, verify every tensor, and only then stage.

Whatever goes wrong before `commit` is a `WeightsError` that leaves the model as it was: nothing the model reads is ever written.
"""

from __future__ import annotations

import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import StageWeights, Tensor
from pipelinerl.weights.base import views
from pipelinerl.weights.commit import Commit
from pipelinerl.weights.manifest import Manifest, check, verify
from pipelinerl.weights.road import Receiver


class Intake:
    """Stages policies in a thread of its own, commits them in the engine's; never both at the same time."""

    def __init__(self, commit: Commit, *, layout: tuple[Tensor, ...], receiver: Receiver) -> None:
        self._commit = commit
        self._layout = layout
        self._receiver = receiver
        self._is_staged = False

    def stage(self, order: StageWeights) -> None:
        """Bring a policy in and verify it. Raises `WeightsError`; the model is then as it was, and nothing is staged."""
        self._is_staged = False

        def check_it(manifest: Manifest) -> None:
            check(manifest, version=order.version, layout=self._layout, slot=order.slot)

        def spare(manifest: Manifest) -> torch.Tensor:
            check_it(manifest)
            return self._commit.spare()

        arrival = self._receiver.fetch(order.slot, order.digest, spare)
        check_it(arrival.manifest)
        verify(arrival.manifest, views(arrival.payload, self._layout), slot=order.slot)
        self._commit.stage(arrival.payload)
        self._is_staged = True

    def commit(self) -> None:
        """Bring the staged policy into force. Raises `WeightsError` where nothing is staged."""
        if not self._is_staged:
            raise WeightsError("nothing is staged: commit follows stage")
        self._is_staged = False
        self._commit.commit()

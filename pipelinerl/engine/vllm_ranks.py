"""An engine whose model is spread over several ranks, each a process that vLLM started: policies are taken by all of them or by none.

The engine's own process holds no weights. It tells the ranks what to stage, waits until each has its part whole and verified, and only then
says so; the commit is one call that every rank makes between the same two forward passes. A rank that failed says why, and the old version
serves on in all.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch

from pipelinerl.engine.vllm_worker import STAGED, UNDER_WAY
from pipelinerl.errors import ConfigError, WeightsError
from pipelinerl.messages import StageWeights, Tensor
from pipelinerl.weights.base import plan_layout
from pipelinerl.weights.reshard import index_map, whole

EXTENSION = "pipelinerl.engine.vllm_worker.PolicyRank"
ASK_EVERY_S = 0.01
"""Between two questions whether the ranks have staged; each takes decoding a fraction of a millisecond. Longer makes policies later."""


class Ranks:
    """The ranks of one vLLM engine, and what they have staged."""

    def __init__(self, llm: Any, *, folder: Path, shapes: dict[str, tuple[int, ...]], wanted: str) -> None:
        """`wanted`: as in `weights.commit`. Raises `ConfigError` where the model cannot take policies."""
        self._llm = llm
        self.turns = Turns()
        """Held by who calls the ranks: for a forward pass, or for a question of the staging thread."""
        plans = llm.collective_rpc("policy_plan", args=(str(folder), wanted))
        self.choice = f"{plans[0][1]}, in each of {len(plans)} ranks between the same two passes"
        boxes = [{name: box for name, (box, _) in plan.items()} for plan, _ in plans]
        dtypes = {name: dtype for plan, _ in plans for name, (_, dtype) in plan.items()}
        shapes = {name: shapes[name] for name in dtypes}
        self.layout: tuple[Tensor, ...] = plan_layout(
            {name: torch.empty(shape, dtype=getattr(torch, dtypes[name]), device="meta") for name, shape in shapes.items()}
        )
        try:
            moves = index_map(shapes, sources=[{name: whole(shape) for name, shape in shapes.items()}], targets=boxes)
        except WeightsError as error:
            raise ConfigError(f"the ranks of this engine do not hold parts of {folder}: {error}") from error
        llm.collective_rpc("policy_moves", args=(self.layout, moves, len(plans)))
        self._staged: int | None = None

    @property
    def are_lost(self) -> bool:
        """True once a rank has ended: the others wait for it for ever."""
        return self._llm.model_executor.is_failed

    def stage(self, order: StageWeights) -> None:
        """Have every rank stage its part. Raises `WeightsError` with the words of each that could not; nothing is staged then."""
        self._staged = None
        self._call("policy_stage", order)
        while UNDER_WAY in (said := self._call("policy_state")):
            time.sleep(ASK_EVERY_S)
        if wrong := [one for one in said if one != STAGED]:
            raise WeightsError("; ".join(wrong))
        self._staged = order.version

    def commit(self) -> None:
        """Bring the staged policy into force, in all ranks. Raises `WeightsError` where nothing is staged.

        Raises `RuntimeError`, which ends the engine, where a rank did not follow: the ranks then hold different versions.
        """
        if self._staged is None:
            raise WeightsError("nothing is staged: commit follows stage")
        version, self._staged = self._staged, None
        try:
            self._call("policy_commit", version)
        except Exception as error:  # whatever a rank or the way to it raises
            raise RuntimeError(f"not every rank took policy {version}: {error}") from error

    def _call(self, method: str, *arguments: object) -> list[Any]:
        with self.turns:
            return self._llm.collective_rpc(method, args=arguments)


class Turns:
    """A lock that whoever waits gets next, and not whoever let go of it last."""

    def __init__(self) -> None:
        self._door, self._room = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._room.acquire()

    def __exit__(self, *error: object) -> None:
        self._room.release()

"""What runs in each rank of an engine that spreads its model over several: vLLM mixes `PolicyRank` into its worker.

Every rank stages its own boxes of a policy, straight from the slot in shared memory, into a buffer of its own; which, says the index map
of `weights.reshard`. No rank reads what it does not hold, but for the digests: each tensor's is taken by one of the ranks, so that together
they verify all of it. Staging runs in a thread of the rank. The commit is a call between two forward passes, which every rank makes after
the same one.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipelinerl.engine.staging import beside_decoding, yield_to_decoding
from pipelinerl.engine.vllm_weights import keep_plain_weights, obstacles_of, plan_of_rank
from pipelinerl.errors import PipelineError, WeightsError
from pipelinerl.messages import StageWeights, Tensor
from pipelinerl.weights.base import views
from pipelinerl.weights.commit import Commit, choose, make
from pipelinerl.weights.manifest import Manifest, check, open_manifest, verify
from pipelinerl.weights.reshard import Box, Move, of_rank
from pipelinerl.weights.shared_memory import attach, read_beside

keep_plain_weights()  # vLLM imports this module in every rank, before it loads the model

UNDER_WAY, STAGED = "", "staged"
"""What `policy_state` says beside an error's text."""


class PolicyRank:
    """Called through `collective_rpc`; names begin with `policy` so that they meet none of vLLM's."""

    rank: int
    """vLLM's own."""

    def policy_plan(self, folder: str, wanted: str) -> tuple[dict[str, tuple[Box, str]], str]:
        """Get ready to take policies. The box of each checkpoint tensor that this rank holds, with its dtype; and how it commits, and why.

        Raises `ConfigError` where this model cannot take any.
        """
        worker: Any = self
        model: torch.nn.Module = worker.get_model()
        captures_graphs = not worker.model_config.enforce_eager
        placed, self._policy_parts = plan_of_rank(model, folder=Path(folder))
        way, choice = choose(wanted, obstacles_of(model, captures_graphs=captures_graphs))
        self._policy_commit: Commit = make(way, placed, gathers=not captures_graphs)
        self._policy_staged: int | None = None
        self._policy_said = UNDER_WAY
        return {name: (part.box, part.tensor.dtype) for name, part in self._policy_parts.items()}, choice

    def policy_moves(self, layout: tuple[Tensor, ...], moves: list[Move], num_ranks: int) -> None:
        """Learn the layout of published policies, and what of them comes here."""
        self._policy_layout = layout
        self._policy_moves = list(of_rank(moves, target=self.rank))
        self._policy_num_ranks = num_ranks

    def policy_stage(self, order: StageWeights) -> None:
        """Begin to stage; `policy_state` says how it ends."""
        self._policy_staged, self._policy_said = None, UNDER_WAY
        threading.Thread(target=self._policy_run, args=(order,), name="stage", daemon=True).start()

    def policy_state(self) -> str:
        """`UNDER_WAY`, `STAGED`, or what went wrong."""
        return self._policy_said

    def policy_commit(self, version: int) -> None:
        """Bring the staged policy into force. Raises `WeightsError` where it is not that version."""
        if self._policy_staged != version:
            raise WeightsError(f"rank {self.rank} has policy {self._policy_staged} staged, told to commit policy {version}")
        self._policy_commit.commit()
        self._policy_staged = None

    def _policy_run(self, order: StageWeights) -> None:
        yield_to_decoding()
        try:
            with beside_decoding():
                self._policy_take(order)
        except (PipelineError, OSError, RuntimeError) as error:
            self._policy_said = f"rank {self.rank}: {error}"
            return
        self._policy_staged, self._policy_said = order.version, STAGED

    def _policy_take(self, order: StageWeights) -> None:
        manifest = open_manifest(read_beside(order.slot, ".manifest"), digest=order.digest, slot=order.slot)
        check(manifest, version=order.version, layout=self._policy_layout, slot=order.slot)
        slot = self._policy_slot(order.slot, manifest)
        own_share = manifest.proofs[self.rank :: self._policy_num_ranks]
        verify(msgspec.structs.replace(manifest, proofs=own_share), slot, slot=order.slot)
        sources, buffer = views(slot, self._policy_layout), self._policy_commit.spare()
        targets = views(buffer, [part.tensor for part in self._policy_parts.values()])
        for move in self._policy_moves:
            targets[move.name][move.target_slices].copy_(sources[move.name][move.source_slices])
        self._policy_commit.stage(buffer)

    def _policy_slot(self, name: str, manifest: Manifest) -> torch.Tensor:
        slot = attach(name)
        if len(slot) < manifest.num_bytes or manifest.base_version is not None:
            raise WeightsError(
                f"slot {name} has {len(slot)} bytes of policy {manifest.version}, whose manifest says {manifest.num_bytes}, laid over"
                f" {manifest.base_version}: an engine of several ranks takes whole policies only; not taken"
            )
        return slot

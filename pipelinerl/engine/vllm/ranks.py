"""An engine whose model is spread over several ranks, each a process that vLLM started: policies are taken by all of them or by none.

To the version transaction (`weights.receiver`) the ranks together are one `WeightSwap`. It fetches over any transport, lays changes over
the policy before, and has everything verified before it stages. The engine's own process runs it and holds no weights; a policy that is not
in the trainer's shared memory already is made whole in shared memory of the engine's own, one copy for all ranks. The commit is one call
that every rank makes between the same two forward passes. A rank that failed says why, and the old version serves on in all.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipelinerl.engine.vllm.rank import OWN, RECEIVED
from pipelinerl.engine.vllm.weights import whole_layout
from pipelinerl.errors import ConfigError, WeightsError
from pipelinerl.messages import Shards, Tensor
from pipelinerl.weights.adapters import AdapterShape, are_adapters
from pipelinerl.weights.base import num_bytes
from pipelinerl.weights.manifest import DIGEST_LENGTH, Manifest, compare
from pipelinerl.weights.reshard import Box, Move, Shapes, index_map, whole
from pipelinerl.weights.sections import sections_of
from pipelinerl.weights.sharded.digests import add_ranks, texts
from pipelinerl.weights.sharded.receiver import ShardReceiver
from pipelinerl.weights.sharded.target import ShardTarget
from pipelinerl.weights.shared_memory import SharedMemorySender
from pipelinerl.weights.swap import Staging, WeightSwap
from pipelinerl.weights.transport import Payload, Receiver
from pipelinerl.weights.transports import connector

EXTENSION = "pipelinerl.engine.vllm.worker.PolicyRank"
ASK_EVERY_S = 0.01
"""Seconds between two questions whether the ranks are ready; each takes a fraction of a millisecond from decoding. Longer delays policies.
"""


class RankKilled(SystemExit):
    """A signal ended a rank. Its engine's process ends by the same one, so that it is started again as any process that was killed."""


class Ranks:
    """The ranks of one vLLM engine: what is asked of them is asked of all, and a policy lies where all can read it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.turns = Turns()
        """Held by who calls the ranks: for a forward pass, or for a question of the staging thread."""
        self.verified = OWN
        """Name of the buffer whose policy was verified last."""
        self._layout: tuple[Tensor, ...] = ()
        self._own: torch.Tensor | None = None
        self._number = 0
        """Number of stagings."""

    def raise_if_lost(self, error: Exception) -> None:
        """Raise where a rank has ended: the others wait for it for ever. `RankKilled` where a signal ended it, else `RuntimeError`."""
        executor = self._llm.model_executor
        codes = [worker.proc.exitcode for worker in getattr(executor, "workers", ()) if hasattr(worker, "proc")]
        if not executor.is_failed and codes == [None] * len(codes):
            return
        if killed := [code for code in codes if code is not None and code < 0 and code != -signal.SIGTERM]:  # vLLM ends the others by that
            raise RankKilled(killed[0]) from error
        raise RuntimeError(f"a rank of this engine has ended: {error}") from error

    def set_layout(
        self, layout: tuple[Tensor, ...], gives: Sequence[tuple[int, Move]] = (), *, num_ranks: int, starts: Sequence[int] = ()
    ) -> None:
        """Agree on the layout of policies, on what each rank gives back of one, and on where its section begins, where it has one."""
        self._layout = layout
        self.call("policy_layout", layout, gives, num_ranks, starts)

    def spare(self) -> torch.Tensor:
        """The engine's own buffer, made when first needed. Raises `NoRoom` where there is none for it in shared memory."""
        if self._own is None:
            memory = SharedMemorySender(uuid.uuid4().hex)
            try:
                buffer = memory.make(0, num_bytes(self._layout))
                self.call("policy_share", buffer.name)
            finally:
                memory.close()  # its name; the memory goes with the last process that has mapped it
            self._own = buffer.memory
        return self._own

    def verify(self, manifest: Manifest, buffer: torch.Tensor, *, name: str) -> None:
        """See `manifest.verify`; each rank verifies its share."""
        self.verified = OWN if self._own is not None and buffer.data_ptr() == self._own.data_ptr() else name
        shares = [_split(share) for share in self.run("digests", self.verified, manifest.digest_kind.value)]
        found = itertools.chain.from_iterable(itertools.zip_longest(*shares))
        compare(manifest, (one for one in found if one is not None), name=name)

    def stage(self, task: str, *arguments: object) -> None:
        """Have every rank stage its part of what was verified last."""
        self._number += 1
        self.run(task, self.verified, self._number, *arguments)

    def commit(self, *arguments: object) -> None:
        """Bring what was staged last into force in all ranks.

        Raises `RuntimeError`, which ends the engine, where a rank did not follow: the ranks then hold different versions.
        """
        try:
            self.call("policy_commit", self._number, *arguments)
        except Exception as error:  # whatever a rank or the way to it raises
            raise RuntimeError(f"not every rank took the policy that all had staged: {error}") from error

    def run(self, task: str, *arguments: object) -> list[Any]:
        """Run a task in every rank, and return what each found. Raises `WeightsError` with the words of each that failed.

        It waits for as long as all ranks live. The deadline is the orchestrator's: it fences an engine that stages for too long.
        """
        self.call("policy_begin", task, *arguments)
        while None in (outcomes := self.call("policy_outcome")):
            time.sleep(ASK_EVERY_S)
        if errors := [error for error, _ in outcomes if error]:
            raise WeightsError("; ".join(errors))
        return [found for _, found in outcomes]

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every rank, and return what each returns. Raises as `raise_if_lost` where one has ended."""
        try:
            with self.turns:
                return self._llm.collective_rpc(method, args=arguments)
        except Exception as error:  # of a rank, or of the way to it
            self.raise_if_lost(error)
            raise


class RanksReceiver:
    """Has every rank of the engine take its own shard from the trainer's ranks: a `Receiver`.

    Adapters, which every rank needs whole, are taken once, into the memory that all ranks of the engine read.
    """

    def __init__(self, ranks: Ranks, *, layout: tuple[Tensor, ...] = ()) -> None:
        """`layout`: of policies."""
        self._ranks = ranks
        self._manifests = ShardTarget(connector, rank=0, parts={})
        self._adapters = ShardReceiver(connector, layout=layout) if are_adapters(layout) else None

    def fetch(self, name: str, digest: str, spare: Callable[[Manifest], torch.Tensor]) -> Payload:
        if self._adapters is not None:
            payload = self._adapters.fetch(name, digest, spare)
            self._ranks.verified = OWN
            return payload
        manifest = self._manifests.manifest(name, digest)
        layout = tuple(proof.tensor for proof in manifest.proofs)
        compare(manifest, texts(add_ranks(self._ranks.run("receive", name)), layout), name=f"number {name.rpartition('/')[2]}")
        self._ranks.verified = RECEIVED
        return Payload(manifest=manifest, data=torch.empty(0, dtype=torch.uint8), is_verified=True)

    def close(self) -> None:
        self._manifests.close()
        if self._adapters is not None:
            self._adapters.close()


def shard_receiver(ranks: Ranks | None, *, layout: tuple[Tensor, ...], swap: WeightSwap) -> Receiver:
    """The engine's end of the transport from shard to shard: all ranks together, or its one rank (None)."""
    return ShardReceiver(connector, layout=layout, save=swap.save) if ranks is None else RanksReceiver(ranks, layout=layout)


class ShardedPolicies:
    """Policies of which each rank takes its part: a `WeightSwap`. With `in_sections` they lie as the ranks hold them, and else whole."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        folder: Path,
        shapes: dict[str, tuple[int, ...]],
        wanted: str,
        sends_deltas: bool,
        staging: Staging = Staging.DEVICE,
        in_sections: bool = False,
    ) -> None:
        """`wanted`: as in `weights.swap_mode`. Raises `ConfigError` where the model cannot take policies."""
        self._ranks = ranks
        self.layout: tuple[Tensor, ...]
        plans = ranks.call("policy_plan", str(folder), wanted, sends_deltas, staging.value)
        self.choice = f"{plans[0][2]}, in each of {len(plans)} ranks between the same two passes"
        self.shards: Shards = tuple({name: tuple(boxes) for name, (boxes, _) in plan.items()} for plan, _, _ in plans)
        if in_sections:
            self.layout, starts = sections_of(ranks.call("policy_parts"))
            ranks.set_layout(self.layout, num_ranks=len(plans), starts=starts)
            return
        dtypes = {name: dtype for plan, _, _ in plans for name, (_, dtype) in plan.items()}
        shapes = {name: shape for name, shape in shapes.items() if name in dtypes}
        self.layout = whole_layout([filled for _, filled, _ in plans], shapes, dtypes)
        try:
            gives = _gives([{name: boxes for name, (boxes, _) in plan.items()} for plan, _, _ in plans], shapes)
        except WeightsError as error:
            raise ConfigError(f"the ranks of this engine do not hold {folder} whole between them: {error}") from error
        ranks.set_layout(self.layout, gives, num_ranks=len(plans))

    def spare(self) -> torch.Tensor:
        return self._ranks.spare()

    def save(self, buffer: torch.Tensor) -> None:
        """`buffer` is the one of `spare`: all ranks write into it."""
        self._ranks.run("save")

    def stage(self, buffer: torch.Tensor) -> None:
        """`buffer` is what was verified last."""
        self._ranks.stage("stage")

    def commit(self) -> None:
        self._ranks.commit()


class ShardedAdapters:
    """Rows of adapters in the layers of all ranks: `vllm.adapters.Rows`."""

    def __init__(self, ranks: Ranks, *, layout: tuple[Tensor, ...], shape: AdapterShape) -> None:
        self._ranks = ranks
        num_ranks = len(ranks.call("policy_adapters", layout, shape))
        ranks.set_layout(layout, num_ranks=num_ranks)

    def spare(self) -> torch.Tensor:
        return self._ranks.spare()

    def save(self, buffer: torch.Tensor) -> None:
        """`buffer` is the one of `spare`: a rank writes into it."""
        self._ranks.run("save_adapter")

    def stage(self, buffer: torch.Tensor, *, place: int) -> None:
        """`buffer` is what was verified last."""
        self._ranks.stage("stage_adapter", place)

    def commit(self, *, place: int, staged_at: int, undone: Sequence[int]) -> None:
        self._ranks.commit({"place": place, "staged_at": staged_at, "undone": undone})


class Turns:
    """A lock that whoever waits gets next, and not whoever let go of it last."""

    def __init__(self) -> None:
        self._door, self._room = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._room.acquire()

    def __exit__(self, *error: object) -> None:
        self._room.release()


def _gives(held: Sequence[Mapping[str, Sequence[Box]]], shapes: Shapes) -> list[tuple[int, Move]]:
    """Which part of which rank goes where in a whole policy, as part number and move; `held` are the boxes of each rank's parts.

    A rank may hold several parts of a tensor, and the map knows one of each source: so the first parts of a rank are one source, its
    second parts another. Raises `WeightsError` where the ranks do not hold the whole.
    """
    num = max((len(boxes) for rank in held for boxes in rank.values()), default=1)
    sources = [{name: boxes[part] for name, boxes in rank.items() if part < len(boxes)} for rank in held for part in range(num)]
    moves = index_map(shapes, sources=sources, targets=[{name: whole(shape) for name, shape in shapes.items()}])
    return [(move.source % num, dataclasses.replace(move, source=move.source // num)) for move in moves]


def _split(digests: str) -> list[str]:
    return [digests[start : start + DIGEST_LENGTH] for start in range(0, len(digests), DIGEST_LENGTH)]

"""One rank of an engine that spreads its model over several: its part of every policy, staged by a thread, committed between two passes.

A policy lies whole in shared memory that all ranks of the engine read. Each takes the digests of its share of the tensors, so that
together they verify all of it, and then stages its own boxes of them, in its own swap mode: no rank copies what it does not hold.
In the sparse mode only what differs from the weights in force is staged; that comparison also finds and mends a weight that was damaged.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipelinerl.engine.staging import beside_decoding, yield_to_decoding
from pipelinerl.engine.vllm.derived import Derived
from pipelinerl.engine.vllm.weights import Filled, obstacles_of, plan_of_rank
from pipelinerl.errors import PipelineError, WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.weights.adapters import AdapterShape
from pipelinerl.weights.base import num_bytes, view_of, views
from pipelinerl.weights.delta_base import MAX_CHANGED_FRACTION
from pipelinerl.weights.manifest import DigestKind, digests
from pipelinerl.weights.reshard import Box, Move, Part
from pipelinerl.weights.sharded.target import ShardTarget
from pipelinerl.weights.shared_memory import attach, attach_to_write
from pipelinerl.weights.shared_names import forget_vllm_names
from pipelinerl.weights.swap import CopySwap, PointerSwap, SparseSwap, Staging, WeightSwap, choose_swap_mode, make_swap
from pipelinerl.weights.throttle import throttle
from pipelinerl.weights.transports import connector

OWN = ""
"""Names the engine's own buffer, where others are named by the trainer's buffer."""
RECEIVED = "received"
"""Names the rank's own shard, taken from the trainer's ranks."""
Outcome = tuple[str, Any]
"""(error, or empty; result)."""


class PolicyRank:
    """vLLM mixes it into its worker, and calls it through `collective_rpc`; names begin with `policy`, so that they meet none of vLLM's.

    What takes time is begun by `policy_begin` and asked after by `policy_outcome`: the rank's own thread runs the forward passes.
    """

    rank: int
    """vLLM's own."""

    def policy_plan(
        self, folder: str, wanted: str, sends_deltas: bool, staging: str = "device"
    ) -> tuple[dict[str, tuple[list[Box], str]], Filled, str]:
        """Get ready to take policies. The boxes of each checkpoint tensor that this rank holds, with its dtype; which of them fill each
        parameter; how it commits, and why.

        Raises `ConfigError` where this model cannot take any.
        """
        worker: Any = self
        model: torch.nn.Module = worker.get_model()
        captures_graphs = not worker.model_config.enforce_eager
        self._policy_derived = Derived(model, dtype=worker.model_config.dtype)
        placed, self._policy_parts, filled = plan_of_rank(model, folder=Path(folder), derived=self._policy_derived.names)
        mode, choice = choose_swap_mode(wanted, obstacles_of(model, captures_graphs=captures_graphs), sends_deltas=sends_deltas)
        self._policy_commit: WeightSwap = make_swap(mode, placed, gathers=not captures_graphs, staging=Staging(staging))
        held = {name: ([part.box for part in parts], parts[0].tensor.dtype) for name, parts in self._policy_parts.items()}
        return held, filled, choice

    def policy_adapters(self, layout: tuple[Tensor, ...], shape: AdapterShape) -> None:
        """Get ready to take adapters in place of whole policies."""
        from pipelinerl.engine.vllm.adapters import AdapterRows

        worker: Any = self
        manager = worker.model_runner.lora_manager._adapter_manager
        self._policy_rows = AdapterRows(manager, layout=layout, shape=shape, device=worker.model_runner.device)

    def policy_parts(self) -> dict[str, list[Part]]:
        """The parts of checkpoint tensors that this rank holds, each with its place in the rank's own memory."""
        return self._policy_parts

    def policy_sleep(self, drops_kv: bool) -> int:
        """Give back what this rank holds of policies and, with `drops_kv`, of the KV cache; the bytes."""
        from pipelinerl.engine.vllm.sleep import give_back_rank

        worker: Any = self
        assert isinstance(self._policy_commit, PointerSwap | CopySwap), type(self._policy_commit)
        self._policy_staged = None
        return give_back_rank(worker.model_runner, self._policy_commit, drops_kv=drops_kv)

    def policy_pipeline(self) -> None:
        """Make what a stage receives from the one before into: vLLM does so when it warms up, which it leaves out on CPUs."""
        worker: Any = self
        runner = worker.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def policy_layout(
        self, layout: tuple[Tensor, ...], gives: Sequence[tuple[int, Move]], num_ranks: int, starts: Sequence[int] = ()
    ) -> None:
        """Learn the layout of policies, and which of its parts of one each rank gives back (`save`): part number and move.

        `starts`: where each rank's section begins, in a layout of sections (`pipelinerl.weights.sections`).
        """
        self._policy_start = starts[self.rank] if starts else None
        self._policy_own = torch.zeros(0, dtype=torch.uint8)
        self._policy_target: ShardTarget | None = None
        self._policy_shard = torch.zeros(0, dtype=torch.uint8)
        self._policy_staged: int | None = None
        self._policy_outcome: Outcome | None = None
        self._policy_whole = layout
        self._policy_gives = [(number, move) for number, move in gives if move.source == self.rank]
        self._policy_num_ranks = num_ranks
        if identity := os.environ.get("VLLM_DIST_IDENT"):  # on CPUs
            forget_vllm_names(identity)  # every rank has loaded, and so mapped what they share

    def policy_share(self, name: str) -> None:
        """Map the engine's own buffer."""
        self._policy_own = attach_to_write(name)

    def policy_begin(self, task: str, *arguments: object) -> None:
        """Begin one of these tasks."""
        self._policy_outcome = None
        work = {
            "receive": self._policy_receive,
            "digests": self._policy_digests,
            "stage": self._policy_stage,
            "save": self._policy_save,
            "stage_adapter": self._policy_stage_adapter,
            "save_adapter": self._policy_save_adapter,
        }[task]
        threading.Thread(target=self._policy_run, args=(work, arguments), name=f"policy-{task}", daemon=True).start()

    def policy_outcome(self) -> Outcome | None:
        """The outcome of the task begun last; None while it is under way."""
        return self._policy_outcome

    def policy_commit(self, number: int, adapter: dict[str, Any] | None = None) -> None:
        """Bring the policy of staging `number` into force; of an adapter, with the arguments of `Rows.commit`.

        Raises `WeightsError` where another one is staged.
        """
        if self._policy_staged != number:
            raise WeightsError(f"rank {self.rank} has staging {self._policy_staged} ready, told to commit staging {number}")
        if adapter is None:
            self._policy_commit.commit()
            self._policy_derived.make_anew()
        else:
            self._policy_rows.commit(**adapter)
        self._policy_staged = None

    def _policy_run(self, work: Any, arguments: tuple[Any, ...]) -> None:
        yield_to_decoding()
        try:
            with beside_decoding():
                found = work(*arguments)
        except Exception as error:  # the thread's boundary: who asks after an outcome that never comes would ask for ever
            said = str(error) if isinstance(error, PipelineError | OSError | RuntimeError) else repr(error)
            self._policy_outcome = f"rank {self.rank}: {said}", None
            return
        self._policy_outcome = "", found

    def _policy_receive(self, name: str) -> dict[str, int]:
        """Take this rank's shard of a policy from the trainer's ranks, beside the one in force; the sums of its digests."""
        self._policy_staged = None
        if self._policy_target is None:
            who = f"the engine of process {os.getppid()}"
            self._policy_target = ShardTarget(connector, rank=self.rank, parts=self._policy_parts, who=who)
        self._policy_shard = self._policy_commit.spare()
        return self._policy_target.fetch(name, self._policy_shard, save=self._policy_commit.save)[1]

    def _policy_digests(self, source: str, kind: str) -> str:
        """Digests of every so-many-th tensor of a policy, side by side."""
        own = self._policy_whole[self.rank :: self._policy_num_ranks]
        return "".join(digests(self._policy_at(source), own, kind=DigestKind(kind)))

    def _policy_stage(self, source: str, number: int) -> None:
        """Stage this rank's boxes of a policy."""
        self._policy_staged = None
        if source == RECEIVED:
            self._policy_commit.stage(self._policy_shard)
            self._policy_staged = number
            return
        if self._policy_start is not None:
            self._policy_commit.stage(self._policy_at(source)[self._policy_start :])
            self._policy_staged = number
            return
        wanted = views(self._policy_at(source), self._policy_whole)
        boxes = [(part, wanted[name][_slices(part.box)]) for name, parts in self._policy_parts.items() for part in parts]
        commit = self._policy_commit
        if isinstance(commit, SparseSwap) and (changes := self._policy_differences(boxes, commit)) is not None:
            commit.stage_delta(changes)
        else:
            buffer = commit.spare()
            for part, box in boxes:
                view_of(buffer, part.tensor).copy_(box)
                throttle()
            commit.stage(buffer)
        self._policy_staged = number

    def _policy_differences(
        self, boxes: list[tuple[Part, torch.Tensor]], commit: SparseSwap
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None:
        """Differences in the form of `SparseSwap.stage_delta`; None where so much differs that the whole is less."""
        found, num_changed, num_all = [], 0, 0
        for part, box in boxes:
            bits = commit.bits_of(part.tensor)
            new = box.contiguous().view(-1).view(bits.dtype)
            places = torch.nonzero(bits.cpu() != new).view(-1)
            num_changed, num_all = num_changed + len(places), num_all + len(new)
            if len(places):
                found.append((bits, places.to(bits.device), new[places].to(bits.device)))
            throttle()
        return found if num_changed <= MAX_CHANGED_FRACTION * num_all else None

    def _policy_save(self) -> None:
        """Write this rank's part of the policy in force into the engine's own buffer."""
        held = self._policy_commit.spare()
        self._policy_commit.save(held)
        targets = views(self._policy_own, self._policy_whole)
        for number, move in self._policy_gives:
            source = view_of(held, self._policy_parts[move.name][number].tensor)
            targets[move.name][move.target_slices].copy_(source[move.source_slices])
            throttle()

    def _policy_stage_adapter(self, source: str, number: int, place: int) -> None:
        """Stage an adapter: its layers take the part that is this rank's."""
        self._policy_staged = None
        self._policy_rows.stage(self._policy_at(source), place=place)
        self._policy_staged = number

    def _policy_save_adapter(self) -> None:
        """Write the adapter in force into the engine's own buffer; every rank has it whole."""
        if self.rank == 0:
            self._policy_rows.save(self._policy_own)

    def _policy_at(self, source: str) -> torch.Tensor:
        policy = self._policy_own if source == OWN else attach(source)
        if len(policy) < num_bytes(self._policy_whole):
            raise WeightsError(
                f"buffer {source} has {len(policy)} bytes, a policy has {num_bytes(self._policy_whole)}: it is truncated; not taken"
            )
        return policy


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, end) for first, end in box)

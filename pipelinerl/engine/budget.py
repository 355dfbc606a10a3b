"""What a GPU of an engine holds: its weights, the next policy beside them, a forward pass, and for the KV cache what is left.

vLLM by itself gives the cache all that a forward pass does not take, and a policy that is staged later finds no room. So the cache is
sized here, before anything loads, from what the GPU has free. A forward pass is counted from config.json: vLLM's own measure of it comes
too late, and sees what other processes on the same GPU do meanwhile. Imports no torch.

A pass over T tokens holds, at its largest layer, hidden state, residual and normed input (3 T H), queries, keys, values and their result,
or gate, up and their product (3 T I; of a mixture 3 T K I + T K H for K experts a token); sampling holds the S rows of logits in the
model's dtype and in float32, log-probabilities, probabilities, and their order with its indices (S V (24 + dtype)).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl.config import EngineSection, ModelSection, RolloutSection
from pipelinerl.engine.kv import KvPlan, plan_kv, text_tree
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.devices import Gpu
from pipelinerl.runtime.machine import say_bytes

MAX_BATCHED_TOKENS = 8192
"""Tokens of one forward pass. vLLM's own default depends on the GPU, and what a pass holds with it. More speeds up long prompts only."""
LIBRARY_BYTES = 2 << 30
"""CUDA's context, NCCL's buffers, workspaces of matrix products and captured graphs: half a GiB to a GiB each for the first and the last,
by vLLM's own accounts. Less runs out of memory in the middle of a run; more costs cache."""
MARGIN_FRACTION = 0.04
"""Part of the GPU's memory that nobody is given, for what an allocator cuts into pieces."""
LEAST_CACHE_FRACTION = 0.5
"""Part of the cache that is left when the next policy waits on the device, below which it waits on the host: a pause of ten milliseconds is
then bought with half of the sequences that could run."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory of each GPU of an engine, in bytes."""

    total_bytes: int
    free_bytes: int
    weights_bytes: int
    staged_bytes: int
    """The next policy, beside the weights; 0 where it waits on the host, or adapters alone travel."""
    pass_bytes: int
    """The largest forward pass."""
    cache_bytes: int
    on_host: bool
    """The next policy waits in the host's memory."""
    max_running: int
    """`engine.max_running`."""
    num_fit: int
    """Sequences of a completion and a prompt as long that the cache holds."""

    def __str__(self) -> str:
        parts = {
            "weights": self.weights_bytes,
            "the next policy": self.staged_bytes,
            "a forward pass": self.pass_bytes,
            "libraries and graphs": LIBRARY_BYTES,
            "margin": int(MARGIN_FRACTION * self.total_bytes),
            "KV cache": self.cache_bytes,
        }
        where = "; the next policy waits on the host, since beside the weights it would leave too little" if self.on_host else ""
        said = ", ".join(f"{what} {say_bytes(size)}" for what, size in parts.items() if size)
        return f"of {say_bytes(self.free_bytes)} free on each GPU: {said}{where}{self._idle_room}"

    @property
    def _idle_room(self) -> str:
        if self.num_fit < 2 * self.max_running:
            return ""
        held = f"the cache holds {self.num_fit:,} sequences of a completion and a prompt as long"
        return f"; {held}, of which engine.max_running decodes {self.max_running:,} at once: raise it where the trainer waits for rows"

    @property
    def utilization(self) -> float:
        """The part of the GPU's memory that vLLM looks for when it starts: all but what others hold and the policy beside it."""
        return max(0.01, (self.weights_bytes + self.pass_bytes + self.cache_bytes) / self.total_bytes)


def plan_on(
    gpus: Sequence[Gpu],
    model: ModelSection,
    engine: EngineSection,
    rollout: RolloutSection,
    *,
    num_parameters: int,
    stages_policies: bool,
) -> Budget | None:
    """Divide the GPUs of one engine, of which the fullest counts; see `plan_budget`."""
    fullest = min(gpus, key=lambda gpu: gpu.free_bytes)
    return plan_budget(
        model,
        engine,
        rollout,
        total_bytes=fullest.total_bytes,
        free_bytes=fullest.free_bytes,
        num_parameters=num_parameters,
        stages_policies=stages_policies,
    )


def plan_budget(
    model: ModelSection,
    engine: EngineSection,
    rollout: RolloutSection,
    *,
    total_bytes: int,
    free_bytes: int,
    num_parameters: int,
    stages_policies: bool,
) -> Budget | None:
    """Divide a GPU; None where config.json says too little, and vLLM is left to measure.

    `stages_policies`: whole ones, not adapters alone. Raises `ConfigError` with the arithmetic where it does not fit.
    """
    kv, tree = plan_kv(model, engine, rollout, memory_bytes=0, on_cpu=False), text_tree(model.path)
    pass_bytes = _pass_bytes(tree, model, engine)
    if kv is None or pass_bytes is None:
        return None
    weights = num_parameters * _DTYPE_BYTES[model.dtype] // engine.num_ranks
    margin = int(MARGIN_FRACTION * total_bytes)
    left = free_bytes - weights - pass_bytes - LIBRARY_BYTES - margin
    sequence = kv.sequence_bytes(min(kv.context_tokens, 2 * rollout.max_tokens))
    wanted = engine.max_running * sequence + kv.least_bytes
    staged = weights if stages_policies else 0
    enough = engine.kv_cache_bytes or max(kv.least_bytes, min(wanted, int(LEAST_CACHE_FRACTION * left)))
    on_host = left - staged < enough
    staged = 0 if on_host else staged
    cache = engine.kv_cache_bytes or left - staged
    budget = Budget(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        weights_bytes=weights,
        staged_bytes=staged,
        pass_bytes=pass_bytes,
        cache_bytes=cache,
        on_host=on_host and stages_policies,
        max_running=engine.max_running,
        num_fit=max(0, cache) // sequence,
    )
    if left - staged < max(cache, kv.least_bytes):
        raise ConfigError(_too_little(budget, kv, margin=margin, left=left, engine=engine))
    return budget


def _too_little(budget: Budget, kv: KvPlan, *, margin: int, left: int, engine: EngineSection) -> str:
    taken = budget.weights_bytes + budget.pass_bytes + LIBRARY_BYTES + margin
    asked = (
        f"engine.kv_cache_bytes asks for {say_bytes(engine.kv_cache_bytes)}"
        if engine.kv_cache_bytes
        else f"one sequence of {kv.context_tokens:,} positions takes {say_bytes(kv.least_bytes)}"
    )
    parts = f"weights {say_bytes(budget.weights_bytes)}, a forward pass {say_bytes(budget.pass_bytes)}"
    parts += f", libraries and graphs {say_bytes(LIBRARY_BYTES)} and margin {say_bytes(margin)} are {say_bytes(taken)}"
    return (
        f"an engine does not fit its GPU: {say_bytes(budget.free_bytes)} of {say_bytes(budget.total_bytes)} are free; {parts}; for the KV"
        f" cache {say_bytes(max(0, left))} are left, and {asked}. Spread the engine over more GPUs (engine.options.tensor_parallel_size),"
        " lower model.max_tokens, engine.max_running or engine.kv_cache_bytes, or free the GPU"
    )


def batched_tokens(options: Mapping[str, Any]) -> int:
    """Tokens of the largest forward pass of an engine with these options."""
    return int(options.get("max_num_batched_tokens") or MAX_BATCHED_TOKENS)


def _pass_bytes(tree: Mapping[str, Any], model: ModelSection, engine: EngineSection) -> int | None:
    """The largest forward pass of one rank; None where config.json does not tell the sizes."""
    size, ranks = _DTYPE_BYTES[model.dtype], int(engine.options.get("tensor_parallel_size", 1))
    hidden, heads, words = (int(tree.get(key) or 0) for key in ("hidden_size", "num_attention_heads", "vocab_size"))
    if not hidden or not heads or not words:
        return None
    head = int(tree.get("head_dim") or hidden // heads)
    keys = int(tree.get("num_key_value_heads") or heads)
    attention = (2 * heads + 2 * keys) * head // ranks
    feed_forward = 3 * int(tree.get("intermediate_size") or 4 * hidden) // ranks
    chosen = int(tree.get("num_experts_per_tok") or 0)
    experts = chosen * (3 * int(tree.get("moe_intermediate_size") or tree.get("intermediate_size") or 0) // ranks + hidden)
    tokens = batched_tokens(engine.options)
    return tokens * size * (3 * hidden + max(attention, feed_forward, experts)) + engine.max_running * words * (24 + size)

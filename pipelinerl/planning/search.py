"""The search for a placement: how many GPUs train, how many generate, and how each side spreads its model.

Training and generation meet in one number, the GPUs that each is given. So for every split the fastest trainer that fits and the fastest
engines that fit are looked for apart, and the split whose slower side is fastest wins; tests hold this to the answer of trying every pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from pipelinerl.config.families import FAMILIES
from pipelinerl.config.layout import Layout, problems_of
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import COLOCATED, DIRECT, TRANSPORTS
from pipelinerl.planning.shape import Shape
from pipelinerl.planning.sheet import Values

MAX_SPLITS = 16
"""Splits of the GPUs that are looked at. More take longer and move the answer by less than the formulas are off."""
RUNNING = (32, 64, 128, 256, 512, 1024)
"""Values of `engine.max_running` that are tried."""
_CHECKPOINTING = ((0.0, 0.0), (1.0, 1.0), (1.0, 0.0))
"""Values of `is_checkpointed` and `keeps_products`, by the memory that they take: those that take no more than what is given are tried."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One placement with all its figures."""

    inputs: Values
    values: Values
    problems: tuple[str, ...]
    """Reasons why it does not fit; empty where it does."""
    obstacles: tuple[str, ...]
    """Reasons why this project cannot run it, however well it fits; empty where it can."""

    @property
    def is_runnable(self) -> bool:
        return not self.problems and not self.obstacles

    @property
    def layout(self) -> Layout:
        return _layout(self.inputs)


def judge(inputs: Mapping[str, float], shape: Shape, *, num_gpus: float | None = None) -> Candidate:
    """Compute a placement's figures, and say what stands against it."""
    values = SHEET.evaluate(inputs)
    return Candidate(
        inputs=dict(inputs),
        values=values,
        problems=tuple(_problems(values, shape, num_gpus=num_gpus)),
        obstacles=tuple(obstacles(inputs, shape)),
    )


def search(inputs: Mapping[str, float], shape: Shape, *, num_gpus: int) -> list[Candidate]:
    """The best placement of every split that has one, the fastest first. `inputs` give all that is not searched, `mode` among it."""
    free, node = num_gpus - int(inputs["prm_gpus"]), int(inputs["gpus_per_node"])
    is_shared = inputs["mode"] >= COLOCATED
    is_mixed = is_shared and inputs["engines_apart"] > 0
    found: list[Candidate] = []
    for ranks in [free] if is_shared and not is_mixed else splits(free, node):
        trainers = sorted(trainers_of(ranks, inputs, shape), key=lambda each: (-each[1]["trained_rate"], _complexity(each[0])))
        best: tuple[tuple[float, float], Values] | None = None
        for engines in engines_of(free if is_shared else free - ranks, inputs, shape):
            if is_mixed:
                engines["engines_apart"] = (free - ranks) // (engines["engine_tensor"] * engines["engine_pipeline"])
            whole = _joined(inputs, trainers, engines)
            if whole is None:
                continue
            values = SHEET.evaluate(whole)
            rank = (values["run_rate"], -float(_complexity(whole)))
            if values["engine_rank_room"] >= 0 and (best is None or _is_better(rank, best[0])):
                best = rank, whole
        if best is not None:
            found.append(judge(best[1], shape, num_gpus=num_gpus))
    return sorted(found, key=lambda each: -each.values["run_rate"])


def splits(num_gpus: int, node: int) -> list[int]:
    """Numbers of GPUs for the trainer: every one on few GPUs, else whole nodes, and then at most `MAX_SPLITS`."""
    unit = 1 if num_gpus <= 2 * node else node
    unit *= max(1, -(-num_gpus // unit // MAX_SPLITS))
    return list(range(unit, num_gpus, unit))


def trainers_of(ranks: int, inputs: Mapping[str, float], shape: Shape) -> Iterator[tuple[Values, Values]]:
    """Layouts of a trainer of so many ranks, with the figures of each."""
    cut, node = shape.cut(), int(inputs["gpus_per_node"])
    least = _CHECKPOINTING.index((inputs["is_checkpointed"], inputs["is_checkpointed"] * inputs["keeps_products"]))
    for tensor in _powers(node):
        for pipeline in _powers(16):
            for context in _powers(8):
                if ranks % (tensor * pipeline * context):
                    continue
                replicas = ranks // (tensor * pipeline * context)
                for shard in _shards(replicas, node // (tensor * pipeline * context)):
                    for expert in _powers(64) if shape.experts else [1]:
                        sizes = {
                            "ranks": ranks,
                            "shard": shard,
                            "context": context,
                            "tensor": tensor,
                            "pipeline": pipeline,
                            "expert": expert,
                        }
                        if problems_of(_layout(sizes), shape=cut):
                            continue
                        for is_checkpointed, keeps_products in _CHECKPOINTING[least:]:
                            own: Values = {**sizes, "is_checkpointed": is_checkpointed, "keeps_products": keeps_products}
                            values = SHEET.evaluate({**inputs, **own})
                            if values["trainer_rank_room"] + values["published_bytes"] >= 0:
                                yield own, values


def engines_of(num_gpus: int, inputs: Mapping[str, float], shape: Shape) -> Iterator[Values]:
    """Numbers, layouts and widths of engines on so many GPUs, and where the transport is `auto` also slower ones that keep GPUs free."""
    transports = (-1, TRANSPORTS.index("shared_memory"), TRANSPORTS.index("gloo")) if inputs["transport"] < 0 else (inputs["transport"],)
    for tensor in _powers(int(inputs["gpus_per_node"])):
        for pipeline in _powers(16):
            if engine_obstacles(tensor, pipeline, shape) or num_gpus < tensor * pipeline:
                continue
            if inputs["mode"] >= COLOCATED and tensor * pipeline > 1:
                continue  # engines of several ranks know no sleep
            own = {"engines": num_gpus // (tensor * pipeline), "engine_tensor": tensor, "engine_pipeline": pipeline}
            for transport in transports:
                if transport == TRANSPORTS.index("shared_memory") and num_gpus >= inputs["gpus_per_node"]:
                    continue  # of one machine
                for running in dict.fromkeys((*RUNNING, int(inputs["max_running"]))):
                    yield {**own, "transport": transport, "max_running": running}


def engine_obstacles(tensor: int, pipeline: int, shape: Shape) -> list[str]:
    """Reasons why vLLM does not cut a model so."""
    found = []
    if shape.heads % tensor or (not shape.is_latent and shape.key_heads % tensor and tensor % shape.key_heads):
        found.append(f"tensor_parallel_size = {tensor} does not divide {shape.heads} heads over {shape.key_heads} heads of keys")
    if shape.expert_size % tensor or shape.intermediate % tensor:
        found.append(f"tensor_parallel_size = {tensor} does not divide the feed-forward layers")
    if pipeline > shape.layers:
        found.append(f"pipeline_parallel_size = {pipeline} is more than the model's {shape.layers} layers")
    return found


def obstacles(inputs: Mapping[str, float], shape: Shape) -> Iterator[str]:
    """Reasons why this project cannot run a placement."""
    yield from problems_of(_layout(inputs), shape=shape.cut())
    yield from engine_obstacles(int(inputs["engine_tensor"]), int(inputs["engine_pipeline"]), shape)
    yield from (family.refused for family in FAMILIES if family.model_type == shape.model_type and family.refused)
    if shape.model_type == "kimi_k2":
        yield "transformers has no kimi_k2, so the trainer has none"
    if inputs["transport"] == DIRECT:
        yield "every trainer rank sending to every engine rank: no transport here does"
    if inputs["mode"] >= COLOCATED and inputs["engine_tensor"] * inputs["engine_pipeline"] > 1:
        yield "taking turns on the same GPUs: an engine of several ranks knows no sleep yet"


def _joined(inputs: Mapping[str, float], trainers: list[tuple[Values, Values]], engines: Values) -> Values | None:
    """These engines with the fastest trainer that has room for what their transport keeps on its GPU."""
    for own, values in trainers:
        whole = {**inputs, **own, **engines}
        placed = SHEET.evaluate(whole)
        if placed["trainer_rank_room"] >= 0:
            return whole
        if values["trained_rate"] <= 0:
            return None
    return None


def _problems(values: Values, shape: Shape, *, num_gpus: float | None) -> Iterator[str]:
    if num_gpus is not None and values["used_gpus"] > num_gpus:
        yield f"takes {values['used_gpus']:.0f} GPUs, and there are {num_gpus:.0f}"
    if values["trainer_rank_room"] < 0:
        largest = max(_REMEDIES, key=values.__getitem__)
        what, do = _REMEDIES[largest]
        yield (
            f"a trainer rank takes {values['trainer_rank_bytes'] / 1e9:.1f} GB, {-values['trainer_rank_room'] / 1e9:.1f} more than there"
            f" is, {values[largest] / 1e9:.1f} of it {what}: {do}"
        )
    if values["prm_rank_room"] < 0:
        each = f"{values['prm_weights_bytes'] / 1e9:.1f} GB on each GPU"
        yield f"the process reward model takes {each}: raise prm.options.tensor_parallel_size"
    if values["engine_rank_room"] < 0:
        yield (
            f"an engine rank has room for {max(0.0, values['kv_tokens']):,.0f} tokens of KV cache, and one sequence may have"
            f" {values['context_tokens']:,.0f}: raise engine.options.tensor_parallel_size, or lower model.max_tokens"
        )


_SPREAD = "raise trainer.parallel.shard, tensor or pipeline, or set trainer.offload"
_REMEDIES = {
    "trainer_weights_bytes": ("weights", _SPREAD),
    "trainer_gradients_bytes": ("gradients", _SPREAD),
    "trainer_optimizer_bytes": ("optimizer state", _SPREAD),
    "gathered_bytes": ("gathered weights", "raise trainer.parallel.tensor"),
    "activation_bytes": ("activations", "set trainer.activation_checkpointing, lower batch.max_tokens, or raise trainer.parallel.context"),
    "published_bytes": ("policies on their way", "raise trainer.parallel.shard, or choose another weights.transport"),
}


def _layout(inputs: Mapping[str, float]) -> Layout:
    ranks, shard, context, tensor, pipeline, expert = (
        int(inputs[name]) for name in ("ranks", "shard", "context", "tensor", "pipeline", "expert")
    )
    return Layout(ranks=ranks, shard=shard, context=context, tensor=tensor, pipeline=pipeline, expert=expert)


def _complexity(inputs: Mapping[str, float]) -> float:
    """Kinds of parallelism in use: of two that are as fast, the simpler one is better."""
    kinds = ("shard", "context", "tensor", "pipeline", "expert", "engine_tensor", "engine_pipeline")
    return sum(inputs.get(kind, 1) > 1 for kind in kinds) + (inputs.get("transport", -1) >= 0) + inputs.get("max_running", 0) / 1e5


def _is_better(rank: tuple[float, float], than: tuple[float, float]) -> bool:
    if abs(rank[0] - than[0]) > 1e-6 * than[0]:
        return rank[0] > than[0]
    return rank[1] > than[1]


def _shards(replicas: int, in_node: int) -> list[int]:
    """Sizes of shard groups that are tried: none, one node's, all; those between are no faster than a node's and hold more than all."""
    return sorted(size for size in {1, in_node, replicas} if size and replicas % size == 0)


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]

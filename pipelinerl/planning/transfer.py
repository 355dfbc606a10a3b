"""Seconds that a policy takes from shard to shard (`weights.transport = "sharded"`), from sizes, links and layouts alone.

Every byte leaves the trainer once for the first engine, and each further engine has it from the one before. So, with a policy of P bytes
on R trainer ranks and engines of T ranks (tensor, pipeline and expert parallel together), links of B bytes per second each way, shared by
r trainer or t engine ranks:

    out of the trainer   r * P * (1 + (T - 1) * f) / R / B     f: the part of P that all engine ranks hold
    into an engine       t * S / B                             S = P * (f + (1 - f) / T), a rank's shard
    between engines      the same again on the way out, at the same time: links are duplex; two engines on one link share it
    the chain's length   (E - 1) * bucket / B                  E engines: the last has its last bucket so much later
    the first bucket     bucket / B, before anything can be put in its place; and `latency_s`, in which peers ask each other

The sums of the first three overlap, so the largest counts. Digests and copies of a bucket are made while the next one travels; they count
where a rank's `work_bytes_per_s` is less than its link brings. No NIC reaches its rate: `efficiency` is the part that payload gets.
"""

from __future__ import annotations

import dataclasses

GB = 1e9
NIC_400G = 50 * GB
"""Bytes per second of one 400 Gbit/s port, each way."""
PCIE_5 = 55 * GB
"""Bytes per second between a GPU and pinned memory of its host, which `sharded+nccl` passes through at both ends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One policy on its way from a trainer to engines."""

    policy_bytes: float
    trainer_ranks: int
    engine_ranks: int
    """Of one engine."""
    num_engines: int = 1
    link_bytes_per_s: float = NIC_400G
    """Of one link, each way."""
    trainer_ranks_per_link: float = 1.0
    engine_ranks_per_link: float = 1.0
    """Of all engines: two engines behind one link share it."""
    replicated_fraction: float = 0.0
    """Part of the policy that every rank of an engine holds."""
    bucket_bytes: float = 16 << 20
    work_bytes_per_s: float = PCIE_5
    """At which one rank checks and places what it receives."""
    latency_s: float = 0.01
    """In which peers ask each other, before the first byte."""
    efficiency: float = 0.9
    """Part of a link's rate that payload gets."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds, and what they are of."""

    seconds: float
    limit: str
    """What takes longest."""
    parts: dict[str, float]
    """Seconds of each thing that could have been the limit."""


def predict(transfer: Transfer) -> Prediction:
    """Predict the seconds until the last engine rank has its shard. Raises `ValueError` for sizes of nothing."""
    if min(transfer.trainer_ranks, transfer.engine_ranks, transfer.num_engines) < 1 or transfer.link_bytes_per_s <= 0:
        raise ValueError(f"a transfer needs ranks at both ends and a link between them, got {transfer}")
    rate = transfer.link_bytes_per_s * transfer.efficiency
    shared = transfer.replicated_fraction
    sent = transfer.policy_bytes * (1 + (transfer.engine_ranks - 1) * shared) / transfer.trainer_ranks
    shard = transfer.policy_bytes * (shared + (1 - shared) / transfer.engine_ranks)
    parts = {
        "out of the trainer": transfer.trainer_ranks_per_link * sent / rate,
        "into the engines": transfer.engine_ranks_per_link * shard / rate,
        "checked and put in its place": shard / transfer.work_bytes_per_s,
    }
    limit = max(parts, key=lambda what: parts[what])
    first = min(transfer.bucket_bytes, shard)
    chain = transfer.num_engines * first / rate
    return Prediction(seconds=transfer.latency_s + parts[limit] + chain, limit=limit, parts=parts)

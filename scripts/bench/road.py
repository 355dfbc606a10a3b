"""Measures the transport from shard to shard: eight ranks of a trainer and eight of engines, each a process, over gloo on this machine.

For pairs of layouts: seconds of a whole transfer (a published policy until every engine rank has its shard, every digest checked) over the
seconds of raw gloo for the same bytes between the same processes, each pair's in one message and all at once; bytes out of the busiest
process over the larger of a trainer rank's part of the policy and an engine's, cut by its tensor-parallel ranks and stages (expert ranks
hold the rest each, and each is sent it); and how far each process's peak memory grew over its own shard and two buckets. Bytes are those
that the kernel counted (`wchar`), memory is its peak of resident pages.

`publish s` is what the trainer's ranks take to fill and seal their weight buffers, beside which no engine waits.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from pipelinerl.messages import Tensor
from pipelinerl.weights.base import num_bytes
from pipelinerl.weights.manifest import Manifest, compare, encode
from pipelinerl.weights.sharded.connections import Place
from pipelinerl.weights.sharded.digests import add_ranks, manifest_of, texts
from pipelinerl.weights.sharded.plan import BUCKET_BYTES, SourcePlan, plan
from pipelinerl.weights.sharded.target import name_of
from scripts.bench import harness
from scripts.bench.road_layouts import Grid, layout_of, shards_of
from scripts.bench.road_ranks import Rank, ask_all, engine_rank, parts_of, trainer_rank

PAIRS = (
    (Grid(), Grid(), 1),
    (Grid(fsdp=2), Grid(tensor=2), 1),
    (Grid(fsdp=8), Grid(tensor=4), 2),
    (Grid(tensor=4, pipeline=2), Grid(tensor=8), 1),
    (Grid(fsdp=8), Grid(tensor=8), 1),
    (Grid(expert=8), Grid(tensor=2, pipeline=4), 1),
    (Grid(pipeline=8), Grid(expert=4, tensor=2), 1),
    (Grid(fsdp=2, tensor=2, expert=2), Grid(tensor=2), 4),
)
"""A trainer's ranks, an engine's, and how many engines."""
SLACK_BYTES = 6 << 20
"""Pages that are no weight buffers: stacks, lists of pieces, the libraries' own."""


@dataclasses.dataclass(kw_only=True)
class Fleet:
    """The processes of one pair of layouts."""

    layout: tuple[Tensor, ...]
    plans: tuple[SourcePlan, ...]
    trainer: list[Rank]
    engines: list[list[Rank]]
    shard_bytes: list[int]
    """Of each process, the trainer's first."""
    num_parts: int
    """Into which an engine cuts what is no expert: its tensor-parallel ranks, and stages."""
    place: Place
    store: dist.TCPStore
    version: int = 0
    publish_s: list[float] = dataclasses.field(default_factory=list)
    spent: list[list[tuple[int, int, float]]] = dataclasses.field(default_factory=list)
    """By transfer and process: bytes out, growth of peak memory, seconds of CPU."""

    @property
    def everybody(self) -> list[Rank]:
        return [*self.trainer, *self._engine_ranks]

    def transfer(self) -> float:
        """Publish a policy, and have every engine take it into memory that it has; seconds of the taking."""
        name, manifest = self._publish()
        ask_all(self._engine_ranks, "reserve")
        started = time.perf_counter()
        self._take(name, manifest)
        return time.perf_counter() - started

    def weigh(self) -> None:
        """The same, from processes that hold nothing; note what it took."""
        ask_all(self.everybody, "mark")
        self._take(*self._publish())
        self.spent.append([tuple(one) for one in ask_all(self.everybody, "spent")])

    def _publish(self) -> tuple[str, Manifest]:
        self.version += 1
        found = ask_all(self.trainer, "publish", self.version)
        self.publish_s.append(max(seconds for _, seconds in found))
        manifest = manifest_of(self.version, add_ranks(sums for sums, _ in found), self.layout)
        ask_all(self.trainer[:1], "offer", encode(manifest).decode())
        return name_of(self.place, 0, carrier="gloo"), manifest

    def _take(self, name: str, manifest: Manifest) -> None:
        answers = ask_all(self._engine_ranks, "fetch", name)
        for number, engine in enumerate(self.engines):
            own = answers[number * len(engine) : (number + 1) * len(engine)]
            assert {version for version, _ in own} == {self.version}
            compare(manifest, texts(add_ranks(sums for _, sums in own), self.layout), name="of the bench")

    @property
    def _engine_ranks(self) -> list[Rank]:
        return [rank for engine in self.engines for rank in engine]

    def raw(self) -> float:
        """The same bytes between the same processes, by gloo alone."""
        members = [["trainer", rank] for rank in range(len(self.trainer))]
        members += [["engine", engine, rank] for engine, ranks in enumerate(self.engines) for rank in range(len(ranks))]
        first = len(self.trainer)
        pairs = [
            (source, first + target, size)
            for source, own in enumerate(self.plans)
            for target, buckets in enumerate(own.buckets)
            if (size := sum(bucket.num_bytes for bucket in buckets))
        ]
        size = len(self.engines[0])
        pairs += [
            (first + (engine - 1) * size + rank, first + engine * size + rank, self.shard_bytes[first + rank])
            for engine in range(1, len(self.engines))
            for rank in range(size)
        ]
        ask_all(self.everybody, "raw", self.store.port, len(members), members, pairs)
        started = time.perf_counter()
        ask_all(self.everybody, "go")
        return time.perf_counter() - started

    def end(self) -> None:
        for rank in self.everybody:
            rank.end()


def start(
    trainer: Grid,
    engine: Grid,
    num_engines: int,
    *,
    policy_bytes: int,
    bucket_bytes: int = BUCKET_BYTES,
    address: str = "127.0.0.1",
    namespaces: tuple[str, str] = ("", ""),
) -> Fleet:
    """Start the processes of a pair of layouts, before this process runs a torch operation; `namespaces`: the trainer's and engines'."""
    layout = layout_of(policy_bytes)
    targets = shards_of(layout, engine)
    wanted = [{name: [box] for name, box in held.items()} for held in targets]
    plans = plan(layout, sources=shards_of(layout, trainer), targets=wanted, bucket_bytes=bucket_bytes)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [trainer_rank(rank, layout, own, address=address, namespace=namespaces[0]) for rank, own in enumerate(plans)]
    parts = [parts_of(held) for held in targets]
    engines = [
        [engine_rank(number, rank, own, bucket_bytes=bucket_bytes, namespace=namespaces[1]) for rank, own in enumerate(parts)]
        for number in range(num_engines)
    ]
    places = [rank.hear() for rank in ranks]
    ask_all(ranks[:1], "lead", places, [[bool(buckets) for buckets in own.buckets] for own in plans])
    shards = [own.num_bytes for own in plans]
    shards += [num_bytes(part.tensor for held in own.values() for part in held) for _ in range(num_engines) for own in parts]
    who, host, port, token = places[0]
    return Fleet(
        layout=layout,
        plans=plans,
        trainer=ranks,
        engines=engines,
        shard_bytes=shards,
        num_parts=engine.num_ranks // engine.expert,
        place=Place(who=who, address=host, port=port, token=token),
        store=store,
    )


def measure(arguments: Any) -> harness.Measured:
    found = harness.Measured()
    megabytes = arguments.megabytes or (96 if arguments.quick else 512)
    worst: dict[str, float] = {}
    for trainer, engine, num_engines in PAIRS[:4] if arguments.quick else PAIRS:
        fleet = start(trainer, engine, num_engines, policy_bytes=megabytes << 20)
        try:
            _measure_pair(found, fleet, f"{trainer} -> {num_engines} x {engine}", repetitions=3 if arguments.quick else 5, worst=worst)
        finally:
            fleet.end()
    return found


def _measure_pair(found: harness.Measured, fleet: Fleet, what: str, *, repetitions: int, worst: dict[str, float]) -> None:
    policy = sum(tensor.num_bytes for tensor in fleet.layout)
    fleet.transfer()  # connections are made once
    fleet.raw()
    for _ in range(2):
        fleet.weigh()
    fleet.publish_s.clear()
    turns = harness.in_turns(repetitions, {"ours": fleet.transfer, "raw": fleet.raw})
    ratio = harness.median_ratio(turns["ours"], turns["raw"])
    busiest = max(max(one[0] for one in spent) for spent in fleet.spent)
    out = busiest / max(policy / len(fleet.trainer), policy / fleet.num_parts)
    memory = [
        max(spent[number][1] for spent in fleet.spent) / (shard + 2 * BUCKET_BYTES + SLACK_BYTES)
        for number, shard in enumerate(fleet.shard_bytes)
    ]
    moved = sum(bucket.num_bytes for own in fleet.plans for buckets in own.buckets for bucket in buckets)
    found.rows.append(
        {
            "layouts": what,
            "policy MB": policy / 1e6,
            "transfer s": statistics.median(turns["ours"]),
            "raw gloo s": statistics.median(turns["raw"]),
            "over raw": ratio,
            "busiest out MB": busiest / 1e6,
            "busiest out / least": out,
            "largest shard MB": max(fleet.shard_bytes) / 1e6,
            "peak / (shard + 2 buckets)": max(memory),
            "publish s": statistics.median(fleet.publish_s),
            "sent MB": moved / 1e6,
        }
    )
    found.goals += [
        harness.at_most(f"{what}: transfer over raw gloo", ratio, 1.3, work=harness.Work.CPU, speeds=turns.speeds),
        harness.at_most(f"{what}: bytes out of the busiest process over the least possible", out, 1.2),
        harness.at_most(f"{what}: peak memory over its own shard and two buckets", max(memory), 1.0),
    ]


if __name__ == "__main__":
    harness.run("road", measure, options={"--megabytes": {"type": int, "help": "size of the policy; default: 512, or 96 with --quick"}})

"""Measures how far the model of seconds from shard to shard (`pipelinerl.planning.transfer`) is off, over a link of known rate.

A trainer's ranks are processes in one network namespace, engines' in another, and the link between the two is shaped (`tc`, a token bucket
each way); needs root. Prints, beside that, what the model says of models and machines that are not here.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.planning.transfer import GB, NIC_400G, PCIE_5, Transfer, predict
from scripts.bench import harness
from scripts.bench.road import start
from scripts.bench.road_layouts import Grid, shards_of

TRAINER, ENGINES = f"trainer-{os.getpid()}", f"engines-{os.getpid()}"
ADDRESSES = "10.203.0.1", "10.203.0.2"
PAYLOAD = 1448 / 1514
"""Part of an Ethernet frame of 1,500 bytes that TCP's payload is."""
BUCKET_BYTES = 1 << 20
CASES = (
    (Grid(fsdp=4), Grid(tensor=2), 1, 24, 200),
    (Grid(fsdp=2), Grid(tensor=2), 2, 24, 400),
    (Grid(tensor=2), Grid(pipeline=2), 1, 48, 400),
)
"""A trainer's ranks, an engine's, engines, megabytes of the policy, and megabits per second of the link."""
STATED = (
    ("7 B, one node: 4 trainer GPUs, 4 engines of 1", 15.2 * GB, 4, 1, 4, PCIE_5, "20 ms (verl, handles of one node)"),
    ("32 B, 8 GPUs to 2 engines of TP4", 65.5 * GB, 8, 4, 2, NIC_400G, ""),
    ("235 B, 64 GPUs to 4 engines of TP8", 470 * GB, 64, 8, 4, NIC_400G, ""),
    ("671 B (fp8), 256 GPUs to 8 engines of 16", 671 * GB, 256, 16, 8, NIC_400G, "2.4 s (NeMo, DeepSeek-V3)"),
    ("1,000 B (fp8), 256 GPUs to 8 engines of 16", 1000 * GB, 256, 16, 8, NIC_400G, "1.3 s (Perplexity, 1 T)"),
)
"""Model, bytes of a policy, trainer ranks, ranks of an engine, engines, a rank's link, and what was published."""


def measure(arguments: Any) -> harness.Measured:
    found = harness.Measured()
    for trainer, engine, num_engines, megabytes, megabits in CASES:
        with link(megabits):
            fleet = start(
                trainer,
                engine,
                num_engines,
                policy_bytes=megabytes << 20,
                bucket_bytes=BUCKET_BYTES,
                address=ADDRESSES[0],
                namespaces=(TRAINER, ENGINES),
            )
            try:
                fleet.transfer()  # connections are made once
                seconds = statistics.median(fleet.transfer() for _ in range(3))
            finally:
                fleet.end()
        policy = sum(tensor.num_bytes for tensor in fleet.layout)
        sent = sum(bucket.num_bytes for own in fleet.plans for buckets in own.buckets for bucket in buckets)
        size = len(shards_of(fleet.layout, engine))
        predicted = predict(
            Transfer(
                policy_bytes=policy,
                trainer_ranks=trainer.num_ranks,
                engine_ranks=size,
                num_engines=1,  # those after the first have it over loopback, as fast as they come
                link_bytes_per_s=megabits * 1e6 / 8,
                trainer_ranks_per_link=trainer.num_ranks,
                engine_ranks_per_link=size,
                replicated_fraction=(sent / policy - 1) / (size - 1),
                bucket_bytes=BUCKET_BYTES,
                efficiency=PAYLOAD,
            )
        )
        what = f"{trainer} -> {num_engines} x {engine}, {policy / 1e6:.0f} MB over {megabits} Mbit/s"
        found.rows.append(
            {"what": what, "predicted s": predicted.seconds, "measured s": seconds, "limit": predicted.limit, "published": ""}
        )
        found.goals.append(harness.at_most(f"{what}: measured over predicted", seconds / predicted.seconds, 1.15))
        found.goals.append(harness.at_least(f"{what}: measured over predicted", seconds / predicted.seconds, 0.85))
    for what, size, trainer_ranks, engine_ranks, num_engines, rate, published in STATED:
        told = predict(
            Transfer(
                policy_bytes=size, trainer_ranks=trainer_ranks, engine_ranks=engine_ranks, num_engines=num_engines, link_bytes_per_s=rate
            )
        )
        found.rows.append({"what": what, "predicted s": told.seconds, "measured s": "", "limit": told.limit, "published": published})
    found.notes.append("the rows without a measurement are of machines that are not here: links at 0.9 of their rate, no NIC shared")
    return found


@contextlib.contextmanager
def link(megabits: int) -> Iterator[None]:
    """Two namespaces with a link of this rate between them, for as long as the context lives."""
    names = (TRAINER, ENGINES)
    try:
        for name in names:
            _run(f"ip netns add {name}")
        _run(f"ip -n {TRAINER} link add veth0 type veth peer name veth0 netns {ENGINES}")
        for name, address in zip(names, ADDRESSES, strict=True):
            _run(f"ip -n {name} addr add {address}/24 dev veth0")
            _run(f"ip -n {name} link set veth0 up")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip netns exec {name} ethtool -K veth0 tso off gso off gro off", may_fail=True)  # frames as a wire has them
            _run(f"tc -n {name} qdisc add dev veth0 root tbf rate {megabits}mbit burst 128kb latency 100ms")
        yield
    finally:
        for name in names:
            _run(f"ip netns del {name}", may_fail=True)


def _run(command: str, *, may_fail: bool = False) -> None:
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        done = subprocess.CompletedProcess(command, 127, "", "not installed")
    if done.returncode and not may_fail:
        sys.exit(f"{command}: {done.stderr.strip()}; this bench makes network namespaces, and needs root and iproute2 for it")


if __name__ == "__main__":
    harness.run("road_network", measure, works=())

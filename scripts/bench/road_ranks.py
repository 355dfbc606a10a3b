"""The ranks of trainers and engines, as processes, for the bench of the transport from shard to shard, and raw gloo between the same ones.

Each is a fork that is told what to do line by line, in JSON. What they send is measured from outside of the transport, too: bytes that a
process wrote (`wchar` of `/proc/self/io`: gloo writes to sockets by `writev`), and the growth of its peak resident memory.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipelinerl.messages import Tensor
from pipelinerl.weights import gloo
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.reshard import Box, Part
from pipelinerl.weights.sharded.connections import Place
from pipelinerl.weights.sharded.plan import Bucket, SourcePlan
from pipelinerl.weights.sharded.source import ShardSource
from pipelinerl.weights.sharded.target import ShardTarget
from scripts.bench import children

DEADLINE_S = 60.0
DTYPE = torch.bfloat16


class Rank:
    """A process as the bench has it: it is told, and answers."""

    def __init__(self, work: Callable[[Callable[[], Any], Callable[[Any], None]], None], *, namespace: str = "") -> None:
        own, its = socket.socketpair()

        def run() -> None:
            own.close()
            if namespace:
                _enter(namespace)
            stream = its.makefile("rw")

            def say(value: Any) -> None:
                stream.write(json.dumps(value) + "\n")
                stream.flush()

            torch.set_num_threads(1)
            work(lambda: json.loads(stream.readline() or '"end"'), say)

        self.process_id = children.start(run)
        its.close()
        self._stream = own.makefile("rw")
        own.close()

    def tell(self, *words: Any) -> None:
        self._stream.write(json.dumps(words) + "\n")
        self._stream.flush()

    def hear(self) -> Any:
        """What it says next. Ends this process where it has ended."""
        if not (line := self._stream.readline()):
            raise SystemExit("a rank of the bench failed; its error stands above")
        return json.loads(line)

    def end(self) -> None:
        self._stream.write('"end"\n')  # its end of file never comes: ranks forked after it have this end of the line open, too
        self._stream.close()
        os.waitpid(self.process_id, 0)


def ask_all(ranks: Sequence[Rank], *words: Any) -> list[Any]:
    """Tell all the same, and wait for every answer."""
    for rank in ranks:
        rank.tell(*words)
    return [rank.hear() for rank in ranks]


def trainer_rank(rank: int, layout: tuple[Tensor, ...], own: SourcePlan, *, address: str = "127.0.0.1", namespace: str = "") -> Rank:
    def work(hear: Callable[[], Any], say: Callable[[Any], None]) -> None:
        source = ShardSource(gloo.connect, rank=rank, address=address, deadline_s=DEADLINE_S)
        say([source.place.who, source.place.address, source.place.port, source.place.token])
        source.follow(own, layout)
        probe = _Probe()
        raw: Any = None
        while (words := hear()) != "end":
            match words:
                case ["lead", places, plans]:
                    told = [Place(who=who, address=address, port=port, token=token) for who, address, port, token in places]
                    some = (Bucket(first_byte=0, num_bytes=0, pieces=()),)
                    empty = [SourcePlan(pieces=(), num_bytes=0, buckets=tuple(some if sends else () for sends in one)) for one in plans]
                    source.lead(told, empty)
                    say(None)
                case ["publish", version]:
                    started = time.perf_counter()
                    source.make(0)
                    for number, (_, view) in enumerate(source.views(0)):
                        view.fill_(version + number % 7)
                    sums = source.seal(0, version)
                    say([sums, time.perf_counter() - started])
                case ["offer", encoded]:
                    source.offer(0, encoded.encode())
                    say(None)
                case ["mark"]:
                    source._held.clear()
                    probe.mark()
                    say(None)
                case ["spent"]:
                    say(probe.spent())
                case ["raw", port, world, members, pairs]:
                    raw = raw or _raw_group(port, members.index(["trainer", rank]), world)
                    memory = torch.ones(max(1, own.num_bytes), dtype=torch.uint8)
                    say(None)
                    assert hear() == ["go"]
                    say(_raw_round(raw[0], memory, members.index(["trainer", rank]), pairs))
        source.close()

    return Rank(work, namespace=namespace)


def engine_rank(engine: int, rank: int, parts: dict[str, list[Part]], *, bucket_bytes: int, namespace: str = "") -> Rank:
    def work(hear: Callable[[], Any], say: Callable[[Any], None]) -> None:
        target = ShardTarget(
            lambda carrier: gloo.connect,
            rank=rank,
            parts=parts,
            who=f"engine {engine}",
            deadline_s=DEADLINE_S,
            bucket_bytes=bucket_bytes,
        )
        size = num_bytes(part.tensor for held in parts.values() for part in held)
        probe = _Probe()
        shard: torch.Tensor | None = None
        raw: Any = None
        while (words := hear()) != "end":
            match words:
                case ["reserve"]:
                    shard = torch.ones(size, dtype=torch.uint8) if shard is None else shard
                    say(None)
                case ["fetch", name]:
                    shard = torch.empty(size, dtype=torch.uint8) if shard is None else shard
                    version, sums = target.fetch(name, shard)
                    say([version, sums])
                case ["mark"]:
                    shard = None
                    target._room = None
                    if target._relay is not None:
                        target._relay.withdraw()
                    probe.mark()
                    say(None)
                case ["spent"]:
                    say(probe.spent())
                case ["raw", port, world, members, pairs]:
                    raw = raw or _raw_group(port, members.index(["engine", engine, rank]), world)
                    memory = torch.ones(size, dtype=torch.uint8)
                    say(None)
                    assert hear() == ["go"]
                    say(_raw_round(raw[0], memory, members.index(["engine", engine, rank]), pairs))
        target.close()

    return Rank(work, namespace=namespace)


def parts_of(boxes: dict[str, Box]) -> dict[str, list[Part]]:
    """An engine rank's shard: its boxes one after the other."""
    empty = {name: torch.empty([end - first for first, end in box], dtype=DTYPE, device="meta") for name, box in boxes.items()}
    return {tensor.name: [Part(box=boxes[tensor.name], tensor=tensor)] for tensor in plan_layout(empty)}


def _raw_group(port: int, rank: int, world: int) -> tuple[Any, dist.Store]:
    """A group of all processes, and the store by which they meet, which must live as long."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = datetime.timedelta(seconds=DEADLINE_S)
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    return kind(dist.PrefixStore("raw", store), rank, world, options), store


def _raw_round(group: Any, memory: torch.Tensor, own: int, pairs: Sequence[tuple[int, int, int]]) -> float:
    """Every pair's bytes as one message, all at once: what gloo takes for them by itself."""
    started = time.perf_counter()
    under_way, place = [], 0
    for source, target, size in pairs:
        if target == own:
            under_way.append(group.recv([memory[place : place + size]], source, 0))
            place += size
    for source, target, size in pairs:
        if source == own:
            under_way.append(group.send([memory[:size]], target, 0))
    for work in under_way:
        work.wait()
    return time.perf_counter() - started


def _enter(namespace: str) -> None:
    """Move this thread, and all that it starts, into a network namespace (`ip netns`)."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL("libc.so.6", use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


class _Probe:
    """What this process wrote since it was marked, how far its memory grew at most, and what the processor did for it."""

    def mark(self) -> None:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew at what is resident now
        self._written, self._resident, self._cpu_s = _written(), _status("VmRSS"), time.process_time()

    def spent(self) -> tuple[int, int, float]:
        return _written() - self._written, _status("VmHWM") - self._resident, time.process_time() - self._cpu_s


def _written() -> int:
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["wchar"])


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{field}:"))

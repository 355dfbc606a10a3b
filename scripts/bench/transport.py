"""Measures what the transport and the orchestrator cost: bytes through two processes, trajectories through a core, growth.

`pair`: one process sends completions of 1,000 tokens, another receives them; our link and hub (encoding, acknowledgements, decoding and
all), eight in one call, as an engine sends what ended in one forward pass, and for comparison one by one; and beside them raw pyzmq
sending the very same bytes, one by one, over the same kind of encrypted sockets. `stages`: the real stages over real
sockets, pinned to one core, among engines, a scorer and a trainer that answer at once from the other core; scoring is a no-op. `growth`:
the same stages with peers in memory, whose engines hold a given number of rollouts: seconds of this process for each rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zmq
import zmq.auth.thread

from orchestrator.ledger.ledger import Ledger
from pipelinerl.config import Config
from pipelinerl.messages import (
    FromEngine,
    FromScorer,
    FromTrainer,
    Stop,
    ToEngine,
    ToScorer,
    ToTrainer,
)
from pipelinerl.transport.codec import encode
from pipelinerl.transport.keys import make_keys, read_keys
from pipelinerl.transport.session import WINDOW_BYTES
from pipelinerl.transport.zmq import ZmqHub, ZmqLink
from scripts.bench import children, harness
from scripts.bench.instant_peers import GROUP_SIZE, TOKENS, Meter, Peers, completion, config_of, hubs_of, run_of

ORCHESTRATOR_CORE, PEERS_CORE = 0, 1
NUM_ENGINES, GROUPS_PER_STEP = 4, 32
TOGETHER = 8
"""Completions sent in one call, between two looks for messages."""
DEADLINE_S = 120.0
"""Of one measurement between two processes, a hundred times what it takes."""
PEERS = (*(f"engine-{number}" for number in range(NUM_ENGINES)), "scorer-0", "trainer-0")


def measure(arguments: Any) -> harness.Measured:
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("transport needs two cores: one for the orchestrator, one for its peers")
    quick = arguments.quick
    found = harness.Measured()
    if arguments.only in (None, "pair"):
        _pairs(found, count=8_000 if quick else 40_000, repetitions=3 if quick else 7)
    if arguments.only in (None, "stages"):
        _stages(found, steps=20 if quick else 80)
    if arguments.only in (None, "growth"):
        if quick:
            _growth(found, groups_per_step=500, num_steps=2, repetitions=1, largest=10**4)
        else:
            _growth(found, groups_per_step=1000, num_steps=3, repetitions=2, largest=10**5)
    return found


def _row(what: str, rate: float, bytes_each: float, cpu_us: float, ratio: object) -> harness.Row:
    """`rate` a second; without bytes there are no MB/s."""
    per_second = rate * bytes_each / 1e6 if bytes_each else ""
    return {"what": what, "per second": rate, "MB/s": per_second, "µs CPU each": cpu_us, "beside the reference": ratio}


# --- two processes -----------------------------------------------------------------------------------------------------------------


def _pairs(found: harness.Measured, *, count: int, repetitions: int) -> None:
    size = len(encode(completion("123456/7")))
    rates = harness.in_turns(
        repetitions,
        {
            "ours, sent one by one": lambda: _ours(count, together=1),
            "ours": lambda: _ours(count, together=TOGETHER),
            "raw pyzmq, encrypted": lambda: _raw(count, size, is_encrypted=True),
            "raw pyzmq, in the clear": lambda: _raw(count, size, is_encrypted=False),
        },
    )
    reference = statistics.median(rates["raw pyzmq, encrypted"])
    for name, measured in rates.items():
        rate = statistics.median(measured)
        found.rows.append(_row(f"pair: {name}", rate, size, 1e6 / rate, rate / reference))
    ratio = harness.median_ratio(rates["ours"], rates["raw pyzmq, encrypted"])
    found.goals.append(harness.at_least("trajectories/s over raw pyzmq", ratio, 0.8, work=harness.Work.CPU, speeds=rates.speeds))


def _ours(count: int, *, together: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_keys(folder, PEERS)
        child = children.start(lambda: _send_ours(folder, count, together))
        seconds = asyncio.run(_receive_ours(folder, count))
        os.waitpid(child, 0)
    return count / seconds


def _send_ours(folder: Path, count: int, together: int) -> None:
    """`together` in one call, as an engine sends what ended in one forward pass."""
    link = ZmqLink(folder, "engine", 0, accepts=ToEngine)
    sent = [completion("123456/7")] * together
    for number in range(count // together + 1):
        link.send(*sent)
        if number * together % TOGETHER == 0:  # as an engine does between two forward passes; its credit comes back that way
            link.receive(0.0)
        while link.unacked_bytes > WINDOW_BYTES:  # an engine has decoding to do meanwhile
            link.receive(0.001)
    while not isinstance(link.receive(1.0), Stop):
        pass
    link.close()


async def _receive_ours(folder: Path, count: int) -> float:
    hub = ZmqHub(folder, "engine", accepts=FromEngine)
    received, started = 0, 0.0
    async with asyncio.timeout(DEADLINE_S):
        while received <= count:
            arrived = len(await hub.receive())
            started = started or time.perf_counter()
            received += arrived
    seconds = time.perf_counter() - started
    hub.send("engine-0", Stop(reason=""))
    hub.close()
    return seconds


def _raw(count: int, size: int, *, is_encrypted: bool) -> float:
    """The same bytes by pyzmq alone: what nobody can beat on these sockets. With ZeroMQ's own bounds: queues without make it slower."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_keys(folder, PEERS)
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        if is_encrypted:
            keys = read_keys(folder, "orchestrator")
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.bind("tcp://127.0.0.1:0")
        address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0")  # pyright: ignore[reportArgumentType]
        child = children.start(lambda: _send_raw(folder, address, count, size, is_encrypted=is_encrypted))
        socket.recv_multipart(copy=False)
        started = time.perf_counter()
        for _ in range(count):
            socket.recv_multipart(copy=False)
        seconds = time.perf_counter() - started
        socket.send_multipart([b"engine-0", b"enough"])
        os.waitpid(child, 0)
        socket.close(linger=0)
        context.term()
    return count / seconds


def _send_raw(folder: Path, address: bytes, count: int, size: int, *, is_encrypted: bool) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.routing_id = b"engine-0"
    if is_encrypted:
        keys = read_keys(folder, "engine-0")
        socket.curve_serverkey = read_keys(folder, "orchestrator").public
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.connect(address.decode())
    frame = os.urandom(size)
    for _ in range(count + 1):
        socket.send(frame)
    socket.recv()
    socket.close()
    context.term()


# --- the stages among peers that answer at once ------------------------------------------------------------------------------------


def _stages(found: harness.Measured, *, steps: int) -> None:
    wall_s, cpu_s, counted = harness.steadily(lambda: _among_peers(steps))
    rollouts = counted * GROUPS_PER_STEP * GROUP_SIZE
    bytes_each = len(encode(completion("1/1"))) + 4 * TOKENS + 17 * (TOKENS + 32)
    for what, seconds in (("wall", wall_s), ("a second of the core", cpu_s)):
        found.rows.append(_row(f"stages: {what}", rollouts / seconds, bytes_each, 1e6 * cpu_s / rollouts, ""))
    found.notes.append(f"stages: the orchestrator's core was busy {cpu_s / wall_s:.0%} of the time, encryption included")
    rate: dict[str, Any] = {"work": harness.Work.CPU, "scale": harness.Scale.RATE}
    found.goals.append(harness.at_least("trajectories/s through one core", rollouts / wall_s, 2000, **rate))


def _among_peers(steps: int) -> tuple[float, float, int]:
    """Seconds of wall and of processor, and of how many steps they are."""
    config = config_of(
        num_engines=NUM_ENGINES, max_running=1024, groups_per_step=GROUPS_PER_STEP, steps=steps, max_staleness=8, num_tokens=TOKENS
    )
    peers = Peers(num_engines=NUM_ENGINES, num_tokens=TOKENS, in_flight=0, steps=steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_keys(folder, PEERS)
        child = children.start(lambda: _serve_peers(folder, peers, NUM_ENGINES), cores={PEERS_CORE})
        measured = children.result_of(_orchestrate, folder, config, cores={ORCHESTRATOR_CORE})
        os.waitpid(child, 0)
    return measured


def _orchestrate(folder: Path, config: Config) -> tuple[float, float, int]:
    """Seconds of wall and of processor, and of how many steps they are."""

    async def run() -> Meter:
        hubs = [ZmqHub(folder, role, accepts=kind) for role, kind in _ROLES]
        with contextlib.closing(Meter(folder)) as journal, contextlib.closing(Ledger(folder / "ledger.sqlite")) as ledger:
            ending = await asyncio.wait_for(run_of(config, hubs, journal, ledger).run(), DEADLINE_S)
        for hub in hubs:
            hub.close()
        assert ending.rollouts.trained == config.trainer.steps * config.batch.groups_per_step * GROUP_SIZE, ending.rollouts
        return journal

    journal = asyncio.run(run())
    since = len(journal.steps) // 5
    return *journal.spent(since), len(journal.steps) - 1 - since


_ROLES = (("engine", FromEngine), ("scorer", FromScorer), ("trainer", FromTrainer))


def _serve_peers(folder: Path, peers: Peers, num_engines: int) -> None:
    links = {f"engine-{number}": ZmqLink(folder, "engine", number, accepts=ToEngine) for number in range(num_engines)}
    links["scorer-0"] = ZmqLink(folder, "scorer", 0, accepts=ToScorer)
    links["trainer-0"] = ZmqLink(folder, "trainer", 0, accepts=ToTrainer)
    for peer, message in peers.announce():
        links[peer].send(message)
    stopped, next_sign = set(), time.monotonic()
    while len(stopped) < len(links):
        if time.monotonic() >= next_sign:
            next_sign += 1.0
            for peer, message in peers.signs_of_life():
                links[peer].send(message)
        is_idle = True
        for name, link in links.items():
            while (message := link.receive(0.0)) is not None:
                is_idle = False
                if isinstance(message, Stop):
                    stopped.add(name)
                for peer, answer in peers.answer(name, message):
                    links[peer].send(answer)
        if is_idle:
            time.sleep(2e-4)
    for link in links.values():
        link.close()


# --- how the cost grows ------------------------------------------------------------------------------------------------------------


def _growth(found: harness.Measured, *, groups_per_step: int, num_steps: int, repetitions: int, largest: int) -> None:
    """Take turns, and of each size the lowest: whatever else the machine does only ever adds."""
    cost = dict.fromkeys([(1_000, 10), (10_000, 10), (largest, 10), (10_000, 1000)], float("inf"))
    for _ in range(repetitions):
        for in_flight, num_engines in cost:
            once = _cost(in_flight=in_flight, num_engines=num_engines, groups_per_step=groups_per_step, num_steps=num_steps)
            cost[in_flight, num_engines] = min(cost[in_flight, num_engines], once)
    for (in_flight, num_engines), each in cost.items():
        found.rows.append(_row(f"growth: {in_flight} in flight, {num_engines} engines", 1e6 / each, 0, each, each / cost[1_000, 10]))
    more_rollouts, more_engines = cost[largest, 10] / cost[1_000, 10], cost[10_000, 1000] / cost[10_000, 10]
    found.goals.append(harness.at_most(f"cost at {largest} in flight over 1,000", more_rollouts, 1.2, work=harness.Work.CPU))
    found.goals.append(harness.at_most("cost with 1,000 engines over 10", more_engines, 1.2, work=harness.Work.CPU))


def _cost(*, in_flight: int, num_engines: int, groups_per_step: int, num_steps: int) -> float:
    """Microseconds of processor for each rollout, once the engines hold `in_flight`; in a process of its own."""
    return children.result_of(_measure_growth, in_flight, num_engines, groups_per_step, num_steps, cores={ORCHESTRATOR_CORE})


def _measure_growth(in_flight: int, num_engines: int, groups_per_step: int, num_steps: int) -> float:
    num_tokens = 16
    per_step = groups_per_step * GROUP_SIZE
    steps = num_steps + 2
    max_staleness = in_flight // per_step + 4
    config = config_of(
        num_engines=num_engines,
        max_running=in_flight + 2 * per_step,
        groups_per_step=groups_per_step,
        steps=steps + max_staleness + 2,
        max_staleness=max_staleness,
        num_tokens=num_tokens,
    )

    async def run() -> Meter:
        peers = Peers(num_engines=num_engines, num_tokens=num_tokens, in_flight=in_flight, steps=config.trainer.steps)
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.closing(Ledger(None)) as ledger,
            contextlib.closing(Meter(Path(folder), enough=steps)) as journal,
        ):
            run = run_of(config, hubs_of(peers), journal, ledger)
            journal.when_enough = run.stop
            await run.run()
        return journal

    journal = asyncio.run(run())
    _, cpu_s = journal.spent(1)
    return 1e6 * cpu_s / ((len(journal.steps) - 2) * per_step)


if __name__ == "__main__":
    harness.run("transport", measure, options={"--only": {"choices": ["pair", "stages", "growth"], "help": "one of the three parts"}})

"""Engine processes, real but for the model: one command starts them all, and each says why it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.config.file import parse, write_run
from pipelinerl.messages import (
    Alive,
    Completion,
    EngineLoad,
    EngineReady,
    Failed,
    Finish,
    FromEngine,
    Generate,
    Message,
    Sampling,
    StageWeights,
    Starting,
    Stop,
    WeightsCommitted,
    WeightsRefused,
)
from pipelinerl.observe.lines import read_journals
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub
from tests import processes
from tests.keys import PEERS

pytestmark = pytest.mark.process


class Engines:
    """Two engines of a run and the orchestrator's end of their connections."""

    def __init__(self, folder: Path) -> None:
        config = parse(
            {
                "model": {"path": "unused", "max_tokens": 100},
                "data": {"source": "unused"},
                "reward": [{"function": "unused:reward"}],
                "engine": {"kind": "fake", "count": 2, "max_running": 3},
                "run": {"restarts": 1, "restart_wait_s": 0.1},
            },
            origin="test",
        )
        write_run(folder, config)
        make_keys(folder, PEERS)
        self.folder = folder
        self.hub = ZmqHub(folder, "engine", accepts=FromEngine)
        with open(folder / "stderr", "wb") as stderr:
            command = (sys.executable, "-m", "pipelinerl.engine", "--run", str(folder))
            self.parent = subprocess.Popen(command, stderr=stderr)
        self.process_ids: dict[int, int] = {}
        self._arrived: list[tuple[str, Message]] = []

    async def start(self) -> None:
        while len(self.process_ids) < 2:
            for peer, message in await asyncio.wait_for(self.hub.receive(), processes.PATIENCE_S):
                if isinstance(message, EngineReady):
                    assert peer == f"engine-{message.engine_id}"
                    assert (message.max_model_tokens, message.max_running) == (100, 3)
                    self.process_ids[message.engine_id] = message.process_id

    async def wait_for(self, *kinds: type[Message], peer: str | None = None) -> Message:
        """The next message of one of these kinds, from a peer."""
        async with asyncio.timeout(processes.PATIENCE_S):
            while True:
                for index, (sender, message) in enumerate(self._arrived):
                    if isinstance(message, kinds) and peer in (None, sender):
                        del self._arrived[index]
                        return message
                self._arrived += await self.hub.receive()

    def ended(self) -> int:
        return self.parent.wait(processes.PATIENCE_S)

    def said(self) -> str:
        return (self.folder / "stderr").read_text()


@pytest.fixture
def with_engines(tmp_path: Path) -> Iterator[Callable[[Callable[[Engines], Coroutine[None, None, None]]], None]]:
    """Run a program with two engines started."""
    made: list[Engines] = []

    def run(program: Callable[[Engines], Coroutine[None, None, None]]) -> None:
        async def whole() -> None:
            made.append(Engines(tmp_path))
            try:
                await made[0].start()
                await program(made[0])
            finally:
                made[0].hub.close()

        asyncio.run(whole())

    yield run
    for engines in made:
        engines.parent.kill()
        engines.parent.wait()
        for process_id in engines.process_ids.values():
            processes.end(process_id)


Run = Callable[[Callable[[Engines], Coroutine[None, None, None]]], None]


def ask(rollout_id: str, *, max_tokens: int = 5) -> Generate:
    return Generate(rollout_id=rollout_id, attempt=0, token_ids=np.array([3, 4], np.int32), sampling=Sampling(max_tokens=max_tokens))


def test_engines_serve_swap_refuse_and_end_well(with_engines: Run):
    async def program(engines: Engines) -> None:
        for number in range(8):
            engines.hub.send(f"engine-{number % 2}", ask(f"0/{number}"))
        done = [await engines.wait_for(Completion) for _ in range(8)]
        assert {completion.rollout_id for completion in done if isinstance(completion, Completion)} == {f"0/{n}" for n in range(8)}
        engines.hub.send("engine-1", StageWeights(version=1, buffer="buffer", digest=""))
        committed = await engines.wait_for(WeightsCommitted)
        assert isinstance(committed, WeightsCommitted)
        assert (committed.engine_id, committed.version) == (1, 1)
        engines.hub.send("engine-1", StageWeights(version=2, buffer="corrupt", digest="ab"))
        refused = await engines.wait_for(WeightsRefused)
        assert isinstance(refused, WeightsRefused)
        assert refused.error == "WeightsError: weight buffer corrupt: digest is not ab"
        engines.hub.send("engine-1", ask("1/0"))
        late = await engines.wait_for(Completion)
        assert isinstance(late, Completion)
        assert late.finish in (Finish.STOP, Finish.LENGTH)
        assert set(late.versions.tolist()) == {1}
        for engine_id in range(2):
            engines.hub.send(f"engine-{engine_id}", Stop(reason="finished"))
        assert engines.ended() == 0

    with_engines(program)


def test_an_idle_engine_sends_signs_of_life_and_keeps_a_journal(with_engines: Run, tmp_path: Path):
    async def program(engines: Engines) -> None:
        await engines.wait_for(EngineLoad, peer="engine-1")
        load = await engines.wait_for(EngineLoad, peer="engine-1")
        assert isinstance(load, EngineLoad)
        assert (load.engine_id, load.num_running, load.num_tokens) == (1, 0, 0)
        assert load.idle_s > 0.5

    with_engines(program)
    kinds = {(line["process"], line["kind"]) for line in read_journals(tmp_path)}
    assert ("engine-1", "load") in kinds


def test_an_engine_that_cannot_go_on_says_why_and_the_others_end_with_it(with_engines: Run, tmp_path: Path):
    """It is sent what no engine takes."""

    async def program(engines: Engines) -> None:
        engines.hub.send("engine-1", Alive(busy_with="not for engines"))
        failed = await engines.wait_for(Failed)
        assert isinstance(failed, Failed)
        assert failed.error.startswith("WireError: ")
        assert "'Alive'" in failed.error
        assert engines.ended() == 1
        assert not any(processes.is_alive(process_id) for process_id in engines.process_ids.values())

    with_engines(program)
    record = json.loads((tmp_path / "failures" / "engine-1.json").read_text())
    assert record["error"].startswith("WireError: ")


def test_an_engine_that_is_killed_is_named_and_started_again_until_the_budget_is_spent(with_engines: Run):
    """It can say nothing itself: an operator who reads the log must not have to guess which engine ran out of memory."""

    async def program(engines: Engines) -> None:
        os.kill(engines.process_ids[1], signal.SIGKILL)
        starting = await engines.wait_for(Starting, peer="engine-1")
        ready = await engines.wait_for(EngineReady, peer="engine-1")
        assert isinstance(starting, Starting)
        assert isinstance(ready, EngineReady)
        assert starting.process_id == ready.process_id != engines.process_ids[1]
        assert processes.is_alive(engines.process_ids[0])
        os.kill(ready.process_id, signal.SIGKILL)
        assert engines.ended() == 1
        assert engines.said().count("engine-1 (process") == 2
        assert engines.said().count("SIGKILL") == 2
        processes.wait_until(lambda: not processes.is_alive(engines.process_ids[0]), what="engine 0 outlives its sibling")

    with_engines(program)


def test_engines_end_with_the_process_that_started_them(with_engines: Run):
    async def program(engines: Engines) -> None:
        engines.parent.kill()
        processes.wait_until(
            lambda: not any(processes.is_alive(process_id) for process_id in engines.process_ids.values()),
            what="an engine outlives its parent",
        )
        with contextlib.suppress(ProcessLookupError):
            engines.parent.wait()

    with_engines(program)

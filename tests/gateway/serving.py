"""A gateway on a real socket, in front of the product's own leasing stage and engine loop; only the engine's words are written by hand."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.engine import Engine
from orchestrator.peers.engines import Engines
from orchestrator.peers.gateway import Gateway as GatewayPeer
from orchestrator.peers.peers import Peers
from orchestrator.rollouts.rollout import Rollout
from orchestrator.stages.agent_turns import AgentTurns
from orchestrator.stages.leasing import Leasing, Seat
from pipelinerl.config import GatewaySection
from pipelinerl.data.chat import ChatTemplate
from pipelinerl.data.tokenizer import decoder, load_tokenizer
from pipelinerl.data.tool_calls import ToolCallParser
from pipelinerl.engine.base import Engine as AnEngine
from pipelinerl.engine.base import Limits, Sampled
from pipelinerl.engine.loop import EngineLoop, Stager
from pipelinerl.engine.stop_strings import StopStrings
from pipelinerl.gateway.episodes import Episodes
from pipelinerl.gateway.http import Gateway, Model
from pipelinerl.gateway.limits import Protocol
from pipelinerl.gateway.listening import Server
from pipelinerl.gateway.orchestrator import Orchestrator
from pipelinerl.gateway.turns import Turns
from pipelinerl.messages import (
    Finish,
    FromEngine,
    FromGateway,
    Generate,
    Message,
    Prompt,
    Sampling,
    StageWeights,
    ToEngine,
    ToGateway,
    Trajectory,
    WeightsCommitted,
)
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch
from tests.sim.clock import later
from tests.sim.memory import MemoryHub, MemoryLink
from tests.tokenizers import make_bytes

CHATML = (
    "{% if tools %}{{ '[tools ' + tools | map(attribute='function.name') | join(',') + ']' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
RUN_TOKEN = "run-token"
MODEL = "test-model"
Says = Callable[[str], str]


class ScriptedEngine:
    """Says what it is told to, a token for each pass, to whatever it is asked: an `Engine`."""

    def __init__(self, tokenizer: Any) -> None:
        self.limits = Limits(max_model_tokens=1 << 20, max_running=256, tensors=())
        self.says: Says = lambda prompt: "fine"
        self.asked: list[tuple[str, list[int]]] = []
        """Each request as text and as tokens, in order."""
        self.constraints: list[dict[str, Any] | None] = []
        """The constraint of each, in order."""
        self.is_held = False
        """True while it samples nothing."""
        self._tokenizer = tokenizer
        self._running: dict[str, tuple[Generate, list[int]]] = {}
        self._num_said: collections.Counter[str] = collections.Counter()

    @property
    def kv_used(self) -> float | None:
        return None

    @property
    def waiting(self) -> Collection[str]:
        return self._running.keys() if self.is_held else ()

    def submit(self, request: Generate, *, version: int, rollback_epoch: int = 0) -> None:
        ids = request.token_ids.tolist()
        text = self._tokenizer.decode(ids)
        self.asked.append((text, ids))
        answer = self._tokenizer.encode(self.says(text), add_special_tokens=False)
        self.constraints.append(next(iter(request.sampling.structured_outputs), None))
        self._running[request.rollout_id] = (request, [*answer, self._tokenizer.eos_token_id])

    def cancel(self, rollout_id: str) -> None:
        self._running.pop(rollout_id, None)
        self._num_said.pop(rollout_id, None)

    def step(self) -> list[Sampled]:
        token_ids: list[int] = []
        finishes: dict[str, Finish] = {}
        running = [] if self.is_held else list(self._running)
        for name in running:
            request, left = self._running[name]
            token_ids.append(left.pop(0))
            self._num_said[name] += 1
            if not left or self._num_said[name] >= request.sampling.max_tokens:
                finishes[name] = Finish.LENGTH if left else Finish.STOP
                self.cancel(name)
        logprobs = np.full(len(running), -0.5, np.float32)
        return [Sampled(rollout_ids=running, token_ids=np.array(token_ids, np.int32), logprobs=logprobs, finishes=finishes)]

    def stage(self, order: StageWeights) -> None:
        """Every policy is the same."""

    def commit(self, recompute: Collection[str] = ()) -> Collection[str]:
        return ()


class DescriptorLink:
    """A link in memory with a descriptor that an event loop can watch."""

    def __init__(self, link: MemoryLink) -> None:
        self.name = link.name
        self._link = link
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        take = link.take

        def take_and_ring(frame: bytes) -> None:
            take(frame)
            os.eventfd_write(self._bell, 1)

        vars(link)["take"] = take_and_ring

    @property
    def silent_s(self) -> float:
        return self._link.silent_s

    def introduce(self, make: Any) -> None:
        self._link.introduce(make)

    def send(self, *messages: Message) -> None:
        self._link.send(*messages)

    def receive(self, timeout_s: float) -> Message | None:
        if (message := self._link.receive(0)) is None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        return message

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def fileno(self) -> int:
        return self._bell

    def close(self) -> None:
        self._link.close()
        os.close(self._bell)


class Serving:
    """Everything between an agent's HTTP client and an engine, in a thread of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        max_context_tokens: int = 4096,
        max_tokens: int = 1 << 20,
        calls: Callable[[Any], ToolCallParser | None] | None = None,
        engine: AnEngine | None = None,
        stager: Stager | None = None,
        structured_outputs: tuple[dict[str, Any], ...] = (),
        policies: tuple[str, ...] = (),
        **section: Any,
    ) -> None:
        """`engine` and its `stager`: in place of the engine whose words are written; its tokens are bytes, too. `policies`: the names of
        several, of which the last is frozen; one engine speaks for all.
        """
        self._policies = policies
        self._calls = calls
        self._sampling = Sampling(max_tokens=256, structured_outputs=structured_outputs)
        self._max_context_tokens = max_context_tokens
        self._max_tokens = max_tokens
        make_bytes(folder)
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = CHATML
        tokenizer.add_special_tokens({"eos_token": "<|end|>"})
        self.tokenizer = tokenizer
        self.engine = ScriptedEngine(tokenizer)
        self.engine_loop = EngineLoop(
            engine or self.engine,
            engine_id=0,
            stager=stager or (lambda order: later(0.0)),
            finder=lambda prompt, stop: StopStrings(tokenizer.backend_tokenizer, prompt=prompt, stop=stop),
        )
        self.trajectories: list[Trajectory] = []
        self.section = GatewaySection(**section)
        self.leasing: Leasing
        self.orchestrator: Orchestrator
        self._version = 0
        self._loop = asyncio.new_event_loop()
        self._ready, self._ended = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Serving:
        self._thread.start()
        assert self._ready.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    # --- for tests ---

    def offer(self, text: str = "hello", *, name: str = "0/0", version: int = 0, policy: str = "", **columns: Any) -> None:
        """Have a rollout lent."""
        ids = np.array(self.tokenizer.encode(text), np.int32)
        prompt = Prompt(prompt_id="0:0", text=text, token_ids=ids, columns=columns)
        group_id, _, sibling = name.partition("/")
        rollout = Rollout(
            rollout_id=name,
            group_id=int(group_id),
            sibling=int(sibling),
            attempt=0,
            prompt=prompt,
            version=version,
            admitted_at=0.0,
            is_greedy=False,
        )
        self.do(lambda: self.leasing.offer(rollout, then=self.trajectories.append, policy=policy))

    def lend(self, client: httpx.Client, **prompt: Any) -> dict[str, Any]:
        """Offer a rollout, and take it as an agent."""
        self.offer(**prompt)
        answer = client.post("/episodes/next", json={"timeout_s": 5}, headers={"authorization": f"Bearer {RUN_TOKEN}"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=10.0)

    def publish(self, *, buffer: str = "none", digest: str = "") -> None:
        """Have the engine change its weights."""
        self._version += 1
        order = StageWeights(version=self._version, buffer=buffer, digest=digest)
        self.do(lambda: (self._engines[0].ordered(version=order.version, rollback_epoch=0), self._hub.send("engine-0", order)))
        self.until(lambda: self._engines[0].version == self._version)

    def do(self, action: Callable[[], Any]) -> Any:
        """Do something in the thread that serves; return what it returns."""

        async def act() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(10.0)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, looked at between two turns of the loop."""

        async def look() -> None:
            async with asyncio.timeout(10.0):
                while not holds():  # noqa: ASYNC110
                    await asyncio.sleep(0.002)  # many things are waited for here

        asyncio.run_coroutine_threadsafe(look(), self._loop).result(11.0)

    # --- the thread ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._listener.close()

    async def _serve(self) -> None:
        watch, credits = Watch(stall_limit_s=1000.0), Signal()
        self._hub, gateway_hub = MemoryHub(accepts=FromEngine), MemoryHub(accepts=FromGateway)
        engine_peers = Peers(self._hub, role="engine", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        gateway_peers = Peers(gateway_hub, role="gateway", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        self._engines = Engines(engine_peers, expected=1, watch=watch, credits=credits)
        self._engines.on_policy(WeightsCommitted, self._committed)
        peer = GatewayPeer(gateway_peers)
        ledger, others = Ledger(None), [Ledger(None) for _ in self._policies[1:]]
        self.leasing = Leasing(gateway=peer, seats={}, watch=watch, section=self.section)
        for number, name in enumerate(self._policies or ("",)):
            turns = AgentTurns(
                gateway=peer,
                engines=self._engines,
                watch=watch,
                section=self.section,
                sampling=self._sampling,
                max_context_tokens=self._max_context_tokens,
                max_tokens=self._max_tokens,
            )
            is_frozen = number and number == len(self._policies) - 1
            self.leasing.seats[name] = Seat(turns=turns, watch=watch, ledger=None if is_frozen else [ledger, *others][number])
        link = DescriptorLink(gateway_hub.connect("gateway-0", accepts=ToGateway))
        self.orchestrator = Orchestrator(link, address=self.address, episodes=Episodes(b"secret"))
        gateway = self._gateway()
        self.server = Server(
            uvicorn.Config(gateway.app(), http=Protocol, ws="none", lifespan="off", log_level="error", timeout_graceful_shutdown=1)
        )
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(each)
                for each in (
                    engine_peers.run(),
                    gateway_peers.run(),
                    self._serve_engine(self._hub.connect("engine-0", accepts=ToEngine)),
                    self.orchestrator.run(),
                )
            ]
            await self._engines.wait_until_ready()
            tasks.append(group.create_task(self.leasing.run()))
            serving = group.create_task(self.server.serve(sockets=[self._listener]))
            while not self.server.started:  # noqa: ASYNC110  # uvicorn tells nobody
                await asyncio.sleep(0.005)
            self._ready.set()
            await self._ended.wait()
            self.server.should_exit = True
            await serving
            for task in tasks:
                task.cancel()
        link.close()
        for one in (ledger, *others):
            one.close()

    def _committed(self, engine: Engine, committed: WeightsCommitted) -> None:
        engine.version = committed.version
        self._engines.changed.set()

    def _gateway(self) -> Gateway:
        turns = Turns(
            self.orchestrator,
            template=ChatTemplate(self.tokenizer),
            decode=decoder(self.tokenizer),
            calls=self._calls(self.tokenizer) if self._calls else None,
            max_turns=self.section.max_requests,
            max_parallel=self.section.max_parallel,
        )
        return Gateway(
            orchestrator=self.orchestrator,
            policies=dict.fromkeys(self._policies or (MODEL,), Model(turns=turns, max_tokens=256, vocabulary=len(self.tokenizer))),
            section=self.section,
            address=self.address,
            run_token=RUN_TOKEN,
        )

    async def _serve_engine(self, link: MemoryLink) -> None:
        loop = self.engine_loop
        link.introduce(lambda kept: [loop.introduce(kept, process_id=1)])
        while True:
            while (message := link.receive(0)) is not None:
                loop.handle(message)
            loop.advance()
            for answer in loop.outbox:
                link.send(answer)
            loop.outbox.clear()
            await asyncio.sleep(0.001)


@contextlib.contextmanager
def serving(folder: Path, **section: Any) -> Iterator[Serving]:
    """Serve while the block runs."""
    with Serving(folder, **section) as one:
        yield one

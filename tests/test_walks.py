"""The five walks of ARCHITECTURE.md, traced: each function that a walk names is called, in the walk's order, with the thing in hand.

The hops are read from the page. One run goes through in this process, on simulated time: the whole orchestrator, engines that sample by
hashing but take real weights, a real step of a tiny model, the real publisher. A profiler sees every call, and the thing is recognised
by itself: the prompt by its tokens, a token by its own log-probability, a policy by its digest, a setting by its value, a reward by its
number.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import itertools
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from orchestrator.advantages import MethodAdvantages
from orchestrator.data.sources import PromptSource
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config, DataSection
from pipelinerl.data.tokenizer import TextEncoder, load_tokenizer
from pipelinerl.engine.base import Sampled
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.messages import (
    CheckpointSaved,
    LayoutFixed,
    MicroBatch,
    PolicyPublished,
    Prompt,
    Request,
    Result,
    ScorerReady,
    StageWeights,
    StepClosed,
    StepDone,
    Stop,
    TakeMicroBatch,
    TrainerReady,
    TrainingEnded,
)
from pipelinerl.messages.base import Outcome
from pipelinerl.rewards.reward import Shape, read_values
from pipelinerl.weights.base import plan_layout
from pipelinerl.weights.receiver import WeightReceiver
from pipelinerl.weights.shared_memory import SharedMemoryReceiver
from pipelinerl.weights.swap import Placed, PointerSwap
from tests.sim import peers, run
from tests.sim.clock import later
from tests.sim.memory import MemoryLink
from tests.tokenizers import make_words
from tests.trainer.tiny import VOCABULARY, make_folder, make_model, make_step
from trainer.weights.publisher import Publisher

PAGE = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text()
MAX_HOPS = 6
MAX_STALENESS = 13
"""A number that nothing else in the run has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A function that a walk names, and what its frames run."""

    name: str
    code: types.CodeType


def walks() -> dict[str, tuple[Hop, ...]]:
    """Title of each walk of the page -> its hops."""
    part = PAGE.split("\n## Five walks\n")[1].split("\n## ")[0]
    return {
        title: tuple(hop(name) for name in re.findall(r"^\d\. `([\w.]+:[\w.]+)`", text, re.MULTILINE))
        for title, text in re.findall(r"\n### (.*?)\n(.*?)(?=\n### |\Z)", part, re.DOTALL)
    }


def hop(name: str) -> Hop:
    module, _, qualified = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return Hop(name=name, code=found.__code__)


# --- recognising the thing -----------------------------------------------------------------------------------------------------------


def inside(value: Any, name: str = "", depth: int = 4) -> Iterator[tuple[str, Any]]:
    """A value and what it holds, each under its name: fields of messages and dataclasses, entries of containers."""
    yield name, value
    if depth == 0:
        return
    held: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, msgspec.Struct):
        held = ((field, getattr(value, field)) for field in value.__struct_fields__)
    elif dataclasses.is_dataclass(value):
        held = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        held = ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        held = ((name, inner) for inner in value)
    for inner_name, inner in held:
        yield from inside(inner, inner_name, depth - 1)


def is_it(thing: Any, name: str, value: Any) -> bool:
    """True where a value is the thing, or a column that holds it."""
    if isinstance(thing, Setting):
        return name == thing.name and value == thing.value
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(thing, np.ndarray):
        return isinstance(value, np.ndarray) and value.shape == thing.shape and bool((value == thing).all())
    if isinstance(thing, str):
        return isinstance(value, str) and value == thing
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return bool((value.astype(np.float32) == np.float32(thing)).any())
    return isinstance(value, float) and np.float32(value) == np.float32(thing)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A key's last name and its value."""

    name: str
    value: int


def of_first(kind: type, take: Callable[[Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: take(value) if isinstance(value, kind) else None


BORN: dict[str, Callable[[str, Any], Any]] = {
    "A prompt to the engine": of_first(Prompt, lambda prompt: prompt.token_ids),
    "A token to the loss": of_first(Sampled, lambda sampled: float(sampled.logprobs[0])),
    "A policy to the swap": of_first(PolicyPublished, lambda published: published.digest),
    "A config key to its line": lambda name, value: Setting(name, value) if value == MAX_STALENESS else None,
    "A reward to the advantage": lambda name, value: value if name == "returned" and isinstance(value, float) else None,
}
"""The thing of each walk, as its first function has it."""


class Tracer:
    """Follows one thing through one walk: which hops had it in hand, in order."""

    def __init__(self, title: str, hops: tuple[Hop, ...]) -> None:
        self.hops = hops
        self.seen: list[str] = []
        """Hops in the order in which each first had the thing."""
        self._born = BORN[title]
        self._thing: Any = None

    def look(self, frame: types.FrameType, returned: Any) -> None:
        """Look whether a hop's frame has the thing, or returns it."""
        at = [hop.name for hop in self.hops if hop.code is frame.f_code]
        if not at or at[0] in self.seen:
            return
        held = itertools.chain(
            *(inside(value, name) for name, value in frame.f_locals.items() if name != "self"),
            inside(returned, "returned"),
            of_itself(frame.f_locals.get("self")),
        )
        if self._thing is None:
            if at[0] == self.hops[0].name:
                self._thing = next((thing for name, value in held if (thing := self._born(name, value)) is not None), None)
                self.seen += [] if self._thing is None else at
        elif any(is_it(self._thing, name, value) for name, value in held):
            self.seen += at


def of_itself(owner: Any) -> Iterator[tuple[str, Any]]:
    """Settings that an object keeps: numbers under its own names, or one level deeper."""
    for name, value in getattr(owner, "__dict__", {}).items():
        yield from inside(value, name.lstrip("_"), 1) if dataclasses.is_dataclass(value) else ((name.lstrip("_"), value),)


def traced(tracers: list[Tracer], work: Callable[[], Any]) -> Any:
    """Run something with every call looked at. A caller that has the thing counts before whom it calls."""
    codes = {hop.code for tracer in tracers for hop in tracer.hops}

    def look(frame: types.FrameType, event: str, argument: Any) -> None:
        if frame.f_code not in codes or event not in ("call", "return"):
            return
        chain: list[types.FrameType] = []
        outer: types.FrameType | None = frame.f_back
        while outer is not None:
            if outer.f_code in codes:
                chain.insert(0, outer)
            outer = outer.f_back
        for tracer in tracers:
            for one in chain:
                tracer.look(one, None)
            tracer.look(frame, argument if event == "return" else None)

    sys.setprofile(look)
    try:
        return work()
    finally:
        sys.setprofile(None)


# --- the run -------------------------------------------------------------------------------------------------------------------------


class Sampler(FakeEngine):
    """Gives every token a log-probability of its own, and takes real policies."""

    numbers = itertools.count(1)

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(max_model_tokens=64, max_running=16, mean_tokens=6, vocabulary=VOCABULARY)
        layout = plan_layout(weights)
        self.limits = dataclasses.replace(self.limits, tensors=layout)
        parameters = {name: torch.nn.Parameter(tensor.clone(), requires_grad=False) for name, tensor in weights.items()}
        placed = [
            Placed(parameter=parameters[tensor.name], offset_bytes=tensor.offset_bytes, num_bytes=tensor.num_bytes) for tensor in layout
        ]
        self._receiver = WeightReceiver(PointerSwap(placed), layout=layout, receiver=SharedMemoryReceiver())

    def step(self) -> list[Sampled]:
        (sampled,) = super().step()
        logprobs = np.array([-1 - next(self.numbers) / 65536 for _ in sampled.rollout_ids], np.float32)
        return [dataclasses.replace(sampled, logprobs=logprobs)]

    def stage(self, order: StageWeights) -> None:
        super().stage(order)
        self._receiver.stage(order)

    def commit(self, recompute: Any = ()) -> Any:
        self._receiver.commit()
        return super().commit(recompute)


def cast(folder: Path) -> run.Cast:
    """Peers that hold a tiny model: engines that take its policies, a trainer that trains it, a scorer with a user's function."""
    model = make_model(make_folder(folder / "model", family="qwen3"))
    numbers = itertools.count(3)

    def my_reward(prompt: str, completion: str) -> float:
        return 1 / next(numbers)

    async def engine(link: MemoryLink, *, engine_id: int, max_running: int, world: peers.World) -> None:
        sampler = Sampler(model.tensors())

        def stage(order: StageWeights) -> Any:
            sampler.stage(order)
            return later(world.stage_s)

        loop = EngineLoop(sampler, engine_id=engine_id, stager=stage, clock=asyncio.get_running_loop().time)
        link.introduce(lambda kept: [loop.introduce(kept, process_id=1000 + engine_id)])
        for turn in itertools.count():
            if not turn % 64:
                link.send(loop.load(idle_s=0.0))
            while (message := link.receive(0)) is not None:
                if isinstance(message, Stop):
                    return
                loop.handle(message)
            await asyncio.sleep(world.step_s)
            loop.advance()
            for answer in loop.outbox:
                link.send(answer)
            loop.outbox.clear()

    async def scorer(link: MemoryLink, *, num_slots: int, world: peers.World) -> None:
        link.introduce(lambda kept: [ScorerReady(scorer_id=0, process_id=2000, num_slots=num_slots)])
        while not isinstance(message := await link.wait(), Stop):
            assert isinstance(message, Request)
            (value,) = read_values(my_reward("", ""), shape=Shape.OURS, num_completions=1)
            assert value is not None
            scored = {"rewards": (value,), "components": ({"reward": value},)}
            link.send(Result(request_id=message.request_id, outcome=Outcome.OK, **scored))

    async def trainer(link: MemoryLink, *, num_steps: int, world: peers.World, record: peers.TrainerRecord) -> None:
        step, _ = make_step(model)
        publisher = Publisher(model.tensors, tied_names=model.tied_names, run_folder=folder, deadline_s=10.0)
        link.send(TrainerReady(replica=0, num_replicas=1, process_id=os.getpid(), version=0))
        try:
            fixed = await link.wait()
            assert isinstance(fixed, LayoutFixed)
            publisher.fix_layout(fixed.tensors, num_engines=fixed.num_engines, transport=fixed.transport)
            last = ""
            for number in range(num_steps):
                index = 0
                while True:
                    link.send(TakeMicroBatch(replica=0, step=number, index=index))
                    while not isinstance(row := await link.wait(), MicroBatch | StepClosed):
                        pass
                    if isinstance(row, StepClosed):
                        break
                    step.add(row)
                    index += 1
                step.train_held(row)
                metrics = step.finish(row)
                link.send(StepDone(step=number, metrics={"grad_norm": metrics["grad_norm"]}))
                published = publisher.publish(number + 1)
                assert published is not None
                link.send(published)
                last = row.commit
            link.send(CheckpointSaved(version=num_steps, commit=last, num_bytes=0, save_s=0.0))
            link.send(TrainingEnded(version=num_steps))
            while not isinstance(await link.wait(), Stop):
                pass
        finally:
            publisher.close()

    return run.Cast(engine=engine, scorer=scorer, trainer=trainer)


def source(folder: Path) -> PromptSource:
    """Rows of a file, through a tokenizer, as in any run."""
    make_words(folder / "tokenizer", template=None, eos="</s>")
    rows = [json.dumps({"prompt": " ".join(words)}) for words in itertools.permutations(["a", "b", "c", "x", "y"], 4)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    section = DataSection(source=str(folder / "prompts.jsonl"))  # pyright: ignore[reportCallIssue]
    return PromptSource(section, encoder=TextEncoder(load_tokenizer(folder / "tokenizer")), seed=0, max_prompt_tokens=9)


def train(folder: Path) -> None:
    """Two steps, from the settings to the last swap."""
    settings: Config = run.config(
        rollout={"group_size": 4, "max_tokens": 12},
        engine={"kind": "fake", "count": 1, "max_running": 16},
        batch={"groups_per_step": 2, "max_tokens": 128},
        pipeline={"max_staleness": MAX_STALENESS},
        trainer={"steps": 2},
        weights={"transport": "shared_memory"},
    )
    credit = MethodAdvantages(method_of(settings), settings.reward)
    ended = run.run(settings, folder=folder, cast=cast(folder), group_advantages=credit, source=source(folder))
    assert ended.ending.reason == "finished"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tracer]:
    """Every walk, followed through one run."""
    tracers = {title: Tracer(title, hops) for title, hops in walks().items()}
    folder = tmp_path_factory.mktemp("walk")
    traced(list(tracers.values()), lambda: train(folder))
    return tracers


def test_there_are_five_walks_of_at_most_six_hops() -> None:
    assert list(walks()) == list(BORN)
    assert all(2 <= len(hops) <= MAX_HOPS for hops in walks().values())


@pytest.mark.parametrize("title", list(BORN))
def test_a_walk_is_gone_as_the_page_says(title: str, found: dict[str, Tracer]) -> None:
    tracer = found[title]
    assert tracer.seen == [hop.name for hop in tracer.hops]


def test_a_walk_that_skips_a_function_or_names_it_too_early_is_noticed(tmp_path: Path) -> None:
    """Each hop is needed where it stands: in another order, or with a function that never has the thing, the walk is not gone."""
    title = "A prompt to the engine"
    hops = walks()[title]
    elsewhere = hop("pipelinerl.algorithms.advantage.outcome:grpo")
    swapped, wrong = Tracer(title, (hops[0], hops[2], hops[1], *hops[3:])), Tracer(title, (*hops[:-1], elsewhere))
    traced([swapped, wrong], lambda: train(tmp_path))
    for tracer in (swapped, wrong):
        assert tracer.seen != [hop.name for hop in tracer.hops]

#!/usr/bin/env python
"""Measures the cost of scoring the steps of traces while they are being written: tokens that the process reward model computes per trace.

A real vLLM pooling engine around a tiny random model (its prefix cache works as that of a large one), eight traces that grow side by side,
32 tokens at a time. Three ways: every step as soon as it is complete, reading the prefix cache (what a run does); the same, every step
from scratch; all steps at once at the end. A new step computes its own tokens and those of the last block of the cache that was not full:
with blocks of b tokens and K steps in a trace of L, about L + K b / 2 in all, at most L + K b; from scratch (K + 1) / 2 L.

`late` is the time from a trace's last token to its last score, the eight traces together.

Where steps end is found in the text, which the model's process decodes: a chunk at once, so that 32 tokens cost about as much as one. The
tokenizer is the demo's, and chunks of one token are the reference.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.data.tokenizer import Codec
from pipelinerl.demo.sort_digits import make_model
from pipelinerl.engine.environment import set_environment
from pipelinerl.rewards.codec import load_codec
from pipelinerl.rewards.prm.scorer import Convention, Cost, PrmEngine, PrmScorer, Reading, Rows, StepScore, Trace
from pipelinerl.rewards.prm.steps import Splitter
from scripts.bench import harness
from tests.tiny_models import make_prm

CONVENTION = Convention(tag="#", reading=Reading.SOFTMAX, good=1, bad=0)
CHUNK_TOKENS = 32
NUM_TRACES = 8
GOAL = 1.25
"""Tokens computed over one prefill, in traces of 1,536 tokens and 16 steps."""
STEPS_GOAL = 5.0
"""Tokens of which steps are found in a second, in chunks of 32 over chunks of one, where a step ends in every second chunk. 32 tokens one
by one are 64 texts to decode; a chunk is 2, and up to 10 more say which of its tokens is a step's last: 9 times fewer.
"""
LARGEST_GAP = 1e-4
"""Between scores made meanwhile and at the end, float32."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The cost of scoring all traces."""

    cost: Cost
    busy_s: float
    late_s: float
    scores: tuple[float, ...]
    """Of all steps of all traces, in order."""


class FromScratch:
    """The same engine, with nothing read from its prefix cache."""

    def __init__(self, engine: PrmEngine) -> None:
        self.max_tokens = engine.max_tokens
        self.encode = engine.encode
        self._engine = engine

    def rows(self, requests: Sequence[Sequence[int]], *, salt: str, reads_cache: bool) -> list[Rows]:
        del reads_cache
        return self._engine.rows(requests, salt=salt, reads_cache=False)


def grow(engine: PrmEngine, *, texts: list[str], chunk_tokens: int, name: str) -> Figures:
    """Let all traces grow by `chunk_tokens` at a time, and score what becomes complete."""
    scorer = PrmScorer(engine, convention=CONVENTION, version=name)
    traces = [
        Trace(
            f"{number}",
            0,
            prompt="sum?",
            splitter=Splitter(lambda ids: "".join(map(chr, ids)), max_steps=1000),
            convention=CONVENTION,
            encode=engine.encode,
        )
        for number in range(len(texts))
    ]
    found: list[StepScore] = []
    busy_s = late_s = 0.0
    for start in range(0, max(map(len, texts)), chunk_tokens):
        for trace, text in zip(traces, texts, strict=True):
            if start < len(text):
                trace.feed([ord(character) for character in text[start : start + chunk_tokens]], is_last=start + chunk_tokens >= len(text))
        begin = time.perf_counter()
        found += scorer.score(traces)
        late_s = time.perf_counter() - begin
        busy_s += late_s
    found.sort(key=lambda one: (int(one.trace.rollout_id), one.step.index))
    return Figures(
        cost=scorer.cost,
        busy_s=busy_s,
        late_s=late_s,
        scores=tuple(float("nan") if one.score is None else one.score for one in found),
    )


def find_steps(codec: Codec, completions: list[list[int]], *, chunk_tokens: int) -> tuple[float, list[int]]:
    """Return the tokens per second, and the last token of every step; a `=` ends one."""
    begin, ends = time.perf_counter(), list[int]()
    for token_ids in completions:
        splitter = Splitter(codec.decode, max_steps=1000, separator="=")
        for start in range(0, len(token_ids), chunk_tokens):
            ends += [step.end for step in splitter.feed(token_ids[start : start + chunk_tokens])]
        ends += [step.end for step in splitter.finish()]
    return sum(map(len, completions)) / (time.perf_counter() - begin), ends


def add_steps(found: harness.Measured, folder: Path) -> None:
    """Add how fast the ends of steps are found."""
    make_model(folder, 0)
    codec = load_codec(folder)
    sums = "".join(f"{number % 10}{number * 7 % 10}{number * 3 % 10}" * 20 + "=" for number in range(32))
    completions = [codec.tokenizer.encode(sums, add_special_tokens=False)] * NUM_TRACES
    rates: dict[int, float] = {}
    for _ in range(3):
        shown = {size: find_steps(codec, completions, chunk_tokens=size) for size in (1, CHUNK_TOKENS)}
        assert shown[1][1] == shown[CHUNK_TOKENS][1], "chunks of any size have the same steps"
        rates = {size: max(rate, rates.get(size, 0.0)) for size, (rate, _) in shown.items()}
    told = ", ".join(f"{rate:,.0f} in chunks of {size}" for size, rate in rates.items())
    found.notes.append(f"tokens per second of which steps are found, {len(completions[0])} tokens each, 32 steps: {told}")
    found.goals.append(
        harness.at_least("tokens a second of which steps are found, over chunks of one", rates[CHUNK_TOKENS] / rates[1], STEPS_GOAL)
    )


def traces_of(num_tokens: int, *, num_steps: int) -> list[str]:
    """Texts of about `num_tokens` characters, one token each, in steps of unequal lengths."""
    mean = num_tokens / num_steps
    texts = []
    for number in range(NUM_TRACES):
        lengths = [int(mean * (0.5 + ((7 * step + 3 * number) % num_steps) / max(1, num_steps - 1))) - 2 for step in range(num_steps)]
        texts.append("\n\n".join(chr(97 + (step + number) % 26) * max(1, length) for step, length in enumerate(lengths)))
    return texts


def engine_in(folder: Path) -> PrmEngine:
    """A tiny model with room for traces of 4,000 tokens."""
    from pipelinerl.rewards.pooling import PoolingModel

    make_prm(folder, context=4096)
    return PoolingModel(folder, task="token_classify", dtype="float32", max_tokens=4096)


def measure(arguments: Any) -> harness.Measured:
    set_environment()
    from pipelinerl.rewards.pooling import BLOCK_TOKENS

    cases = [(1536, 16)] if arguments.quick else [(1536, 16), (1536, 64), (2048, 8), (2048, 16), (2048, 32)]
    found = harness.Measured(
        notes=[f"{NUM_TRACES} traces side by side, chunks of {CHUNK_TOKENS} tokens, blocks of {BLOCK_TOKENS}; 0.4 M parameters, float32"]
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_in(Path(folder))
        grow(engine, texts=traces_of(256, num_steps=4), chunk_tokens=CHUNK_TOKENS, name="warm-up")
        for num_tokens, num_steps in cases:
            texts, case = traces_of(num_tokens, num_steps=num_steps), f"{num_tokens}/{num_steps}"
            whole = grow(engine, texts=texts, chunk_tokens=10 * num_tokens, name=f"whole {case}")
            growing = grow(engine, texts=texts, chunk_tokens=CHUNK_TOKENS, name=f"growing {case}")
            scratch = grow(FromScratch(engine), texts=texts, chunk_tokens=CHUNK_TOKENS, name=f"scratch {case}")
            for way, figures in (("at the end", whole), ("meanwhile", growing), ("meanwhile, from scratch", scratch)):
                found.rows.append(
                    {
                        "tokens": num_tokens,
                        "steps": num_steps,
                        "scored": way,
                        "computed per trace": figures.cost.num_computed / NUM_TRACES,
                        "over one prefill": figures.cost.num_computed / whole.cost.num_computed,
                        "requests": figures.cost.num_requests,
                        "past the cache": figures.cost.num_asked_again,
                        "busy s": figures.busy_s,
                        "late ms": figures.late_s * 1e3,
                    }
                )
            gap = max(abs(one - other) for one, other in zip(growing.scores, whole.scores, strict=True))
            print(f"{case}: largest gap between scores made meanwhile and at the end {gap:.2g}")
            if (num_tokens, num_steps) == cases[0]:
                ratio = growing.cost.num_computed / whole.cost.num_computed
                found.goals.append(harness.at_most("tokens computed meanwhile over one prefill", ratio, GOAL))
                found.goals.append(harness.at_most("largest gap of a score", gap, LARGEST_GAP))
        add_steps(found, Path(folder) / "policy")
    return found


if __name__ == "__main__":
    harness.run("prm", measure, works=())

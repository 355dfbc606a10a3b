#!/usr/bin/env python
"""Measures what speculative decoding gives the tail: tokens a second of 1, 2, 4 and 8 running sequences, with and without drafts.

    python -m scripts.bench.speculation                     # a random model, and the simulated rows
    python -m scripts.bench.speculation --part trained      # a model that has learned a task: the long-tailed one's, warm-started

A real vLLM engine. `random`: a model of 44 M parameters in float32 (177 MB: more than a processor's cache, so that a pass is bound by
reading weights, as on a GPU). Its head is scaled, and temperatures set how sure it is: mean nats of a token, measured, stand in the
table. `trained`: 1.07 M parameters that count down as `beside/countdown.py` asks, at temperature 1; what it is unsure of is large or small
letters, as its demonstrations were. Each sequence is the last of its group; five siblings of it have ended. Drafts come from its own
text, or also from these. Which tokens come is not judged here: they, and their log-probabilities, are distributed as without drafts
(`tests/engine/test_speculation.py`).

The last rows of `random` are simulated, with the live rules: steps whose slowest rollouts are long (lognormal, cv 1.5), Qwen2.5-7B on
H100s as `pipelinerl plan` has them, with the tokens per pass measured above. They follow from these and a seed.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipelinerl.messages import Int32
from scripts.bench import harness

SIZES = (1, 2, 4, 8)
MOODS = {"random": {"sure": 0.35, "unsure": 1.0}, "trained": {"trained": 1.0}}
"""Temperatures of each part's model."""
SHARPENED = 24.0
VOCABULARY = 512
SIBLINGS = 5
NUM_TOKENS, NUM_TOKENS_QUICK = 96, 48
"""Of each sequence of the tail; siblings wrote as many."""
DRAFTED = 4
GOAL_ONE = 1.3
"""Times the tokens a second of one sequence, drafts from siblings, where the model is sure: set before measuring."""
GOAL_EIGHT = 1.0
"""The same of eight sequences: no slower."""
GOAL_SIBLINGS = 1.2
"""Tokens kept of a pass with drafts from siblings, over those from its own text alone."""
GOAL_STEP = 1.05
"""Samples a second of the simulated run over those without speculation."""


def measure(arguments: Any) -> harness.Measured:
    """Measure the engine, then, of the random model, simulate."""
    from pipelinerl.engine.environment import set_environment

    set_environment()
    sizes, repetitions = ((1, 8), 2) if arguments.quick else (SIZES, 3)
    part: str = arguments.part
    with tempfile.TemporaryDirectory() as folder:
        source = _trained() if part == "trained" else _random(Path(folder))
        bench = _Bench(source, MOODS[part].values(), NUM_TOKENS_QUICK if arguments.quick else NUM_TOKENS)
    ways = {
        f"{mood} {size} {mode}": lambda temperature=temperature, size=size, mode=mode: bench.run(temperature, size, mode)
        for mood, temperature in MOODS[part].items()
        for size in sizes
        for mode in ("off", "ngram", "siblings")
    }
    turns = harness.in_turns(repetitions, ways)
    found = harness.Measured()
    ratios, kept = _rows(found, turns)
    timed: dict[str, Any] = {"work": harness.Work.CPU, "speeds": turns.speeds}
    if part == "random":
        found.goals += _goals(ratios, kept, timed) + _simulated_rows(found, kept)
    else:
        found.goals += [
            harness.at_least(
                f"tokens/s of {size} sequences, trained model, drafts from siblings over none",
                ratios[f"trained {size} siblings"],
                1.0,
                **timed,
            )
            for size in sizes
        ]
    found.notes.append(
        f"medians of {repetitions} rounds, {bench.num_tokens} tokens of each sequence, up to {DRAFTED} drafted; of a simulation,"
        " tokens/s are the trained ones"
    )
    return found


def _rows(found: harness.Measured, turns: harness.Turns[_Found]) -> tuple[dict[str, float], dict[str, float]]:
    """Add what was measured; return tokens/s over those without drafts, and tokens kept of a pass."""
    ratios, kept = dict[str, float](), dict[str, float]()
    for name, runs in turns.items():
        mood, size, mode = name.split()
        ratios[name] = harness.median_ratio([one.tokens_per_s for one in runs], [one.tokens_per_s for one in turns[f"{mood} {size} off"]])
        kept[name] = statistics.median(one.tokens_per_pass for one in runs)
        drafted, accepted = (sum(getattr(one, key) for one in runs) for key in ("drafted", "accepted"))
        found.rows.append(
            {
                "model": f"{mood}, {statistics.median(one.nats for one in runs):.2f} nats",
                "sequences": int(size),
                "drafts": mode,
                "tokens/s": statistics.median(one.tokens_per_s for one in runs),
                "over off": ratios[name],
                "accepted": accepted / drafted if drafted else 0.0,
                "tokens a pass": kept[name],
            }
        )
    return ratios, kept


def _goals(ratios: dict[str, float], kept: dict[str, float], timed: dict[str, Any]) -> list[harness.Goal]:
    return [
        harness.at_least(
            "tokens/s of one sequence, sure model, drafts from siblings over none", ratios["sure 1 siblings"], GOAL_ONE, **timed
        ),
        harness.at_least(
            "tokens/s of eight sequences, sure model, drafts from siblings over none", ratios["sure 8 siblings"], GOAL_EIGHT, **timed
        ),
        harness.at_least(
            "tokens of a pass, sure model, drafts from siblings over own text",
            kept["sure 8 siblings"] / kept["sure 8 ngram"],
            GOAL_SIBLINGS,
        ),
    ]


def _simulated_rows(found: harness.Measured, kept: dict[str, float]) -> list[harness.Goal]:
    """Add what the tokens kept of a pass would be worth elsewhere; return the goal."""
    gains: dict[str, float] = {}
    for mood in MOODS["random"]:
        tokens_per_pass = kept[f"{mood} 8 siblings"]
        per_s, without = _simulated(tokens_per_pass)
        gains[mood] = per_s / without
        found.rows.append(
            {
                "model": f"simulated 7B, {mood}",
                "sequences": 0,
                "drafts": "siblings",
                "tokens/s": per_s,
                "over off": gains[mood],
                "accepted": float("nan"),
                "tokens a pass": tokens_per_pass,
            }
        )
    name = "simulated 7B, long-tailed steps, sure model: sampled tokens trained a second"
    return [harness.at_least(name, gains["sure"], GOAL_STEP)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    tokens_per_s: float
    tokens_per_pass: float
    """Of a sequence."""
    drafted: int
    accepted: int
    nats: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A model, and what it is asked."""

    folder: Path
    prompt: Callable[[int], Int32]
    """Tokens of a group's prompt."""


def _random(folder: Path) -> _Source:
    """Write a random model."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.tiny_models import make_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    tensors = dict(model.state_dict())
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * SHARPENED / 768**0.5 * 128**0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return _Source(folder=folder, prompt=lambda group: np.random.default_rng(group).integers(3, VOCABULARY, 16, dtype=np.int32))


def _trained() -> _Source:
    """Return the long-tailed task's model, whose answers here are longer than what is written of them."""
    from transformers import AutoTokenizer

    from scripts.bench import peers
    from scripts.bench.beside import countdown

    folder = peers.task_of(peers.LONG_TAIL).model
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def prompt(group: int) -> Int32:
        words = countdown.prompt_of(countdown.LONGEST // 2 - 5 * group)
        return np.array(tokenizer(words, add_special_tokens=False).input_ids, np.int32)

    return _Source(folder=folder, prompt=prompt)


class _Bench:
    """An engine, and groups whose other siblings have ended."""

    def __init__(self, source: _Source, temperatures: Iterable[float], num_tokens: int) -> None:
        from pipelinerl.config import EngineSection, ModelSection, RolloutSection
        from pipelinerl.engine.vllm.engine import VllmEngine

        self.num_tokens, self._prompt = num_tokens, source.prompt
        self._engine = VllmEngine(
            model=ModelSection(path=source.folder, dtype="float32", max_tokens=256),  # pyright: ignore[reportCallIssue]
            engine=EngineSection(  # pyright: ignore[reportCallIssue]
                max_running=64, speculation="siblings", speculate_below=17, speculative_tokens=DRAFTED
            ),
            rollout=RolloutSection(max_tokens=num_tokens),  # pyright: ignore[reportCallIssue]
            seed=0,
        )
        self._num_runs = 0
        self._written: dict[float, dict[str, list[int]]] = {temperature: self._finished(temperature) for temperature in temperatures}

    def run(self, temperature: float, size: int, mode: str) -> _Found:
        """Write the last sequences of some groups."""
        from pipelinerl.engine.drafts import Drafts

        speculation: Any = self._engine._speculation
        speculation._below = 0 if mode == "off" else 17
        speculation._drafts = Drafts(num_tokens=DRAFTED, from_siblings=mode == "siblings")
        for name, token_ids in self._written[temperature].items():
            speculation._drafts.end(name, token_ids)
        self._num_runs += 1
        for group in range(size):
            self._ask(f"{group}/last", temperature, seed=1000 + group)
        self._engine.step()  # prompts
        began, num_passes, drafted, accepted = time.perf_counter(), 0, 0, 0
        tokens, logprobs = 0, 0.0
        while self._engine._requests:
            passed = self._engine.step()
            num_passes += len(passed[0].rollout_ids)
            drafted += passed[0].num_drafted
            accepted += sum(len(one.rollout_ids) for one in passed[1:])
            tokens += sum(len(one.rollout_ids) for one in passed)
            logprobs += sum(float(one.logprobs.sum()) for one in passed)
        seconds = time.perf_counter() - began
        return _Found(
            tokens_per_s=tokens / seconds, tokens_per_pass=tokens / num_passes, drafted=drafted, accepted=accepted, nats=-logprobs / tokens
        )

    def _finished(self, temperature: float) -> dict[str, list[int]]:
        """What siblings wrote."""
        speculation: Any = self._engine._speculation
        speculation._below = 0
        written: dict[str, list[int]] = {}
        for group in range(max(SIZES)):
            for sibling in range(SIBLINGS):
                written[f"{group}/{sibling}"] = []
                self._ask(f"{group}/{sibling}", temperature, seed=100 * group + sibling)
        while self._engine._requests:
            for sampled in self._engine.step():
                for name, token_id in zip(sampled.rollout_ids, sampled.token_ids.tolist(), strict=True):
                    written[name].append(token_id)
        return written

    def _ask(self, name: str, temperature: float, *, seed: int) -> None:
        from pipelinerl.messages import Generate, Sampling

        prompt = self._prompt(int(name.partition("/")[0]))
        sampling = Sampling(max_tokens=self.num_tokens, temperature=temperature, seed=seed, ignores_ends=True)
        self._engine.submit(Generate(rollout_id=name, attempt=0, token_ids=prompt, sampling=sampling), version=0)


def _simulated(tokens_per_pass: float) -> tuple[float, float]:
    """Return sampled tokens trained a second of a simulated run, with speculation and without."""
    from orchestrator.simulate.planned import changed, world_of_plan
    from orchestrator.simulate.run import simulate
    from orchestrator.simulate.summary import summary_of
    from tests.orchestrator.simulate.worlds import config

    found = []
    for speculation in ("siblings", "off"):
        settings = config(
            model={"path": "Qwen/Qwen2.5-7B"},
            rollout={"group_size": 16, "max_tokens": 16384},
            engine={"kind": "vllm", "count": 4, "max_running": 64, "speculation": speculation},
            trainer={"steps": 6, "ranks": 4, "parallel": {"shard": 4}},
            batch={"groups_per_step": 16, "max_tokens": 32768},
            pipeline={"mode": "sync", "max_staleness": 0},
        )
        given = {"mean_tokens": 2000.0, "prompt_tokens": 200.0, "length_cv": 1.5}
        world = changed(world_of_plan(settings, gpu="h100", given=given), {"tokens_per_pass": tokens_per_pass})
        found.append(summary_of(simulate(settings, world, seed=0)).tokens_per_s)
    return found[0], found[1]


if __name__ == "__main__":
    part = {"--part": {"choices": list(MOODS), "default": "random", "help": "whose drafts"}}
    harness.run("speculation", measure, options=part)

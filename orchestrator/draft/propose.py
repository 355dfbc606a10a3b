"""Decides a config from what was seen of a model and of rows, and says with each line why: the text of a TOML file.

Only what the two ask for is written; every other key keeps its default. Figures come from the files and from the rows: lengths in tokens,
the context, what training takes by `pipelinerl.planning.memory`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.draft.look import DataFacts, ModelFacts
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.engine.kv import plan_kv
from pipelinerl.errors import ConfigError
from pipelinerl.planning import memory
from pipelinerl.runtime.machine import say_bytes

BUILTIN = "pipelinerl.rewards.functions.builtin"
SMALL_PARAMETERS = 1_000_000_000
"""Models with fewer are asked for the bare answer: they rarely gain from reasoning in text, and always pay for it in tokens."""
WORKED_TOKENS = 512
"""Room for a worked solution where the rows show none. Less cuts solutions of grade-school problems off, which take 100 to 300 tokens."""
SENTENCE_TOKENS = 32
"""Room for a number in a sentence, which is how chat models answer before they are trained. Less cuts it off before the number."""
SHARE_OF_MEMORY = 0.8
"""Part of the memory that a run may be estimated to take: the estimate of activations is rough."""
MAX_ANSWER_TOKENS = 64
"""Median length beyond which an answer is a text, which no rule compares."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine for which a config is written."""

    memory_bytes: int
    num_gpus: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A config, and the files that it names."""

    text: str
    reward_file: str | None
    """Python source of the reward, for the path that `propose` was given; None where a built-in function serves."""


def propose(model: ModelFacts, data: DataFacts, machine: Machine, *, reward: str | None, reward_path: Path, name: str) -> Proposal:
    """Write a config. Raises `ConfigError` where no reward follows from the rows, and none is named."""
    function, reward_file, why = _reward(data, reward=reward, reward_path=reward_path)
    style = _style(model, data)
    rollout = _max_tokens(model, data, style=style)
    longest = int(1.25 * max(data.prompt_tokens)) + (64 if style.is_chat else 0)
    sequence = min(model.context, -(-(longest + rollout) // 64) * 64)
    sizes: dict[str, Any] = {"rollout": rollout, "sequence": sequence, "row": max(4096 if not machine.num_gpus else 16384, sequence)}
    fit = _fit(model, machine, sizes=sizes)
    lines = [
        *_head(model, data, machine, name=name),
        *_model(model, machine, fit, sizes),
        *_data(data, style),
        *_rollout(data, style, sizes),
    ]
    lines += ["", "[[reward]]", f"function = {_quoted(function)}   # {why}"]
    if data.is_gym and data.are_integers and reward is None:
        lines += ["options = { pattern = '-?\\d+' }   # its last match is the answer: in a sentence, too, it is right"]
    lines += [*_evaluation(data), *_engine(machine), *_training(machine, fit, sizes)]
    return Proposal(text="\n".join(lines) + "\n", reward_file=reward_file)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """The way in which the model is asked."""

    is_chat: bool
    makes_chats: bool
    """Prompts are plain text, and the chat template is put around them."""
    system_prompt: str | None
    is_worked: bool
    """Completions reason before they answer."""
    can_think: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """What of the training fits into the machine's memory."""

    dtype: str
    lora_rank: int
    checkpointing: bool
    total_bytes: int
    why: str


def _reward(data: DataFacts, *, reward: str | None, reward_path: Path) -> tuple[str, str | None, str]:
    """Return the function's name, the source of its file where it has to be written, and the reason."""
    if reward is not None:
        return reward, None, "as asked for with --reward"
    if data.is_gym:
        return f"{BUILTIN}:reasoning_gym", None, "the generator's own score_answer; 1 is right"
    if data.answer_column is None:
        raise ConfigError(
            f"data: no column of {data.source} looks like an answer to compare with; it has {', '.join(data.columns)}. Name one"
            " (--answer-column), or a function of yours that scores completions (--reward rewards.py:my_reward)"
        )
    median = float(np.median(data.answer_tokens))
    if not data.is_math and median > MAX_ANSWER_TOKENS:
        raise ConfigError(
            f"data: column {data.answer_column!r} of {data.source} holds texts of {median:,.0f} tokens (median), which no rule compares."
            " Fine-tune on them (`pipelinerl sft`), or name a function that scores completions: --reward rewards.py:my_reward, or"
            f" {BUILTIN}:judge"
        )
    kind, why = ("math", "answers are numbers or LaTeX") if data.is_math else ("exact_match", "answers are short texts")
    if kind == "math" and importlib.util.find_spec("math_verify") is None:
        why += "; needs pip install 'pipelinerl[rewards]'"
    if data.answer_column == "answer":
        return f"{BUILTIN}:{kind}", None, f"{why}; compares with the column answer"
    called = f"{data.answer_column}" if data.answer_column.isidentifier() else None
    if called is None:
        raise ConfigError(f"data: column {data.answer_column!r} cannot be a parameter's name: rename it, or name a function with --reward")
    source = (
        '"""The reward of this run: a starting point, yours to change. Columns of the row arrive by the names of parameters."""\n\n'
        f"from {BUILTIN} import {kind}\n\n\n"
        f"def reward(completion: str, {called}: str) -> float:\n"
        f'    """1.0 where the completion ends in what the row\'s `{called}` says; else 0.0."""\n'
        f"    return {kind}(completion, answer={called})\n"
    )
    return f"{reward_path}:reward", source, f"{why}; written beside this file, because the column is called {called}"


def _style(model: ModelFacts, data: DataFacts) -> _Style:
    is_chat = data.is_chat or model.has_chat
    is_worked = data.is_math and not data.is_gym and (model.weights.num_parameters >= SMALL_PARAMETERS or _is_worked_in(data))
    if not model.has_chat:
        system = None
    elif is_worked:
        system = "Reason step by step, and put your final answer within \\boxed{}."
    elif data.is_gym and model.weights.num_parameters >= SMALL_PARAMETERS:
        system, is_worked = "Reason step by step, then give the final answer alone between <answer> and </answer>.", True
    elif data.is_gym or data.answer_column is not None:
        system = "Reply with the answer alone."
    else:
        system = None
    return _Style(
        is_chat=is_chat,
        makes_chats=model.has_chat and not data.is_chat,
        system_prompt=system,
        is_worked=is_worked,
        can_think=model.can_think,
    )


def _is_worked_in(data: DataFacts) -> bool:
    """The rows' own answers are worked out, and so not only numbers."""
    return bool(data.answer_tokens) and float(np.median(data.answer_tokens)) > MAX_ANSWER_TOKENS / 2


def _max_tokens(model: ModelFacts, data: DataFacts, *, style: _Style) -> int:
    """Choose the longest completion: twice what nineteen of twenty answers take, and room to reason where they do not show it."""
    answer = int(np.quantile(data.answer_tokens, 0.95)) if data.answer_tokens else 0
    wanted = max(2 * answer, WORKED_TOKENS if style.is_worked else SENTENCE_TOKENS if data.are_integers else 16)
    return min(1 << (wanted - 1).bit_length(), max(16, model.context // 2))


def _fit(model: ModelFacts, machine: Machine, *, sizes: dict[str, Any]) -> _Fit:
    """Choose the first way to train that fits: everything, then adapters, then adapters in fewer bits, with layers computed again."""
    on_cpu = not machine.num_gpus
    dtypes = ("float32", "bfloat16") if on_cpu else ("bfloat16",)
    room = SHARE_OF_MEMORY * machine.memory_bytes
    ways = [(dtypes[0], 0, False)] + [(dtype, rank, again) for dtype in dtypes for again in (False, True) for rank in (16,)]
    tried: list[int] = []
    for dtype, rank, again in ways:
        needed = _needed(model, dtype=dtype, rank=rank, again=again, sizes=sizes, machine=machine)
        tried.append(needed)
        if needed <= room:
            of = f"about {say_bytes(needed)} of {say_bytes(machine.memory_bytes)}"
            full = f"; all weights would take about {say_bytes(tried[0])}" if rank else ""
            return _Fit(dtype=dtype, lora_rank=rank, checkpointing=again, total_bytes=needed, why=of + full)
    raise ConfigError(
        f"model: {model.given} has {model.weights.num_parameters:,} parameters: the least that a run of it takes is about"
        f" {say_bytes(min(tried))} (adapters, layers computed again), and there are {say_bytes(machine.memory_bytes)}"
        f" {'here' if on_cpu else f'on {machine.num_gpus} GPUs'}. Take a smaller model, or a machine with more"
    )


def _needed(model: ModelFacts, *, dtype: str, rank: int, again: bool, sizes: dict[str, Any], machine: Machine) -> int:
    """The run's memory, in bytes: all of it on a CPU, what lies on GPUs on a machine that has them."""
    on_cpu = not machine.num_gpus
    config = Config.model_validate(
        {
            "model": {"path": model.folder, "dtype": dtype, "max_tokens": sizes["sequence"]},
            "rollout": {"max_tokens": sizes["rollout"]},
            "engine": {"max_running": 32},
            "batch": {"max_tokens": sizes["row"]},
            "lora": {"rank": rank},
            "trainer": {"activation_checkpointing": "full" if again else "none"},
        }
    )
    kv = plan_kv(config.model, config.engine, config.rollout, memory_bytes=machine.memory_bytes, on_cpu=on_cpu)
    parts = memory.bill(config, model.weights, method=method_of(config), kv=kv)
    return sum(part.num_bytes for part in parts if on_cpu or part.on_device)


def _head(model: ModelFacts, data: DataFacts, machine: Machine, *, name: str) -> Iterator[str]:
    rows = "rows without an end" if data.num_rows is None else f"{data.num_rows:,} rows"
    low, high = min(data.prompt_tokens), max(data.prompt_tokens)
    yield f"# Written by `pipelinerl init` after a look at {model.given} and {data.source}; yours to change."
    yield f"# Model: {model.weights.num_parameters:,} parameters, made for {model.context:,} tokens; {model.stop_tokens}."
    yield f"# Rows: {rows} with {', '.join(data.columns)}; prompts of {low:,} to {high:,} tokens (the first {len(data.prompt_tokens)})."
    yield f"# Machine: {say_bytes(machine.memory_bytes)} of {'GPU ' if machine.num_gpus else ''}memory, {machine.num_gpus or 'no'} GPU."
    yield from (f"# Note: {warning}" for warning in model.warnings)
    yield "# `pipelinerl keys` lists every other key, with its default."
    yield from ("", "[run]", f"name = {_quoted(name)}")


def _model(model: ModelFacts, machine: Machine, fit: _Fit, sizes: dict[str, Any]) -> Iterator[str]:
    yield from ("", "[model]", f"path = {_quoted(str(model.given))}")
    yield f'dtype = "{fit.dtype}"' + ("" if machine.num_gpus else "             # on a CPU the most exact that fits")
    yield f"max_tokens = {sizes['sequence']}              # prompt and completion; KV caches are sized by it"
    if fit.lora_rank:
        yield from ("", "[lora]", f"rank = {fit.lora_rank}                       # adapters: {fit.why}")


def _data(data: DataFacts, style: _Style) -> Iterator[str]:
    yield from ("", "[data]", f"source = {_quoted(data.source)}")
    if data.prompt_column != "prompt" and not data.is_gym:
        yield f"prompt_column = {_quoted(data.prompt_column)}"
    if style.makes_chats:
        yield "chat = true                     # the model has a chat template: text becomes a user's message"
    if style.system_prompt is not None:
        yield f"system_prompt = {_quoted(style.system_prompt)}"
    if style.can_think:
        yield "chat_template_kwargs = { enable_thinking = false }   # true lets it think first; then rollout.max_tokens = 4096 or more"


def _rollout(data: DataFacts, style: _Style, sizes: dict[str, Any]) -> Iterator[str]:
    answers = f"answers take {int(np.median(data.answer_tokens))} tokens (median)" if data.answer_tokens else "no answers to measure"
    yield from ("", "[rollout]", "group_size = 8                  # completions of a prompt, compared with each other")
    yield f"max_tokens = {sizes['rollout']:<18} # {answers}{'; room to reason' if style.is_worked else ''}"


def _evaluation(data: DataFacts) -> Iterator[str]:
    yield ""
    if data.held_out is None:
        yield from (
            "# [evaluation]",
            '# source = "held_out.jsonl"     # name prompts that are not trained: their score is what was learned',
        )
        return
    yield from ("[evaluation]", f"source = {_quoted(data.held_out)}", "every = 20", "limit = 256")


def _engine(machine: Machine) -> Iterator[str]:
    yield from ("", "[engine]")
    if not machine.num_gpus:
        yield "max_running = 32                # sequences decoded at once; a CPU gains little from more"
        return
    yield "max_running = 256"
    if machine.num_gpus > 1:
        yield f"count = {machine.num_gpus // 2}                       # one GPU each; the other half trains"
    else:
        yield "shares_gpus = true              # the trainer is on the same GPU"
        yield f"kv_cache_bytes = {machine.memory_bytes // 4} # a quarter of it; the rest is for both models and the trainer's state"


def _training(machine: Machine, fit: _Fit, sizes: dict[str, Any]) -> Iterator[str]:
    rate = "1e-5, the default for adapters" if fit.lora_rank else "1e-6, the default for all weights"
    yield from ("", "[batch]", f"groups_per_step = {32 if machine.num_gpus else 8}", f"max_tokens = {sizes['row']}")
    yield from ("", "[trainer]", "steps = 200")
    yield f"# learning_rate = {rate}; models under a billion parameters often take ten times as much"
    if (ranks := machine.num_gpus - machine.num_gpus // 2) > 1:
        yield from (f"ranks = {ranks}", f"parallel = {{ shard = {ranks} }}")
    if fit.checkpointing:
        yield f'activation_checkpointing = "full" # {fit.why}'
    elif not fit.lora_rank:
        yield f"# All weights are trained: {fit.why}. [lora] rank = 16 takes less."


def _quoted(text: str) -> str:
    """TOML's basic string, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)

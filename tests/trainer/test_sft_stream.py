"""Demonstrations beside RL: one objective, one update, and rows that follow from seed and step alone."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.config import Config
from pipelinerl.config.layout import Layout
from pipelinerl.demo.sort_digits import make_model as make_demo_model
from pipelinerl.messages import StepClosed
from pipelinerl.runtime.findings import Level, collect, ok, sentences
from tests.trainer.conductor import make_config
from tests.trainer.ranks import run_jobs
from tests.trainer.test_loop import _in_this_process, _run
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step
from trainer.checkpoint.portable import state_of
from trainer.data.demonstrations import Demonstrations
from trainer.data.sft_stream import SftStream
from trainer.optimizer import Optimizer
from trainer.parallel.replicas import Replicas
from trainer.preflight import look
from trainer.step import Step

COEF = 0.3
NUM_ROWS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of digits, and `rows.jsonl` of 7 demonstrations, of different lengths."""
    folder = tmp_path_factory.mktemp("stream")
    make_demo_model(folder, seed=0)
    rows = [{"prompt": "1" * (1 + number) + "=", "completion": "23456789"[: 1 + number % 4]} for number in range(NUM_ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _config(folder: Path, **stream: Any) -> Config:
    section = {"source": str(folder / "rows.jsonl"), "batch_size": 5, "coef": COEF} | stream
    return Config.model_validate(make_config(folder).model_dump() | {"batch": {"max_tokens": 24}, "sft_stream": section})


def _step(folder: Path, *, is_streamed: bool = True, replicas: Replicas | None = None, **options: Any) -> tuple[Step, Optimizer, Any]:
    """A step whose rows of demonstrations have 24 tokens, with its optimizer and its model."""
    replicas = replicas or Replicas(ranks=1, deadline_s=60)
    mix: dict[str, Any] = {"divergence_mix": 0.5} if options.get("method") == "gkd" else {}
    model = make_model(folder, replicas=replicas, **mix)
    step, optimizer = make_step(model, replicas=replicas, **options)
    if is_streamed:
        found = Demonstrations(_config(folder), beside_rl=True)
        step.sft_stream = SftStream(found, backend=step.backend, replicas=replicas, max_tokens=24, coef=COEF)
    return step, optimizer, model


def _samples() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [make_sample(generator, prompt=4, completion=int(generator.integers(2, 7))) for _ in range(5)]


def _sft_gradient(folder: Path, *, step: int = 0) -> tuple[torch.Tensor, float, int]:
    """Of the mean over the completion tokens of a step's rows, each alone through Hugging Face's model; the mean; the tokens."""
    module = AutoModelForCausalLM.from_pretrained(folder)
    losses: list[torch.Tensor] = []
    for one in Demonstrations(_config(folder), beside_rl=True).batch_at(step):
        ids, num_prompt = one.token_ids, one.num_prompt
        tokens = torch.from_numpy(ids).long()
        logits = module(input_ids=tokens[None], use_cache=False).logits[0, num_prompt - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, tokens[num_prompt:], reduction="none").unbind()
    mean = torch.stack(losses).mean()
    mean.backward()
    return (
        torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None]),
        mean.item(),
        len(losses),
    )


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("method", "epochs", "divisor"),
    [("grpo", 1, "tokens"), ("dr_grpo", 1, "constant"), ("grpo", 2, "tokens"), ("gkd", 1, "tokens")],
)
def test_the_gradient_is_that_of_rl_plus_coef_times_that_of_the_mean_loss(folder: Path, method: str, epochs: int, divisor: str) -> None:
    """Whatever the method divides by, and in every pass: the rate is 0, so that the second sees the same weights."""
    samples = _samples()
    options: dict[str, Any] = {"method": method, "epochs": epochs, "learning_rate": 0.0}
    options |= {"reference": make_model(folder, is_frozen=True), "overrides": {}} if method == "gkd" else {}
    gradients: list[torch.Tensor] = []
    numbers: list[dict[str, float]] = []
    seal = StepClosed(step=0, num_micro_batches=1, num_tokens=90, num_samples=8)
    for is_streamed in (False, True):
        step, optimizer, _ = _step(folder, is_streamed=is_streamed, **options)
        step.add(make_batch(samples))
        step.train_held(seal)
        gradients.append(optimizer.gradient / (90 if divisor == "tokens" else 8 * 32))
        numbers.append(step.finish(seal))
    of_sft, mean, num_tokens = _sft_gradient(folder)
    assert _distance(gradients[1], gradients[0] + COEF * of_sft) < 1e-5
    assert _distance(gradients[1], gradients[0]) > 1e-2
    alone, both = numbers
    assert both.keys() - alone.keys() == {"sft_loss", "sft_tokens"}
    assert (both["sft_loss"], both["sft_tokens"]) == (pytest.approx(mean, rel=1e-5), num_tokens)
    assert {name for name in alone if alone[name] != both[name]} == {"grad_norm"}, "RL's own numbers do not see the demonstrations"


def test_a_step_without_a_token_of_rl_trains_the_demonstrations_alone(folder: Path) -> None:
    step, optimizer, _ = _step(folder)
    seal = StepClosed(step=2, num_micro_batches=1, num_tokens=0, num_samples=0)
    step.add(make_batch([], step=2))
    step.train_held(seal)
    of_sft, mean, _ = _sft_gradient(folder, step=2)
    assert _distance(optimizer.gradient, COEF * of_sft) < 1e-5
    numbers = step.finish(seal)
    assert numbers["sft_loss"] == pytest.approx(mean, rel=1e-5)
    assert numbers["grad_norm"] == pytest.approx(float(COEF * of_sft.double().norm()), rel=1e-4)


def test_a_policy_that_rests_while_its_critic_warms_up_sees_none(folder: Path) -> None:
    critic = make_model(folder, gives_values=True)
    step, _, _ = _step(folder, method="ppo", overrides={"proximal": "engine", "weight": "none"}, critic=critic, critic_warmup_steps=1)
    told: list[dict[str, float]] = []
    for number in (0, 1):
        step.add(make_batch(_samples(), step=number))
        step.train_held(make_seal(_samples(), step=number))
        told.append(step.finish(make_seal(_samples(), step=number)))
    assert ["sft_loss" in numbers for numbers in told] == [False, True]


def test_a_dropped_step_leaves_nothing_of_its_demonstrations(folder: Path) -> None:
    """A step done again has the same rows, and their gradient once."""
    gradients: list[torch.Tensor] = []
    step, optimizer, _ = _step(folder)
    for _ in range(2):
        step.add(make_batch(_samples()))
        step.train_held(make_seal(_samples()))
        gradients.append(optimizer.gradient.clone())
        step.drop()
    assert torch.equal(*gradients)


def test_the_rows_of_a_step_follow_from_seed_and_step(folder: Path) -> None:
    """Also those of a process that begins there; an epoch has every row once, and goes over into the next within a step."""
    first, resumed = (Demonstrations(_config(folder), beside_rl=True) for _ in range(2))

    def of(demonstrations: Demonstrations, step: int) -> list[bytes]:
        return [one.token_ids.tobytes() for one in demonstrations.batch_at(step)]

    drawn = [of(first, step) for step in range(7)]
    assert of(resumed, 5) == drawn[5]
    assert of(first, 1) == drawn[1], "a step that is done again"
    rows = [row for batch in drawn for row in batch]
    epochs = [rows[start : start + NUM_ROWS] for start in range(0, len(rows), NUM_ROWS)]
    assert [len(set(epoch)) for epoch in epochs] == [NUM_ROWS] * 5
    assert epochs[0] != epochs[1]
    other = _config(folder).model_copy(update={"run": _config(folder).run.model_copy(update={"seed": 1})})
    assert of(Demonstrations(other, beside_rl=True), 0) != drawn[0]


def test_a_resumed_run_goes_on_bit_by_bit(folder: Path) -> None:
    def train(step: Step, number: int) -> dict[str, float]:
        step.add(make_batch(_samples(), step=number))
        step.train_held(make_seal(_samples(), step=number))
        return step.finish(make_seal(_samples(), step=number))

    step, optimizer, model = _step(folder)
    for number in range(2):
        train(step, number)
    saved = {part: {name: tensor.clone() for name, tensor in of.items()} for part, of in state_of(model, optimizer).items()}
    whole = train(step, 2)
    step, optimizer, other = _step(folder, first_step=2)
    for part, of in state_of(other, optimizer).items():
        for name, tensor in of.items():
            tensor.copy_(saved[part][name])
    optimizer.round()
    assert train(step, 2) == whole
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(model.state(), other.state(), strict=True))


def _of_layout(replicas: Replicas, *, folder: Path) -> dict[str, Any]:
    """Two steps, their rows dealt to the replicas."""
    samples = _samples()
    rows = [samples[:3], samples[3:]]
    step, _, model = _step(folder, replicas=replicas)
    told: dict[str, float] = {}
    for number in range(2):
        for round_index in range(-(-len(rows) // replicas.layout.replicas)):
            index = round_index * replicas.layout.replicas + replicas.number
            step.add(make_batch(rows[index] if index < len(rows) else [], step=number, index=round_index))
        step.train_held(make_seal(samples, step=number))
        told = step.finish(make_seal(samples, step=number))
    return {"metrics": told, "weights": {name: tensor.clone() for name, tensor in model.state()}}


@pytest.mark.slow
def test_two_ranks_in_any_layout_train_what_one_trains(folder: Path, tmp_path: Path) -> None:
    job = functools.partial(_of_layout, folder=folder)
    kinds: list[dict[str, Any]] = [{}, {"shard": 2}, {"context": 2}, {"pipeline": 2}]
    layouts = [Layout(ranks=2, **sizes) for sizes in kinds]
    found = run_jobs([(layout, job) for layout in layouts], tmp_path)
    expected = job(Replicas(ranks=1, deadline_s=60))
    for layout, ranks in zip(layouts, found, strict=True):
        for rank in ranks:
            assert rank["metrics"] == pytest.approx(expected["metrics"], rel=2e-3, abs=1e-4), layout
            for name, weight in rank["weights"].items():
                assert torch.allclose(weight, expected["weights"][name], atol=3e-4), (layout, name)


def test_a_run_reports_the_loss_of_its_demonstrations_and_lowers_it(folder: Path, tmp_path: Path) -> None:
    """The whole trainer over the real transport; what it publishes is what engines hold, so the checks against them go on to hold."""
    settings = make_config(folder, learning_rate=1e-3, warmup_steps=0).model_dump()
    section = {"source": str(folder / "rows.jsonl"), "batch_size": 2 * NUM_ROWS, "coef": 10.0}
    conductor = _run(_in_this_process, tmp_path, Config.model_validate(settings | {"sft_stream": section}))
    losses = [done.metrics["sft_loss"] for done in conductor.done]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    tokens = {done.metrics["sft_tokens"] for done in conductor.done}
    assert tokens == {2.0 * sum(1 + number % 4 + 1 for number in range(NUM_ROWS))}
    assert all(done.metrics["logprob_gap_max"] < 1e-4 for done in conductor.done)


def test_the_preflight_reads_every_demonstration(folder: Path, tmp_path: Path) -> None:
    told = "7 rows of 4 to 12 tokens, median 8; each is trained 2.1 times"
    assert collect(look(_config(folder))) == [ok(f"sft_stream.source {folder / 'rows.jsonl'}", told)]
    rows = [{"prompt": "1=", "completion": "2"}] * 20
    rows[3] = {"prompt": "1="}
    rows[5:9] = [{"prompt": "1=", "completion": "2" * 30}] * 4
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = sentences(collect(look(_config(folder, source=str(tmp_path / "bad.jsonl")))), Level.FAIL)
    assert len(problems) == 3
    assert problems[0].endswith("bad.jsonl, row 3: column 'completion' is None, expected text; it has prompt")
    assert "row 5: 2 tokens of prompt, 33 in all; expected at least one of prompt and at most 24 in all" in problems[1]
    assert problems[2].endswith("; and 2 more of 20 rows alike")
    (gone,) = sentences(collect(look(_config(folder, source="gone.jsonl"))), Level.FAIL)
    assert gone.startswith("sft_stream.source gone.jsonl cannot be read: No such file or directory")

"""Measures what RL costs the trainer: the whole trainer, fed over the wire, against its engine alone on the same rows.

`plain` is the engine's own loop: rows laid out beforehand, the negative log-likelihood, the same optimizer. `RL` is what runs in a run:
rows over ZeroMQ from another process (on the other core), laid out as they come, the loss of GRPO with its meters, the step's bookkeeping.
Both train the same model in this process on one core, in turns. Waiting is what the loop waits for rows after its first one, with a server
that always has the next. Packing is the orchestrator's own rule on eight long-tailed mixes of lengths. Memory is the peak of a process that
computes the log-probabilities of one row, forward and backward, over what it held before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from orchestrator.rollouts.micro_batch import micro_batch_of
from pipelinerl.algorithms.methods import resolve
from pipelinerl.data.packing import Packing
from pipelinerl.messages import (
    Finish,
    FromTrainer,
    MicroBatch,
    Prompt,
    Sample,
    StepClosed,
    TakeMicroBatch,
    ToTrainer,
    TrainerReady,
    Trajectory,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub, ZmqLink
from scripts.bench import children, harness
from scripts.bench.qwen3 import qwen3_config
from trainer.backend import Backend, Outputs
from trainer.data.loader import RowLoader
from trainer.data.rows_in_progress import RowsInProgress
from trainer.data.sample_digest import SampleDigest
from trainer.logprob_mismatch import Agreement
from trainer.loop import Loop
from trainer.model.head import linear_logprobs
from trainer.model.model import Model
from trainer.optimizer import Optimizer, Schedule
from trainer.orchestrator_client import OrchestratorClient
from trainer.parallel.replicas import Replicas
from trainer.rows.packed_row import PackedRow
from trainer.step import Step
from trainer.step_timer import StepTimer
from trainer.steps import Steps
from trainer.weights.async_publisher import AsyncPublisher

FOLDER = Path("runs/bench-trainer")
VOCABULARY = 4096
GROUP_SIZE = 8
MIXES = [(median, sigma) for median in (0.03, 0.06, 0.12, 0.25) for sigma in (0.8, 1.2)]
"""Log-normal lengths: median as a part of a row, and sigma of its logarithm. At 0.25 and 1.2 one sample in eight fills a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The rows of every step."""

    steps: list[list[MicroBatch]]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for rows in self.steps for row in rows)

    def seal(self, step: int) -> StepClosed:
        rows = self.steps[step]
        num_tokens, num_samples = sum(int(row.loss_mask.sum()) for row in rows), sum(len(row.lengths) for row in rows)
        return StepClosed(step=step, num_micro_batches=len(rows), num_tokens=num_tokens, num_samples=num_samples)


def measure(arguments: Any) -> harness.Measured:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    num_steps, num_groups, rounds, row_tokens = (2, 5, 3, 1024) if arguments.quick else (3, 8, 5, 4096)
    whole_table, in_pieces = (
        children.result_of(_peak_mib, function, 2048 if arguments.quick else 4096, 32_000) for function in (_whole_table, _in_pieces)
    )
    children.result_of(_make_model)
    work = _make_work(num_steps, num_groups=num_groups, row_tokens=row_tokens)
    cores = sorted(os.sched_getaffinity(0))
    folders = [FOLDER / str(number) for number in range(2 * rounds)]  # as many again for rounds that are disturbed
    for folder in folders:
        make_keys(folder, [f"trainer-{one}" for one in range(8)])
    server = children.start(lambda: _serve_all(work, folders), cores={cores[-1]})
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    _plain_s(Work(steps=work.steps[:1]))  # warms up allocator and caches
    waits: list[float] = []
    unused = iter(folders)
    seconds = harness.in_turns(rounds, {"plain": lambda: _plain_s(work), "whole": lambda: _run_s(work, next(unused), waits)})
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    fullness = {mix: _fullness(*mix) for mix in MIXES}
    plain, whole = seconds["plain"], seconds["whole"]
    judged: dict[str, Any] = {"work": harness.Work.CPU, "speeds": seconds.speeds}
    figures = [
        ("engine's own loop", work.num_tokens / statistics.median(plain), "tokens/s"),
        ("RL, fed over the wire", work.num_tokens / statistics.median(whole), "tokens/s"),
        *((f"packing, lengths of median {median:g} rows, sigma {sigma:g}", part, "full") for (median, sigma), part in fullness.items()),
        ("log-probabilities, whole table", whole_table, "MiB"),
        ("log-probabilities, in pieces", in_pieces, "MiB"),
    ]
    return harness.Measured(
        rows=[{"what": what, "value": value, "unit": unit} for what, value, unit in figures],
        goals=[
            harness.at_least("RL over the engine's own loop", harness.median_ratio(plain, whole), 0.95, **judged),
            harness.at_most("waiting for rows that are there", statistics.median(waits), 0.01, **judged),
            harness.at_least("fullness of rows, worst mix", min(fullness.values()), 0.97),
            harness.at_most("memory of log-probabilities over the whole table's", in_pieces / whole_table, 0.5),
        ],
        notes=[f"ratios of the {rounds} rounds: {', '.join(f'{alone / run:.3f}' for alone, run in zip(plain, whole, strict=True))}"],
    )


def _plain_s(work: Work) -> float:
    """Seconds the engine alone takes for the work."""
    step, backend = _make_step()
    laid_out = [[step.lay_out(row) for row in rows] for rows in work.steps]
    start = time.perf_counter()
    for number, rows in enumerate(laid_out):
        for row in rows:
            backend.train(row, lambda outputs: -outputs.logprobs.sum())
        backend.update(number, denominator=work.seal(number).num_tokens)
    return time.perf_counter() - start


def _only(step: Step) -> Steps:
    """The steps of a run that has one loss."""
    lacks: dict[str, Any] = {"critic_of": lambda method: None, "reference": lambda: None}
    return Steps(step, method_of=lambda name: resolve(name, group_size=1), max_tokens=1, **lacks)


def _run_s(work: Work, run_folder: Path, waits: list[float]) -> float:
    """Seconds the training loop takes for the work, from its first row on; the part of them that it waited is added to `waits`."""
    step, _ = _make_step()
    replicas = Replicas(ranks=1, deadline_s=60)
    in_progress = RowsInProgress(run_folder, rank=0, replica=0, num_replicas=1)

    def lay_out(batch: MicroBatch) -> PackedRow | None:
        with in_progress(batch):
            return step.lay_out(batch)

    ready = TrainerReady(replica=0, num_replicas=1, process_id=os.getpid(), version=0)
    seen: list[Any] = []
    with (
        OrchestratorClient(
            lambda: ZmqLink(run_folder, "trainer", 0, accepts=ToTrainer, deadline_s=60),
            ready=ready,
            num_steps=len(work.steps),
            silent_after_s=60,
        ) as client,
        RowLoader(client, replicas=replicas, lay_out=lay_out, split=step.split) as loader,
        AsyncPublisher(None, sharded=None, send=lambda policy: None) as async_publisher,
    ):
        timer = StepTimer(Journal(run_folder, "trainer-0"), loader=loader)
        while loader._ready.empty():  # the first row has to be made and sent; every later one could be there
            time.sleep(0.001)
        start = time.perf_counter()
        loop = Loop(
            loader=loader,
            steps=_only(step),
            async_publisher=async_publisher,
            send=seen.append,
            timer=timer,
            sample_digest=SampleDigest(),
            in_progress=in_progress,
            checkpoint=lambda version, commit: None,
            wait_for_checkpoint=lambda: None,
            take_news=lambda: (),
            checkpoint_every=len(work.steps),
        )
        loop.run(0, len(work.steps))
        seconds = time.perf_counter() - start
        for done in seen:
            client.send(done)
    waits.append(sum(done.metrics["wait_s"] for done in seen) / seconds)
    return seconds


_MODELS: list[Model] = []


def _model() -> Model:
    """The model, loaded once: its weights do not matter."""
    if not _MODELS:
        replicas = Replicas(ranks=1, deadline_s=60)
        _MODELS.append(Model(FOLDER / "model", dtype="float32", temperature=1.0, device=replicas.device))
    return _MODELS[0]


def _make_step() -> tuple[Step, Backend[Outputs]]:
    model, replicas = _model(), Replicas(ranks=1, deadline_s=60)
    schedule = Schedule(learning_rate=1e-6, num_steps=1000)
    optimizer = Optimizer(model.parameters(), schedule=schedule, betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
    backend = Backend(model, optimizer=optimizer, replicas=replicas, read=Outputs.of)
    method = resolve("grpo", {}, group_size=GROUP_SIZE)
    return Step(
        backend,
        method=method,
        replicas=replicas,
        max_completion_tokens=1024,
        agreement=Agreement(max_logprob_gap=1e9, device=replicas.device),
    ), backend


def _make_model() -> None:
    torch.manual_seed(0)
    config = qwen3_config(
        vocabulary=VOCABULARY, positions=8192, num_key_value_heads=2, eos_token_id=None, bos_token_id=None, pad_token_id=None
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(FOLDER / "model")


def _make_work(num_steps: int, *, num_groups: int, row_tokens: int) -> Work:
    """Groups of siblings with long-tailed completions, packed by the orchestrator's rule."""
    chance = np.random.default_rng(0)
    steps: list[list[MicroBatch]] = []
    for step in range(num_steps):
        packing = Packing(max_tokens=row_tokens)
        rows = [row for group in range(num_groups) for sample in _group(chance, group, longest=row_tokens) for row in packing.add(sample)]
        rows += packing.flush()
        steps.append([micro_batch_of(tuple(row), step=step, index=index) for index, row in enumerate(rows)])
    return Work(steps=steps)


def _group(chance: np.random.Generator, number: int, *, longest: int) -> list[Sample]:
    prompt = chance.integers(0, VOCABULARY, int(chance.integers(16, 128)), dtype=np.int32)
    return [_sample(chance, prompt, longest=longest, name=f"{number}/{sibling}") for sibling in range(GROUP_SIZE)]


def _sample(chance: np.random.Generator, prompt: np.ndarray, *, longest: int, name: str) -> Sample:
    length = int(np.clip(chance.lognormal(np.log(0.06 * longest), 1.0), 8, longest - len(prompt)))
    ids = np.concatenate((prompt, chance.integers(0, VOCABULARY, length, dtype=np.int32)))
    loss_mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.where(loss_mask, -9.0, 0.0).astype(np.float32)
    advantages = np.where(loss_mask, chance.normal(), 0).astype(np.float32)
    return _sample_of(ids, prompt=prompt, loss_mask=loss_mask, logprobs=logprobs, advantages=advantages, name=name)


def _sample_of(
    ids: np.ndarray, *, prompt: np.ndarray, loss_mask: np.ndarray, logprobs: np.ndarray, advantages: np.ndarray, name: str
) -> Sample:
    trajectory = Trajectory(
        rollout_id=name,
        group_id=0,
        sibling=0,
        attempt=0,
        prompt=Prompt(prompt_id="0:0", text="", token_ids=prompt),
        token_ids=ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        finish=Finish.STOP,
    )
    return Sample(trajectory=trajectory, reward=0.0, advantages=advantages)


def _serve_all(work: Work, folders: list[Path]) -> None:
    """Serve the work once in each run folder."""
    for folder in folders:
        asyncio.run(_serve(work, folder))


async def _serve(work: Work, run_folder: Path) -> None:
    hub = ZmqHub(run_folder, "trainer", accepts=FromTrainer)
    num_left = len(work.steps)
    while num_left:
        for peer, message in await hub.receive():
            num_left -= type(message).__name__ == "StepDone"
            if isinstance(message, TakeMicroBatch):
                rows = work.steps[message.step]
                hub.send(peer, rows[message.index] if message.index < len(rows) else work.seal(message.step))
    hub.close()


def _fullness(median: float, sigma: float, *, row_tokens: int = 16_384, num_samples: int = 512, num_steps: int = 10) -> float:
    """Part of all rows that is tokens."""
    chance = np.random.default_rng(0)
    num_tokens = num_rows = 0
    for _ in range(num_steps):
        packing = Packing(max_tokens=row_tokens)
        for length in np.clip(chance.lognormal(np.log(median * row_tokens), sigma, num_samples), 1, row_tokens).astype(int).tolist():
            num_rows += len(packing.add(_blank_sample(length)))
            num_tokens += length
        num_rows += len(packing.flush())
    return num_tokens / (num_rows * row_tokens)


def _blank_sample(length: int) -> Sample:
    zeros, ids = np.zeros(length, np.float32), np.zeros(length, np.int32)
    return _sample_of(ids, prompt=ids[:1], loss_mask=ids.astype(bool), logprobs=zeros, advantages=zeros, name="0/0")


def _whole_table(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.t()).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def _in_pieces(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return linear_logprobs(hidden, weight, targets, temperature=1.0)[0]


def _peak_mib(function: Callable[..., torch.Tensor], num_tokens: int, num_words: int) -> float:
    """Peak memory of log-probabilities and gradients, over the inputs', of a process of its own."""
    hidden, weight = torch.randn(num_tokens, 512, requires_grad=True), torch.randn(num_words, 512, requires_grad=True)
    targets = torch.randint(0, num_words, (num_tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    function(hidden, weight, targets).sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    harness.run("trainer", measure)

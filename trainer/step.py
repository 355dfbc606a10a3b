"""One optimizer step: rows come in one by one, each adds its raw loss sum and gradient; the seal says what they are divided by.

Nothing is normalised per row or per rank, so how samples are split into rows, and rows over replicas, changes nothing but rounding.

A method that compares all tokens of a step (`Need.WHOLE_STEP`) needs two passes: `add` then only computes a row's log-probabilities,
without a gradient, and holds the row; `train_held` finds what the method must know of the whole step, over all replicas, and trains the
rows. That costs one more forward pass of every row, which still hides inside generation; the training itself no longer does.

The first step also checks that trainer and engine mean the same: on tokens sampled by the very weights being trained, both must give the
same log-probabilities. Where they do not, every importance ratio of the run would be wrong, and the run ends with the reasons to look for.
Every step checks it again in the mean, before its update: see `check_mismatch`.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from pipelinerl.algorithms.loss import (
    StepStatistics,
    TokenColumns,
    denominator,
    finish_meters,
    measure_step,
    merge_meters,
    policy_loss,
    reduces_by_maximum,
)
from pipelinerl.algorithms.method import Method, Need
from pipelinerl.errors import MismatchError
from pipelinerl.messages import MicroBatch, StepSealed
from trainer.engine import Engine, Outputs
from trainer.parallel import Replicas
from trainer.row import Row, arrange

DRIFT = 20.0
"""How much more than engine and trainer at equal weights all tokens may differ, staleness included. At the default limit that is a mean KL
of 0.6 nats per token: a few tokens then hold all the importance. Smaller would end runs that stale tokens alone have moved."""
_SHORT_NAMES = {"ess": "ess_fraction", "kl": "mismatch_kl_k3"}
"""Meters that a live view shows in a narrow column."""


class Step:
    """The step under way: `add` every row, then `finish`, or `drop` it. Used again for the next."""

    def __init__(
        self,
        engine: Engine,
        *,
        method: Method,
        replicas: Replicas,
        max_completion_tokens: int,
        max_logprob_gap: float,
        max_mismatch_kl: float = float("inf"),
        correct_reward: float = 1.0,
        first_step: int = 0,
    ) -> None:
        """`max_completion_tokens` is the constant length of Dr.GRPO; `max_logprob_gap` bounds the check of `first_step`, `max_mismatch_kl`
        that of every step; a sample with at least `correct_reward` is correct."""
        self._engine = engine
        self._method = method
        self._replicas = replicas
        self._max_completion_tokens = max_completion_tokens
        self._max_logprob_gap = max_logprob_gap
        self._max_mismatch_kl = max_mismatch_kl
        self._correct_reward = correct_reward
        self._first_step = first_step
        # The meters of a row without a token: every meter there is, so that all ranks reduce the same ones whatever rows they had.
        self._no_meters = policy_loss(_no_columns(replicas.device), method=method, statistics=StepStatistics()).meters
        self._meters = dict(self._no_meters)
        self._num_tokens = 0
        self._held: list[tuple[MicroBatch, Row | None, TokenColumns | None]] = []
        """Rows that wait for the measure of the whole step, with their columns before it."""

    def lay_out(self, batch: MicroBatch) -> Row | None:
        """Bring a row to the device, laid out for the model; None for a zero-loss row. May run beside `add`. Raises `DataError`."""
        return arrange(
            batch.token_ids,
            trains=batch.trains,
            lengths=batch.lengths,
            names=batch.rollout_ids,
            device=self._replicas.device,
            part=self._replicas.part,
        )

    def add(self, batch: MicroBatch, row: Row | None = None) -> None:
        """Compute a row's loss sum and add its gradient, or hold it where the method measures the whole step first.

        A zero-loss row adds nothing. `row` is what `lay_out` gave for it, where that was done before. Raises `MismatchError` and
        `DataError`.
        """
        row = row or self.lay_out(batch)
        self._num_tokens += len(batch.token_ids)
        if Need.WHOLE_STEP not in self._method.needs:
            self._engine.train(row, functools.partial(self._loss, batch, row))
            return
        outputs = self._engine.logprobs(row)
        columns = None
        if row is not None and outputs is not None:
            columns = self._columns(batch, row, logprobs=outputs.logprobs, entropy=outputs.entropy)
        self._held.append((batch, row, columns))

    def train_held(self) -> None:
        """Measure the whole step and train the rows held for it, or put off by the engine; comes before `finish`, on every rank."""
        measured = [columns for _, _, columns in self._held if columns is not None]
        statistics = measure_step(measured, method=self._method, reduce=self._summed)
        held, self._held = self._held, []
        for batch, row, columns in held:
            old_logprobs = None if columns is None else columns.old_logprobs
            self._engine.train(row, functools.partial(self._loss, batch, row, old_logprobs=old_logprobs, statistics=statistics))
        self._engine.complete()

    def finish(self, sealed: StepSealed) -> dict[str, float]:
        """Sum over the replicas, divide once, update the weights; return the step's numbers, the same on every rank."""
        assert not self._held, "rows are held for a measure of the whole step: train_held comes before finish"
        divisor = denominator(
            self._method.aggregation,
            num_tokens=sealed.num_tokens,
            num_sequences=sealed.num_samples,
            max_tokens=self._max_completion_tokens,
        )
        totals = self._reduced(sealed.step)
        num_tokens = totals.pop("row_tokens_sum")
        numbers = finish_meters(totals, denominator=divisor)
        check_mismatch(numbers, step=sealed.step, limit=self._max_mismatch_kl)
        update = self._engine.update(sealed.step, denominator=divisor)
        self.drop()
        numbers |= {short: numbers[name] for short, name in _SHORT_NAMES.items() if name in numbers}
        return numbers | {
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "num_tokens": num_tokens,
            "num_trained_tokens": float(sealed.num_tokens),
            "num_micro_batches": float(sealed.num_micro_batches),
        }

    def drop(self) -> None:
        """Forget the rows added so far."""
        self._engine.drop()
        self._meters = dict(self._no_meters)
        self._num_tokens = 0
        self._held.clear()

    def _loss(
        self,
        batch: MicroBatch,
        row: Row | None,
        outputs: Outputs,
        *,
        old_logprobs: torch.Tensor | None = None,
        statistics: StepStatistics | None = None,
    ) -> torch.Tensor:
        """A row's raw loss sum; its meters are kept. `old_logprobs` are those measured before: thresholds see the same bits."""
        assert row is not None, "the loss of a zero-loss row is not asked for"
        columns = self._columns(batch, row, logprobs=outputs.logprobs, entropy=outputs.entropy)
        if old_logprobs is not None:
            columns = dataclasses.replace(columns, old_logprobs=old_logprobs)
        if batch.step == self._first_step:
            check_agreement(columns, batch=batch, limit=self._max_logprob_gap)
        sums = policy_loss(columns, method=self._method, statistics=statistics)
        self._meters = merge_meters((self._meters, sums.meters))
        return sums.loss

    def _columns(self, batch: MicroBatch, row: Row, *, logprobs: torch.Tensor, entropy: torch.Tensor) -> TokenColumns:
        """The loss's view of a row: trained tokens only."""
        sample_of = np.repeat(np.arange(len(batch.lengths)), batch.lengths)

        def on_device(column: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(column).to(self._replicas.device, non_blocking=True)

        def trained(column: np.ndarray) -> torch.Tensor:
            return on_device(column[batch.trains])

        return TokenColumns(
            logprobs=logprobs,
            behaviour_logprobs=trained(batch.logprobs),
            advantages=trained(batch.advantages),
            trains=torch.ones_like(row.trained, dtype=torch.bool),
            versions=trained(batch.versions),
            sequence_ids=trained(sample_of),
            trained_version=batch.step,
            positions=row.trained,
            entropy=entropy,
            old_logprobs=logprobs.detach() if Need.OLD_LOGPROBS in self._method.needs else None,
            correct=None if batch.rewards is None else on_device(batch.rewards >= self._correct_reward),
            truncated=None if batch.truncated is None else on_device(batch.truncated.copy()),  # what came off the wire is read-only
        )

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its sum over all replicas, on the host."""
        on_device = tensor.to(self._replicas.device)
        self._replicas.sum(on_device, what="to measure the whole step")
        return on_device.cpu()

    def _reduced(self, step: int) -> dict[str, float]:
        """The step's meters over all replicas."""
        meters = self._meters | {"row_tokens_sum": torch.tensor(float(self._num_tokens))}
        totals: dict[str, float] = {}
        for is_maximum, reduce in ((False, self._replicas.sum), (True, self._replicas.maximum)):
            names = sorted(name for name in meters if reduces_by_maximum(name) == is_maximum)
            values = torch.stack([meters[name].double().to(self._replicas.device) for name in names])
            reduce(values, what=f"to add up the meters of step {step}")
            totals |= dict(zip(names, values.tolist(), strict=True))
        return totals


def check_agreement(columns: TokenColumns, *, batch: MicroBatch, limit: float) -> None:
    """Raise `MismatchError` where a token sampled by the version being trained has another log-probability here than in its engine."""
    fresh = columns.versions == columns.trained_version
    if not bool(fresh.any()):
        return
    ours, theirs = columns.logprobs.detach(), columns.behaviour_logprobs
    gaps = (ours - theirs).abs().masked_fill(~fresh, 0.0)  # NaN is the largest for argmax, and below no limit
    worst = int(gaps.argmax())
    if float(gaps[worst]) <= limit:
        return
    place = int(np.flatnonzero(batch.trains)[worst])
    sample = int(np.searchsorted(np.cumsum(batch.lengths), place, side="right"))
    within = place - int(batch.lengths[:sample].sum())
    raise MismatchError(
        f"rollout {batch.rollout_ids[sample]}, token {within} (id {batch.token_ids[place]}): the trainer's log-probability is"
        f" {float(ours[worst]):.6f}, the engine's {float(theirs[worst]):.6f}; expected a gap of at most"
        f" {limit:g}, got {float(gaps[worst]):.3g} (mean {float(gaps[fresh].mean()):.3g} over {int(fresh.sum())} tokens). Both hold version"
        f" {columns.trained_version}, so the two compute something else, and every importance ratio would be wrong. Likely causes:\n"
        "  - the engine serves other weights: another model folder, or weights it transformed after loading\n"
        "  - another dtype: bfloat16 here and float32 there differ by 0.01 to 0.5 (trainer.max_logprob_gap is the bound)\n"
        "  - the engine's log-probabilities are those before temperature, top-p or top-k (vLLM: logprobs_mode must be processed_logprobs)\n"
        "  - samples of a packed row see each other, or positions do not restart: a model whose code ignores our attention\n"
        "  - token ids of another tokenizer, or a chat template applied twice"
    )


def check_mismatch(numbers: dict[str, float], *, step: int, limit: float) -> None:
    """Raise `MismatchError` where engine and trainer drift apart, before the step's update; `numbers` are the step's meters.

    The limit is for sequences that one version sampled whole, the one being trained: there the weights are equal, and no token saw keys and
    values of older weights (an engine keeps those over a swap, so a sequence that lived through one differs for a reason that is no fault).
    A step may hold no such sequence; all its tokens together may then differ by staleness, too, and only `DRIFT` times as much is too much.
    """
    for name, bound, whose in (
        ("mismatch_kl_fresh", limit, "sequences that version {0} sampled whole"),
        ("mismatch_kl_k3", DRIFT * limit, "all tokens, whatever their version"),
    ):
        found = numbers.get(name, 0.0)
        if not found <= bound:  # NaN is below no limit
            raise MismatchError(
                f"step {step}: mean KL between engine and trainer over {whose.format(step)}: got {found:.3g}, expected at most {bound:g}"
                f" (trainer.max_mismatch_kl = {limit:g}; largest single gap {numbers.get('logprob_gap_max', float('nan')):.3g}, mean"
                f" staleness {numbers.get('staleness_mean', float('nan')):.2f}). Nothing was updated. Likely causes: an engine that serves"
                " another version than it says, arithmetic of another precision, a policy that has diverged (lower trainer.learning_rate or"
                " pipeline.max_staleness), or, for mixtures of experts, other routes in engine and trainer"
            )


def _no_columns(device: torch.device) -> TokenColumns:
    nothing, no_ids = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    return TokenColumns(
        logprobs=nothing,
        behaviour_logprobs=nothing,
        advantages=nothing,
        trains=no_ids.bool(),
        versions=no_ids,
        sequence_ids=no_ids,
        trained_version=0,
        positions=no_ids,
        entropy=nothing,
        old_logprobs=nothing,
        correct=no_ids.bool(),
        truncated=no_ids.bool(),
    )

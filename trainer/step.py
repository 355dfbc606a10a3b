"""One optimizer step: rows come in one by one, each adds its raw loss sum and gradient; the seal says what they are divided by.

Nothing is normalised per row or per rank, so how samples are split into rows, and rows over replicas, changes nothing but rounding.

The first step also checks that trainer and engine mean the same: on tokens sampled by the very weights being trained, both must give the
same log-probabilities. Where they do not, every importance ratio of the run would be wrong, and the run ends with the reasons to look for.
"""

from __future__ import annotations

import numpy as np
import torch

from pipelinerl.algorithms.loss import TokenColumns, denominator, finish_meters, merge_meters, policy_loss, reduces_by_maximum
from pipelinerl.algorithms.method import Method, Need
from pipelinerl.errors import MismatchError
from pipelinerl.messages import MicroBatch, StepSealed
from trainer.engine import Engine, Outputs
from trainer.parallel import Replicas
from trainer.row import Row, arrange

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
        first_step: int = 0,
    ) -> None:
        """`max_completion_tokens` is the constant length of Dr.GRPO; `max_logprob_gap` bounds the check of `first_step`."""
        self._engine = engine
        self._method = method
        self._replicas = replicas
        self._max_completion_tokens = max_completion_tokens
        self._max_logprob_gap = max_logprob_gap
        self._first_step = first_step
        # The meters of a row without a token: every meter there is, so that all ranks reduce the same ones whatever rows they had.
        self._no_meters = policy_loss(_no_columns(replicas.device), method=method).meters
        self._meters = dict(self._no_meters)
        self._num_tokens = 0

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
        """Compute a row's loss sum and add its gradient. A zero-loss row adds nothing. Raises `MismatchError` and `DataError`.

        `row` is what `lay_out` gave for it, where that was done before.
        """
        row = row or self.lay_out(batch)
        self._num_tokens += len(batch.token_ids)
        self._engine.train(row, lambda outputs: self._loss(batch, row, outputs))

    def finish(self, sealed: StepSealed) -> dict[str, float]:
        """Sum over the replicas, divide once, update the weights; return the step's numbers, the same on every rank."""
        divisor = denominator(
            self._method.aggregation,
            num_tokens=sealed.num_tokens,
            num_sequences=sealed.num_samples,
            max_tokens=self._max_completion_tokens,
        )
        update = self._engine.update(sealed.step, denominator=divisor)
        totals = self._reduced(sealed.step)
        num_tokens = totals.pop("row_tokens_sum")
        numbers = finish_meters(totals, denominator=divisor)
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

    def _loss(self, batch: MicroBatch, row: Row | None, outputs: Outputs) -> torch.Tensor:
        """A row's raw loss sum; its meters are kept."""
        assert row is not None, "the loss of a zero-loss row is not asked for"
        columns = self._columns(batch, row, logprobs=outputs.logprobs, entropy=outputs.entropy)
        if batch.step == self._first_step:
            check_agreement(columns, batch=batch, limit=self._max_logprob_gap)
        sums = policy_loss(columns, method=self._method)
        self._meters = merge_meters((self._meters, sums.meters))
        return sums.loss

    def _columns(self, batch: MicroBatch, row: Row, *, logprobs: torch.Tensor, entropy: torch.Tensor) -> TokenColumns:
        """The loss's view of a row: trained tokens only."""
        sample_of = np.repeat(np.arange(len(batch.lengths)), batch.lengths)

        def trained(column: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(column[batch.trains]).to(self._replicas.device, non_blocking=True)

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
        )

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
    )

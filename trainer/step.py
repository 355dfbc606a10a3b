"""One step: rows come in one by one, each adds its raw loss sum and gradient; the seal says what they are divided by.

Nothing is normalised per row or per rank, so how samples are split into rows, and rows over replicas, changes nothing but rounding.

A method that compares all tokens of a step (`Need.WHOLE_STEP`), and a step that is trained for several epochs, need two phases: `add` then
only computes what the trainer's models say of a row, without a gradient, and holds the row; `train_held` makes the advantages that are
the trainer's to make, finds what the method must know of the whole step, over all replicas, and trains the rows. That costs one more
forward pass of every row, which still hides inside generation; the training itself no longer does.

The first step also checks that trainer and engine mean the same, every step that they do not drift apart: see `trainer.logprob_mismatch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

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
from pipelinerl.algorithms.rules import makes_advantages_in_trainer
from pipelinerl.algorithms.signal import gradient_needs_advantage
from pipelinerl.data.expert_routes import num_unrouted, table_of
from pipelinerl.data.images import ImageProcessor
from pipelinerl.errors import ConfigError
from pipelinerl.messages import EngineMismatch, MicroBatch, StepClosed
from trainer.advantages import HeldRow, with_advantages
from trainer.backend import Backend, Outputs
from trainer.controllers import Controllers
from trainer.critic import Critic, finish_critic_meters
from trainer.data.sft_stream import SftStream
from trainer.data.split import split_by_gradient, without_samples
from trainer.data.token_columns import columns_of, no_columns
from trainer.logprob_mismatch import Agreement
from trainer.model.reference import Reference
from trainer.model.teachers import Teachers
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import arrange, arrange_parts
from trainer.rows.images import images_of_row
from trainer.rows.packed_row import PackedRow

_OF_LAST_EPOCH = ("ratio_mean", "ratio_min", "ratio_max", "ppo_kl", "clip_fraction", "value_clipped")
"""Meters of how far a step moves; all others are of its first epoch, which sees the policy that the engines know."""


@dataclasses.dataclass(eq=False)
class Step:
    """The step under way: `add` every row, then `finish`, or `drop` it. Used again for the next."""

    backend: Backend[Outputs]
    _: dataclasses.KW_ONLY
    method: dataclasses.InitVar[Method]
    replicas: Replicas
    max_completion_tokens: int
    """The constant length of Dr.GRPO."""
    agreement: Agreement
    """The check that the engines' log-probabilities are the trainer's."""
    correct_reward: float = 1.0
    """A sample with at least this reward is correct."""
    epochs: int = 1
    """Updates of a step, each over all its rows."""
    reference: Reference | Teachers | None = None
    critic: Critic | None = None
    critic_warmup_steps: int = 0
    """Steps before this one leave the policy as it is."""
    replay_routing: bool = False
    """Tokens that have no route to replay are counted."""
    controllers: Controllers | None = None
    """The coefficients that follow a measurement; by default, from the method's own on."""
    image_processor: ImageProcessor | None = None
    """Of a model that takes images."""
    max_row_tokens: int | None = None
    """An episode with more is computed in parts of as many; None: no episode is."""
    sft_stream: SftStream | None = None
    """Demonstrations that every epoch trains beside the rows."""

    def __post_init__(self, method: Method) -> None:
        if self.max_row_tokens is not None and Need.DIVERGENCE in method.needs:
            raise ConfigError(
                "gateway.max_episode_tokens: an episode that is larger than a packed row is computed in parts, which is not written for"
                " whole distributions of a teacher. Leave it out, or choose a method that reads sampled tokens alone, such as opd"
            )
        self._controllers = self.controllers or Controllers(method)
        self._backends = (self.backend,) if self.critic is None else (self.backend, self.critic.backend)
        self._holds = Need.WHOLE_STEP in method.needs or self.epochs > 1
        # A pipeline computes several rows in one pass, and a row by itself would cost it as much as the backward pass that it saves.
        self._needs_advantage = gradient_needs_advantage(method) and self.replicas.layout.pipeline == 1
        # The meters of a row without a token: every meter there is, so that all ranks reduce the same ones whatever rows they had.
        nothing = no_columns(self.replicas.device, has_reference=self.reference is not None, has_divergence=Need.DIVERGENCE in method.needs)
        self._no_meters = policy_loss(nothing, method=method, statistics=StepStatistics()).meters
        names = self.critic.meters if self.critic is not None else ()
        self._no_meters |= {name: torch.zeros((), dtype=torch.float64, device=self.replicas.device) for name in names}
        self._meters = dict(self._no_meters)
        self._num_tokens = 0
        self._num_tokens_without_gradient = 0
        """Tokens of rows for which no backward pass was computed."""
        self.engines: tuple[EngineMismatch, ...] = ()
        """The distance of each engine from the trainer in the step that was finished last."""
        self._num_unrouted = 0
        """Tokens that were not sent where their engine sent them, because that is not known."""
        self._held: list[HeldRow] = []
        self._first_epoch: dict[str, float] = {}
        """Numbers of the first of several epochs, once it is over."""
        self._of_step: dict[str, float] = {}
        """Numbers of the whole step that are no sums over its rows."""

    @property
    def _method(self) -> Method:
        """The method with the coefficients of the step under way."""
        return self._controllers.method()

    def lay_out(self, batch: MicroBatch) -> PackedRow | None:
        """Bring a row to the device, laid out for the model; None for a zero-loss row. May run beside `add`. Raises `DataError`."""
        if batch.nodes is not None and self.max_row_tokens is not None and len(batch.token_ids) > self.max_row_tokens:
            return arrange_parts(batch, max_tokens=self.max_row_tokens, device=self.replicas.device)
        return arrange(
            batch.token_ids,
            loss_mask=batch.loss_mask,
            lengths=batch.lengths,
            names=batch.rollout_ids,
            device=self.replicas.device,
            context_shard=self.replicas.context_shard,
            routes=None if batch.routes is None else table_of(batch.routes),
            nodes=batch.nodes,
            images=images_of_row(batch, processor=self.image_processor),
        )

    def split(self, batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
        """Split a row into what has a gradient and what has none, whatever the model computes of it; see `pipelinerl.algorithms.signal`."""
        return split_by_gradient(batch) if self._needs_advantage else (batch, without_samples(batch))

    def add(self, batch: MicroBatch, row: PackedRow | None = None, *, has_gradient: bool = True) -> None:
        """Compute a row's loss sum and add its gradient, or hold it where the method needs the whole step first.

        A zero-loss row adds nothing. `row` is what `lay_out` gave for it, where that was done before. Without `has_gradient`, which all
        ranks say alike, the row is measured and no backward pass is computed. Raises `DataError`.
        """
        row = row or self.lay_out(batch)
        self._num_tokens += len(batch.token_ids)
        self._num_tokens_without_gradient += 0 if has_gradient else len(batch.token_ids)
        self._num_unrouted += num_unrouted(batch.routes, lengths=batch.lengths) if self.replay_routing else 0
        if row is not None and batch.teacher_ids is not None:
            row = dataclasses.replace(row, teacher_ids=teacher_ids(batch, device=self.replicas.device))
        reference_logprobs, row = (None, row) if self.reference is None else self.reference.judge(row)

        def columns(outputs: Outputs) -> TokenColumns:
            assert row is not None, "the loss of a zero-loss row is not asked for"
            found = columns_of(
                batch,
                row,
                outputs,
                correct_reward=self.correct_reward,
                reference_logprobs=reference_logprobs,
                keeps_old=Need.OLD_LOGPROBS in self._method.needs,
            )
            self.agreement.add(found, batch=batch)
            return found

        if not self._holds:
            self._compute(row, lambda outputs: self._loss(columns(outputs)), has_gradient=has_gradient)
            return
        outputs = self.backend.outputs(row)
        values = self.critic.backend.outputs(row) if self.critic is not None else outputs.square_sums if outputs is not None else None
        found = None if outputs is None else columns(outputs)
        self._held.append(HeldRow(batch=batch, row=row, columns=found, values=values, has_gradient=has_gradient))

    def train_held(self, sealed: StepClosed) -> None:
        """Train what waits for the seal: rows held for the whole step, epoch after epoch, or put off by the backend, and demonstrations.

        Comes before `finish`, on every rank.
        """
        held, self._held = self._held, []
        if makes_advantages_in_trainer(self._method):
            held = with_advantages(held, method=self._method, replicas=self.replicas, correct_reward=self.correct_reward)
        measured = [one.columns for one in held if one.columns is not None]
        statistics = measure_step(measured, method=self._method, reduce=self._summed)
        if statistics is not None and self._method.weight.options.get("batch_normalize"):
            self._of_step["weight_batch_mean"] = statistics.mean_weight
        rests = sealed.step < self.critic_warmup_steps
        for number in range(self.epochs):
            if number:
                numbers = self._update(sealed)
                self._first_epoch = self._first_epoch or numbers
            for one in held:
                self._train(one, statistics=statistics, rests=rests)
            if self.sft_stream is not None and not rests:
                self.sft_stream.train(sealed.step, divisor=self._divisor(sealed))
            for backend in self._backends:
                backend.complete()

    def finish(self, sealed: StepClosed) -> dict[str, float]:
        """Sum over the replicas, divide once, update the weights; return the step's numbers, the same on every rank.

        Raises `MismatchError`, before the update, where engine and trainer do not agree.
        """
        assert not self._held, "rows are held for a measure of the whole step: train_held comes before finish"
        numbers = self._update(sealed)
        if self._first_epoch:
            numbers = self._first_epoch | {name: numbers[name] for name in _OF_LAST_EPOCH if name in numbers}
        self.drop()
        numbers |= self._of_step | self._controllers.in_force()
        self._of_step = {}
        if sealed.step >= self.critic_warmup_steps:  # a policy that rests moves no measurement
            self._controllers.follow(numbers, agree=self._agreed)
        return numbers | {"num_trained_tokens": float(sealed.num_tokens), "num_micro_batches": float(sealed.num_micro_batches)}

    def drop(self) -> None:
        """Forget the rows added so far."""
        for backend in self._backends:
            backend.drop()
        self._meters = dict(self._no_meters)
        self._num_tokens = self._num_tokens_without_gradient = self._num_unrouted = 0
        self.agreement.drop()
        self._held.clear()
        self._first_epoch = {}

    def _train(self, held: HeldRow, *, statistics: StepStatistics | None, rests: bool) -> None:
        """Add the gradients of a held row; where the policy `rests`, only the critic's."""

        def loss(outputs: Outputs) -> torch.Tensor:
            assert held.columns is not None, "the loss of a zero-loss row is not asked for"
            columns = dataclasses.replace(held.columns, logprobs=outputs.logprobs, entropy=outputs.entropy, divergence=outputs.divergence)
            return self._loss(columns, statistics=statistics)

        self._compute(held.row, loss, has_gradient=held.has_gradient and not rests)
        if self.critic is not None:
            self.critic.train(held, report=self._merge)

    def _compute(self, row: PackedRow | None, loss: Callable[[Outputs], torch.Tensor], *, has_gradient: bool) -> None:
        """Add a row's gradient; where it has none, only what `loss` measures."""
        if has_gradient:
            self.backend.train(row, loss)
        elif (outputs := self.backend.outputs(row)) is not None:
            loss(outputs)

    def _loss(self, columns: TokenColumns, *, statistics: StepStatistics | None = None) -> torch.Tensor:
        """A row's raw loss sum; its meters are kept."""
        sums = policy_loss(columns, method=self._method, statistics=statistics)
        self._merge(sums.meters)
        return sums.loss

    def _merge(self, meters: dict[str, torch.Tensor]) -> None:
        self._meters = merge_meters((self._meters, meters))

    def _update(self, sealed: StepClosed) -> dict[str, float]:
        """End an epoch: its numbers, over all replicas, and the update of every model that is trained."""
        divisor = self._divisor(sealed)
        totals = self._reduced(sealed.step)
        numbers = {"num_tokens": totals.pop("row_tokens_sum"), "num_tokens_without_gradient": totals.pop("row_without_gradient_sum")}
        numbers |= {"num_unrouted_tokens": totals.pop("row_unrouted_sum")} if self.replay_routing else {}
        numbers |= finish_critic_meters(finish_meters(totals, denominator=divisor))
        if not self._first_epoch:  # later epochs have moved away from what the engines know, on purpose
            numbers |= self.agreement.quantile(summed=self._summed)
            self.engines = self.agreement.check(numbers, step=sealed.step, summed=self._summed)
        if sealed.step >= self.critic_warmup_steps:
            update = self.backend.update(sealed.step, denominator=divisor)
            numbers |= {"grad_norm": update.grad_norm, "learning_rate": update.learning_rate}
        if self.critic is not None:
            update = self.critic.update(sealed)
            numbers |= {"critic_grad_norm": update.grad_norm, "critic_learning_rate": update.learning_rate}
        if self.sft_stream is not None:
            numbers |= self.sft_stream.finish(sealed.step)
        self._meters = dict(self._no_meters)
        return numbers

    def _divisor(self, sealed: StepClosed) -> float:
        """Give the divisor of the step's sums."""
        return denominator(
            self._method.aggregation,
            num_tokens=sealed.num_tokens,
            num_sequences=sealed.num_samples,
            max_tokens=self.max_completion_tokens,
        )

    def _agreed(self, tensor: torch.Tensor) -> None:
        """Have every rank hold the same tensor, also those of one replica."""
        self.replicas.reduce(tensor, dist.ReduceOp.MAX, what="to agree on coefficients")

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all replicas, on the host."""
        on_device = tensor.to(self.replicas.device)
        self.replicas.sum(on_device, what="to measure the whole step")
        return on_device.cpu()

    def _reduced(self, step: int) -> dict[str, float]:
        """The step's meters over all replicas."""
        counts = {"row_tokens_sum": self._num_tokens, "row_without_gradient_sum": self._num_tokens_without_gradient}
        counts |= {"row_unrouted_sum": self._num_unrouted} if self.replay_routing else {}
        meters = self._meters | {name: torch.tensor(float(count)) for name, count in counts.items()}
        totals: dict[str, float] = {}
        for is_maximum, reduce in ((False, self.replicas.sum), (True, self.replicas.maximum)):
            names = sorted(name for name in meters if reduces_by_maximum(name) == is_maximum)
            values = torch.stack([meters[name].double().to(self.replicas.device) for name in names])
            reduce(values, what=f"to add up the meters of step {step}")
            totals |= dict(zip(names, values.tolist(), strict=True))
        return totals


def teacher_ids(batch: MicroBatch, *, device: torch.device) -> torch.Tensor:
    """[K] int64, the teacher of each trained token."""
    assert batch.teacher_ids is not None
    return torch.from_numpy(np.repeat(batch.teacher_ids, batch.lengths)[batch.loss_mask].astype(np.int64)).to(device, non_blocking=True)

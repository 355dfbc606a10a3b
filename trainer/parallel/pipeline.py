"""Rows through the stages of a pipeline, by torch's schedules: while one rank has a row's first layers, the next has another's later ones.

torch's stages take tensors of one shape, given beforehand. Rows have any length, and every rank of a pipeline knows them: what travels is
padded to the longest of the rows that go together, what is computed is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from pipelinerl.config.layout import Schedule
from pipelinerl.errors import PipelineError
from trainer.parallel.replicas import Replicas
from trainer.rows.packed_row import PackedRow

_SCHEDULES = {
    Schedule.ONE_FORWARD_ONE_BACKWARD: "1F1B",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZERO_BUBBLE: "InterleavedZeroBubble",
}

Outputs = tuple[torch.Tensor, ...]
"""The model's outputs for a row's trained tokens, [K] float32 each: see `trainer.model.Model.outputs`."""


class Stage(Protocol):
    """A run of layers of the model on this rank, a `torch.nn.Module`."""

    rows: Sequence[PackedRow]
    """The rows that go through the stages together; a stage is given the number of one."""
    length: int
    """Tokens to which hidden states are padded."""

    def __call__(self, given: torch.Tensor, number: torch.Tensor) -> Any:
        """Turn the hidden states of the stage before into this one's, [1, length, H]; the last stage gives `Outputs`."""
        ...


class Pipeline:
    """This rank's stages among those of its pipeline. All ranks of one call the same, with the same rows."""

    def __init__(self, stages: Sequence[Any], *, num_columns: int, hidden_size: int, dtype: torch.dtype, replicas: Replicas) -> None:
        """`num_columns` the last stage gives of a row."""
        self._stages: list[Any] = list(stages)
        self._num_columns = num_columns
        self._replicas = replicas
        self._layout = replicas.layout
        self._place = replicas.place("pipeline")
        self._group = replicas.mesh("pipeline").get_group()
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._is_last = self._place == self._layout.pipeline - 1

    def train(self, rows: Sequence[PackedRow], losses: Sequence[Callable[[Outputs], torch.Tensor]]) -> None:
        """Add the gradient of each row's loss. There are a multiple of as many rows as ranks; every loss is called on every rank."""
        found: dict[int, Outputs] = {}

        def loss(outputs: Outputs, number: torch.Tensor) -> torch.Tensor:
            found[int(number)] = tuple(column.detach() for column in outputs)
            return losses[int(number)](outputs)

        self._prepare(rows)
        numbers = torch.arange(len(rows))
        schedule = self._make_schedule(len(rows), loss)
        self._bounded(
            lambda: schedule.step(
                *(() if self._place else (numbers,)), number=numbers, target=numbers if self._is_last else None, return_outputs=False
            )
        )
        shared = self._share(rows, [found[number] for number in range(len(rows))] if self._is_last else [])
        if not self._is_last:  # the last rank has called them: others learn what they measure
            for outputs, of_row in zip(shared, losses, strict=True):
                of_row(outputs)

    def outputs(self, row: PackedRow) -> Outputs:
        """Compute a row's outputs, without gradient, on every rank: stage after stage, while the other ranks wait."""
        self._prepare([row])
        computed: Any = None
        number = torch.zeros(1, dtype=torch.int64)
        num_stages = self._layout.num_stages
        for index, stage in zip(range(self._place, num_stages, self._layout.pipeline), self._stages, strict=True):
            given = number if index == 0 else self._received()
            computed = stage(given, number)
            if index < num_stages - 1:
                self._bounded(lambda sent=computed: dist.send(sent, group_dst=(self._place + 1) % self._layout.pipeline, group=self._group))
        return self._share([row], [computed] if self._is_last else [])[0]

    def send_to_all(self, tensor: torch.Tensor, *, owner: int) -> None:
        """Have `tensor` on every rank be that of the rank at place `owner`."""
        self._bounded(lambda: dist.broadcast(tensor, group_src=owner, group=self._group))

    def _prepare(self, rows: Sequence[PackedRow]) -> None:
        for stage in self._stages:
            stage.rows, stage.length = rows, max(len(row.token_ids) for row in rows)

    def _hidden(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(1, self._stages[0].length, self._hidden_size, dtype=self._dtype, device=device)

    def _make_schedule(self, num_rows: int, loss: Callable[..., torch.Tensor]) -> Any:
        """Made anew for every pass: a schedule holds to the shapes it has seen, and takes milliseconds to make."""
        num_stages = self._layout.num_stages
        hidden = self._hidden("meta").requires_grad_()
        number, outputs = torch.empty(1, dtype=torch.int64, device="meta"), (torch.empty(0, device="meta"),) * self._num_columns
        stages = [
            PipelineStage(
                stage,
                index,
                num_stages,
                self._replicas.device,
                input_args=hidden if index else number,
                output_args=hidden if index < num_stages - 1 else outputs,
                group=self._group,
            )
            for index, stage in zip(range(self._place, num_stages, self._layout.pipeline), self._stages, strict=True)
        ]
        kind = get_schedule_class(_SCHEDULES[self._layout.schedule])
        takes: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        return kind(takes, n_microbatches=num_rows, loss_fn=loss, scale_grads=False)  # pyright: ignore[reportCallIssue]

    def _received(self) -> torch.Tensor:
        hidden = self._hidden(self._replicas.device)
        self._bounded(lambda: dist.recv(hidden, group_src=(self._place - 1) % self._layout.pipeline, group=self._group))
        return hidden

    def _share(self, rows: Sequence[PackedRow], outputs: Sequence[Outputs]) -> list[Outputs]:
        """The last rank's outputs of all rows, on every rank."""
        lengths = [len(row.trained) for row in rows]
        columns = torch.empty(self._num_columns, sum(lengths), device=self._replicas.device)
        if outputs:
            torch.cat([torch.stack(of_row) for of_row in outputs], 1, out=columns)
        self.send_to_all(columns, owner=self._layout.pipeline - 1)
        return [tuple(part.unbind()) for part in columns.split(lengths, 1)]

    def _bounded(self, call: Callable[[], object]) -> None:
        """Tell an error of our own, which torch wraps, from a rank that is lost."""

        def unwrapped() -> None:
            try:
                call()
            except RuntimeError as error:
                if isinstance(error.__cause__, PipelineError):
                    raise error.__cause__ from error
                raise

        self._replicas.bounded(unwrapped, "of its pipeline to compute rows")

"""Forward and backward passes over a client's data: packed like the rows of a run, with the targets and the loss that the client names.

A datum is what the model reads, and for each position the token whose log-probability is wanted behind it: mostly the next one, but any
may be asked for. Beginnings that data share are computed once, as in every row.

Legend: `R` positions of all data end to end, `K` those of a row whose log-probability is wanted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from pipelinerl.algorithms.loss.client_losses import check, client_loss
from pipelinerl.data.packing import Packing
from pipelinerl.errors import DataError
from pipelinerl.messages import ForwardBackward, ForwardBackwardDone
from trainer.backend import Backend, Outputs
from trainer.rows.arrange import arrange


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Datum:
    """The place of a datum among the request's positions."""

    start: int
    length: int

    @property
    def num_tokens(self) -> int:
        """One more than it reads: the last target stands behind."""
        return self.length + 1

    @property
    def positions(self) -> slice:
        return slice(self.start, self.start + self.length)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Computes requests with the model in use."""

    backend: Backend[Outputs]
    device: torch.device
    max_row_tokens: int
    """`batch.max_tokens`: bounds the memory of one pass."""
    num_words: int
    """Rows of the model's output embedding."""

    def run(self, request: ForwardBackward) -> ForwardBackwardDone:
        """Add the gradient of the request's loss, unless it is forward only; return its log-probabilities. Raises `DataError` before any
        of it is computed."""
        check(request.loss, columns=request.columns, options=request.options)
        for what, ids in (("tokens", request.token_ids), ("targets", request.targets)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_words:
                raise DataError(f"{what} from {ids.min()} to {ids.max()}: the model knows 0 to {self.num_words - 1}")
        logprobs = np.zeros(len(request.token_ids), np.float32)
        total, num_computed = 0.0, 0
        for row in list(self._rows(request)):
            loss, computed = self._run_row(request, row, logprobs)
            total, num_computed = total + loss, num_computed + computed
        self.backend.complete()
        return ForwardBackwardDone(request_id=request.request_id, logprobs=logprobs, loss=total, num_computed=num_computed)

    def _rows(self, request: ForwardBackward) -> Iterator[list[_Datum]]:
        starts = np.cumsum(request.lengths, dtype=np.int64) - request.lengths
        data = [_Datum(start=start, length=length) for start, length in zip(starts.tolist(), request.lengths.tolist(), strict=True)]
        if (longest := max((datum.num_tokens for datum in data), default=0)) > self.max_row_tokens:
            raise DataError(
                f"a datum of {longest - 1} tokens does not fit a row of {self.max_row_tokens - 1}. Send shorter ones, or raise"
                " batch.max_tokens in the server's settings"
            )
        packing = Packing[_Datum](max_tokens=self.max_row_tokens)
        for datum in data:
            if request.wanted[datum.positions].any():
                yield from packing.add(datum)
        yield from packing.flush()

    def _run_row(self, request: ForwardBackward, data: list[_Datum], logprobs: np.ndarray) -> tuple[float, int]:
        """Compute a row and write down its log-probabilities; return its loss, and how many tokens went through the model."""
        where = np.concatenate([np.arange(datum.start, datum.start + datum.length) for datum in data])
        wanted = where[request.wanted[where]]
        behind = [np.append(request.token_ids[datum.positions], request.targets[datum.start + datum.length - 1]) for datum in data]
        mask = [np.append(False, request.wanted[datum.positions]) for datum in data]
        row = arrange(
            np.concatenate(behind).astype(np.int32),
            loss_mask=np.concatenate(mask),
            lengths=np.array([datum.num_tokens for datum in data], np.int32),
            names=[str(datum.start) for datum in data],
            device=self.device,
        )
        assert row is not None, "data without a wanted position are left out"
        row = dataclasses.replace(row, targets=self._on_device(request.targets[wanted].astype(np.int64)))
        number = np.repeat(np.arange(len(data)), [int(request.wanted[datum.positions].sum()) for datum in data])
        columns = {name: self._on_device(column[wanted]) for name, column in request.columns.items()}
        found: list[tuple[torch.Tensor, float]] = []

        def loss(outputs: Outputs) -> torch.Tensor:
            value = client_loss(
                request.loss,
                logprobs=outputs.logprobs,
                columns=columns,
                sequence_ids=self._on_device(number),
                num_sequences=len(data),
                options=request.options,
            )
            found.append((outputs.logprobs.detach(), float(value.detach())))
            return value

        if request.is_forward_only:
            outputs = self.backend.outputs(row)
            assert outputs is not None, "the row has wanted positions"
            loss(outputs)
        else:
            self.backend.train(row, loss)
        ((computed, value),) = found
        logprobs[wanted] = computed.float().cpu().numpy()
        return value, len(row.token_ids)

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

"""A client's request for a gradient, checked, as the trainer takes it.

Each datum is what the model reads, and one target for every position of that. Legend: `R` positions of all data end to end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from pipelinerl.gateway.refusal import wrong
from pipelinerl.messages import Figures, Float32, ForwardBackward, Int32, Mask
from pipelinerl.tinker import wire
from pipelinerl.tinker.provenance import Span

COLUMNS = frozenset({"weights", "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask", "mask"})
"""What a datum may bring beside its targets. `mask` is for the client alone, and not read."""
_SAYS_WHAT_COUNTS = ("weights", "advantages", "sequence_ratio_mask")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A request for a gradient, or for its forward pass alone."""

    model_id: str
    seq_id: int
    loss: str
    options: Figures
    is_forward_only: bool
    token_ids: Int32
    """[R]."""
    targets: Int32
    """[R]."""
    wanted: Mask
    """[R]: positions whose log-probability can matter to the client."""
    lengths: Int32
    columns: dict[str, Float32]
    spans: Sequence[Sequence[Span]]
    """Of each datum; none where the client says nothing of where it has its targets from."""

    def message(self) -> ForwardBackward:
        """Return it as the trainer takes it; its number is given where it is sent."""
        return ForwardBackward(
            request_id=0,
            model_id=self.model_id,
            loss=self.loss,
            options=self.options,
            token_ids=self.token_ids,
            targets=self.targets,
            wanted=self.wanted,
            lengths=self.lengths,
            columns=self.columns,
            is_forward_only=self.is_forward_only,
        )

    def targets_of(self, index: int) -> Int32:
        """Return the targets of one datum."""
        end = int(self.lengths[: index + 1].sum())
        return self.targets[end - int(self.lengths[index]) : end]


def read(body: bytes) -> Gradient:
    """Read the protobuf of a `forward_backward`. Raises `RequestRefused` naming the datum and the field."""
    said = wire.ForwardBackwardRequest()
    try:
        said.ParseFromString(body)
    except DecodeError as error:
        raise wrong(f"the body is no ForwardBackwardRequest: {error}", code="invalid_protobuf") from None
    if not said.data:
        raise wrong("data is empty, expected a datum at least", param="data")
    token_ids, targets, columns, wanted = [], [], [], []
    for number, datum in enumerate(said.data):
        tokens = _tokens(datum.model_input, about=f"data[{number}]")
        named = {name: _array(tensor, about=f"data[{number}].loss_fn_inputs[{name}]") for name, tensor in datum.loss_fn_inputs.items()}
        target = named.pop("target_tokens", None)
        if target is None or len(target) != len(tokens):
            got = "none" if target is None else f"{len(target)}"
            raise wrong(f"data[{number}]: target_tokens has {got}, expected one for each of {len(tokens)} tokens", param="target_tokens")
        if unknown := named.keys() - COLUMNS:
            raise wrong(f"data[{number}].loss_fn_inputs has {', '.join(sorted(unknown))}: expected some of {', '.join(sorted(COLUMNS))}")
        if said.loss_fn == "cross_entropy":
            named.setdefault("weights", np.ones(len(tokens), np.float32))
        for name, column in named.items():
            if len(column) != len(tokens) or not np.isfinite(column).all():
                raise wrong(f"data[{number}].{name}: {len(column)} numbers, expected {len(tokens)} finite ones", param=name)
        spans = _spans(datum.loss_fn_input_spans, length=len(tokens), about=f"data[{number}]")
        token_ids.append(tokens)
        targets.append(_int32(target, about=f"data[{number}].target_tokens"))
        columns.append({name: column.astype(np.float32) for name, column in named.items() if name != "mask"})
        wanted.append((_wanted(named, spans, length=len(tokens), is_all=said.forward_only), spans))
    names = columns[0].keys()
    if any(column.keys() != names for column in columns):
        raise wrong(f"loss_fn_inputs: all data must have the same ones, the first has {', '.join(sorted(names))}")
    return Gradient(
        model_id=said.model_id,
        seq_id=said.seq_id,
        loss=said.loss_fn,
        options=_options(said),
        is_forward_only=said.forward_only,
        token_ids=np.concatenate(token_ids),
        targets=np.concatenate(targets),
        wanted=np.concatenate([mask for mask, _ in wanted]),
        lengths=np.array([len(tokens) for tokens in token_ids], np.int32),
        columns={name: np.concatenate([column[name] for column in columns]) for name in names},
        spans=[spans for _, spans in wanted],
    )


def _tokens(chunks: Any, *, about: str) -> Int32:
    found = []
    for chunk in chunks:
        if (kind := chunk.WhichOneof("choice")) != "encoded_text":
            raise wrong(f"{about}.model_input holds a chunk of kind {kind}: this server takes text alone", param="model_input")
        if len(chunk.encoded_text.tokens) % 4:
            raise wrong(f"{about}.model_input: {len(chunk.encoded_text.tokens)} bytes are no int32 numbers", param="model_input")
        found.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(found) if found else np.zeros(0, np.int32)
    if not len(tokens) or tokens.min() < 0:
        raise wrong(f"{about}.model_input: {len(tokens)} tokens, expected at least one, none negative", param="model_input")
    return tokens


def _array(tensor: Any, *, about: str) -> np.ndarray:
    if tensor.WhichOneof("choice") == "sparse_csr" or len(tensor.shape) > 1:
        shape = "sparse" if tensor.WhichOneof("choice") == "sparse_csr" else f"of shape {list(tensor.shape)}"
        raise wrong(f"{about} is {shape}: this server takes one number for each position")
    dtype = wire.DTYPES.get(tensor.dtype)
    if dtype is None or len(tensor.dense) % dtype.itemsize:
        raise wrong(f"{about}: {len(tensor.dense)} bytes of dtype {tensor.dtype}, expected float32 (1) or int64 (2)")
    return np.frombuffer(tensor.dense, dtype)


def _int32(values: np.ndarray, *, about: str) -> Int32:
    if values.dtype.kind != "i" or values.min() < 0 or values.max() >= 1 << 31:
        raise wrong(f"{about}: {values.dtype} from {values.min()} to {values.max()}, expected token ids")
    return values.astype(np.int32)


def _options(said: Any) -> Figures:
    options = dict(said.loss_fn_config)
    for name, value in said.loss_fn_config_v2.items():
        if value.WhichOneof("choice") != "number":
            raise wrong(f"loss_fn_config.{name} is a text: the losses of this server take numbers alone", param=name)
        options[name] = value.number
    return options


def _spans(said: Any, *, length: int, about: str) -> list[Span]:
    found = []
    for one in said:
        is_sampled = one.WhichOneof("choice") == "sampled_tokens"
        inner = one.sampled_tokens if is_sampled else one.prompt_tokens
        if inner.length < 0 or inner.offset < 0:
            raise wrong(f"{about}.loss_fn_input_spans: offset {inner.offset}, length {inner.length}, expected none negative")
        found.append(Span(sequence_id=inner.sequence_id, is_sampled=is_sampled, offset=inner.offset, length=inner.length))
    if found and sum(span.length for span in found) != length:
        raise wrong(f"{about}.loss_fn_input_spans cover {sum(span.length for span in found)} positions, expected {length}")
    return found


def _wanted(columns: dict[str, np.ndarray], spans: list[Span], *, length: int, is_all: bool) -> Mask:
    """Positions whose log-probability is computed: all, but where the client says by spans which tokens were sampled, those, and
    whatever else counts."""
    if is_all or not spans:
        return np.ones(length, np.bool_)
    wanted = np.repeat([span.is_sampled for span in spans], [span.length for span in spans])
    for name in _SAYS_WHAT_COUNTS:
        if name in columns:
            wanted = wanted | (columns[name] != 0)
    return wanted

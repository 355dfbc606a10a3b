"""The protobuf messages of Tinker's API (SDK 0.38), as a table of names and numbers: what a generated module would hold.

Bytes fields hold arrays of the machine's own little-endian numbers: tokens int32, log-probabilities float32, offsets int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from pipelinerl.messages import Float32, Int32

_PACKAGE = "pipelinerl_tinker"
_FLOAT32, _INT64 = 1, 2
DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype(np.float32), _INT64: np.dtype(np.int64), 3: np.dtype(np.int32)}
"""Numpy's types by the number of the wire's. bfloat16 (4) is for answers alone, and not used here."""
STOP, LENGTH = 0, 1
"""Why a sequence ended."""

_MESSAGES: dict[str, str] = {
    "SampleResponse": "1 sequences *SampledSequence; 2 prompt_logprobs ?bytes; 4 prompt_cache_hit_tokens int32",
    "SampledSequence": "1 stop_reason int32; 2 tokens bytes; 3 logprobs ?bytes",
    "SparseCsr": "1 values bytes; 2 crow_indices bytes; 3 col_indices bytes",
    "Tensor": "1 dense |bytes; 2 sparse_csr |SparseCsr; 3 dtype int32; 4 shape *int64",
    "BatchedTensor": "1 data bytes; 2 offsets bytes; 3 dtype int32; 4 trailing_shape *int64",
    "ArrayRecord": "1 type_tag string; 2 fields {BatchedTensor; 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string; 2 loss_fn_outputs *ArrayRecord; 3 metrics {double",
    "LossConfigValue": "1 number |double; 2 text |string",
    "PromptSpan": "1 sequence_id string; 2 offset int64; 3 length int64",
    "SampledSpan": "1 sequence_id string; 2 offset int64; 3 length int64",
    "ProvenanceSpan": "1 prompt_tokens |PromptSpan; 2 sampled_tokens |SampledSpan",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": "1 data bytes; 2 format string",
    "DmelChunk": "1 dmel bytes",
    "Chunk": "1 encoded_text |EncodedTextChunk; 2 image |ImageChunk; 3 dmel |DmelChunk",
    "Datum": "1 model_input *Chunk; 2 loss_fn_inputs {Tensor; 3 model_input_spans *ProvenanceSpan; 4 loss_fn_input_spans *ProvenanceSpan",
    "ForwardBackwardRequest": (
        "1 model_id string; 2 seq_id int32; 3 data *Datum; 4 loss_fn string; 5 loss_fn_config {double; 6 forward_only bool;"
        " 7 loss_fn_config_v2 {LossConfigValue"
    ),
}
"""The fields of each message: number, name, and type, behind `*` of a repeated field, `?` of one whose absence can be told, `|` of one of
several of which one is there, `{` of a map from strings. Enumerations are their numbers; fields that nobody reads here are left out."""


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        _add(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add(message: descriptor_pb2.DescriptorProto, fields: str) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    choices: list[descriptor_pb2.FieldDescriptorProto] = []
    optional: list[descriptor_pb2.FieldDescriptorProto] = []
    for text in fields.split("; "):
        number, name, kind = text.split()
        sign = kind[0] if kind[0] in "*?|{" else ""
        kind = kind.removeprefix(sign)
        field = message.field.add(name=name, number=int(number))
        field.label = kinds.LABEL_REPEATED if sign in ("*", "{") else kinds.LABEL_OPTIONAL
        if sign == "{":
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            _add(entry, f"1 key string; 2 value {kind}")
            kind = f"{message.name}.{entry.name}"
        if kind[0].isupper():
            field.type, field.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
        else:
            field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
        choices += [field] if sign == "|" else []
        optional += [field] if sign == "?" else []
    if choices:
        message.oneof_decl.add(name="choice")
    for field in choices:
        field.oneof_index = 0
    for field in optional:  # each alone in a choice of its own, behind the others
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")


_POOL = _pool()


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


SampleResponse = _class("SampleResponse")
ForwardBackwardOutput = _class("ForwardBackwardOutput")
ForwardBackwardRequest = _class("ForwardBackwardRequest")


def sample_response(sequences: Sequence[tuple[int, Int32, Float32]], *, prompt_logprobs: Float32 | None) -> bytes:
    """Encode sampled sequences, each (`STOP` or `LENGTH`, tokens, log-probabilities), and those of the prompt, NaN where there is none."""
    response = SampleResponse()
    for reason, tokens, logprobs in sequences:
        sequence = response.sequences.add(stop_reason=reason)
        sequence.tokens, sequence.logprobs = tokens.astype(np.int32).tobytes(), logprobs.astype(np.float32).tobytes()
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    return response.SerializeToString()


def forward_backward_output(logprobs: Float32, *, lengths: Int32, metrics: dict[str, float]) -> bytes:
    """Encode what a pass found: the log-probabilities of all data end to end, cut at `lengths`."""
    output = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = output.loss_fn_outputs.add(num_datums=len(lengths))
    tensor = record.fields["logprobs"]
    tensor.dtype, tensor.data = _FLOAT32, logprobs.astype(np.float32).tobytes()
    tensor.offsets = (4 * np.append(0, np.cumsum(lengths, dtype=np.int64))).astype(np.int64).tobytes()
    return output.SerializeToString()

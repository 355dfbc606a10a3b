"""The protobuf messages against bytes that SDK 0.38's own generated classes wrote."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipelinerl.gateway.refusal import RequestRefused
from pipelinerl.tinker import data, wire
from pipelinerl.tinker.provenance import Span

REQUEST = bytes.fromhex(
    "0a1173657373696f6e2d313a747261696e3a3010031ac4010a0c0a0a0a0805000000060000000a080a060a040700000012210a0a616476616e746167657312130a0c00"
    "0000000000803f000080bf1801220103121f0a086c6f6770726f627312130a0c00000000000000bf000080be180122010312300a0d7461726765745f746f6b656e7312"
    "1f0a1806000000000000000700000000000000080000000000000018022201031a0b0a090a05732f302f3018021a0b12090a05732f302f301801220d0a0b0a05732f30"
    "2f3010011801220b12090a05732f302f301802220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411cdccccccccccec3f3a1f0a12636c69705f6c6f77"
    "5f7468726573686f6c64120909cdccccccccccec3f"
)
"""One datum: tokens 5 6 | 7, targets 6 7 8, of which the last two were sampled, as `s/0/0`."""
SAMPLED = bytes.fromhex("0a160801120808000000090000001a08000000bf000080bf12080000c07f000000c0")
PASSED = bytes.fromhex(
    "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c000080bf000000c0000040c01218000000000000000008000000000000000c0000000000"
    "0000180118021a130a086c6f73733a73756d11000000000000f83f"
)


def test_a_request_for_a_gradient_is_read():
    asked = data.read(REQUEST)
    assert (asked.model_id, asked.seq_id, asked.loss, asked.is_forward_only) == ("session-1:train:0", 3, "ppo", False)
    assert asked.options == {"clip_low_threshold": 0.9}
    assert asked.token_ids.tolist() == [5, 6, 7]
    assert asked.targets.tolist() == [6, 7, 8]
    assert asked.lengths.tolist() == [3]
    assert asked.columns["logprobs"].tolist() == [0.0, -0.5, -0.25]
    assert asked.columns["advantages"].tolist() == [0.0, 1.0, -1.0]
    assert asked.spans == [
        [
            Span(sequence_id="s/0/0", is_sampled=False, offset=1, length=1),
            Span(sequence_id="s/0/0", is_sampled=True, offset=0, length=2),
        ]
    ]


def test_only_what_was_sampled_or_counts_is_computed_where_the_client_says_what_was():
    assert data.read(REQUEST).wanted.tolist() == [False, True, True]
    said = wire.ForwardBackwardRequest.FromString(REQUEST)
    said.data[0].ClearField("loss_fn_input_spans")
    assert data.read(said.SerializeToString()).wanted.all(), "without a word of it all may matter"


def test_what_counts_is_computed_though_it_was_not_sampled():
    said = wire.ForwardBackwardRequest.FromString(REQUEST)
    said.data[0].loss_fn_inputs["advantages"].dense = np.array([2, 0, 0], np.float32).tobytes()
    assert data.read(said.SerializeToString()).wanted.all()


def test_sampled_sequences_are_written_as_the_sdk_reads_them():
    sequence = (wire.LENGTH, np.array([8, 9], np.int32), np.array([-0.5, -1.0], np.float32))
    assert wire.sample_response([sequence], prompt_logprobs=np.array([math.nan, -2.0], np.float32)) == SAMPLED


def test_log_probabilities_of_a_pass_are_written_as_the_sdk_reads_them():
    logprobs, lengths = np.array([-1.0, -2.0, -3.0], np.float32), np.array([2, 1], np.int32)
    assert wire.forward_backward_output(logprobs, lengths=lengths, metrics={"loss:sum": 1.5}) == PASSED


def changed(**fields: object) -> bytes:
    said = wire.ForwardBackwardRequest.FromString(REQUEST)
    datum = said.data[0]
    for name, value in fields.items():
        match name:
            case "image":
                datum.model_input.add().image.data = b"png"
            case "targets":
                tensor = datum.loss_fn_inputs["target_tokens"]
                tensor.dense = np.array(value, np.int64).tobytes()
            case "shape":
                datum.loss_fn_inputs["target_tokens"].shape.append(1)
            case "sparse":
                datum.loss_fn_inputs["advantages"].sparse_csr.values = b""
            case "unknown":
                datum.loss_fn_inputs["teacher"].CopyFrom(datum.loss_fn_inputs["advantages"])
            case "nan":
                datum.loss_fn_inputs["advantages"].dense = np.array([0, np.nan, 0], np.float32).tobytes()
            case "text":
                said.loss_fn_config_v2["clip_low_threshold"].text = "low"
            case "span":
                datum.loss_fn_input_spans[0].prompt_tokens.length = 5
            case _:
                raise AssertionError(name)
    return said.SerializeToString()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xff\xff", "no ForwardBackwardRequest"),
        (b"", "data is empty"),
        (changed(image=True), "a chunk of kind image: this server takes text alone"),
        (changed(targets=[1, 2]), "target_tokens has 2, expected one for each of 3"),
        (changed(targets=[1, 2, -1]), "expected token ids"),
        (changed(shape=True), "one number for each position"),
        (changed(sparse=True), "is sparse"),
        (changed(unknown=True), "teacher: expected some of"),
        (changed(nan=True), "expected 3 finite ones"),
        (changed(text=True), "is a text"),
        (changed(span=True), "cover 7 positions, expected 3"),
    ],
)
def test_what_is_malformed_is_refused_by_name(body: bytes, words: str):
    with pytest.raises(RequestRefused, match=words) as refused:
        data.read(body)
    assert refused.value.status == 400

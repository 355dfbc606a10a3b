"""Constraints on turns (`rollout.structured_outputs`), by vLLM's structured outputs in a real engine around a tiny random model."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Completion, Finish, Generate, Sampling
from tests.e2e.test_canary import loop_around


def test_each_turn_has_its_own_constraint_and_the_last_is_that_of_all_further_ones() -> None:
    first, free, last = {"regex": "a"}, {}, {"choice": ["b"]}
    sampling = Sampling(max_tokens=1, structured_outputs=(first, free, last))
    assert [sampling.of_turn(number).structured_outputs[0] for number in range(5)] == [first, free, last, last, last]
    assert Sampling(max_tokens=1).of_turn(3) == Sampling(max_tokens=1)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")  # vLLM's call of xgrammar
def test_an_engine_says_what_the_constraint_allows_with_the_log_probability_under_it(tmp_path: Path) -> None:
    from tests import real_engine, tiny_models

    tiny_models.make_qwen2(tmp_path, tied=False)
    decode = load_tokenizer(tmp_path).decode
    constraints: dict[str, dict[str, Any]] = {
        "regex": {"regex": "x[ab]{6}y"},
        "choice": {"choice": ["yes", "no"]},
        "grammar": {"grammar": 'root ::= "1" | "2" root'},
        "json": {"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}},
        "free": {},
    }
    broken = real_engine.vllm_engine(tmp_path, structured_outputs=({"regex": "("},))
    with pytest.raises(ConfigError, match=r"rollout.structured_outputs: \{'regex': '\('\}: vLLM refused"), broken:
        pass
    with real_engine.vllm_engine(tmp_path, structured_outputs=tuple(constraints.values())) as engine, loop_around(engine) as loop:
        for name, constraint in constraints.items():
            sampling = Sampling(max_tokens=60, structured_outputs=(constraint, {"choice": ["of a later turn"]}))
            loop.handle(Generate(rollout_id=name, attempt=0, token_ids=np.array([20, 30, 40], np.int32), sampling=sampling))
        while loop.has_work:
            loop.advance()
        said = {each.rollout_id: each for each in loop.outbox if isinstance(each, Completion)}
        loop.outbox.clear()
    texts = {name: decode(each.token_ids.tolist(), skip_special_tokens=True) for name, each in said.items()}
    assert re.fullmatch("x[ab]{6}y", texts["regex"]), texts
    assert texts["choice"] in ("yes", "no")
    assert re.fullmatch("2*1", texts["grammar"])
    assert re.fullmatch(r'\{\s*"a"\s*:\s*[12]\s*\}', texts["json"])
    assert all(said[name].finish is Finish.STOP for name in ("regex", "choice", "grammar", "json"))
    logprobs = said["regex"].logprobs.tolist()
    assert logprobs[0] == pytest.approx(0.0, abs=1e-6), "one token was allowed"
    assert all(-3.0 < one < -0.1 for one in logprobs[1:7]), "two were, about equally likely in a random model"
    assert float(said["free"].logprobs.mean()) < -math.log(20), "of 128 where nothing was forbidden"

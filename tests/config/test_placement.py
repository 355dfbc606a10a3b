"""What goes with engines and trainer on the same devices, in turns."""

from __future__ import annotations

from typing import Any

import pytest

from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError

BASE: dict[str, Any] = {"model": {"path": "unused"}, "data": {"source": "unused"}, "reward": [{"function": "unused:reward"}]}


def settings(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**BASE, "pipeline": {"placement": "colocated"}} | {
        name: ({"placement": "colocated"} if name == "pipeline" else {}) | values for name, values in sections.items()
    }


def test_streaming_and_sync_may_be_colocated_and_the_default_is_apart():
    assert not parse(BASE, origin="test").is_colocated
    for mode in ("streaming", "sync"):
        assert parse(settings(pipeline={"mode": mode}, engine={"sleep_kv": "keep"}), origin="test").is_colocated
    assert parse(settings(engine={"options": {"tensor_parallel_size": 2}}), origin="test").is_colocated


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"pipeline": {"mode": "one_step_off"}}, 'pipeline.mode is "one_step_off"'),
        ({"weights": {"transport": "files"}}, 'weights.transport is "files"'),
        ({"weights": {"delta": True}}, "weights.delta is true"),
        ({"lora": {"rank": 4}}, "lora.rank is 4"),
        ({"engine": {"quantization": "int8"}}, 'engine.quantization is "int8"'),
        ({"engine": {"options": {"pipeline_parallel_size": 2}}}, "pipeline_parallel_size lets passes begin before others end"),
        ({"engine": {"async_scheduling": True}}, "engine.async_scheduling is true"),
        ({"weights": {"kv_max_staleness": 1}}, "every KV cache is computed anew"),
    ],
)
def test_what_does_not_go_with_turns_is_refused_by_name(sections: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        parse(settings(**sections), origin="test")


def test_some_engines_may_stand_apart_and_not_all():
    mixed = parse(settings(engine={"count": 3, "apart": 1}), origin="test")
    assert [mixed.takes_turns(number) for number in range(4)] == [True, True, False, False], "engine 3 has joined since"
    with pytest.raises(ConfigError, match=r"engine\.apart is 2 and engine\.count is 2: no engine would take turns"):
        parse(settings(engine={"count": 2, "apart": 2}), origin="test")
    with pytest.raises(ConfigError, match=r"engine\.apart is 1, and every engine stands apart"):
        parse({**BASE, "engine": {"count": 2, "apart": 1}}, origin="test")


def test_a_kept_cache_without_sleep_is_refused():
    with pytest.raises(ConfigError, match=r'engine\.sleep_kv is "keep", and no engine sleeps'):
        parse({**BASE, "engine": {"sleep_kv": "keep"}}, origin="test")

"""Asynchronous scheduling is had where it is asked for, and where vLLM turns it off its own reason is told: on vLLM's own settings."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.engine.environment import set_environment
from pipelinerl.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes vLLM's settings, which its platform has completed."""
    from tests import tiny_models

    tiny_models.make_qwen2(tmp_path)
    before = dict(os.environ)
    set_environment()
    from vllm.engine.arg_utils import EngineArgs

    common: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    yield lambda **options: EngineArgs(model=str(tmp_path), **common, **options).create_engine_config()
    os.environ.clear()
    os.environ.update(before)


def choose(config: Any, wanted: bool | None) -> str:
    from pipelinerl.engine.vllm.scheduling import choose_scheduling

    return choose_scheduling(config, wanted)


def scheduler_of(config: Any) -> str:
    return config.scheduler_config.get_scheduler_cls().__name__


def test_on_a_cpu_vllm_turns_it_off_and_a_run_that_asks_for_it_has_it(settings: Callable[..., Any]):
    config = settings(async_scheduling=True)
    assert not config.scheduler_config.async_scheduling
    assert choose(config, None) == ("a forward pass is scheduled when the one before has ended: async scheduling is not required on CPU")
    assert (scheduler_of(config), config.max_concurrent_batches) == ("Scheduler", 1)
    assert choose(config, False).endswith("has ended: engine.async_scheduling says so")
    assert choose(config, True).endswith("stamped when they are launched: engine.async_scheduling says so")
    assert (scheduler_of(config), config.max_concurrent_batches) == ("AsyncScheduler", 2)


def test_along_a_pipeline_it_is_refused_for_vllms_first_model_runner_and_had_for_the_second(
    settings: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    config = settings(pipeline_parallel_size=2)
    assert choose(config, None).endswith("has ended: the V1 model runner does not support it with pipeline parallelism")
    with pytest.raises(ConfigError, match=r"engine.async_scheduling is true, and .*pipeline_parallel_size is 2: the V1 model runner does"):
        choose(config, True)
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    assert choose(config, True).endswith("engine.async_scheduling says so")
    assert (scheduler_of(config), config.max_concurrent_batches) == ("AsyncScheduler", 3)


def test_the_reasons_are_vllms_own_words():
    import vllm.config.vllm
    import vllm.platforms.cpu

    from pipelinerl.engine.vllm.scheduling import ALONG_A_PIPELINE, ON_CPU

    assert ON_CPU in inspect.getsource(vllm.platforms.cpu)
    assert ALONG_A_PIPELINE in re.sub(r'"\s+"', "", inspect.getsource(vllm.config.vllm))

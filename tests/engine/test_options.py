"""`engine.options` are checked against a table of vLLM's arguments, and the table against the vLLM that is installed."""

from __future__ import annotations

from typing import Any

import pytest

from pipelinerl.engine.options import pinned, problems_of_options


def problems(installed: str | None = None, **options: Any) -> list[str]:
    return list(problems_of_options(options, section="engine", installed=installed))


def test_what_vllm_takes_passes():
    assert not problems(
        block_size=32,
        gpu_memory_utilization=1,
        kv_cache_dtype="fp8",
        enable_expert_parallel=True,
        compilation_config={"level": 3},
        hf_overrides={"rope_theta": 1e6},
        max_lora_rank=16,
        logprobs_mode="raw_logprobs",
    )


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("gpu_memory_utilisation", 0.9, "is no engine argument of vLLM 0.32.0 (did you mean 'gpu_memory_utilization'?)"),
        ("zzzzzz", 1, "is no engine argument of vLLM 0.32.0"),
        ("block_size", "large", "is 'large', expected int (vLLM 0.32.0)"),
        ("enforce_eager", 1, "is 1, expected bool (vLLM 0.32.0)"),
        ("tensor_parallel_size", True, "is True, expected int (vLLM 0.32.0)"),
        ("watermark", float("nan"), "is nan, expected float (vLLM 0.32.0)"),
        ("compilation_config", 3.5, "is 3.5, expected a table (vLLM 0.32.0)"),
        ("scheduling_policy", "lifo", 'is \'lifo\', expected "fcfs" or "priority" (vLLM 0.32.0)'),
        ("max_model_len", 4096, "is model.max_tokens, which the rest of the run reads, too. Set that."),
        ("async_scheduling", True, "is engine.async_scheduling, which the rest of the run reads, too. Set that."),
        ("skip_tokenizer_init", False, "is False, and has to be True: "),
    ],
)
def test_what_vllm_would_refuse_later_is_refused_now(name: str, value: Any, problem: str):
    (found,) = problems(**{name: value})
    assert found.startswith(f"engine.options.{name} {problem}")


def test_another_version_may_have_options_that_the_table_lacks():
    assert problems(installed="0.33.0", quite_new=1) == []
    assert problems(installed="0.32.0+cpu", quite_new=1)
    assert problems(installed="0.33.0", block_size="large"), "what both have is checked all the same"


@pytest.mark.vllm
@pytest.mark.slow
def test_the_table_is_that_of_the_installed_vllm():
    from scripts.vllm_options import table

    found = table()
    for part in ("options", "tool_call_parsers"):
        assert pinned(part) == (found["vllm"], found[part]), "run `python -m scripts.vllm_options`"

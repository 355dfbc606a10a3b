"""What the engine touches inside vLLM exists there, for both model runners: read from its source, which the wheels for CPU and CUDA share.

On CPUs the first runner runs; on GPUs the second does, and nothing here can start it. `python -m scripts.vllm_next` runs the same over the
source of another release.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

OURS = Path(__file__).parents[2] / "pipelinerl" / "engine" / "vllm"
INSTALLED: Any = importlib.util.find_spec("vllm")
VLLM = Path(os.environ.get("VLLM_SOURCE") or INSTALLED.submodule_search_locations[0])
ONLY_ON_CPUS = {"input_batch"}
"""Of the first runner, for `routes.RouteRecorder`: on a GPU vLLM returns routes itself."""


def attributes(*files: str) -> set[str]:
    """Names that classes of these files define, or set on themselves."""
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse((VLLM / file).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return found


def used(of: str) -> set[str]:
    """Names that our sources read or call of a thing of vLLM's."""
    text = "\n".join(path.read_text() for path in OURS.glob("*.py"))
    return set(re.findall(rf"(?<!\w)(?:_|model_)?{of}\.([a-z_]\w*)", text)) - {"py"}


@pytest.mark.parametrize("runner", ["v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"])
def test_both_model_runners_have_what_is_used_of_them(runner: str):
    wanted = used("runner") - (ONLY_ON_CPUS if "gpu/" in runner else set())
    assert {"device", "intermediate_tensors", "lora_manager", "execute_model"} <= wanted, "the search finds what there is"
    assert wanted <= attributes(runner, "v1/worker/lora_model_runner_mixin.py")


def test_the_scheduler_has_what_is_used_of_it():
    wanted = used("scheduler") - {"Scheduler"}
    assert {"running", "_preempt_request", "kv_cache_manager"} <= wanted
    assert wanted <= attributes("v1/core/sched/scheduler.py")
    (preempt,) = re.findall(r"def _preempt_request\((.*?)\) ->", (VLLM / "v1/core/sched/scheduler.py").read_text(), re.DOTALL)
    assert "drop_stale_output" in preempt


def test_the_core_and_the_worker_have_what_is_used_of_them():
    assert used("engine_core") - {"engine_core"} <= attributes("v1/engine/core.py", "v1/engine/core_client.py") | {"scheduler"}
    assert {"get_model", "model_runner", "model_config"} <= attributes("v1/worker/gpu_worker.py", "v1/worker/worker_base.py")
    assert "driver_worker" in attributes("v1/executor/uniproc_executor.py")


def test_latent_attention_keeps_a_second_form_under_the_names_for_which_it_is_refused():
    """`config.families` refuses it by W_UV and W_UK_T. vLLM's own hook makes both, in place: what a commit would have to call."""
    text = (VLLM / "model_executor/layers/attention/mla_attention.py").read_text()
    (hook,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == "process_weights_after_loading" and "W_UK_T" in ast.unparse(node)
    )
    assert [argument.arg for argument in hook.args.args] == ["self", "act_dtype"]
    made = {
        ast.literal_eval(call.args[1]): {word.arg: ast.unparse(word.value) for word in call.keywords}
        for call in ast.walk(hook)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "replace_parameter" and isinstance(call.args[1], ast.Constant)
    }
    assert made["W_UV"] == made["W_UK_T"] == {"prefer_copy": "True"}

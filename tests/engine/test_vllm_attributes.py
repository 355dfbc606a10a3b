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


def imported() -> set[tuple[str, str]]:
    """(module, name) of everything of vLLM's that our sources import; the name is empty where a whole module is."""
    found: set[tuple[str, str]] = set()
    for path in (*OURS.glob("*.py"), OURS.parents[1] / "rewards" / "pooling.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm"}
    return found


def has(module: str, name: str) -> bool:
    """True where vLLM's source has a module, and in it a name: defined, assigned, imported, or a module below it."""
    place = VLLM.joinpath(*module.split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.exists():
        return False
    if not name or (place / name).is_dir() or (place / f"{name}.py").exists():
        return True
    return bool(re.search(rf"\b{name}\b", file.read_text()))


def test_every_name_that_is_imported_of_vllm_is_there():
    wanted = imported()
    assert {("vllm.v1.engine.llm_engine", "LLMEngine"), ("vllm.engine.arg_utils", "EngineArgs")} <= wanted, "the search finds what there is"
    assert [f"{module}:{name}" for module, name in sorted(wanted) if not has(module, name)] == []
    assert not has("vllm.v1.engine.llm_engine", "LLMEngineOfTomorrow")
    assert not has("vllm.v2", "")


@pytest.mark.parametrize(
    ("file", "function", "passed"),
    [
        ("v1/engine/input_processor.py", "process_inputs", {"request_id", "prompt", "params", "supported_tasks", "lora_request"}),
        ("v1/engine/llm_engine.py", "from_vllm_config", {"vllm_config", "disable_log_stats"}),
        ("v1/core/sched/scheduler.py", "_preempt_request", {"request", "timestamp", "drop_stale_output"}),
        ("v1/engine/core.py", "abort_requests", {"request_ids"}),
    ],
)
def test_what_is_called_of_vllm_takes_what_it_is_passed(file: str, function: str, passed: set[str]):
    tree = ast.parse((VLLM / file).read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function]
    assert passed <= {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)}


def test_the_sampling_parameters_that_are_set_are_vllms():
    ours = ast.parse((OURS / "engine.py").read_text())
    (call,) = [node for node in ast.walk(ours) if isinstance(node, ast.Call) and ast.unparse(node.func) == "SamplingParams"]
    tree = ast.parse((VLLM / "sampling_params.py").read_text())
    (theirs,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    assert {word.arg for word in call.keywords} <= {ast.unparse(node.target) for node in theirs.body if isinstance(node, ast.AnnAssign)}


def test_latent_attention_takes_its_second_form_out_of_a_weight_as_views():
    """`pipelinerl.engine.vllm.derived` lets it pass for that; a form in memory of its own would be made anew in every commit instead."""
    text = (VLLM / "model_executor/layers/attention/mla_attention.py").read_text()
    hook, cut = (
        next(
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.name == name and "W_UK" in ast.unparse(node)
        )
        for name in ("process_weights_after_loading", "split_kv_b_proj")
    )
    assert [argument.arg for argument in hook.args.args] == ["self", "act_dtype"]
    called = {node.func.attr for node in ast.walk(cut) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
    assert called == {"view", "split"}
    made = {
        ast.literal_eval(call.args[1]): {word.arg: ast.unparse(word.value) for word in call.keywords}
        for call in ast.walk(hook)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "replace_parameter" and isinstance(call.args[1], ast.Constant)
    }
    assert made["W_UV"] == made["W_UK_T"] == {"prefer_copy": "True"}


def test_attention_has_the_hook_that_derived_weights_are_made_by():
    assert {"process_weights_after_loading", "get_impl_variants"} <= attributes("v1/attention/backend.py")
    assert "is_deferred_attention_layer" in attributes("model_executor/layers/attention/__init__.py")
    text = (VLLM / "model_executor/model_loader/utils.py").read_text()
    assert "if is_deferred_attention_layer(module):" in text, "these are the layers whose hook runs after loading"
    assert 'if hasattr(model, "process_weights_after_loading"):' in text

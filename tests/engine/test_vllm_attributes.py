"""What the engine touches inside vLLM exists there, for both model runners: read from its source, which the wheels for CPU and CUDA share.

On CPUs the first runner runs; on GPUs the second does, and nothing here can start it. `python -m scripts.vllm_next` runs the same over the
source of another release.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

OURS = Path(__file__).parents[2] / "pipelinerl" / "engine" / "vllm"
INSTALLED: Any = importlib.util.find_spec("vllm")
VLLM = Path(os.environ.get("VLLM_SOURCE") or INSTALLED.submodule_search_locations[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    """A thing of vLLM's that our sources touch, by the names that they have for it, and where vLLM makes it."""

    names: frozenset[str]
    files: tuple[str, ...]
    wanted: frozenset[str]
    """Some of what is used of it: the search finds what there is."""
    within: frozenset[str] = frozenset()
    """The functions of ours in which the names mean it; everywhere, where none is named."""
    absent: frozenset[str] = frozenset()
    """Touched on CPUs alone."""
    classes: tuple[str, ...] = ()
    """In these files; all of their classes, where none is named."""


def thing(names: str, *files: str, wanted: str, within: str = "", absent: str = "", classes: str = "") -> Thing:
    first, second, third, fourth = (frozenset(words.split()) for words in (names, wanted, within, absent))
    return Thing(names=first, files=files, wanted=second, within=third, absent=fourth, classes=tuple(classes.split()))


RUNNER = "device intermediate_tensors lora_manager execute_model max_num_tokens model_config model"
MIXIN = "v1/worker/lora_model_runner_mixin.py"
THINGS = {
    "first runner": thing("runner", "v1/worker/gpu_model_runner.py", MIXIN, wanted=f"{RUNNER} input_batch"),
    "second runner": thing("runner", "v1/worker/gpu/model_runner.py", MIXIN, wanted=RUNNER, absent="input_batch"),
    "worker": thing("worker", "v1/worker/gpu_worker.py", "v1/worker/worker_base.py", wanted="get_model model_runner", absent="proc worker"),
    "scheduler": thing("scheduler", "v1/core/sched/scheduler.py", wanted="running _preempt_request prev_step_scheduled_req_ids"),
    "KV cache": thing("kv_cache_manager", "v1/core/kv_cache_manager.py", wanted="usage"),
    "request": thing("request", "v1/request.py", wanted="request_id skip_reading_prefix_cache", within="_drop_kv", classes="Request"),
    "pass": thing("scheduled", "v1/core/sched/output.py", wanted="num_scheduled_tokens scheduled_new_reqs", classes="SchedulerOutput"),
    "new request of a pass": thing(
        "request", "v1/core/sched/output.py", wanted="req_id num_computed_tokens", within="_file", classes="NewRequestData"
    ),
    "old requests of a pass": thing("cached", "v1/core/sched/output.py", wanted="req_ids num_computed_tokens", classes="CachedRequestData"),
    "output of a request": thing(
        "output", "v1/engine/__init__.py", wanted="new_token_ids routed_experts", within="_sampled columns_of", classes="EngineCoreOutput"
    ),
    "core": thing("engine_core", "v1/engine/core.py", wanted="batch_queue scheduler", classes="EngineCore"),
    "client of the core": thing(
        "core",
        "v1/engine/core_client.py",
        wanted="get_output abort_requests add_request engine_core",
        classes="EngineCoreClient InprocClient",
    ),
    "engine": thing("llm", "v1/engine/llm_engine.py", wanted="collective_rpc reset_prefix_cache engine_core", classes="LLMEngine"),
    "prompts": thing("input_processor", "v1/engine/input_processor.py", wanted="process_inputs"),
    "executor of one rank": thing("model_executor", "v1/executor/uniproc_executor.py", wanted="driver_worker"),
    "executor of several": thing(
        "executor", "v1/executor/multiproc_executor.py", wanted="is_failed", within="raise_if_lost", classes="MultiprocExecutor"
    ),
    "adapters": thing("lora_manager", "lora/worker_manager.py", wanted="_adapter_manager"),
    "rows of adapters": thing(
        "manager", "lora/model_manager.py", wanted="add_adapter activate_adapter lora_index_to_id _create_merged_loras_inplace"
    ),
    "layer with rows": thing("layer", "lora/layers/base.py", wanted="set_lora reset_lora", within="_write"),
    "config": thing("config", "config/vllm.py", wanted="scheduler_config use_v2_model_runner", within="choose_scheduling"),
    "settings of scheduling": thing(
        "settings", "config/scheduler.py", wanted="async_scheduling", within="choose_scheduling", classes="SchedulerConfig"
    ),
}


def base_of(node: ast.expr) -> str:
    """The last name of an expression, as `THINGS` have it: `self._runner` is a runner, and so is `worker.model_runner`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.removeprefix("_").removeprefix("driver_").removeprefix("model_" if name.endswith("runner") else "")


def uses_of(one: Thing) -> tuple[set[str], list[tuple[str, ast.Call]]]:
    """Attributes that our sources read or set of a thing, and their calls of its methods."""
    names: set[str] = set()
    calls: list[tuple[str, ast.Call]] = []
    for path in OURS.glob("*.py"):
        roots: list[ast.AST] = [ast.parse(path.read_text())]
        if one.within:
            roots = [node for node in ast.walk(roots[0]) if isinstance(node, ast.FunctionDef) and node.name in one.within]
        for node in (node for root in roots for node in ast.walk(root)):
            if isinstance(node, ast.Attribute) and base_of(node.value) in one.names:
                names.add(node.attr)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and base_of(node.func.value) in one.names:
                calls.append((node.func.attr, node))
    return names, calls


def attributes(*files: str, classes: tuple[str, ...] = ()) -> dict[str, ast.FunctionDef | None]:
    """Names that classes of these files define, declare, or set on themselves, methods with their definition."""
    found: dict[str, ast.FunctionDef | None] = {}
    for tree in (ast.parse((VLLM / file).read_text()) for file in files):
        roots = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and (not classes or node.name in classes)] or [tree]
        for node in (node for root in roots for node in ast.walk(root)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, node if isinstance(node, ast.FunctionDef) else None)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.setdefault(node.target.id, None)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                found.setdefault(node.attr, None)
            elif isinstance(node, ast.alias):
                found.setdefault(node.asname or node.name, None)
    return found


def refusal(call: ast.Call, definition: ast.FunctionDef) -> str:
    """Why a method does not take a call; empty where it does."""
    taken = definition.args
    is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in definition.decorator_list)
    places = [argument.arg for argument in (*taken.posonlyargs, *taken.args)][0 if is_static else 1 :]
    by_name = {word.arg for word in call.keywords}
    given = set(places[: len(call.args)]) | by_name
    required = {*places[: len(places) - len(taken.defaults)]}
    required |= {one.arg for one, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None}
    if len(call.args) > len(places) and taken.vararg is None:
        return f"{len(call.args)} arguments by place, it takes {len(places)}"
    if unknown := by_name - {*places, *(one.arg for one in taken.kwonlyargs), None} if taken.kwarg is None else set():
        return f"no arguments {sorted(map(str, unknown))}"
    is_open = None in by_name or any(isinstance(argument, ast.Starred) for argument in call.args)
    return f"without {sorted(required - given)}" if required - given and not is_open else ""


@pytest.mark.parametrize("name", THINGS)
def test_vllm_has_what_is_touched_of_it_and_takes_what_it_is_passed(name: str):
    one = THINGS[name]
    names, calls = uses_of(one)
    theirs = attributes(*one.files, classes=one.classes)
    assert one.wanted <= names, "the search finds what there is"
    assert names - one.absent <= theirs.keys()
    refused = [
        f"{ast.unparse(call)}: {why}"
        for method, call in calls
        if isinstance(definition := theirs.get(method), ast.FunctionDef) and (why := refusal(call, definition))
    ]
    assert refused == []


def test_a_call_that_vllm_would_refuse_is_seen():
    (definition,) = (
        node
        for node in ast.walk(ast.parse("class A:\n    def method(self, one, two=0, *, three): ..."))
        if isinstance(node, ast.FunctionDef)
    )
    said = {text: refusal(ast.parse(text, mode="eval").body, definition) for text in (  # pyright: ignore[reportArgumentType]
        "a.method(1, three=3)", "a.method(1, 2, 3, three=3)", "a.method(1, four=4, three=3)", "a.method(1)", "a.method(**all)"
    )}  # fmt: skip
    assert list(said.values()) == ["", "3 arguments by place, it takes 2", "no arguments ['four']", "without ['three']", ""]


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


def test_the_sampling_parameters_that_are_set_are_vllms():
    ours = ast.parse((OURS / "words.py").read_text())
    (call,) = [node for node in ast.walk(ours) if isinstance(node, ast.Call) and ast.unparse(node.func) == "SamplingParams"]
    tree = ast.parse((VLLM / "sampling_params.py").read_text())
    (theirs,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    assert {word.arg for word in call.keywords} <= {ast.unparse(node.target) for node in theirs.body if isinstance(node, ast.AnnAssign)}


def test_the_sleep_that_is_asked_for_on_a_device_is_vllms_own():
    """Its worker for CPUs knows none, so nothing here could run it: what is called, and what with."""
    ours = ast.walk(ast.parse((OURS / "sleep.py").read_text()))
    calls = [node for node in ours if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self._llm.")]
    asked = {ast.unparse(call.func).rpartition(".")[2]: {str(word.arg) for word in call.keywords} for call in calls}
    assert asked == {"sleep": {"level", "mode"}, "wake_up": set(), "reset_prefix_cache": {"reset_running_requests"}}
    tree = ast.walk(ast.parse((VLLM / "v1/engine/llm_engine.py").read_text()))
    theirs = {node.name: {argument.arg for argument in node.args.args} for node in tree if isinstance(node, ast.FunctionDef)}
    assert [name for name, words in asked.items() if not words <= theirs[name]] == []
    assert 'PauseMode = Literal["abort", "wait", "keep"]' in (VLLM / "v1/engine/__init__.py").read_text()


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
    assert {"process_weights_after_loading", "get_impl_variants"} <= attributes("v1/attention/backend.py").keys()
    assert "is_deferred_attention_layer" in attributes("model_executor/layers/attention/__init__.py")
    text = (VLLM / "model_executor/model_loader/utils.py").read_text()
    assert "if is_deferred_attention_layer(module):" in text, "these are the layers whose hook runs after loading"
    assert 'if hasattr(model, "process_weights_after_loading"):' in text

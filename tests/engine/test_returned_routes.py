"""The experts of a request as vLLM returns them: rows that follow on each other, or nothing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np

from pipelinerl.data.expert_routes import table_of
from pipelinerl.engine.vllm.experts import device_options
from pipelinerl.engine.vllm.routes import ReturnedRoutes


def rows(first: int, count: int) -> np.ndarray:
    """[count, 2 layers, 1]: a token's place, twice."""
    return np.repeat(np.arange(first, first + count, dtype=np.int64), 2).reshape(count, 2, 1)


def test_rows_of_prompt_and_completion_become_one_table_that_is_one_row_short():
    routes = ReturnedRoutes(num_experts=300)
    routes.begin("a", num_prompt_tokens=3)
    routes.add("a", None, num_tokens=0)
    routes.add("a", rows(0, 3), num_tokens=1)
    routes.add("a", rows(3, 2), num_tokens=2)
    found = routes.take("a")
    assert found is not None
    assert (found.num_layers, found.top_k, found.width) == (2, 1, 2)
    assert table_of(found)[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert routes.take("a") is None, "it was taken"


def test_rows_that_came_twice_or_not_at_all_are_not_known():
    routes = ReturnedRoutes(num_experts=8)
    for request_id, second in (("twice", rows(0, 4)), ("missing", None)):
        routes.begin(request_id, num_prompt_tokens=3)
        routes.add(request_id, rows(0, 3), num_tokens=1)
        routes.add(request_id, second, num_tokens=1)
        assert routes.take(request_id) is None


def test_what_was_cancelled_is_forgotten():
    routes = ReturnedRoutes(num_experts=8)
    for request_id in ("a", "b", "c"):
        routes.begin(request_id, num_prompt_tokens=1)
        routes.add(request_id, rows(0, 1), num_tokens=1)
    routes.forget("a")
    assert routes.take("a") is None
    assert routes.take("b") is not None
    routes.forget()
    assert routes.take("c") is None


def test_the_options_and_fields_are_vllms_own():
    """Read from its source, which both wheels share, because importing it takes longer than all of these tests."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])  # pyright: ignore[reportOptionalMemberAccess,reportOptionalSubscript]
    options = device_options(replay_routing=True)
    assert options == {"moe_backend": "triton", "enable_return_routed_experts": True}
    assert device_options(replay_routing=False) == {"moe_backend": "triton"}
    arguments = (folder / "engine/arg_utils.py").read_text()
    assert all(re.search(rf"^    {name}: ", arguments, re.MULTILINE) for name in options)
    backends = re.search(r"^MoEBackend = Literal\[(.*?)\]", (folder / "config/kernel.py").read_text(), re.MULTILINE | re.DOTALL)
    assert backends is not None
    assert '"triton"' in backends[1]
    assert "    routed_experts: np.ndarray | None = None\n" in (folder / "v1/engine/__init__.py").read_text()
    assert "self.aux_output_config" in arguments

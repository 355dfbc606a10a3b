"""A record of the experts to which vLLM sent each token, pass by pass, so that the trainer can send it to the same ones.

vLLM's routers call a hook with what they chose, one call per layer, rows in the order of the batch. Rows are filed under their request and
their position: a sequence that is preempted and computed again overwrites its rows with those that count. What the prefix cache spared is
not computed, hence not known.

vLLM's own way to return routes (`enable_return_routed_experts`) needs a newer model runner than there is for CPUs, and is taken on GPUs:
there no hook sees what a captured graph chooses, and what the prefix cache spared is known, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelinerl.data.expert_routes import dtype_for, routes_of
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Routes


class ReturnedRoutes:
    """The routes of all running requests, as vLLM returns them beside their tokens: rows [tokens, layers, k] that follow on each other."""

    def __init__(self, *, num_experts: int) -> None:
        self._dtype = dtype_for(num_experts)
        self._parts: dict[str, list[np.ndarray]] = {}
        self._num_tokens: dict[str, int] = {}
        """Of the prompt and what was sampled so far, by request."""

    def begin(self, request_id: str, *, num_prompt_tokens: int) -> None:
        """Expect the routes of a request."""
        self._parts[request_id], self._num_tokens[request_id] = [], num_prompt_tokens

    def add(self, request_id: str, rows: np.ndarray | None, *, num_tokens: int) -> None:
        """Note what came with so many new tokens; None where nothing did."""
        self._num_tokens[request_id] += num_tokens
        if rows is not None:
            self._parts[request_id].append(rows.astype(self._dtype))

    def take(self, request_id: str) -> Routes | None:
        """The routes of a finished request, for every token but its last, and forget them; None where they are not one row for each.

        So a request that was preempted and returned some of its rows twice, or not all, trains as one whose routes are not known.
        """
        parts, num_tokens = self._parts.pop(request_id, []), self._num_tokens.pop(request_id, 0)
        if not parts or sum(map(len, parts)) != num_tokens - 1:
            return None
        return routes_of(np.concatenate(parts))

    def forget(self, request_id: str | None = None) -> None:
        """Drop what is known of a request that was cancelled; by default of all."""
        for known in (self._parts, self._num_tokens):
            if request_id is None:
                known.clear()
            else:
                known.pop(request_id, None)


class RouteRecorder:
    """The routes of all running requests, by a hook in every router."""

    def __init__(self, runner: Any, *, model: Any, num_experts: int, is_eager: bool) -> None:
        """`runner` is vLLM's model runner. Raises `ConfigError` for a model without routers, and where passes are replayed from graphs."""
        routers = [module.router for module in model.modules() if hasattr(getattr(module, "router", None), "set_capture_fn")]
        if not routers:
            raise ConfigError(f"model.replay_routing: {type(model).__name__} has no routers that tell their choice. Set it to false")
        if not is_eager:
            raise ConfigError(
                "model.replay_routing reads every router's choice, which captured graphs hide: set engine.options.enforce_eager"
            )
        self._num_layers = len(routers)
        self._dtype = dtype_for(num_experts)
        self._present: dict[int, np.ndarray] = {}
        """[batch, k] choices of the pass under way, by layer."""
        self._parts: dict[str, list[tuple[int, np.ndarray]]] = {}
        """First position and [rows, layers, k] of every pass, by request."""
        self._num_tokens: dict[str, int] = {}
        """Of the prompt and what was sampled so far, by request."""
        self._runner = runner
        self._execute = runner.execute_model
        runner.execute_model = self._recorded
        for layer, router in enumerate(routers):
            router.set_capture_fn(self._capture(layer))

    def begin(self, request_id: str, *, num_prompt_tokens: int) -> None:
        """Expect the routes of a request."""
        self._num_tokens[request_id] = num_prompt_tokens

    def add(self, request_id: str, rows: np.ndarray | None, *, num_tokens: int) -> None:
        """Note that so many tokens came; their passes were recorded already."""
        self._num_tokens[request_id] += num_tokens

    def take(self, request_id: str) -> Routes | None:
        """The routes of a finished request, for every token but its last, and forget them; None where no pass was recorded.

        With asynchronous scheduling its last token has been through a pass of its own before it was known to be the last.
        """
        parts, num_tokens = self._parts.pop(request_id, []), self._num_tokens.pop(request_id, 0)
        if not parts:
            return None
        num_rows = max(start + len(rows) for start, rows in parts)
        table = np.full((num_rows, *parts[0][1].shape[1:]), np.iinfo(self._dtype).max, self._dtype)
        for start, rows in parts:
            table[start : start + len(rows)] = rows
        return routes_of(table[: num_tokens - 1])

    def forget(self, request_id: str | None = None) -> None:
        """Drop what is known of a request that was cancelled; by default of all."""
        for known in (self._parts, self._num_tokens):
            if request_id is None:
                known.clear()
            else:
                known.pop(request_id, None)

    def _capture(self, layer: int) -> Any:
        def capture(expert_ids: Any) -> None:
            self._present[layer] = expert_ids.cpu().numpy().astype(self._dtype)

        return capture

    def _recorded(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._present.clear()
        output = self._execute(scheduled, *arguments, **options)
        if len(self._present) == self._num_layers:
            self._file(scheduled)
        return output

    def _file(self, scheduled: Any) -> None:
        """Deal the rows of a pass to the requests in it."""
        table = np.stack([self._present[layer] for layer in range(self._num_layers)], 1)
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
        first = 0
        for request_id in self._runner.input_batch.req_ids:
            count = scheduled.num_scheduled_tokens.get(request_id, 0)
            if count:
                self._parts.setdefault(request_id, []).append((starts[request_id], table[first : first + count]))
                first += count

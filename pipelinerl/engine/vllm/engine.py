"""vLLM in this process, driven one forward pass at a time.

The engine core is stepped directly, below vLLM's output processing, so a reply costs no detokenisation and every token's forward pass is
known. Where several are under way, each was noted when it was launched (`passes`), which makes the version stamp exact.

On CPU, vLLM repacks every linear weight into a kernel-private copy; `keep_plain_weights` turns that off before the model loads, so that
a new policy can be taken by pointing parameters at it. See `packed` for how layers get packed kernels all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput

from pipelinerl.config import EngineSection, ModelSection, RolloutSection, WeightsSection
from pipelinerl.config.families import check_servable
from pipelinerl.engine.base import Limits, Sampled
from pipelinerl.engine.budget import batched_tokens
from pipelinerl.engine.vllm.adapters import AdapterRows, Adapters, Rows, Versions, adapter_options
from pipelinerl.engine.vllm.constraints import prove_constraints
from pipelinerl.engine.vllm.derived import Derived
from pipelinerl.engine.vllm.loading import budget_of, load_vllm
from pipelinerl.engine.vllm.packed import make_packed_swap, pack_for_good
from pipelinerl.engine.vllm.passes import Passes, columns_of, prompt_logprobs_of
from pipelinerl.engine.vllm.prompts import Prompts
from pipelinerl.engine.vllm.quantised import check_kernel, make_int8_swap
from pipelinerl.engine.vllm.ranks import EXTENSION, Ranks, ShardedAdapters, ShardedPolicies, shard_receiver
from pipelinerl.engine.vllm.routes import ReturnedRoutes, RouteRecorder
from pipelinerl.engine.vllm.sleep import SleepMode, give_back_rank
from pipelinerl.engine.vllm.speculation import Speculation
from pipelinerl.engine.vllm.weights import checkpoint_shapes, keep_plain_weights, obstacles_of, plan_of
from pipelinerl.engine.vllm.words import FINISHES, sampling_params
from pipelinerl.errors import ConfigError, EngineError
from pipelinerl.messages import Finish, Generate, Sampling, StageWeights, Tensor
from pipelinerl.weights import manifest
from pipelinerl.weights.adapters import AdapterShape, adapter_layout
from pipelinerl.weights.receiver import WeightReceiver
from pipelinerl.weights.swap import CopySwap, PointerSwap, Staging, SwapMode, WeightSwap, choose_swap_mode, make_swap
from pipelinerl.weights.transports import AutoReceiver, device_transports


class VllmEngine:
    """See `engine.base.Engine`. Raises `ConfigError` where vLLM cannot serve the model."""

    def __init__(
        self,
        *,
        model: ModelSection,
        engine: EngineSection,
        rollout: RolloutSection,
        seed: int,
        weights: WeightsSection | None = None,
        policies: Path = Path("weights"),
        adapters: AdapterShape | None = None,
        choices: tuple[str, ...] = (),
        is_colocated: bool = False,
        in_sections: bool = False,
    ) -> None:
        """`is_colocated`: the engine shares its device with the trainer, and sleeps. `in_sections`: a policy has a section for each of its
        ranks, as engines that are colocated read it.

        `policies` is the folder of published files, where policies travel by files; `adapters`: policies are these alone.

        `choices` were made before the engine, and are reported with its own.
        """
        check_servable(Path(model.path))
        if engine.quantization == "int8":
            check_kernel()
        keep_plain_weights()
        options = adapter_options(adapters) if adapters else {}
        weights = weights or WeightsSection()  # pyright: ignore[reportCallIssue]
        budget = budget_of(model, engine, rollout, stages_policies=adapters is None)
        self._staging = Staging.HOST if budget is not None and budget.on_host else Staging.DEVICE
        if budget is not None:
            choices = (*choices, str(budget))
            sizes = {"kv_cache_memory_bytes": budget.cache_bytes, "gpu_memory_utilization": budget.utilization}
            options |= sizes | {"max_num_batched_tokens": batched_tokens(engine.options)}
        self._is_colocated, self._in_sections = is_colocated, in_sections or is_colocated
        if is_colocated and torch.cuda.is_available():
            self._staging = Staging.HOST  # a second model on the device is what sleep is to save
            options |= {"enable_sleep_mode": True}
        if is_sharded := engine.num_ranks > 1:
            options |= {"worker_extension_cls": EXTENSION}
        self._num_engines = engine.count
        self._llm, scheduling = load_vllm(model=model, engine=engine, rollout=rollout, seed=seed, options=options)
        self._core: Any = self._llm.engine_core
        self._prompts = Prompts(self._llm, folder=Path(model.path))
        self._passes: Passes[int | Versions] = Passes(self._core)
        self._speculation = Speculation(self._core, engine) if engine.speculation != "off" else None
        self._is_pipelined = engine.num_stages > 1
        self._adapters: Adapters | None = None
        self._derived: Derived | None = None
        self._ranks = Ranks(self._llm) if is_sharded else None
        if self._ranks is not None and self._is_pipelined:
            self._ranks.call("policy_pipeline")
        swap, layout, choice = self._make_swap(Path(model.path), adapters, weights, in_int8=engine.quantization == "int8")
        verify = self._ranks.verify if self._ranks is not None else manifest.verify_alone if is_colocated else manifest.verify
        receiver = AutoReceiver(folder=policies, sharded=shard_receiver(self._ranks, layout=layout, swap=swap))
        self._weights = WeightReceiver(swap, layout=layout, receiver=receiver, verify=verify)
        self._sleep_mode: SleepMode | None = None
        if is_colocated:
            drops_kv = engine.sleep_kv == "drop"
            self._sleep_mode = SleepMode(self._llm, give_back=functools.partial(self._give_back, swap), drops_kv=drops_kv)
        self._routes = self._recorder() if model.replay_routing else None
        self._requests: dict[str, str] = {}
        """vLLM's request id by rollout id."""
        self._rollouts: dict[str, str] = {}
        """Rollout id by vLLM's request id."""
        self._num_submitted = 0
        self._ordered = self._version = 0
        """The policy ordered last, and the one in force."""
        self.limits = Limits(
            max_model_tokens=self._llm.model_config.max_model_len,
            max_running=engine.max_running,
            tensors=layout,
            shards=swap.shards if isinstance(swap, ShardedPolicies) else (),
            choices=(*choices, scheduling, *([str(self._speculation)] if self._speculation is not None else []), choice),
            tensor_parallel_size=engine.tensor_parallel_size,
            kv_tokens=self._llm.vllm_config.cache_config.kv_cache_size_tokens,
            transports=tuple(one for one in device_transports() if not is_sharded or "sharded" in one),
        )
        self._prove_forward_pass(Path(model.path))
        prove_constraints(self, rollout.structured_outputs)

    def submit(self, request: Generate, *, version: int, rollback_epoch: int = 0) -> None:
        if request.rollout_id in self._requests:
            raise EngineError(f"{request.rollout_id} is being served already; cancel it before asking again")
        request_id = f"{request.rollout_id}#{self._num_submitted}"
        self._num_submitted += 1
        try:
            inputs = self._llm.input_processor.process_inputs(
                request_id,
                self._prompts.prompt_of(request, salt=f"v{version}.{rollback_epoch}"),
                sampling_params(request.sampling),
                supported_tasks=self._llm.get_supported_tasks(),
                lora_request=self._adapter_for(request, rollback_epoch=rollback_epoch) if self._adapters else None,
            )
            self._core.add_request(inputs)
        except (ValueError, TypeError, VLLMClientError) as error:  # vLLM's refusals; the engine is unharmed by them
            self._forget_adapter(request.rollout_id)
            raise EngineError(f"vLLM refused {request.rollout_id}: {error}") from error
        self._requests[request.rollout_id] = request_id
        self._rollouts[request_id] = request.rollout_id
        if self._speculation is not None:
            self._speculation.begin(request.rollout_id, request_id)
        if self._routes is not None:
            self._routes.begin(request_id, num_prompt_tokens=len(request.token_ids))

    def cancel(self, rollout_id: str) -> None:
        request_id = self._requests.pop(rollout_id, None)
        if request_id is not None:
            del self._rollouts[request_id]
            self._core.abort_requests([request_id])
            self._forget(rollout_id)
            if self._routes is not None:
                self._routes.forget(request_id)

    def step(self) -> list[Sampled]:
        try:
            with self._ranks.turns if self._ranks is not None else contextlib.nullcontext():
                outputs, weights = self._passes.advance(self._version if self._adapters is None else self._adapters.versions)
        except Exception as error:  # whatever a forward pass raises: the engine is emptied, so that it can go on
            if self._ranks is not None:
                self._ranks.raise_if_lost(error)
            self._core.abort_requests(list(self._rollouts))
            for rollout_id in self._requests:
                self._forget(rollout_id)
            self._requests.clear()
            self._rollouts.clear()
            self._passes.forget_failed()
            if self._routes is not None:
                self._routes.forget()
            self._llm.reset_prefix_cache()
            raise EngineError(f"forward pass failed: {type(error).__name__}: {error}") from error
        sampled = self._sampled(outputs, weights)
        if self._speculation is None:
            return sampled
        num_drafted = self._speculation.verified(outputs)
        self._speculation.propose()
        return [dataclasses.replace(one, num_drafted=num_drafted if place == 0 else 0) for place, one in enumerate(sampled)]

    def stage(self, order: StageWeights) -> None:
        self._weights.stage(order)
        self._ordered = order.version
        if self._adapters is not None:
            self._adapters.is_next(order)

    def commit(self, recompute: Collection[str] = ()) -> Collection[str]:
        preempted = self._sleep_mode.wake() if self._sleep_mode is not None else []
        self._weights.commit()
        self._prompts.forget_features()
        if self._derived is not None:
            self._derived.make_anew()
        self._version = self._ordered
        if self._is_pipelined:
            return ()  # vLLM is in the middle of passes over these sequences
        goes_on = self._requests if self._adapters is None else self._adapters.moved
        dropped = [rollout_id for rollout_id in recompute if rollout_id in goes_on]
        if dropped:
            self._drop_kv({self._requests[rollout_id] for rollout_id in dropped})
        return [*dropped, *(self._rollouts[request_id] for request_id in preempted if request_id in self._rollouts)]

    def sleep(self) -> int:
        assert self._sleep_mode is not None, "only a colocated engine sleeps"
        return self._sleep_mode.fall_asleep()

    def _give_back(self, swap: WeightSwap, drops_kv: bool) -> int:
        if self._ranks is not None:
            return sum(self._ranks.call("policy_sleep", drops_kv))
        assert isinstance(swap, PointerSwap | CopySwap), type(swap)  # the settings refuse what makes another
        return give_back_rank(self._runner, swap, drops_kv=drops_kv)

    @property
    def kv_used(self) -> float | None:
        return float(self._core.engine_core.scheduler.kv_cache_manager.usage)

    @property
    def waiting(self) -> Collection[str]:
        queued = (request.request_id for request in self._core.engine_core.scheduler.waiting)
        return [self._rollouts[request_id] for request_id in queued if request_id in self._rollouts]

    def _drop_kv(self, request_ids: set[str]) -> None:
        """Preempt running requests, as vLLM does when its cache is full: resumed in the next pass, they are computed from their start.

        None of them may read the prefix cache then: what it holds of them was computed under the policies before. A token that a pass under
        way samples of them is dropped, and sampled again.
        """
        scheduler = self._core.engine_core.scheduler
        for request in [request for request in reversed(scheduler.running) if request.request_id in request_ids]:
            request.skip_reading_prefix_cache = True
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def _sampled(self, outputs: list[EngineCoreOutput], weights: int | Versions) -> list[Sampled]:
        """What a pass sampled under some weights, less what was cancelled since; requests that ended are forgotten."""
        outputs = [output for output in outputs if output.request_id in self._rollouts]
        if not outputs:
            return []
        if self._routes is not None:
            for output in outputs:
                self._routes.add(output.request_id, output.routed_experts, num_tokens=len(output.new_token_ids))
        judged = {self._rollouts[output.request_id]: prompt_logprobs_of(output) for output in outputs if output.new_prompt_logprobs_tensors}
        passed = []
        for those, token_ids, logprobs in columns_of(outputs):
            rollout_ids = [self._rollouts[output.request_id] for output in those]
            versions = self._versions_of(rollout_ids, weights)
            passed.append(Sampled(rollout_ids=rollout_ids, token_ids=token_ids, logprobs=logprobs, versions=versions))
        if judged:
            passed[0] = dataclasses.replace(passed[0], prompt_logprobs=judged)
        if ended := {output.request_id: FINISHES[output.finish_reason] for output in outputs if output.finish_reason is not None}:
            passed[-1] = self._with_ends(passed[-1], ended)
        return passed

    def _versions_of(self, rollout_ids: list[str], weights: int | Versions) -> int | np.ndarray:
        if isinstance(weights, int):
            return weights
        assert self._adapters is not None
        return self._adapters.served_under(weights, rollout_ids)

    def _with_ends(self, sampled: Sampled, ended: dict[str, Finish]) -> Sampled:
        """Add the sequences that ended with a pass, by vLLM's request ids, and forget them."""
        finishes, routes = {}, {}
        for request_id, finish in ended.items():
            rollout_id = self._rollouts.pop(request_id)
            del self._requests[rollout_id]
            self._forget(rollout_id)
            finishes[rollout_id] = finish
            if self._routes is not None and (taken := self._routes.take(request_id)) is not None:
                routes[rollout_id] = taken
        return dataclasses.replace(sampled, finishes=finishes, routes=routes)

    def _make_swap(
        self, folder: Path, adapters: AdapterShape | None, weights: WeightsSection, *, in_int8: bool
    ) -> tuple[WeightSwap, tuple[Tensor, ...], str]:
        """Make the swap of policies for this engine; return it, the layout of policies, and a sentence that says why."""
        if adapters is not None:
            layout = adapter_layout(checkpoint_shapes(folder), adapters, dtype=str(self._llm.model_config.dtype).removeprefix("torch."))
            self._adapters = Adapters(self._rows(layout, adapters), num_versions=adapters.num_versions)
            packed = "" if self._ranks is not None else pack_for_good(self.model, num_engines=self._num_engines)
            why = "policies are committed by exchanging rows: adapters are staged in one that no sequence reads"
            return self._adapters, layout, why + packed
        lays_over = weights.delta and weights.transport != "sharded"  # whose changes make a whole shard before it is staged
        if self._ranks is not None:
            sharded = ShardedPolicies(
                self._ranks,
                folder=folder,
                shapes=checkpoint_shapes(folder),
                wanted=weights.swap_mode,
                sends_deltas=lays_over,
                staging=self._staging,
                in_sections=self._in_sections,
            )
            return sharded, sharded.layout, sharded.choice
        self._derived = Derived(self.model, dtype=self._llm.model_config.dtype)
        parameters, layout = plan_of(self.model, folder=folder, derived=self._derived.names)
        captures_graphs = not self._llm.vllm_config.model_config.enforce_eager
        obstacles = obstacles_of(self.model, captures_graphs=captures_graphs)
        mode, choice = choose_swap_mode(weights.swap_mode, obstacles, sends_deltas=lays_over)
        if in_int8 and mode is not SwapMode.POINTER:
            raise ConfigError(f'engine.quantization is "int8", whose weights change over by a pointer, and here {choice}')
        if in_int8:
            return make_int8_swap(self.model, parameters, num_engines=self._num_engines), layout, f"{choice}; linear layers compute in int8"
        # A packed copy of the matrices beside them is what one copy of the weights for both phases does without.
        if (
            mode is SwapMode.POINTER
            and not self._is_colocated
            and (swap := make_packed_swap(self.model, parameters, num_engines=self._num_engines)) is not None
        ):
            return swap, layout, f"{choice}; {swap}"
        return make_swap(mode, parameters, gathers=not captures_graphs, staging=self._staging), layout, choice

    def _rows(self, layout: tuple[Tensor, ...], shape: AdapterShape) -> Rows:
        if self._ranks is not None:
            return ShardedAdapters(self._ranks, layout=layout, shape=shape)
        return AdapterRows(self._runner.lora_manager._adapter_manager, layout=layout, shape=shape, device=self._runner.device)

    def _recorder(self) -> RouteRecorder | ReturnedRoutes:
        settings: Any = self._llm.model_config.hf_text_config
        num_experts = getattr(settings, "num_experts", None) or getattr(settings, "num_local_experts", 0)
        if self._llm.vllm_config.aux_output_config.enable_return_routed_experts:
            return ReturnedRoutes(num_experts=num_experts)
        is_eager = self._llm.vllm_config.model_config.enforce_eager
        return RouteRecorder(self._runner, model=self.model, num_experts=num_experts, is_eager=is_eager)

    def _adapter_for(self, request: Generate, *, rollback_epoch: int) -> LoRARequest:
        assert self._adapters is not None
        return self._adapters.request_for(request.rollout_id, rollback_epoch=rollback_epoch, version=request.version)

    def _forget(self, rollout_id: str) -> None:
        """Let go of what is held for a request that has ended."""
        self._forget_adapter(rollout_id)
        if self._speculation is not None:
            self._speculation.end(rollout_id)

    def _forget_adapter(self, rollout_id: str) -> None:
        if self._adapters is not None:
            self._adapters.ended(rollout_id)

    def _prove_forward_pass(self, folder: Path) -> None:
        """Sample one token now: a model that loads but that no kernel here can run is found at start."""
        self.submit(Generate(rollout_id="probe", attempt=0, token_ids=np.zeros(1, np.int32), sampling=Sampling(max_tokens=1)), version=0)
        try:
            while self._requests:
                self.step()
        except EngineError as error:
            raise ConfigError(f"vLLM loads {folder} but cannot run it here: {error}") from error

    @property
    def model(self) -> torch.nn.Module:
        """The module that runs the forward passes."""
        return self._worker.get_model()

    @property
    def _worker(self) -> Any:
        worker: Any = self._llm.model_executor.driver_worker  # pyright: ignore[reportAttributeAccessIssue]
        return getattr(worker, "worker", worker)

    @property
    def _runner(self) -> Any:
        return self._worker.model_runner

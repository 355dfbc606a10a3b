"""Problems between sections of the settings that are each right by themselves."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipelinerl.config.backends import TrainerBackend, problems_of_backend, problems_of_passes
from pipelinerl.config.constrained_sampling import constraints_are_accounted_for
from pipelinerl.config.engines import EngineSection
from pipelinerl.config.gateway import GatewaySection
from pipelinerl.config.images import images_go_with
from pipelinerl.config.large_episodes import large_episodes_go_with
from pipelinerl.config.layout import Schedule, nearest, problems_of
from pipelinerl.config.nodes import engines_elsewhere_are_the_runs, nodes_have_work
from pipelinerl.config.placement import devices_can_be_shared
from pipelinerl.config.scaling import elastic_goes_with, engines_may_join, trainer_may_change
from pipelinerl.config.scheduling import cut_is_unbiased, dispatch_is_for_completions, early_stop_is_unbiased, sequences_may_move
from pipelinerl.config.scoring import EnvironmentSection, PrmSection, RewardSection
from pipelinerl.config.sections import (
    AlgorithmSection,
    BatchSection,
    DataSection,
    EvaluationSection,
    LoraSection,
    ModelSection,
    ReferenceSection,
    RolloutSection,
    SftSection,
    SftStreamSection,
    TrainerSection,
    WeightsSection,
)
from pipelinerl.config.sharded_policies import sharded_policies_can_be_sent
from pipelinerl.config.speculation import speculation_goes_with
from pipelinerl.config.tinker import TinkerSection
from pipelinerl.config.trainer_memory import Offload
from pipelinerl.runtime.machine import has_amx

SECRET_WORDS = ("token", "key", "apikey", "secret", "password", "credential", "credentials")
"""Last words of settings that must not be settings."""


def problems_between_sections(sections: Mapping[str, Any]) -> list[str]:
    """Return the problems between those sections that are there."""
    found = []
    for check in _CHECKS:
        needed = inspect.signature(check).parameters
        if needed.keys() <= sections.keys():
            found += check(**{name: sections[name] for name in needed})
    return found


def _row_holds_a_trajectory(rollout: RolloutSection, batch: BatchSection) -> Iterator[str]:
    if rollout.max_tokens > batch.max_tokens:
        yield (
            f"batch.max_tokens is {batch.max_tokens} but rollout.max_tokens is {rollout.max_tokens}: a trajectory could never be packed."
            " Raise batch.max_tokens."
        )


def _group_can_survive(rollout: RolloutSection, batch: BatchSection) -> Iterator[str]:
    if batch.min_group_size > rollout.group_size:
        yield (
            f"batch.min_group_size is {batch.min_group_size} but rollout.group_size is {rollout.group_size}: every group would fail."
            " Lower batch.min_group_size."
        )


def _one_core_for_each_process(engine: EngineSection, trainer: TrainerSection, prm: PrmSection) -> Iterator[str]:
    parts = ("engine", engine.count, engine.cores), ("trainer", trainer.ranks, trainer.cores), ("prm", prm.count, prm.cores)
    for part, wanted, cores in parts:
        if cores and len(cores) != wanted:
            yield f"{part}.cores names {len(cores)} cores for {wanted} processes. Name one core for each, or none."


def _sharing_leaves_room(engine: EngineSection) -> Iterator[str]:
    if engine.shares_gpus and engine.kv_cache_bytes is None:
        yield (
            "engine.shares_gpus is true, and without engine.kv_cache_bytes an engine takes all that its GPU has free when it starts, and"
            " leaves the trainer nothing. Set engine.kv_cache_bytes."
        )


def _dtype_can_be_trained(model: ModelSection) -> Iterator[str]:
    if model.dtype == "float16":
        yield (
            'model.dtype is "float16": engines could serve it, and the trainer cannot train in it, because gradients leave its range (those'
            ' of the first batch of the demo are not finite). Set "bfloat16", or "float32".'
        )


def _free_tables(reward: tuple[RewardSection, ...], environment: EnvironmentSection, prm: PrmSection) -> dict[str, dict[str, Any]]:
    """Yield the tables of options that go to scorers as they are, by key."""
    tables = {f"reward.{number}.options": one.options for number, one in enumerate(reward)}
    return tables | {"environment.options": environment.options, "prm.options": prm.options, "prm.judge.extra": prm.judge.extra}


def _options_are_finite(
    engine: EngineSection,
    algorithm: AlgorithmSection,
    reward: tuple[RewardSection, ...],
    environment: EnvironmentSection,
    prm: PrmSection,
) -> Iterator[str]:
    tables = {"engine.options": engine.options, "algorithm.overrides": algorithm.overrides}
    for key, value in (tables | _free_tables(reward, environment, prm)).items():
        for path, number in _not_finite(key, value):
            yield f"{path} is {number}, expected a finite number: settings are kept as JSON, which has no such one."


def _not_finite(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """Numbers in a nested value that JSON cannot say, with their paths."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ():
        yield from _not_finite(f"{path}.{name}", inner)


def _no_secrets(engine: EngineSection, algorithm: AlgorithmSection) -> Iterator[str]:
    tables = {"engine.options": engine.options, "algorithm.overrides": algorithm.overrides}
    return _secrets(tables, do=". Leave it out, and set it in the environment.")


def _no_secrets_for_scorers(reward: tuple[RewardSection, ...], environment: EnvironmentSection, prm: PrmSection) -> Iterator[str]:
    do = ", and a scorer's environment holds none. Put it in a file, and give the file's path under another name (the judge's is key_file)."
    return _secrets(_free_tables(reward, environment, prm), do=do)


def _secrets(tables: Mapping[str, Mapping[str, Any]], *, do: str) -> Iterator[str]:
    for table, values in tables.items():
        for key in values:
            if key.lower().rpartition("_")[2] in SECRET_WORDS:
                yield f"{table}.{key} looks like a secret: settings are written to the run folder and shown{do}"


def _reference_can_be_offloaded(trainer: TrainerSection, reference: ReferenceSection) -> Iterator[str]:
    if reference.offload and trainer.layout.ranks > trainer.layout.copies:
        yield (
            f"reference.offload keeps whole weights on the host, and trainer.{trainer.layout} spreads them over ranks. Set it to false: a"
            " rank then holds its part only."
        )


def _teachers_are_named_once(reference: ReferenceSection) -> Iterator[str]:
    if reference.path is not None and reference.teachers:
        yield (
            f"reference.path is {reference.path}, and reference.teachers names {', '.join(reference.teachers)}: a row has one reference or"
            " teacher. Leave one of the keys out."
        )


def _adapters_can_be_separate(weights: WeightsSection, lora: LoraSection) -> Iterator[str]:
    if weights.adapters == "separate" and not lora.rank:
        yield 'weights.adapters is "separate", but lora.rank is 0: all weights are trained. Set lora.rank, or leave weights.adapters out.'
    if weights.adapters == "separate" and weights.swap_mode != "auto":
        yield (
            f'weights.swap_mode is "{weights.swap_mode}", which is how whole policies take effect, and weights.adapters is "separate".'
            ' Set one of them to "auto".'
        )


def no_quantised_engine(key: str, value: str) -> str:
    """Say why a quantisation of vLLM's own is refused where whole policies are taken in flight."""
    kernel = ""
    if value.startswith("fp8"):
        here = "" if has_amx() else ", which this machine's processor lacks"
        kernel = f" On a CPU its kernels for it, as CPUFp8PerTensorScaledMMLinearKernel, also want AMX tiles{here}."
    return (
        f'{key} is "{value}": vLLM repacks such weights once it has loaded them, so a policy in flight would not reach them.{kernel} Use'
        ' engine.quantization = "int8" on a CPU, whose weights are made of each policy, or leave it out.'
    )


def _int8_is_for_whole_policies_of_one_rank(engine: EngineSection, weights: WeightsSection) -> Iterator[str]:
    if engine.quantization == "int8" and engine.num_ranks > 1:
        yield (
            f'engine.quantization is "int8", and engine.options spread an engine over {engine.num_ranks} ranks, which quantise nothing.'
            " Leave one of them out."
        )
    if engine.quantization == "int8" and weights.swap_mode not in ("auto", "pointer"):
        yield (
            f'engine.quantization is "int8", whose weights change over as a whole, and weights.swap_mode is "{weights.swap_mode}". Set it'
            ' to "auto".'
        )
    if engine.quantization == "int8" and weights.adapters == "separate":
        yield (
            'engine.quantization is "int8", which is made of whole policies, and weights.adapters is "separate". Set it to "merged", or'
            " leave engine.quantization out."
        )


def _ranks_can_take_policies(engine: EngineSection, model: ModelSection, weights: WeightsSection) -> Iterator[str]:
    ranks = f"engine.options spread an engine over {engine.num_ranks} ranks"
    if (copies := int(engine.options.get("data_parallel_size", 1))) > 1:
        yield f"engine.options.data_parallel_size is {copies}: such an engine takes no policies. Use engine.count: each swaps by itself."
    if engine.num_ranks > 1 and weights.transport in ("cuda_ipc", "nccl"):
        yield (
            f'{ranks}, and weights.transport is "{weights.transport}": what fetches policies for all of them has no device. Use'
            " shared_memory, files or gloo."
        )
    if engine.num_ranks > 1 and model.replay_routing:
        yield f"{ranks}, which record no routes, and model.replay_routing is true. Leave one of them out."
    if engine.num_stages > 1 and weights.adapters == "separate":
        yield (
            f'engine.options.pipeline_parallel_size is {engine.num_stages}, and weights.adapters is "separate": a forward pass under way'
            ' would change its adapter. Use tensor_parallel_size, or weights.adapters = "merged".'
        )
    if engine.num_stages > 1 and (weights.kv_max_staleness is not None or weights.kv_max_kl is not None):
        yield (
            f"engine.options.pipeline_parallel_size is {engine.num_stages}, and weights.kv_max_staleness or weights.kv_max_kl is"
            " set: no KV cache is recomputed while forward passes over it are under way. Use tensor_parallel_size, or leave them out."
        )


def _layout_works(trainer: TrainerSection) -> Iterator[str]:
    if found := problems_of(trainer.layout):
        yield f"trainer.{trainer.layout}: {'; '.join(found)}. The nearest that works: {nearest(trainer.layout)}"


def _backend_can_do_it(model: ModelSection, trainer: TrainerSection, lora: LoraSection, tinker: TinkerSection | None) -> Iterator[str]:
    found = list(problems_of_backend(trainer.backend, trainer.layout))
    if trainer.backend is not TrainerBackend.FSDP2:
        asked = {
            "lora.rank": lora.rank > 0,
            "model.replay_routing": model.replay_routing,
            f'trainer.offload = "{trainer.offload}"': trainer.offload is Offload.WEIGHTS,
            "pipelinerl serve": tinker is not None,
        }
        found += [f"{key} is written for fsdp2 alone" for key, is_asked in asked.items() if is_asked]
    if found:
        yield f'trainer.backend is "{trainer.backend}": {"; ".join(found)}. Leave that out, or set trainer.backend to "fsdp2".'
    yield from problems_of_passes(trainer.backend, trainer.layout, trainer.activation_checkpointing, is_compiled=trainer.compile)


def _zero_bubble_adds_up_in_float32(model: ModelSection, trainer: TrainerSection) -> Iterator[str]:
    if trainer.layout.pipeline > 1 and trainer.layout.schedule is Schedule.ZERO_BUBBLE and model.dtype != "float32":
        yield (
            f'trainer.parallel.schedule = "zero_bubble" adds up the gradients of rows in model.dtype, and {model.dtype} is too coarse for'
            ' that. The nearest that works: trainer.parallel.schedule = "interleaved"'
        )


def _samples_differ(evaluation: EvaluationSection) -> Iterator[str]:
    if evaluation.samples > 1 and not evaluation.temperature:
        yield (
            f"evaluation.samples is {evaluation.samples} and evaluation.temperature is 0: all answers to a prompt would be the same."
            " Raise evaluation.temperature, or leave evaluation.samples at 1."
        )


def _episodes_go_with(environment: EnvironmentSection, prm: PrmSection, model: ModelSection) -> Iterator[str]:
    if environment.function is not None and environment.cls is not None:
        yield f"environment.function is {environment.function}, environment.cls {environment.cls}: one of them replies. Leave one out."
    if not environment.is_used:
        return
    if environment.python is not None and environment.cls is None:
        yield "environment.python runs a class, and environment.cls names none. Set it, or leave environment.python out."
    if prm.is_used and prm.early_stop.threshold is not None:
        yield (
            f"prm.early_stop.threshold is {prm.early_stop.threshold:g}, and {environment.key} makes episodes of several turns, which a"
            " process reward model scores once they are over: none could be stopped. Leave one of them out."
        )
    if prm.is_used and prm.separator is not None:
        yield f"prm.separator is {prm.separator!r}, and {environment.key} makes episodes, whose steps are their turns. Leave one out."
    if model.replay_routing:
        yield (
            f"{environment.key} makes episodes of several turns, and model.replay_routing = true needs the experts of every token: an"
            " engine tells those of one turn. Leave one of them out."
        )


def _agents_play_alone(
    gateway: GatewaySection | None,
    environment: EnvironmentSection,
    prm: PrmSection,
    model: ModelSection,
    evaluation: EvaluationSection,
    reward: tuple[RewardSection, ...],
) -> Iterator[str]:
    if gateway is None:
        return
    if environment.is_used:
        yield "gateway lends rollouts to agents, which bring their own world, and [environment] is another. Leave one of them out."
    if prm.is_used:
        yield "gateway lends rollouts to agents, and a process reward model (prm) follows completions of one turn. Leave one of them out."
    if model.replay_routing:
        yield "gateway lends episodes, and model.replay_routing = true needs the experts of every token. Leave one of them out."
    if evaluation.source is not None and not reward:
        yield (
            "evaluation.source names held-out prompts, and no [[reward]] scores them: rewards that agents post are for what they played."
            " Name a [[reward]], or leave evaluation.source out."
        )


def _stop_strings_go_with(rollout: RolloutSection, model: ModelSection) -> Iterator[str]:
    if rollout.stop and model.replay_routing:
        yield (
            "rollout.stop ends completions in the middle of vLLM's own account of them, and model.replay_routing = true needs the experts"
            " of every token, which vLLM tells at its own end. Use rollout.stop_token_ids, or leave one of them out."
        )


def _template_arguments_are_free(data: DataSection) -> Iterator[str]:
    own = {"conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template"}
    for name in sorted(own & data.chat_template_kwargs.keys()):
        yield f"data.chat_template_kwargs.{name} is passed by this project itself. Leave it out; tools have a key of their own: data.tools."


def _fine_tuning_keeps_its_base(model: ModelSection, sft: SftSection) -> Iterator[str]:
    if sft.output is not None and sft.output == model.path:
        yield (
            f"sft.output is {sft.output}, and so is model.path: fine-tuning would replace the model it began with. Name another folder, and"
            " start RL from it with model.path."
        )


def _sft_stream_has_rows_and_weight(sft_stream: SftStreamSection) -> Iterator[str]:
    if sft_stream.source is not None and sft_stream.coef is None:
        yield (
            f"sft_stream.source is {sft_stream.source}, and sft_stream.coef does not say how much its rows weigh beside RL. Set it, for"
            " example to 0.1; with 0 none is trained."
        )
    if sft_stream.coef and sft_stream.source is None:
        yield f"sft_stream.coef is {sft_stream.coef:g}, and sft_stream.source names no rows. Set it, or leave sft_stream.coef out."


def _steps_have_one_model(prm: PrmSection) -> Iterator[str]:
    if prm.path is not None and prm.judge.url is not None:
        yield f"prm.path is {prm.path} and prm.judge.url is {prm.judge.url}: one of them scores steps. Leave the other out."
    if prm.judge.url is not None and prm.judge.model is None:
        yield f"prm.judge.url is {prm.judge.url}, and prm.judge.model does not say whom to ask there."


def _rewards_are_functions_or_models(reward: tuple[RewardSection, ...], environment: EnvironmentSection) -> Iterator[str]:
    for number, one in enumerate(reward):
        if (one.function is None) == (one.model is None):
            found = "neither function nor model" if one.function is None else f"function {one.function} and model {one.model}"
            yield f"reward.{number} names {found}, expected one of them: what scores a completion."
        elif one.model is None:
            for key in ("format", "dtype", "max_tokens"):
                if getattr(one, key) != type(one).model_fields[key].default:
                    yield f"reward.{number}.{key} is for a reward model, and {one.function} is a function. Leave it out."
        else:
            if one.per == "group":
                yield f'reward.{number}.per is "group", and the model {one.model} scores one completion. Leave it out.'
            if one.format == "chat" and environment.is_used:
                yield (
                    f"{environment.key} makes episodes of several turns, and a chat template would take them for one. Set"
                    f' reward.{number}.format to "text".'
                )


_CHECKS = (
    _row_holds_a_trajectory,
    _group_can_survive,
    _one_core_for_each_process,
    _sharing_leaves_room,
    _dtype_can_be_trained,
    _options_are_finite,
    _no_secrets,
    _no_secrets_for_scorers,
    _layout_works,
    _backend_can_do_it,
    _zero_bubble_adds_up_in_float32,
    _samples_differ,
    nodes_have_work,
    engines_elsewhere_are_the_runs,
    engines_may_join,
    trainer_may_change,
    elastic_goes_with,
    _reference_can_be_offloaded,
    _teachers_are_named_once,
    _adapters_can_be_separate,
    _episodes_go_with,
    _agents_play_alone,
    large_episodes_go_with,
    images_go_with,
    _rewards_are_functions_or_models,
    _steps_have_one_model,
    _fine_tuning_keeps_its_base,
    _sft_stream_has_rows_and_weight,
    _stop_strings_go_with,
    _template_arguments_are_free,
    early_stop_is_unbiased,
    cut_is_unbiased,
    dispatch_is_for_completions,
    sequences_may_move,
    _int8_is_for_whole_policies_of_one_rank,
    _ranks_can_take_policies,
    sharded_policies_can_be_sent,
    devices_can_be_shared,
    constraints_are_accounted_for,
    speculation_goes_with,
)
"""Each takes the sections it is about, by name."""

"""A world from the arithmetic of `pipelinerl plan`: for a machine that is not there, or a run that never was.

The formulas stay where they are (`pipelinerl.planning.formulas`); here they are read at several points, so that a number per running
sequence becomes a curve. What they assume, a simulation assumes, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from orchestrator.simulate.draws import Distribution, fixed
from orchestrator.simulate.roles import Elastic
from orchestrator.simulate.world import EngineWorld, ScoringWorld, SyncWorld, TrainerWorld, World, block_tokens_of
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.scaling import elastic_sizes, units_of
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import TRANSPORTS, gpu_inputs, run_inputs
from pipelinerl.planning.plan import model_of, parameters_of
from pipelinerl.planning.sheet import Values


def world_of_plan(config: Config, *, gpu: str, given: Mapping[str, float]) -> World:
    """Return the world that a plan foresees for a run as configured, on GPUs of the table. Raises `ConfigError`."""
    inputs, values = _planned(config, gpu=gpu, given=given)
    plan = f"plan, {gpu.lower()}"
    origins: dict[str, str] = {name: plan for name in ("engine", "trainer", "sync", "lengths")}
    origins |= {name: "a guess" for name in ("scoring", "rewards")}
    return World(
        engine=_engine(config, inputs, values),
        trainer=TrainerWorld(token_s=values["row_s"] / values["row_length"], step_s=values["update_s"]),
        sync=_sync(values),
        scoring=ScoringWorld(prm_token_s=_prm_token_s(inputs, values)),
        prompt_tokens=fixed(inputs["prompt_tokens"]),
        lengths=_lengths(inputs, is_given="length_cv" in given),
        origins=origins,
    )


def elastic_of_plan(config: Config, *, gpu: str, given: Mapping[str, float], switch_s: float, whole: int = 1) -> Elastic:
    """Return the devices of a run that may change roles, as far as a plan says what they then do: the units of a live run
    (`pipelinerl.config.scaling`), in multiples of `whole` devices, with engines of every width that divides one. As there, the trainer
    starts again with each change of its ranks. Raises `ConfigError`.
    """
    inputs, _ = _planned(config, gpu=gpu, given=given)
    trainer, width = config.trainer, config.engine.num_ranks
    sizes = elastic_sizes(config.engine, config.pipeline)
    units = units_of(config.engine, trainer.layout, least_ranks=trainer.least_ranks, sizes=sizes, whole=whole)
    unit = units.devices
    each = {"engine_pipeline": 1.0, "engines": 1.0}
    engines: dict[int, EngineWorld] = {}
    slots: dict[int, int] = {}
    for other in (width, *(1 << power for power in range(unit.bit_length()))):
        most = max(1, config.engine.max_running * other // width)
        changed = {**inputs, **each, "engine_tensor": float(other), "max_running": float(most)}
        found = SHEET.evaluate(changed)
        if other == width or (not unit % other and found["engine_rank_room"] >= 0):
            engines[other], slots[other] = _engine(config, changed, found), most
    return Elastic(
        unit_devices=unit,
        core_replicas=units.core_ranks // units.ranks_per_replica,
        unit_replicas=unit // units.ranks_per_replica,
        width=width,
        engines=engines,
        slots=slots,
        switch_s=switch_s,
        away_s=switch_s,
    )


def _planned(config: Config, *, gpu: str, given: Mapping[str, float]) -> tuple[Values, Values]:
    """Return the inputs and the values of a plan of a run as configured."""
    shape, adapters = model_of(config)
    prm = 0 if config.prm.path is None else parameters_of(config.prm.path)
    inputs = run_inputs(config, shape, method=method_of(config), adapter_parameters=adapters, prm_parameters=prm)
    inputs = {**inputs, **gpu_inputs(gpu), **given, "epochs": 1.0}  # the simulated trainer repeats rows by itself
    return inputs, SHEET.evaluate(inputs)


def _engine(config: Config, inputs: Values, values: Values) -> EngineWorld:
    def pass_s(num: float, context: float) -> float:
        return SHEET.evaluate(inputs, fixed={"running": num, "decode_context": max(1e-9, context)})["pass_s"]

    most = max(1, int(inputs["max_running"]))
    nums = sorted({1, most, *(2**power for power in range(most.bit_length()) if 2**power < most)})
    context = values["decode_context"]
    return EngineWorld(
        block_tokens=block_tokens_of(config.engine.options),
        pass_s=tuple((num, pass_s(num, 0.0)) for num in nums),
        kv_token_s=max(0.0, pass_s(most, context) - pass_s(most, 0.0)) / (most * context),
        prefill_token_s=values["prefill_s"] * inputs["mean_tokens"] / inputs["prompt_tokens"],
        pass_tokens=int(inputs["batched_tokens"]),
        kv_tokens=values["kv_tokens"],
    )


def _sync(values: Values) -> SyncWorld:
    """Return the way of a policy as `formulas.run` describes it, transport by transport."""
    num_bytes, gather_s, pause_s = values["policy_bytes"], values["gather_s"], values["commit_s"]
    transport = TRANSPORTS[int(values["chosen_transport"])] if values["chosen_transport"] < len(TRANSPORTS) else "nccl"
    sender, receiver, publish_s = math.inf, math.inf, 0.0
    match transport:
        case "cuda_ipc":
            receiver = values["nvlink_bandwidth"]
        case "shared_memory":
            publish_s, receiver = num_bytes / values["host_bandwidth"], values["host_bandwidth"] * values["engine_ranks"]
        case "nccl":
            sender = values["nic_bandwidth"]
        case "gloo":
            sender = values["gloo_bandwidth"]
        case _:
            publish_s, sender = num_bytes / values["files_bandwidth"], values["files_bandwidth"]
    return SyncWorld(
        publish_s=gather_s, publish_beside_s=publish_s, num_bytes=num_bytes, sender_rate=sender, receiver_rate=receiver, pause_s=pause_s
    )


def _prm_token_s(inputs: Values, values: Values) -> float:
    """Return the seconds of one token in the process reward model: two operations for each parameter, as reading a prompt."""
    if not inputs["prm_gpus"]:
        return 0.0
    return 2 * inputs["prm_parameters"] / (inputs["prm_gpus"] * inputs["peak_flops"] * inputs["prefill_efficiency"])


def _lengths(inputs: Values, *, is_given: bool) -> Distribution:
    """Return even lengths, as a plan assumes, or, with a spread that was given, lognormal ones."""
    mean = inputs["mean_tokens"]
    if is_given:
        return Distribution(kind="lognormal", mean=mean, cv=inputs["length_cv"])
    return Distribution(kind="uniform", low=1.0, high=2 * mean - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Settable:
    """What `--set` may give beside the inputs of a plan, and between which numbers."""

    what: str
    least: float = 0.0
    most: float = math.inf


SETTABLE = {
    "tokens_per_pass": Settable("tokens of a sequence in a pass that verifies drafts (engine.speculation)", least=1.0),
    "score_s": Settable("seconds of a reward call"),
    "reply_s": Settable("seconds of an environment's reply"),
    "reply_tokens": Settable("tokens of it"),
    "turns": Settable("turns of an episode", least=1.0),
    "reward_mean": Settable("mean reward: 1 right, 0 wrong", most=1.0),
    "truncated_reward_mean": Settable("the same of completions that end at their limit", most=1.0),
    "reward_spread": Settable("how far prompts differ in difficulty", most=1.0),
    "forward_part": Settable(
        "what a token without a gradient takes of the trainer's time for one with; 1: all have a backward pass", most=1.0
    ),
    "length_growth": Settable("how many times as long completions are at the run's end", least=0.001),
    "likeness": Settable("correlation of siblings' lengths", most=1.0),
    "failed_fraction": Settable("part of the reward calls that fail", most=1.0),
    "hopeless_fraction": Settable("part of the rollouts that the process reward model flags", most=1.0),
}


def changed(world: World, given: Mapping[str, float]) -> World:
    """Return a world with values that `--set` gave, by the names of `SETTABLE`."""
    scoring = dataclasses.asdict(ScoringWorld()).keys()
    for name, value in given.items():
        if name == "tokens_per_pass":
            world = dataclasses.replace(world, engine=dataclasses.replace(world.engine, tokens_per_pass=value))
        elif name == "forward_part":
            world = dataclasses.replace(world, trainer=dataclasses.replace(world.trainer, forward_part=value))
        elif name in scoring:
            kept = fixed(value) if name in ("score_s", "reply_s", "turns") else int(value) if name == "reply_tokens" else value
            world = dataclasses.replace(world, scoring=dataclasses.replace(world.scoring, **{name: kept}))
        elif name == "length_growth":
            world = dataclasses.replace(world, length_factors=(1.0, value))
        else:
            world = dataclasses.replace(world, **{name: value})
    return dataclasses.replace(world, origins={**world.origins, **dict.fromkeys(given, "--set")})

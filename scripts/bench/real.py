"""Measures what is lost at the size of a real model: SmolLM2-135M's shape in float32, on two cores, each part beside its reference.

`engine`: tokens per second of a core, over plain vLLM with the kernels that it chooses by itself; and a policy that is brought in while no
sequence runs (staging), over what that consists of at full speed. `trainer`: tokens with a gradient per second of a core, over a plain
transformers forward and backward of the same samples: as rewards come (most groups have equal ones), and where every group has a signal,
all weights and LoRA. `start`: from the command to the first trained step, process by process, for this model and for the demo's.
`idle`: how long the engine has nothing to do in a run of which the trainer is not the limit.

`--part` measures one of them and stores it apart; all of them take about ten minutes. `--quick` has three layers, and measures engine and
trainer. `--model` takes a model folder in place of random weights, which cost the same.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import children, harness, real_engine, real_model, real_run
from scripts.bench.verdict import Work

FOLDER = Path("runs/bench-real")
ENGINE_CORE, TRAINER_CORE = 0, 1
PARTS = ("engine", "trainer", "start", "idle")
QUICK_LAYERS = 3
LIMITED = 0.05
"""Part of the time for which a trainer at least waits that is not the limit of its run."""
ENGINE_SIZE = {"num_sequences": 48, "num_tokens": 32, "num_prompt_tokens": 32}
QUICK_ENGINE_SIZE = {"num_sequences": 16, "num_tokens": 12, "num_prompt_tokens": 12}
CASES = (("all weights", False, 0.0, 1.2), ("LoRA", True, 0.0, 1.2), ("all weights", False, real_model.EQUAL_REWARD, 1.5))
"""(what is trained, by adapters, part of groups whose rewards are all equal, goal)."""


def measure(arguments: Any) -> harness.Measured:
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("real needs two cores: engine and trainer have one each")
    os.environ["OMP_NUM_THREADS"] = "1"
    from pipelinerl.engine.environment import set_environment

    FOLDER.mkdir(parents=True, exist_ok=True)
    num_layers = QUICK_LAYERS if arguments.quick else real_model.SMOLLM2_135M["num_hidden_layers"]
    model = arguments.model or FOLDER / f"model-{num_layers}"
    if not (model / "config.json").exists():
        children.result_of(real_model.make_model, str(model), num_layers)
    parts = [arguments.part] if arguments.part else ["engine", "trainer"] if arguments.quick else PARTS
    found = harness.Measured(notes=[f"{num_layers} layers"])
    if "start" in parts:  # before this process sets an environment that its children would inherit
        _start(found, model)
    if "idle" in parts:
        _idle(found, model)
    set_environment()
    if "trainer" in parts:
        _trainer(
            found, model, is_quick=arguments.quick, meanwhile=_import_engine if arguments.quick and "engine" in parts else lambda: None
        )
    if "engine" in parts:
        _import_engine()
        _engine(found, model, is_quick=arguments.quick)
    columns = list(dict.fromkeys(name for row in found.rows for name in row))
    found.rows = [{name: row.get(name, "") for name in columns} for row in found.rows]
    return found


def _engine(found: harness.Measured, model: Path, *, is_quick: bool) -> None:
    size = QUICK_ENGINE_SIZE if is_quick else ENGINE_SIZE
    plain = real_engine.Turns(functools.partial(real_engine.plain, model, **size), core=ENGINE_CORE)
    ours = real_engine.Turns(functools.partial(real_engine.ours, model, **size), core=ENGINE_CORE)
    for engine in (plain, ours):
        engine("decode")  # warms up
    speeds = harness.in_turns(2 if is_quick else 3, {"plain": lambda: plain("decode"), "ours": lambda: ours("decode")})
    plain.end()
    staging = harness.steadily(lambda: ours("stage"))
    ours.end()
    ratio = harness.median_ratio(speeds["ours"], speeds["plain"])
    for name, values in speeds.items():
        found.rows.append({"part": "engine", "what": f"{name}, {size['num_sequences']} sequences", "per s": sum(values) / len(values)})
    for name in ("stage", "hash", "copy", "pack", "pause"):
        found.rows.append({"part": "staging", "what": f"{name}, {staging['mb']:.0f} MB", "seconds": staging[name]})
    work = staging["hash"] + max(staging["copy"], staging["pack"])
    found.goals += [
        harness.at_least("engine's tokens/s over plain vLLM's", ratio, 0.95, work=Work.CPU, speeds=speeds.speeds),
        harness.at_most("staging at rest over hashing and packing", staging["stage"] / work, 1.2),
        harness.at_most("staging at rest over hashing and copying", staging["stage"] / (staging["hash"] + staging["copy"]), 1.2),
        harness.at_most("pause of a commit, ms", 1e3 * staging["pause"], 2.0),
    ]


def _import_engine() -> None:
    """Import what engines need, for the forks to come, on their core; a second time this does nothing."""
    from pipelinerl.runtime.imports import of_large_packages

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {ENGINE_CORE})
    with of_large_packages():
        from pipelinerl.engine.vllm.imports import import_everything

        import_everything()
    os.sched_setaffinity(0, cores)


def _trainer(found: harness.Measured, model: Path, *, is_quick: bool, meanwhile: Callable[[], None]) -> None:
    for name, lora, equal_reward, goal in CASES[:1] if is_quick else CASES:
        size = {"num_groups": 1 if not equal_reward else 7, "rounds": 1 if equal_reward or is_quick else 2, "row_tokens": 4096}
        with_signal = "every group has a signal" if not equal_reward else f"{equal_reward:.0%} of groups have equal rewards"
        shown = harness.steadily(lambda options=(lora, equal_reward, size): _trained(model, *options, meanwhile=meanwhile))
        what = f"{name}, {with_signal}"
        found.rows += [
            {"part": "trainer", "what": f"{what}: ours", "per s": shown["ours"]},
            {"part": "trainer", "what": f"{what}: transformers, {shown['way']}", "per s": shown["plain"]},
        ]
        found.goals.append(harness.at_least(f"useful tokens/s over transformers, {what}", shown["ratio"], goal))
        found.goals.append(harness.at_most(f"difference of the gradients, {what}", shown["difference"], 1e-3))


def _trained(model: Path, lora: bool, equal_reward: float, size: dict[str, int], *, meanwhile: Callable[[], None]) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        from scripts.bench import real_trainer

        return real_trainer.measure(str(model), lora=lora, equal_reward=equal_reward, **size)

    return children.result_of(work, cores={TRAINER_CORE}, meanwhile=meanwhile)


def _start(found: harness.Measured, model: Path) -> None:
    folder = _fresh("start")
    own, demo = real_run.settings(folder, model, num_steps=50), children.result_of(real_run.prepare_demo, str(folder))
    for name, command, goal in (
        ("135M", real_run.command_of_run(own), 20.0),
        ("the demo's model", real_run.command_of_run(Path(demo)), 8.0),
        ("the demo, from the end of its warm start", real_run.command_of_demo(folder, warm_start_steps=40), 8.0),
    ):
        told = harness.steadily(lambda command=command: real_run.start(command, folder=folder, deadline_s=180))
        found.rows += [{"part": f"start, {name}", **row} for row in told["processes"]]
        found.goals.append(harness.at_most(f"first trained step, {name}, s", told["first_step_s"], goal, **harness.SECONDS))


def _idle(found: harness.Measured, model: Path) -> None:
    folder = _fresh("idle")
    command = real_run.command_of_run(real_run.settings(folder, model, num_steps=100, max_running=2))
    told = harness.steadily(lambda: real_run.idle(command, folder=folder, steps=range(2, 8), deadline_s=240))
    found.rows += [{"part": "idle", "what": what, "of the time": value} for what, value in told.items()]
    if told["trainer without a row"] < LIMITED:
        found.notes.append("the trainer was the limit of this run, so the engine's idle time is not held to its goal: lower max_running")
        return
    found.goals.append(harness.at_most("engine idle where the trainer is not the limit", told["engine without a sequence"], 0.05))


def _fresh(name: str) -> Path:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    options = {
        "--part": {"choices": PARTS, "help": "only this one; staging is measured with the engine"},
        "--model": {"type": Path, "help": "a model folder of this shape; default: random weights"},
    }
    harness.run("real", measure, works=(Work.CPU, Work.MEMORY), options=options)

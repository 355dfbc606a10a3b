"""Checks before anything starts: `pipelinerl run` makes all of them each time, and `--dry-run` makes nothing else.

No model is loaded, and neither torch nor vLLM is imported: a head node has neither. The user's own code (rewards, environment, sources of
rows) is looked at in processes of their own, `python -m orchestrator.preflight`, with every row of the data, and `trainer.preflight`, with
every demonstration beside RL: `look_apart` starts them, and `answer` is their main function.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from pipelinerl.algorithms.method import Method
from pipelinerl.algorithms.methods import facts_of, method_of
from pipelinerl.algorithms.unused import unused_parts
from pipelinerl.config import Config
from pipelinerl.config.backends import check_installed, check_model
from pipelinerl.config.families import check_servable, check_trainable, lora_targets
from pipelinerl.config.file import with_tensor_parallel
from pipelinerl.config.layout import check_layout
from pipelinerl.data.hub import model_folder
from pipelinerl.engine.budget import plan_on
from pipelinerl.engine.kv import SHARE_OF_MEMORY, KvPlan, context_of, plan_kv
from pipelinerl.engine.options import problems_of_options, problems_of_parser
from pipelinerl.errors import ConfigError
from pipelinerl.launch import doctor
from pipelinerl.launch.gpus import place
from pipelinerl.launch.places import look_at_places
from pipelinerl.launch.roles import roles_of
from pipelinerl.launch.unused_keys import refused, unused_keys
from pipelinerl.observe.tracking.beside import missing_packages
from pipelinerl.planning import memory
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.findings import Finding, Level, collect, fail, note, ok, warn
from pipelinerl.runtime.machine import has_gpu, memory_bytes, say_bytes
from pipelinerl.runtime.plugin import nearest
from pipelinerl.runtime.process import how_it_ended
from pipelinerl.upload import check_store

ROWS_DEADLINE_S = 3600.0
"""Longest look at the user's functions and rows; a source on a slow disk may have millions."""
_PRM_KEYS = {"model": "prm.path", "dtype": "prm.dtype", "max_model_len": "prm.max_tokens"}
_NO_TARGET = re.compile(r"embed|\.experts\.[0-9]").search
"""Finds the matrices that get no adapter: the trainer has no linear layer of their name."""
_REWARD_KEYS = {"model": "model", "dtype": "dtype", "max_model_len": "max_tokens"}


def check(
    config: Config,
    *,
    runs_here: bool = True,
    is_dry: bool = False,
    in_script: bool = False,
    is_one_of_several: bool = False,
    is_frozen: bool = False,
) -> list[Finding]:
    """Look at everything; whatever is wrong is in the findings, all at once.

    `runs_here`: this machine will run the processes, so its packages, memory and disks are looked at. `is_dry`: nothing will start, so a
    machine without torch and vLLM may check for another. `in_script`: what a script calls may read what the method does not.
    `is_one_of_several`: one policy of a run, whose GPUs are dealt elsewhere; `is_frozen`: it has engines alone.
    """
    if config.policies:
        do = "a script trains them, with `pipelinerl.Policies` in place of `pipelinerl.Controller` or this command: docs/controller.md"
        return [fail("policies", f"{', '.join(config.policies)}: several policies have no loop of their own", do=do)]
    has_model = (config.model.path / "config.json").is_file()
    layout = _raised_by(lambda: check_layout(config.trainer.layout, config.model.path)) if has_model else ()
    backend = _raised_by(lambda: _backend(config, has_model=has_model, runs_here=runs_here))
    servable = _raised_by(lambda: check_servable(config.model.path) if config.engine.kind == "vllm" else None)
    if is_frozen:
        return collect(_model(config), servable, _engine_options(config), _packages(otherwise=Level.NOTE if is_dry else Level.FAIL))
    trackers = _raised_by(lambda: missing_packages(config.tracking.to))
    looks = [
        _model(config),
        servable,
        _folders(config),
        layout,
        backend,
        _settings(config, in_script=in_script),
        _raised_by(lambda: _elastic_sizes(config, has_model=has_model)),
        _engine_options(config),
        trackers,
    ]
    looks += [_raised_by(lambda: _gateway_packages(config)), _raised_by(lambda: _store(config, is_dry=is_dry or not runs_here))]
    if runs_here:
        otherwise = Level.NOTE if is_dry else Level.FAIL
        looks += [_packages(otherwise=otherwise), _cores(config), look_at_places(config, otherwise=otherwise)]
        looks += [] if is_one_of_several else [_gpus(config, is_dry=is_dry)]
    if has_model and config.engine.kind == "vllm":
        looks += [_memory(config, runs_here=runs_here)]
    if config.tinker is None:  # else prompts and rewards are the clients' own
        looks += [look_apart(config, module="orchestrator.preflight", imports="rewards, environment and data.source")]
    if config.sft_stream.coef and has_model:
        looks += [look_apart(config, module="trainer.preflight", imports="sft_stream.source")]
    return collect(*looks)


def look_apart(config: Config, *, module: str, imports: str) -> Iterator[Finding]:
    """Have `module` look in a process of its own, which shows its progress; `imports` names the user's code it loads, for errors."""
    with tempfile.TemporaryDirectory(prefix="pipelinerl-preflight-") as scratch:
        settings, output = Path(scratch) / "config.json", Path(scratch) / "findings.json"
        settings.write_text(config.model_dump_json())
        command = [sys.executable, "-m", module, "--config", str(settings), "--output", str(output)]
        try:
            code = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                timeout=ROWS_DEADLINE_S,
                process_group=0,  # Ctrl-C ends this process, which kills that one: by itself it would print a traceback
            ).returncode
        except subprocess.TimeoutExpired:
            yield fail(imports, f"the rows could not be read within {ROWS_DEADLINE_S:g} s")
            return
        if output.exists():
            yield from msgspec.json.decode(output.read_bytes(), type=list[Finding])
        else:
            yield fail("", f"the process that imports {imports} {how_it_ended(code)}; what it printed stands above")


def answer(look: Callable[[Config], Iterable[Finding]], *, module: str, description: str | None) -> None:
    """Be the process that `look_apart` starts: read the settings, look, write the findings."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--config", type=Path, required=True, help="resolved settings, as JSON")
    parser.add_argument("--output", type=Path, required=True, help="where the findings go, as JSON")
    arguments = parser.parse_args()
    config = Config.model_validate_json(arguments.config.read_bytes())
    sys.path.insert(0, os.getcwd())  # as in the processes of a run, modules of the working directory can be imported
    arguments.output.write_bytes(msgspec.json.encode(collect(look(config))))


def _raised_by(check: Callable[[], None]) -> Iterator[Finding]:
    """Make a look of a check that raises its problem, for `collect` to catch."""
    check()
    yield from ()


def _backend(config: Config, *, has_model: bool, runs_here: bool) -> None:
    """Raise `ConfigError` where the trainer's backend is not installed here, or does not compute this model."""
    if runs_here:
        check_installed(config.trainer.backend)
    if has_model:
        check_model(config.trainer.backend, config.trainer.layout, config.model.path)


def _elastic_sizes(config: Config, *, has_model: bool) -> None:
    """Raise `ConfigError` where no engine could serve with a `tensor_parallel_size` that `pipeline.elastic` may give it."""
    for size in config.pipeline.elastic_tensor_parallel_sizes if config.pipeline.elastic and has_model else ():
        try:
            with_tensor_parallel(config, size)
        except ConfigError as error:
            raise ConfigError(f"pipeline.elastic_tensor_parallel_sizes names {size}: {error}") from None


def _gateway_packages(config: Config) -> None:
    """Raise `ConfigError` where the process that serves HTTP could not import what it does that with."""
    needed = ("starlette", "uvicorn", "httptools", "uvloop", *(["google.protobuf"] if config.tinker is not None else []))
    section = "gateway" if config.gateway is not None else "tinker" if config.tinker is not None else None
    if section and (missing := [name for name in needed if not _is_installed(name)]):
        raise ConfigError(f"{section}: {', '.join(missing)} is not installed. pip install 'pipelinerl[gateway]'")


def _store(config: Config, *, is_dry: bool) -> None:
    if config.checkpoint.to is not None:
        check_store(config.checkpoint.to, is_dry=is_dry)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _model(config: Config) -> Iterator[Finding]:
    folder = config.model.path
    yield from _model_folder("model.path", folder, "config.json", "tokenizer_config.json", "*.safetensors")
    if not (folder / "config.json").exists():
        return
    own, wanted = context_of(folder, max_tokens=None), context_of(folder, max_tokens=config.model.max_tokens)
    if own and wanted and wanted > own:
        yield fail("model.max_tokens", f"{wanted}, but {folder} was made for {own} positions", do="lower model.max_tokens")
    if wanted and config.rollout.max_tokens >= wanted:
        found = f"{config.rollout.max_tokens}, and the context holds {wanted} tokens, prompt included: no room left for a prompt"
        yield fail("rollout.max_tokens", found, do="lower rollout.max_tokens")
    if warning := check_trainable(folder):
        yield warn("", warning)
    if config.lora.rank:
        yield from _targets(config.lora.targets, folder)


def _targets(targets: Iterable[str], folder: Path) -> Iterator[Finding]:
    """Names of `lora.targets` that no matrix of the model has, which the trainer would say once it has loaded it."""
    shapes = memory.read_weights(folder).shapes
    named = {name.removesuffix(".weight").rpartition(".")[2] for name, shape in shapes.items() if len(shape) == 2 and not _NO_TARGET(name)}
    known = sorted(named | set(lora_targets(folder)))
    missing = [target for target in dict.fromkeys(targets) if target not in known]
    if named and missing:
        found = ", ".join(f"{target!r}{nearest(target, known)}" for target in missing)
        yield fail("lora.targets", f"no matrix of {folder} is named {found}", do=f"take of {', '.join(known)}")


def _folders(config: Config) -> Iterator[Finding]:
    """Models beside the policy."""
    rewards = ((f"reward.{number}.model", reward.model) for number, reward in enumerate(config.reward))
    beside = (("critic.path", config.critic.path), ("prm.path", config.prm.path))
    for key, folder in (*config.reference.folders.items(), *beside, *rewards):
        if folder is not None:
            yield from _model_folder(key, folder, "config.json", "*.safetensors")
    for number, reward in enumerate(config.reward):
        if reward.model is not None and (reward.model / "config.json").is_file():
            yield from _length(f"reward.{number}", reward.model, reward.max_tokens, longest=config.rollout.max_tokens)
    if (key_file := config.prm.judge.key_file) is not None and not key_file.is_file():
        yield fail("prm.judge.key_file", f"no file at {key_file} (looked from {Path.cwd()})")


def _length(key: str, folder: Path, max_tokens: int | None, *, longest: int) -> Iterator[Finding]:
    """Compare what a reward model takes with what it may be given; its own tokens may be more or fewer than the policy's."""
    own = context_of(folder, max_tokens=None)
    if own and max_tokens and max_tokens > own:
        yield fail(f"{key}.max_tokens", f"{max_tokens}, but {folder} was made for {own} positions", do=f"lower {key}.max_tokens")
    takes = max_tokens or own
    if takes and takes <= longest:
        found = f"takes {takes} tokens, prompt included, and rollout.max_tokens is {longest}: longer rollouts fail as invalid"
        yield note(f"{key}.model", found, do="lower rollout.max_tokens, or take a reward model with a longer context")


def _model_folder(key: str, folder: Path, *patterns: str) -> Iterator[Finding]:
    try:
        folder = model_folder(folder, key=key)
    except ConfigError as error:  # a name of the Hub, which a dry run leaves as it is where it cannot be had
        yield fail("", str(error))
        return
    if not folder.is_dir():
        yield fail(key, f"no folder at {folder} (looked from {Path.cwd()})", do="name a Hugging Face model folder")
    elif missing := ", ".join(pattern for pattern in patterns if not list(folder.glob(pattern))):
        yield fail(key, f"{folder} lacks {missing}", do="a Hugging Face model folder with safetensors weights is expected")


def _settings(config: Config, *, in_script: bool) -> Iterator[Finding]:
    """Settings that would do nothing in this run, or do harm."""
    method = method_of(config)
    if config.pipeline.elastic and config.pipeline.migration == "off" and not config.why_sequences_stay:
        found = 'is "off" while pipeline.elastic is true: an engine that joins gets nothing of what waits in the others for room'
        yield warn("pipeline.migration", found, do='set pipeline.migration to "waiting"')
    yield from (fail("", problem) for problem in refused(config, method=method, in_script=in_script))
    yield from (note("", sentence) for sentence in (*unused_keys(config, method=method), *unused_parts(method, run=facts_of(config))))


def _engine_options(config: Config) -> Iterator[Finding]:
    installed = next(filter(None, map(doctor.version_of, doctor.VLLM_PACKAGES)), None)
    engine = problems_of_options(config.engine.options, section="engine", installed=installed)
    prm = problems_of_options(config.prm.options, section="prm", installed=installed, own_keys=_PRM_KEYS)
    parser = problems_of_parser(config.data.tool_call_parser, installed=installed)
    yield from (fail("", problem) for problem in (*engine, *prm, *parser))
    for number, reward in enumerate(config.reward):
        if reward.model is not None:
            section = f"reward.{number}"
            own_keys = {option: f"{section}.{key}" for option, key in _REWARD_KEYS.items()}
            problems = problems_of_options(reward.options, section=section, installed=installed, own_keys=own_keys)
            yield from (fail("", problem) for problem in problems)


def _packages(*, otherwise: Level) -> Iterator[Finding]:
    packages = {"torch": ("torch",), "vLLM": doctor.VLLM_PACKAGES}
    if missing := [name for name, options in packages.items() if not any(map(doctor.version_of, options))]:
        do = (
            "set up with scripts/setup, or install pipelinerl[gpu]; a machine without them can check a run with --dry-run, and submit one"
            " with pipelinerl slurm"
        )
        yield Finding(otherwise, " and ".join(missing), "not installed here, where engines and trainer would run", do)
    yield from doctor.versions(doctor.unmet(), otherwise=otherwise)


def _cores(config: Config) -> Iterator[Finding]:
    here = os.sched_getaffinity(0)
    for part in ("run", "engine", "trainer", "prm"):
        cores = getattr(config, part).cores
        if unknown := sorted(set(cores) - here):
            found = f"names {', '.join(map(str, unknown))}, and processes here may use {', '.join(map(str, sorted(here)))}"
            yield fail(f"{part}.cores", found)


def _gpus(config: Config, *, is_dry: bool) -> Iterator[Finding]:
    """Who takes which GPU. A machine without any may check for another, which then has to have those that settings name."""
    gpus = usable_gpus()
    if not gpus and is_dry and any((config.engine.gpus, config.prm.gpus, config.trainer.gpus)):
        yield note("GPUs", "settings name some, and this machine has none that a run could use: the machine of the run must have them")
        return
    _, placement = place(config, roles_of(config, config.run.folder), gpus)
    yield from (ok("GPUs", line) for line in placement.table())
    if (own := placement.taken.get("engine-0")) and (config.model.path / "config.json").is_file():
        budget = plan_on(
            own,
            config.model,
            config.engine,
            config.rollout,
            num_parameters=memory.read_weights(config.model.path).num_parameters,
            stages_policies=not config.lora.rank or config.weights.adapters == "merged",
        )
        yield ok("GPU memory", f"engine-0, {budget or 'as vLLM itself measures it: config.json says too little'}")


def _memory(config: Config, *, runs_here: bool) -> Iterator[Finding]:
    """KV caches, memory, shared memory and disk."""
    on_cpu, limit = not has_gpu(), memory_bytes()
    kv: KvPlan | None = None
    if runs_here or config.engine.kv_cache_bytes is not None:
        kv = plan_kv(config.model, config.engine, config.rollout, memory_bytes=limit, on_cpu=on_cpu)
    weights = memory.read_weights(config.model.path)
    yield from (ok("KV cache", found) for found in _kv_cache(config, kv))
    if config.lora.rank and on_cpu and config.weights.adapters == "auto":
        whole = memory.shared_bytes(config, weights) // memory.NUM_POLICIES
        found = f"{config.lora.rank}, and each step publishes all {say_bytes(whole)} of the model: on a CPU adapters are merged before they"
        do = 'weights.adapters = "separate" sends adapters alone, and a forward pass then takes 1.4 to 2.6 times as long'
        yield note("lora.rank", f"{found} travel", do=do)
    method = method_of(config)
    if not weights.num_parameters:
        return
    parts = list(memory.bill(config, weights, method=method, kv=kv))
    yield ok("memory", f"{weights.num_parameters:,} parameters in {config.model.dtype}")
    yield from (ok("memory", f"{part.what:<42} {'' if part.is_sure else 'about '}{say_bytes(part.num_bytes)}") for part in parts)
    if not runs_here:
        return
    counted = [part for part in parts if on_cpu or not part.on_device]
    total, sure = sum(part.num_bytes for part in counted), sum(part.num_bytes for part in counted if part.is_sure)
    where = "in all" if on_cpu else "of it outside of the GPUs"
    yield ok("memory", f"{where + f', of {say_bytes(limit)} here':<42} about {say_bytes(total)}")
    if total > limit:
        advice = "lower engine.kv_cache_bytes, batch.max_tokens or engine.count, train adapters (lora.rank), or take a machine with more"
        takes, level = (say_bytes(sure), Level.FAIL) if sure > limit else (f"about {say_bytes(total)}", Level.NOTE)
        yield Finding(level, "memory", f"the run takes {takes} and this machine has {say_bytes(limit)}", advice)
    yield from _disks(config, weights, method, on_cpu=on_cpu)


def _kv_cache(config: Config, kv: KvPlan | None) -> Iterator[str]:
    if kv is None:
        yield "not estimated, because config.json does not say how much a token takes; see engine.kv_cache_bytes"
        return
    longest = min(kv.context_tokens, 2 * config.rollout.max_tokens)
    yield (
        f"{kv.token_bytes:,} bytes a token; {say_bytes(kv.sequence_bytes(longest))} for a sequence of {longest:,} tokens,"
        f" {say_bytes(kv.sequence_bytes(kv.context_tokens))} for the whole context of {kv.context_tokens:,}"
    )
    if kv.cache_bytes is None:
        yield f"of each engine: {kv.why}"
        return
    fit, whole = kv.num_sequences(longest), kv.num_sequences(kv.context_tokens)
    yield f"of each engine: {say_bytes(kv.cache_bytes)} ({kv.why}); {fit} such sequences fit, {whole} of the whole context"
    if fit is not None and fit < config.engine.max_running:
        yield (
            f"engine.max_running = {config.engine.max_running} are more than fit at that length: others wait; engine.kv_cache_bytes"
            f" may exceed the {SHARE_OF_MEMORY:.0%} of the machine's memory that caches take by default"
        )


def _disks(config: Config, weights: memory.Weights, method: Method, *, on_cpu: bool) -> Iterator[Finding]:
    """Room for policies on their way, and for checkpoints."""
    shared, folder = Path("/dev/shm"), doctor.existing(config.run.folder)
    policies, one = memory.shared_bytes(config, weights), memory.checkpoint_bytes(config, weights, method=method)
    through_shared = config.weights.transport == "shared_memory" or (config.weights.transport == "auto" and on_cpu)
    if through_shared and shared.exists() and (free := shutil.disk_usage(shared).free) < policies:
        level = Level.FAIL if free < policies * 2 // memory.NUM_POLICIES else Level.NOTE
        found = f"{say_bytes(free)} free, and {memory.NUM_POLICIES} policies on their way take {say_bytes(policies)}"
        do = 'in a container: --shm-size; `pipelinerl doctor` says what lies there; or set weights.transport = "files"'
        yield Finding(level, str(shared), found, do)
    free, model = shutil.disk_usage(folder).free, policies // memory.NUM_POLICIES
    wanted = (config.checkpoint.keep + 1) * one + model
    yield ok("disk", f"{say_bytes(one)} a checkpoint, {say_bytes(wanted)} in all; {say_bytes(free)} free at {folder}")
    if free < wanted:
        level = Level.FAIL if free < one + model else Level.NOTE
        found = f"{config.run.folder} has {say_bytes(free)} free, and {config.checkpoint.keep} + 1 checkpoints and the model take"
        do = "free some, set run.folder to a larger disk, or lower checkpoint.keep"
        yield Finding(level, "run.folder", f"{found} {say_bytes(wanted)}", do)

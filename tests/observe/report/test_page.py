"""The page says what the journals say, asks for nothing from outside, and is whole HTML whatever the journals lack or contain."""

import base64
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.errors import DataError
from pipelinerl.observe.report import write_report
from pipelinerl.observe.report.reading import read_tables
from scripts.bench.demo_journal import DemoJournals
from tests.observe.report.reading_html import Page
from tests.observe.report.synthetic import BEGAN, Line, Plan, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KINDS = ("run", "status", "step", "swap", "evaluation", "end", "span")


def _report(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


def _of_kind(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def _change(folder: Path, kind: str, **fields: object) -> None:
    """Change fields of every line of a kind in the orchestrator's journal."""
    path = folder / "journal" / "orchestrator.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | (fields if line["kind"] == kind else {})) + "\n" for line in lines))


def test_headline_numbers_are_those_of_the_journal(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run")
    page = _report(tmp_path / "run")
    steps = _of_kind(lines, "step")
    assert page.by_id["final-reward"] == f"{np.mean([step['reward_mean'] for step in steps[-10:]]):.3f}"
    assert f"first 10 steps: {np.mean([step['reward_mean'] for step in steps[:10]]):.3f}" in page.by_id["final-reward-note"]
    assert page.by_id["held-out"] == "0.125 → 0.812"
    assert page.by_id["held-out-note"] == "version 0 → 40, 64 prompts"
    assert page.by_id["num-steps"] == "40 of 40"
    assert page.by_id["num-samples"] == f"{40 * 64:,}"
    trained, useful = (f"{sum(step[name] for step in steps):,}" for name in ("num_trained_tokens", "num_useful_tokens"))
    assert page.by_id["num-samples-note"] == f"{trained} trained tokens, {useful} useful"
    pauses = [1000 * line["pause_s"] for line in _of_kind(lines, "swap")]
    assert page.by_id["pause"] == f"{np.quantile(pauses, 0.5):.3f} / {np.quantile(pauses, 0.99):.3f} ms"
    assert page.by_id["pause-note"] == "78 swaps"


def test_rates_are_tokens_over_the_steady_stretch(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run")
    page = _report(tmp_path / "run")
    steps = _of_kind(lines, "step")
    trained = sum(step["num_trained_tokens"] for step in steps[1:]) / (steps[-1]["t"] - steps[0]["t"])
    assert page.by_id["trained-rate"] == f"{round(trained):,} tok/s"
    useful = sum(step["num_useful_tokens"] for step in steps[1:]) / (steps[-1]["t"] - steps[0]["t"])
    assert page.by_id["trained-rate-note"].startswith(f"useful {round(useful):,} tok/s, steps ")
    generated = float(page.by_id["generated-rate"].removesuffix(" tok/s").replace(",", ""))
    assert generated == pytest.approx(15_000 / Plan().period_s, rel=1e-3)


def test_staleness_is_weighted_by_tokens(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run")
    page = _report(tmp_path / "run")
    tokens: dict[int, int] = {}
    for step in _of_kind(lines, "step"):
        for age, count in step["staleness"].items():
            tokens[int(age)] = tokens.get(int(age), 0) + count
    mean = sum(age * count for age, count in tokens.items()) / sum(tokens.values())
    assert page.by_id["staleness-mean"] == f"{mean:.3f} / 3"
    labels = [f"{100 * count / sum(tokens.values()):.1f} %" for count in tokens.values()]
    assert re.findall(r"\d+\.\d %", page.by_id["staleness"]) == labels


def test_steps_are_listed_with_their_own_numbers(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run")
    page = _report(tmp_path / "run")
    listed = page.cells("steps")
    assert len(listed) == 40
    for step in _of_kind(lines, "step"):
        cells = listed[str(step["step"])]
        assert cells[0] == str(step["version"])
        assert float(cells[1]) == pytest.approx(step["reward_mean"], rel=1e-3)
        assert cells[3:5] == [f"{step['num_trained_tokens']:,}", f"{step['num_useful_tokens']:,}"]


def test_identity_that_balances_has_its_mark(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    page = _report(tmp_path / "run")
    expected = "✓ 2,706 admitted = 0 in flight + 2,560 trained + 120 filtered + 10 stale + 5 failed + 11 cancelled"
    assert page.by_id["identity-sentence"] == expected
    assert page.by_id["identity-note"].startswith("✓")
    assert page.cells("outcomes")["trained"][0] == "2,560"
    assert page.cells("reasons")["failed: timeout"] == ["3"]


@pytest.mark.parametrize(("lost", "words"), [(7, "7 rollouts unaccounted for"), (-1, "1 rollout ended more often than admitted")])
def test_identity_that_does_not_balance_is_flagged(tmp_path: Path, lost: int, words: str) -> None:
    lines = write_run(tmp_path / "run")
    identity = dict(_of_kind(lines, "end")[0]["rollouts"])
    identity["admitted"] += lost
    _change(tmp_path / "run", "end", rollouts=identity)
    page = _report(tmp_path / "run")
    assert page.by_id["identity-sentence"].startswith("✗")
    assert page.by_id["identity-sentence"].endswith(words)
    assert "≠" in page.by_id["identity-sentence"]
    assert page.by_id["identity-note"] == f"✗ off by {lost}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_without_one_kind_is_shown_and_the_gap_is_named(tmp_path: Path, kind: str) -> None:
    write_run(tmp_path / "run", Plan(num_steps=6), without=frozenset({kind}))
    page = _report(tmp_path / "run")
    where, words = {
        "run": ("configuration", "not recorded"),
        "status": ("queues", "not recorded"),
        "step": ("final-reward", "not recorded"),
        "swap": ("pause", "not recorded"),
        "evaluation": ("held-out", "not recorded"),
        "end": ("ended", "The journal holds no end"),
        "span": ("timeline", "not recorded"),
    }[kind]
    assert words in page.by_id[where]


@pytest.mark.parametrize("kept", KINDS)
def test_a_journal_of_one_kind_only_is_shown(tmp_path: Path, kept: str) -> None:
    write_run(tmp_path / "run", Plan(num_steps=3), without=frozenset(KINDS) - {kept})
    assert _report(tmp_path / "run").by_id["name"] == ("synthetic" if kept == "run" else "run")


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_runs_of_very_few_steps_are_shown(tmp_path: Path, num_steps: int) -> None:
    write_run(tmp_path / "run", Plan(num_steps=num_steps))
    assert _report(tmp_path / "run").by_id["num-steps"] == f"{num_steps} of {num_steps}"


def test_lines_that_hold_only_time_and_kind_are_shown(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    bare = [{"t": float(number), "kind": kind, "process": "orchestrator"} for number, kind in enumerate(KINDS * 2)]
    (tmp_path / "journal" / "orchestrator.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bare))
    assert _report(tmp_path).by_id["final-reward"] == "not recorded"


def test_numbers_that_are_not_finite_count_as_not_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=4))
    _change(tmp_path / "run", "step", reward_mean=float("nan"), trainer={"loss": float("inf"), "grad_norm": float("nan")})
    page = _report(tmp_path / "run")
    assert page.by_id["final-reward"] == "not recorded"
    assert "nan" not in page.by_id["trainer"].lower()


def test_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    text = write_report(tmp_path / "run").read_text()
    assert not re.search(r"https?://|//[a-z]|@import|url\(", text.replace("/*! https://github.com/leeoniya/uPlot", ""))
    page = Page(text)
    assert not page.tags & {"link", "img", "iframe", "object", "embed", "use", "image"}
    assert not [
        name for _, name, _ in page.attributes if name in ("src", "srcset", "xlink:href", "action", "style") or name.startswith("on")
    ]
    targets = [value for _, name, value in page.attributes if name == "href"]
    assert targets
    assert all(target.startswith("#") and target[1:] in page.by_id for target in targets)


def test_only_our_own_scripts_and_style_may_act_and_their_digests_are_right(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=4))
    page = Page(write_report(tmp_path / "run").read_text())
    (policy,) = [value for tag, name, value in page.attributes if (tag, name) == ("meta", "content") and "default-src" in value]
    acting = [(kind, text) for kind, text in page.unseen if not text.startswith("{")]  # a figure's numbers are data and never run
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for _, text in acting]
    assert [kind for kind, _ in acting] == ["style", "script", "script"]
    style, library, drawing = digests
    assert policy == f"default-src 'none'; script-src {library} {drawing}; style-src {style}; base-uri 'none'; form-action 'none'"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_and_nothing_is_wider_than_a_phone(tmp_path: Path, scheme: str) -> None:
    """Chromium draws the page in a window of 390 pixels; a script of the frame around it, which the page's policy does not bind, looks."""
    write_run(tmp_path / "run", Plan(name="</script><script>parent.document.body.id='broken'</script>"))
    _change(tmp_path / "run", "step", components={"</script><script>parent.document.body.id='broken'</script>": 1.0, "b": 0.5})
    report = write_report(tmp_path / "run")
    look = """
      const seen = () => {
        const page = document.querySelector("iframe").contentDocument, plots = [...page.querySelectorAll(".plot")];
        const inks = plots.map((plot) => {
          const canvas = plot.querySelector("canvas");
          const pixels = canvas && canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return pixels && new Set(new Uint32Array(pixels.buffer)).size;
        });
        document.body.dataset.plots = plots.length;
        document.body.dataset.blank = inks.filter((colours) => !(colours > 3)).length;
        document.body.dataset.wide = page.documentElement.scrollWidth;
      };
      document.querySelector("iframe").onload = () => setTimeout(seen, 1000);
    """
    frame = tmp_path / "run" / "frame.html"
    frame.write_text(f'<body><iframe src="{report.name}" style="width: 390px; height: 900px"></iframe><script>{look}</script></body>')
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    options = ["--allow-file-access-from-files", "--enable-logging=stderr", *dark, "--virtual-time-budget=5000", "--dump-dom"]
    command = [CHROMIUM or "", "--headless=new", "--no-sandbox", "--disable-gpu", *options, frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    assert "CONSOLE" not in done.stderr, "nothing was refused by the policy and no script failed"
    (found,) = re.findall(r"<body[^>]*>", done.stdout)
    assert "broken" not in found
    told = {name: int(value) for name, value in re.findall(r'data-(\w+)="(\d+)"', found)}
    assert told["plots"] > 15
    assert told["blank"] == 0
    assert told["wide"] <= 390


def test_words_from_the_run_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('1')</script>&\"<b>"
    write_run(tmp_path / "run", Plan(name=evil, num_steps=4))
    _change(tmp_path / "run", "end", reason=evil)
    _change(tmp_path / "run", "step", components={evil: 1.0, "b": 0.5})
    _change(
        tmp_path / "run",
        "status",
        queues={evil: {"items": 1, "bytes": 1, "bound_bytes": 2}, "other": {"items": 2}},
        reasons={evil: 2},
        waited_s={evil: 1.0},
    )
    (tmp_path / "run" / "failures").mkdir()
    (tmp_path / "run" / "failures" / "engine-0.json").write_text(json.dumps({"t": 1.0, "process": evil, "error": evil}))
    text = write_report(tmp_path / "run").read_text()
    page = Page(text)
    assert "b" not in page.tags
    assert not [words for _, words in page.unseen if "alert" in words and not json.loads(words)], "a figure's numbers are JSON, whole"
    assert text.count("<script>") == 2, "the plot library and what draws with it"
    assert page.by_id["name"] == evil
    assert page.by_id["ended"] == f"Ended: {evil}."
    assert evil in page.cells("reasons")
    assert evil in page.cells("waits")


def test_half_written_last_line_is_left_out_and_a_broken_one_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=5))
    path = tmp_path / "run" / "journal" / "orchestrator.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"t": 1760000100.0, "kind": "step", "step": 5, "rew')
    assert _report(tmp_path / "run").by_id["num-steps"] == "5 of 5"
    path.write_text('{"t": 17600{"t": 1.0, "kind"\n[1, 2]\n' + whole)
    text = write_report(tmp_path / "run").read_text()
    assert "2 journal lines could not be read" in text


def test_last_words_of_a_failed_process_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=4), without=frozenset({"end"}))
    (tmp_path / "run" / "failures").mkdir()
    for t, process in ((5.0, "orchestrator"), (4.0, "engine-1")):
        record = {"t": t, "process": process, "error": f"PeerGone: {process} is gone"}
        (tmp_path / "run" / "failures" / f"{process}.json").write_text(json.dumps(record))
    text = write_report(tmp_path / "run").read_text()
    assert 0 < text.index("engine-1 failed:") < text.index("orchestrator failed:"), "the first failure comes first"


def test_a_step_done_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", Plan(num_steps=5))
    again = next(line for line in lines if line["kind"] == "step" and line["step"] == 4) | {"reward_mean": 0.25, "t": lines[-1]["t"] + 9}
    resumed = next(line for line in lines if line["kind"] == "run") | {"t": lines[-1]["t"] + 1}
    with open(tmp_path / "run" / "journal" / "orchestrator.jsonl", "a") as file:
        file.write(json.dumps(resumed) + "\n" + json.dumps(again) + "\n")
    page = _report(tmp_path / "run")
    assert page.by_id["num-samples"] == f"{5 * 64}"
    assert page.cells("steps")["4"][1] == "0.2500"
    assert "holds no end" in page.by_id["ended"], "the end before the resume is not the run's end"


def test_configuration_is_listed_key_by_key(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=3))
    page = _report(tmp_path / "run")
    settings = page.cells("settings")
    assert settings["pipeline.max_staleness"] == ["4"]
    assert settings["reward[0].function"] == ["rewards.py:exact"]
    assert page.cells("derived")["samples per step"] == ["64"]


def test_a_long_run_stays_under_a_megabyte(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=500, num_engines=4, num_slots=8))
    assert write_report(tmp_path / "run").stat().st_size < 500_000


def test_a_folder_without_journal_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no journal in .*journal: name the folder of a run"):
        write_report(tmp_path)


def test_alarms_failures_of_functions_and_held_out_by_component_are_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    _change(tmp_path / "run", "step", truncated_fraction=0.86)
    _change(tmp_path / "run", "evaluation", components={"right": 0.25, "format": 1.0})
    error = {"kind": "function_error", "process": "orchestrator", "function": "right", "function_kind": "reward", "outcome": "error"}
    error |= {"cause": 'ValueError("<no>")', "where": "rewards.py:3", "num_calls": 900}
    with open(tmp_path / "run" / "journal" / "orchestrator.jsonl", "a") as file:
        for t, count in ((70.0, 1), (75.0, 640)):
            file.write(json.dumps({"t": BEGAN + t, "count": count, **error}) + "\n")
    page = _report(tmp_path / "run")
    assert page.by_id["learning"].startswith("truncation, since step 0: 86% of samples are cut off at rollout.max_tokens. Raise")
    assert page.rows["learning-table"][2] == ["samples cut off, part of one", "0.860", "0.860"]
    assert page.rows["function-errors-table"][1:] == [
        ["right (reward)", 'ValueError("<no>")', "rewards.py:3", "640", "1 min 10 s after the start"]
    ]
    assert page.rows["held-out-table"][:2] == [["version", "weighted", "right", "format"], ["0", "0.125", "0.250", "1.00"]]


def test_stages_that_had_nothing_to_do_are_not_among_what_held_the_run_up(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    page = _report(tmp_path / "run")
    assert {row[0] for row in page.rows["waits-table"][1:]} == {"trainer: a micro-batch", "generation: an admission credit"}
    assert {row[0] for row in page.rows["idle-table"][1:]} == {"scoring: trajectories", "scoring: scores"}


def test_failures_of_functions_add_up_over_the_lives_of_a_run(tmp_path: Path) -> None:
    error = {"kind": "function_error", "function": "right", "cause": "KeyError()", "where": "r.py:1"}
    lines = [{"kind": "run"}, {**error, "count": 1}, {**error, "count": 5}, {"kind": "run"}, {**error, "count": 2}]
    (tmp_path / "journal").mkdir()
    path = tmp_path / "journal" / "orchestrator.jsonl"
    path.write_text("".join(json.dumps({"t": float(t), **line}) + "\n" for t, line in enumerate(lines)))
    (row,) = read_tables(tmp_path).function_errors
    assert (row.count, row.t) == (7, 1.0)


@pytest.mark.slow
def test_twice_the_journal_costs_twice_the_work(tmp_path: Path) -> None:
    """Counted in calls, not in seconds: a machine that is busy does not change them."""

    def num_calls(num_steps: int) -> int:
        folder, count = tmp_path / str(num_steps), itertools.count()
        DemoJournals(folder, num_steps=num_steps).write()
        tables = read_tables(folder)  # imports what it needs, too
        assert len(tables.steps) == num_steps
        sys.setprofile(lambda frame, event, argument: next(count) if event == "call" else None)
        try:
            write_report(folder)
        finally:
            sys.setprofile(None)
        return next(count)

    num_calls(20)
    small, middle, large = num_calls(50), num_calls(100), num_calls(200)
    assert (large - middle) / (middle - small) == pytest.approx(2.0, rel=0.25)

"""The table of metrics: every number that a tracker gets stands in it once, whole, and docs/metrics.md is its print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelinerl.cli.entry import app
from pipelinerl.config import Config
from pipelinerl.config.alarm_names import AlarmName
from pipelinerl.observe.alarms.names import ALARMS
from pipelinerl.observe.fold.rows import EvaluationRow, StepRow
from pipelinerl.observe.lines import read_journal
from pipelinerl.observe.metrics.gauges import EVALUATION, evaluation_metrics
from pipelinerl.observe.metrics.page import SECTIONS, markdown
from pipelinerl.observe.metrics.steps import BY_FIELD, STEP_METRICS, TRAINER_METRICS, step_value, trainer_metric
from pipelinerl.observe.metrics.table import Metric, over_fleet
from pipelinerl.observe.tracking.names import AXES, Namer
from tests.observe.report.synthetic import write_run

METRICS = [metric for _, _, listed in SECTIONS for metric in listed]


def test_the_page_in_docs_is_what_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert page == markdown(), "pipelinerl metrics --markdown > docs/metrics.md"
    assert CliRunner().invoke(app, ["metrics", "--markdown"]).output == page


def test_every_metric_has_a_formula_and_says_what_to_do_and_none_stands_twice() -> None:
    assert all(metric.formula and metric.action for metric in METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert set(ALARMS) == set(AlarmName)


def test_every_field_is_one_of_its_row() -> None:
    assert {metric.field for metric in STEP_METRICS} <= set(StepRow.__dataclass_fields__)
    assert {metric.field for metric in EVALUATION} <= set(EvaluationRow.__dataclass_fields__)


def test_every_name_that_a_tracker_gets_is_one_of_the_table(tmp_path: Path) -> None:
    write_run(tmp_path)
    namer = Namer()
    lines = list(read_journal(tmp_path / "journal" / "orchestrator.jsonl"))
    names = {name for at, line in enumerate(lines) for point in namer.points(at, line) for name in point.values}
    listed = [metric.name for metric in METRICS if metric.name != "trainer/<name>"]
    patterns = [re.compile(re.sub(r"<[^>]+>", ".+", name)) for name in listed]
    known = {name for name in names if any(pattern.fullmatch(name) for pattern in patterns)}
    assert len(known) > 40
    assert names == known
    firsts = {metric.name.split("/")[0] for metric in METRICS} - {"progress"}
    assert firsts == {first for prefixes in AXES.values() for first in prefixes}, "each first part stands over one axis"


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("entropy", "entropy/all/mean"),
        ("geo_rs_dropped_fraction", "off_policy/dropped/geo_rs"),
        ("something", "trainer/something"),
        ("kl_penalty", "trainer/kl_penalty"),
    ],
)
def test_a_metric_of_the_trainer_has_its_name(field: str, name: str) -> None:
    assert trainer_metric(field)[1] == name


def test_a_value_is_read_from_the_step_or_from_its_trainer() -> None:
    row = StepRow(step=0, reward_mean=0.5, trainer={"entropy": 0.25})
    assert [step_value(row, field) for field in ("reward_mean", "entropy", "loss")] == [0.5, 0.25, None]


def test_parts_of_a_metric_take_its_place_and_what_is_not_recorded_is_left_out() -> None:
    metric = Metric("queue/<queue>/items", "", "", "", "")
    assert metric.named({"rows": 3.0, "scored": None}) == {"queue/rows/items": 3.0}
    assert metric.named(over_fleet([])) == {}
    assert over_fleet([1.0, None, 3.0]) == {"mean": 2.0, "min": 1.0, "max": 3.0}
    row = EvaluationRow(reward_mean=0.5, num_samples=2.0, pass_at={"2": 0.75}, components={"right": 0.25})
    assert evaluation_metrics(row) == {"eval/all/avg@2": 0.5, "eval/all/pass@2": 0.75, "eval/right/mean": 0.25}


def test_a_figure_has_its_title_and_its_unit_from_the_table() -> None:
    assert BY_FIELD["entropy"].label == "entropy per token, nats"
    assert BY_FIELD["reward_mean"].label == "reward"
    assert [metric.field for metric in TRAINER_METRICS if metric.title][:2] == ["mismatch_kl_on_policy", "logprob_gap_mean"]


def test_every_config_key_that_is_named_exists() -> None:
    sections = Config.model_fields
    texts = [text for metric in METRICS for text in (metric.formula, metric.action)] + [kind.change for kind in ALARMS.values()]
    named = {found for text in texts for found in re.findall(r"\b([a-z_]+)\.([a-z0-9_]+)\b", text) if found[0] in sections}
    assert len(named) > 15
    missing = [f"{section}.{key}" for section, key in named if key not in getattr(sections[section].annotation, "model_fields", {})]
    assert missing == []

"""A journal of an older run reads as one of today: its names, and the settings that it was begun with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.observe import renamed
from pipelinerl.observe.lines import decode, read_journals
from pipelinerl.observe.report.reading import read_tables
from pipelinerl.observe.tracking.names import Namer


def read(kind: str, **fields: Any) -> dict[str, Any]:
    line = decode(json.dumps({"t": 1.0, "kind": kind, "process": "orchestrator", **fields}).encode())
    assert line is not None
    return {name: value for name, value in line.items() if name not in ("t", "process")}


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("evaluation_given_up", {"version": 3}, {"kind": "evaluation_dropped", "version": 3}),
        ("step", {"set_aside_groups": 2, "engines_differ": ["one"]}, {"kind": "step", "filtered_groups": 2, "engine_mismatch": ["one"]}),
        (
            "step",
            {"trainer": {"ess_fraction": 0.8, "ess": 0.9, "mismatch_kl_kept": 0.1}},
            {"kind": "step", "trainer": {"ess_fraction": 0.8, "mismatch_kl_stale_kv": 0.1}},
        ),
        ("step", {"trainer": "no object"}, {"kind": "step", "trainer": "no object"}),
        ("sample", {"fate": "failed", "steps": [[1, 0.5]]}, {"kind": "sample", "status": "failed", "step_scores": [[1, 0.5]]}),
        ("alarm", {"name": "kv_lag", "is_over": True}, {"kind": "alarm", "name": "stale_kv", "is_over": True}),
        (
            "status",
            {
                "queues": {"written": {"items": 1, "ever": 7}, "rows": 3},
                "waited_s": {"dispatch: an admission credit": 1.5, "comparing: followed": 2.0},
                "waits": [{"stage": "following", "what": "room in followed", "seconds": 0.5}, None],
            },
            {
                "kind": "status",
                "queues": {"generated": {"items": 1, "num_items_total": 7}, "rows": 3},
                "waited_s": {"generation: an admission credit": 1.5, "group_rewards: prm_scored": 2.0},
                "waits": [{"stage": "prm", "what": "room in prm_scored", "seconds": 0.5}, None],
            },
        ),
        ("lie", {"peer": "engine-0"}, {"kind": "violation", "peer": "engine-0"}),
        ("load", {"num_taken": 3, "num_asked": 5}, {"kind": "load", "num_trace_tokens": 3, "num_uncached_tokens": 5}),
        ("end", {"identity": {"admitted": 3}}, {"kind": "end", "rollouts": {"admitted": 3}}),
        (
            "status",
            {"identity": {"admitted": 3}, "prm": {"num_flagged": 2}, "environment": {"num_between": 1, "num_replies": 4}},
            {
                "kind": "status",
                "prm": {"num_hopeless": 2},
                "environment": {"num_awaiting_reply": 1, "num_observations": 4},
                "rollouts": {"admitted": 3},
            },
        ),
        (
            "run",
            {"config": {"run": {"fatal_alarms": ["kv_lag"]}}},
            {"kind": "run", "config": {"run": {"fatal_alarms": ["stale_kv"]}}},
        ),
    ],
)  # fmt: skip
def test_an_old_name_is_read_as_todays(kind: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(kind, **old) == new


def test_a_line_of_today_stays_as_it_is() -> None:
    line = {"kind": "step", "filtered_groups": 1, "trainer": {"ess_fraction": 0.5}}
    assert read(**line) == line


def test_no_name_is_both_old_and_new() -> None:
    tables = [
        renamed.KINDS,
        *renamed.FIELDS.values(),
        renamed.TRAINER_METRICS,
        renamed.STAGES,
        renamed.QUEUES,
        renamed.ALARMS,
        renamed.PRM,
        renamed.ENVIRONMENT,
    ]
    assert all(not table.keys() & set(table.values()) for table in tables)


def test_report_and_trackers_tell_of_an_old_run_what_they_tell_of_a_new_one(tmp_path: Path) -> None:
    trainers = {"old": {"ess": 0.9, "publish_beside_s": 0.1}, "new": {"ess_fraction": 0.9, "publish_async_s": 0.1}}
    told = {}
    for name, trainer in trainers.items():
        (tmp_path / name / "journal").mkdir(parents=True)
        lines = [{"kind": "run", "config": {}}, {"kind": "step", "step": 0, "reward_mean": 0.5, "trainer": trainer}]
        text = "".join(json.dumps({"t": 1.0 + at, "process": "orchestrator", **line}) + "\n" for at, line in enumerate(lines))
        (tmp_path / name / "journal" / "orchestrator.jsonl").write_text(text)
        namer = Namer()
        points = [point.values for at, line in enumerate(read_journals(tmp_path / name)) for point in namer.points(at, line)]
        told[name] = (points, read_tables(tmp_path / name).steps)
    assert told["old"] == told["new"]
    assert told["new"][0][0]["time/broadcast_weights_async"] == 0.1

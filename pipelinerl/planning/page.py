"""A plan as a page: sliders over its inputs move the very formulas that made it, emitted as JavaScript from the same sheet.

One HTML file with its scripts within, which opens from the file system and asks for nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelinerl.observe.report.page import Parts, render, write_whole
from pipelinerl.observe.report.plots import Figure, Line
from pipelinerl.planning.formulas import SECTIONS, SHEET
from pipelinerl.planning.inputs import INPUTS, gpu_inputs, gpus, origin_of
from pipelinerl.planning.plan import UNPROVEN, Plan, gpu_name
from pipelinerl.planning.shape import known_models, shape_of
from pipelinerl.planning.show import ENGINE_PARTS, TRAINER_PARTS, TRANSPORT_FIGURES
from pipelinerl.planning.words import number, say

CARDS = (
    ("a step", "step_s"),
    ("tokens/s of the run", "run_rate"),
    ("R, written per second", "generated_rate"),
    ("T, trained per second", "trained_rate"),
    ("staleness, mean", "expected_staleness"),
    ("weight sync", "sync_s"),
    ("the whole run", "run_s"),
    ("cost", "gpu_hours"),
)
_SLIDERS = {
    "lengths": ("prompt_tokens", "mean_tokens", "max_tokens", "length_cv"),
    "batch": ("groups_per_step", "group_size", "row_tokens", "max_staleness", "steps"),
    "engines": ("engines", "engine_tensor", "engine_pipeline", "max_running"),
    "trainer": ("ranks", "shard", "context", "tensor", "pipeline", "expert", "is_checkpointed", "keeps_products"),
    "assumed": ("training_efficiency", "read_efficiency", "decode_efficiency", "step_overhead_s", "gloo_bandwidth", "nic_bandwidth"),
}
_POWERS = {"engine_tensor": 8, "engine_pipeline": 16, "shard": 512, "context": 8, "tensor": 8, "pipeline": 16, "expert": 64}
_CLAIMS = {"is_checkpointed": 1.0, "keeps_products": 1.0}
_FRACTIONS = {"training_efficiency": 0.7, "read_efficiency": 1.0, "decode_efficiency": 1.0, "length_cv": 1.0, **_CLAIMS}


def write_plan(plan: Plan, path: Path) -> Path:
    """Write the page, whole or not at all, and return its path."""
    parts = Parts("templates/style.css", "templates/plan.css", "templates/plan.js", made=SHEET.javascript())
    chosen = plan.chosen
    page = render(
        "plan.html",
        parts,
        title=f"{plan.model} on {plan.num_gpus} x {gpu_name(plan.gpu)}: plan",
        plan=plan,
        data=_data(plan),
        cards=[(words, name, say(chosen.values[name], SHEET.rows[name].unit)) for words, name in CARDS],
        sliders={title: [_slider(name, plan) for name in names] for title, names in _SLIDERS.items()},
        memories=[
            ("A trainer rank", "trainer", TRAINER_PARTS, "trainer_rank_bytes"),
            ("An engine rank", "engine", ENGINE_PARTS, "engine_rank_bytes"),
        ],
        transports=TRANSPORT_FIGURES,
        figures_of=[_rates(plan), _split_times(plan)],
        sections=SECTIONS,
        values={**chosen.inputs, **chosen.values},
        say=say,
        unproven=UNPROVEN,
    )
    return write_whole(path, page)


def _data(plan: Plan) -> dict[str, Any]:
    """What the script needs: numbers and words, and no arithmetic."""
    rows = {row.name: {"unit": row.unit, "formula": row.formula, "what": row.what} for rows in SECTIONS.values() for row in rows}
    models = {plan.model: plan.shape.inputs()} | {name: shape_of(tree, origin=name).inputs() for name, tree in known_models().items()}
    return {
        "num_gpus": plan.num_gpus,
        "rows": rows,
        "inputs": {name: {"unit": one.unit, "what": one.what, "origin": origin_of(name, given=plan.given)} for name, one in INPUTS.items()},
        "placements": {name: one.inputs for name, one in plan.placements.items()},
        "chosen": next(name for name, one in plan.placements.items() if one is plan.chosen),
        "models": models,
        "gpus": {name: gpu_inputs(name) for name in gpus()},
        "gpu": plan.gpu,
        "model": plan.model,
    }


def _slider(name: str, plan: Plan) -> dict[str, Any]:
    """A slider's range: powers of two, parts of one, or from an eighth to eight times the plan's value."""
    value = plan.chosen.inputs[name]
    one = {"name": name, "what": INPUTS[name].what, "value": value, "words": number(value), "steps": ""}
    if name in _POWERS:
        steps = sorted({1 << at for at in range(_POWERS[name].bit_length())} | {int(value)})
        return one | {"steps": json.dumps(steps), "low": 0, "high": len(steps) - 1, "step": 1, "at": steps.index(int(value))}
    if name in _FRACTIONS:
        return one | {
            "low": 0 if name in _CLAIMS else 0.05,
            "high": _FRACTIONS[name],
            "step": 1 if name in _CLAIMS else 0.01,
            "at": value,
        }
    is_whole = float(value).is_integer()
    least, most = (1, max(8 * value, 8)) if is_whole else (value / 8, 8 * value)
    if name in ("engines", "ranks"):
        most = max(plan.num_gpus, value)
    if name == "max_staleness":
        least, most = 0, max(16, 2 * value)
    return one | {"low": least, "high": most, "step": 1 if is_whole else least / 10, "at": value}


def _rates(plan: Plan) -> Figure:
    lines = [
        Line(name="R, written", colour="engine", points=[(one.inputs["ranks"], one.values["generated_rate"]) for one in plan.splits]),
        Line(name="T, trained", colour="train", points=[(one.inputs["ranks"], one.values["trained_rate"]) for one in plan.splits]),
        Line(name="the run", colour="score", points=[(one.inputs["ranks"], one.values["run_rate"]) for one in plan.splits]),
    ]
    return Figure(
        title="Rates of every split",
        lines=lines,
        x_label="GPUs for the trainer",
        y_label="tokens/s",
        from_zero=True,
        note="the best layouts of each",
    )


def _split_times(plan: Plan) -> Figure:
    lines = [Line(name="a step", colour="warm", points=[(one.inputs["ranks"], one.values["step_s"]) for one in plan.splits])]
    return Figure(title="A step of every split", lines=lines, x_label="GPUs for the trainer", y_label="seconds", from_zero=True)

"""What cannot act in a run is said by name, and nothing is said of what can."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from pipelinerl.algorithms.listing import describe_run
from pipelinerl.algorithms.loss import measure_step
from pipelinerl.algorithms.loss.call import call_rule
from pipelinerl.algorithms.loss.correction import terms_of
from pipelinerl.algorithms.methods import METHODS
from pipelinerl.algorithms.rules import COLUMNS, with_columns
from pipelinerl.algorithms.unused import unused_parts
from pipelinerl.algorithms.validation import RunFacts, needs_several_epochs
from pipelinerl.cli.entry import app
from pipelinerl.config.file import parse
from tests.algorithms.every_method import filled, sample
from tests.algorithms.rows import EVERYTHING, changed, method_of, pack


def lines_of(name: str, overrides: dict[str, Any] | None = None, *, max_staleness: int = 4, epochs: int = 1) -> list[str]:
    method = with_columns(METHODS[name], overrides or {})
    run = RunFacts(group_size=8, offers=EVERYTHING, max_staleness=max_staleness, epochs=epochs)
    return unused_parts(method, run=run)


@pytest.mark.parametrize("name", METHODS)
def test_no_row_prints_what_does_not_act(name: str) -> None:
    epochs = 2 if needs_several_epochs(METHODS[name]) else 1
    lines = lines_of(name, filled(METHODS[name]), epochs=epochs)
    expected = ["clip_low of cispo unused: no ratio is below 0"] if name == "cispo" else []
    assert lines == expected, "cispo's published form has an upper bound alone, and its formula says so"


@pytest.mark.parametrize(
    ("name", "overrides", "told"),
    [
        ("grpo", {"kl": {"name": "k3", "beta": 0.0}}, "k3 unused: algorithm.overrides.kl.beta is 0"),
        ("grpo", {"kl": {"name": "k3", "final": 0.01}}, "final of k3 unused: fade_steps is 0"),
        ("grpo", {"auxiliary": {"name": "entropy_bonus", "coef": 0.0}}, "entropy_bonus unused: algorithm.overrides.auxiliary.coef is 0"),
        ("prime_rl", {"auxiliary": {"name": "squared_log_ratio", "tau": 0}}, "squared_log_ratio unused"),
        ("dro", {"objective": {"beta": 0.0}}, "log ratio of dro unused"),
        (
            "grpo",
            {"masks": {"name": "probability_band", "high": 1.0}},
            "high of probability_band unused: a probability changes by at most 1",
        ),
        ("dppo_tv", {"objective": {"clip_high": 1.0}}, "clip_high of dppo_tv unused"),
        ("grpo", {"objective": {"clip_low": 1.0}}, "clip_low of clip unused: no ratio is below 0"),
        ("rloo", {"advantage": {"eps": 1e-3}}, "eps of rloo unused: divide_by_std is false"),
        ("grpo_tis", {"proximal": "recomputed", "weight": "none"}, "proximal recomputed unused"),
        (
            "grpo",
            {"masks": {"name": "version_withhold", "bound": 4}},
            "version_withhold unused: the run's staleness bound of 4",
        ),
        (
            "loglinear_ppo",
            {"proximal": {"prox_lag": 4}},
            "loglinear unused: with a staleness bound of 4 no token is older than prox_lag 4",
        ),
        ("grpo", {"mask_order": "after_weight"}, "mask_order unused"),
    ],
)
def test_what_an_override_makes_inert_is_said(name: str, overrides: dict[str, Any], told: str) -> None:
    (line,) = lines_of(name, overrides)
    assert line.startswith(told)


def test_a_coefficient_that_fades_in_from_nothing_is_not_inert() -> None:
    assert lines_of("grpo", {"kl": {"name": "k3", "beta": 0.0, "final": 0.1, "fade_steps": 10}}) == []


@pytest.mark.parametrize(
    ("name", "what"), [("dapo", "clip"), ("grpo_tis", "tis_token"), ("m2po", "m2po"), ("prime_rl", "squared_log_ratio")]
)
def test_without_staleness_and_with_one_pass_corrections_see_rounding_alone(name: str, what: str) -> None:
    told = f"{what} unused: with a staleness bound of 0 and one epoch, pi is the policy that sampled"
    assert any(line.startswith(told) for line in lines_of(name, max_staleness=0))
    assert not any(line.startswith(told) for line in lines_of(name, max_staleness=1))
    assert not any(line.startswith(told) for line in lines_of(name, max_staleness=0, epochs=2))


@pytest.mark.parametrize("name", COLUMNS["masks"])
def test_a_mask_says_whether_it_looks_at_the_engines_probabilities(name: str) -> None:
    """By what it keeps where the engine's are the policy's, and where they are far from them to both sides."""
    mask = {"name": name} | ({"low": 0.5} if name == "veto" else {})  # no probability of these cases is a ten-thousandth of another
    method = method_of("grpo", **filled(with_columns(METHODS["grpo"], {"proximal": "recomputed", "masks": mask})))
    kept = []
    for drift in (0.0, 6.0):
        row = [changed(seq, behaviour=[min(-1e-3, x + drift * (-1) ** t) for t, x in enumerate(seq.old)]) for seq in sample(3)]
        columns = pack(row)
        statistics = measure_step([columns], method=method, reduce=lambda tensor: tensor)
        terms = terms_of(columns, proximal=method.proximal, statistics=statistics)
        kept.append(call_rule(method.masks[0], terms, column="masks")[columns.loss_mask].tolist())
    assert (kept[0] != kept[1]) == COLUMNS["masks"][name].reads_mu


CONFIG = """
[model]
path = "m"
[data]
source = "d.jsonl"
[[reward]]
function = "r.py:r"
[algorithm]
name = "dapo"
[pipeline]
max_staleness = 0
"""


def test_a_dry_run_prints_the_method_in_force_and_what_of_it_is_inert(tmp_path: Any) -> None:
    path = tmp_path / "my.toml"
    path.write_text(CONFIG)
    printed = CliRunner().invoke(app, ["run", str(path), "--dry-run"]).output
    assert "objective    clip(clip_low=0.2, clip_high=0.28, dual_clip=0)" in printed
    assert "clip unused: with a staleness bound of 0 and one epoch" in printed
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"source": "d"}, "reward": [{"function": "r:r"}], "algorithm": {"name": "dapo"}}
    assert "unused" not in describe_run(parse(tree, origin="a test"))
    assert "clip unused" in describe_run(parse(tree | {"pipeline": {"mode": "sync"}}, origin="a test"))

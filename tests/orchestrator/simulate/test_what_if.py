"""What other settings would have made of a run: from its own journal, with how far the simulation is off."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from orchestrator.simulate import what_if
from orchestrator.simulate.calibrated import world_of_runs
from orchestrator.simulate.recorded import read_journal
from orchestrator.simulate.run import simulate
from orchestrator.simulate.what_if import foretell
from pipelinerl.config import Config
from pipelinerl.config.file import write_run as write_settings
from pipelinerl.errors import DataError
from pipelinerl.observe.report import write_report
from pipelinerl.observe.report.what_ifs import FILE, WhatIf, WhatIfs, read_what_ifs
from tests.orchestrator.simulate.test_calibrated import NUM_STEPS, write_run
from tests.orchestrator.simulate.worlds import config

SETTINGS = config(engine={"kind": "fake", "count": 1, "max_running": 4}, trainer={"steps": 100})
STEPS = NUM_STEPS + 2
"""That the run of `test_calibrated` has trained, one every two seconds."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("what-if") / "run"
    write_run(folder)
    write_settings(folder, SETTINGS)
    return folder


@pytest.fixture(scope="module")
def foretold(run_folder: Path) -> WhatIfs:
    return foretell(run_folder)


def seconds(settings: Config, run_folder: Path) -> float:
    ends_s = simulate(settings, world_of_runs(settings, [run_folder])).totals.step_ends_s
    return ends_s[-1] - ends_s[0]


def test_a_change_is_told_in_measured_seconds(run_folder: Path, foretold: WhatIfs):
    assert foretold.measured_s == 2.0 * (STEPS - 1)
    assert foretold.last_step == STEPS - 1
    usual, two = (config(engine={"kind": "fake", "count": num, "max_running": 4}, trainer={"steps": STEPS}) for num in (1, 2))
    usual_s = seconds(usual, run_folder)
    assert foretold.simulated_s == pytest.approx(usual_s)
    found = {one.change: one for one in foretold.what_ifs}["2 engines in place of 1"]
    assert found.seconds == pytest.approx(foretold.measured_s * seconds(two, run_folder) / usual_s)
    assert found.overrides[0] == "engine.count=2"


def test_what_two_engines_share_is_not_known_of_one_and_that_is_said(foretold: WhatIfs):
    assert foretold.assumes.endswith("one engine tells nothing of how two share a machine")
    assert foretold.assumes in " ".join(foretold.sentences())


def test_the_error_is_that_of_the_half_it_was_not_fitted_to(run_folder: Path, foretold: WhatIfs):
    half = STEPS // 2
    settings = config(engine={"kind": "fake", "count": 1, "max_running": 4}, trainer={"steps": STEPS})
    known = world_of_runs(settings, [run_folder], until_s=1000.0 + 2 * half)
    ends_s = simulate(settings, known).totals.step_ends_s
    assert foretold.held_out_error == pytest.approx((ends_s[-1] - ends_s[half - 1]) / (2.0 * (STEPS - half)) - 1)


def test_nothing_later_is_read_for_it(run_folder: Path):
    whole, half = (world_of_runs(SETTINGS, [run_folder], until_s=until_s) for until_s in (float("inf"), 1014.0))
    assert len(whole.lengths.recorded) == 2 * STEPS
    assert len(half.lengths.recorded) == 14
    journal = read_journal(run_folder, 1014.0)
    assert len(journal.steps) == 7
    assert max(end for _, end in journal.work) <= 1014.0
    assert max(load["t"] for loads in journal.loads.values() for load in loads) <= 1014.0


def test_of_a_long_run_the_last_steps_are_simulated(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A step ends every two seconds, the first at 1002; the bound is one of steps that are trained, beside what is sampled before."""
    monkeypatch.setattr(what_if, "MOST_ROLLOUTS", 1)
    monkeypatch.setattr(what_if, "LEAST_STEPS", 8)
    found = foretell(run_folder)
    assert (found.first_step, found.last_step) == (STEPS - what_if.LEAST_STEPS, STEPS - 1)
    assert found.measured_s == 2.0 * what_if.LEAST_STEPS
    since_s = 1002.0 + 2 * (STEPS - 1 - what_if.LEAST_STEPS)
    settings = config(engine={"kind": "fake", "count": 1, "max_running": 4}, trainer={"steps": what_if.LEAST_STEPS + 1})
    known = world_of_runs(settings, [run_folder], since_s=since_s, lead_s=2.0 * (1 + settings.pipeline.max_staleness))
    ends_s = simulate(settings, known).totals.step_ends_s
    assert found.simulated_s == pytest.approx(ends_s[-1] - ends_s[0])
    assert f"steps {found.first_step} to {found.last_step} take" in " ".join(found.sentences())


def test_nothing_earlier_is_read_for_it(run_folder: Path):
    world = world_of_runs(SETTINGS, [run_folder], since_s=1014.0, lead_s=4.0)
    assert len(world.lengths.recorded) == 2 * (STEPS - 4), "of each step from the one that ended at 1010 on"
    journal = read_journal(run_folder, since_s=1014.0)
    assert len(journal.steps) == STEPS - 6
    assert min(start for start, _ in journal.work) >= 1014.0
    assert min(load["t"] for loads in journal.loads.values() for load in loads) >= 1014.0


def test_a_run_that_tells_too_little_is_refused(tmp_path: Path):
    write_settings(tmp_path, SETTINGS)
    (tmp_path / "journal").mkdir()
    with pytest.raises(DataError):
        foretell(tmp_path)


SAID = WhatIfs(
    last_step=40,
    measured_s=3480.0,
    simulated_s=3375.6,
    held_out_error=0.05,
    what_ifs=(
        WhatIf(change="3 engines in place of 2", overrides=("engine.count=3",), seconds=2460.0),
        WhatIf(change="2 trainer ranks in place of 1", overrides=("trainer.ranks=2",), seconds=3470.0),
    ),
)


def test_sentences_say_what_helps_what_does_not_and_how_far_off_it_is():
    assert list(SAID.sentences()) == [
        "With 3 engines in place of 2, steps 1 to 40 would have taken 41 min 00 s instead of 58 min 00 s.",
        "Of little use, or slower: 2 trainer ranks in place of 1: 57 min 50 s.",
        "Simulated as they were, steps 1 to 40 take 56 min 16 s: 3.0\N{NO-BREAK SPACE}% too short.",
        "Fitted to the first half of these steps, the simulation foretells the second half 5.0\N{NO-BREAK SPACE}% too long.",
    ]


def test_the_report_tells_what_was_foretold_and_nothing_of_a_file_it_cannot_read(run_folder: Path):
    assert "What other settings" not in write_report(run_folder).read_text()
    (run_folder / FILE).write_bytes(msgspec.json.encode(SAID))
    assert read_what_ifs(run_folder) == SAID
    page = write_report(run_folder).read_text()
    assert "With 3 engines in place of 2, steps 1 to 40 would have taken 41 min 00 s instead of 58 min 00 s." in page
    (run_folder / FILE).write_text('{"another": "version"}')
    assert "What other settings" not in write_report(run_folder).read_text()

"""Progress: a step's journal line, worked out by hand."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from orchestrator.observe.progress import Progress
from orchestrator.rules.batch import BatchCut, Filtered, Siblings, StepRules
from pipelinerl.messages import Finish, Group, Outcome, StepDone, TraceScores, WeightsCommitted
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journals
from tests.orchestrator import handmade


def two_groups() -> list[Group]:
    """Step 5. Group 0: rewards 1 and 0, lengths 2 and 4 after prompts of 3. Group 1: rewards 0.5 twice, lengths 1 and 1, and a timeout."""
    first = [
        handmade.scored(
            handmade.trajectory((4, 5), group_id=0, sibling=0, num_prompt=3, admitted_at=10.0, finished_at=12.0),
            1.0,
            components={"right": 1.0, "short": 0.0},
        ),
        handmade.scored(
            handmade.trajectory(
                (3, 3, 4, 5), group_id=0, sibling=1, num_prompt=3, finish=Finish.LENGTH, admitted_at=10.0, finished_at=14.0
            ),
            0.0,
            components={"right": 0.0},
        ),
    ]
    second = [
        handmade.scored(
            handmade.trajectory((5,), group_id=1, sibling=sibling, num_prompt=1, admitted_at=11.0, finished_at=12.0),
            0.5,
            components={"right": 0.5},
        )
        for sibling in range(2)
    ]
    failed = handmade.scored(handmade.trajectory([0] * 50, group_id=1, sibling=2, finished_at=20.0), outcome=Outcome.TIMEOUT)
    return [handmade.group(0, first), handmade.group(1, [*second, failed])]


def flat_set_aside(survivors: Siblings) -> Filtered:
    return Filtered(reason="flat", advantages=handmade.centred(survivors))


@pytest.fixture
def line(tmp_path: Path) -> dict[str, object]:
    """The line of step 5, trained at 30 s of a run that began at 2 s; groups were placed at 15 s and 16 s."""
    journal = Journal(tmp_path, "orchestrator")
    progress = Progress(journal=journal, started_s=2.0)
    cut = BatchCut(groups_per_step=2, max_staleness=4, min_group_size=2, group_advantages=handmade.centred, first_step=5)
    for now_s, group in zip((15.0, 16.0), two_groups(), strict=True):
        progress.group_completed(cut.take(group), now_s=now_s)
    progress.trained(StepDone(step=5, metrics={"loss": -0.25}), now_s=30.0)
    journal.close()
    (written,) = [line for line in read_journals(tmp_path) if line["kind"] == "step"]
    assert {key: written[key] for key in progress.last_step} == progress.last_step
    assert progress.rewards == [0.5]
    assert progress.num_trained_tokens == 2 + 4 + 1 + 1, "what was sampled, not the prompt of every sibling"
    return written


def test_rewards_are_those_of_the_samples_placed(line: dict[str, object]):
    assert line["step"] == 5
    assert line["reward_mean"] == 0.5
    assert line["reward_std"] == pytest.approx(np.sqrt((0.25 + 0.25 + 0 + 0) / 4))
    assert line["components"] == {"right": 0.5, "short": 0.0}
    assert line["zero_variance_fraction"] == 0.5


def test_counts_and_lengths(line: dict[str, object]):
    assert (line["num_groups"], line["num_samples"]) == (2, 4)
    assert line["num_tokens"] == (3 + 2) + (3 + 4) + (1 + 1) + (1 + 1)
    assert line["num_trained_tokens"] == 2 + 4 + 1 + 1
    assert line["num_useful_tokens"] == 2 + 4, "the other group's rewards are equal, so its advantages are zero"
    assert line["length_mean"] == 2.0
    assert line["truncated_fraction"] == 0.25


def test_staleness_is_counted_token_by_token(line: dict[str, object]):
    """Versions 4 5 | 3 3 4 5 | 5 | 5 in step 5: ages 1 0 | 2 2 1 0 | 0 | 0."""
    assert line["staleness"] == {"0": 4, "1": 2, "2": 2}
    assert line["staleness_mean"] == pytest.approx(6 / 8)
    assert (line["staleness_min"], line["staleness_max"]) == (0, 2)


def test_staleness_is_split_into_flight_and_queue(line: dict[str, object]):
    """Newest versions of the four rollouts are 5, 5, 5, 5: nothing waited; in flight 1 0 | 2 2 1 0 | 0 | 0."""
    assert (line["staleness_in_flight_mean"], line["staleness_in_flight_max"]) == (pytest.approx(6 / 8), 2)
    assert (line["staleness_in_queue_mean"], line["staleness_in_queue_max"]) == (0.0, 0)


def test_where_the_trainer_makes_the_advantages_nobody_says_which_tokens_are_useful(tmp_path: Path):
    progress = Progress(journal=Journal(tmp_path, "orchestrator"), started_s=0.0, has_advantages=False)
    progress.trained(StepDone(step=0, metrics={}), now_s=1.0)
    progress.journal.close()
    assert "num_useful_tokens" not in progress.last_step


def test_groups_set_aside_let_through_and_too_old_are_counted_in_the_step_they_would_have_filled(tmp_path: Path):
    journal = Journal(tmp_path, "orchestrator")
    progress = Progress(journal=journal, started_s=0.0)
    rules = StepRules(refill_batches=2)
    cut = BatchCut(groups_per_step=1, max_staleness=0, min_group_size=2, group_advantages=flat_set_aside, rules=rules, first_step=1)
    for number, versions in enumerate([(1,), (0,), (1,), (1,)]):
        progress.group_completed(cut.take(handmade.plain_group(number, [1.0, 1.0], versions=versions)), now_s=1.0)
    progress.trained(StepDone(step=1, metrics={}), now_s=2.0)
    journal.close()
    last = progress.last_step
    assert (last["filtered_groups"], last["unfiltered_groups"], last["stale_groups"]) == (2, 1, 1)


def test_times_are_means_over_samples(line: dict[str, object]):
    assert line["in_flight_s_mean"] == pytest.approx((2 + 4 + 1 + 1) / 4)
    assert line["in_queue_s_mean"] == pytest.approx(((15 - 12) + (15 - 14) + (16 - 12) + (16 - 12)) / 4)
    assert line["elapsed_s"] == 28.0
    assert line["trainer"] == {"loss": -0.25}


def test_a_group_given_up_leaves_no_trace_in_the_step(tmp_path: Path):
    journal = Journal(tmp_path, "orchestrator")
    progress = Progress(journal=journal, started_s=0.0)
    cut = BatchCut(groups_per_step=1, max_staleness=4, min_group_size=2, group_advantages=handmade.centred)
    progress.group_completed(cut.take(handmade.plain_group(0, [9.0, Outcome.ERROR])), now_s=1.0)
    progress.group_completed(cut.take(handmade.plain_group(1, [1.0, 0.0])), now_s=1.0)
    progress.trained(StepDone(step=0, metrics={}), now_s=2.0)
    journal.close()
    assert progress.last_step["num_groups"] == 1
    assert progress.last_step["zero_variance_fraction"] == 0.0
    assert progress.last_step["reward_mean"] == 0.5
    shown = [(line["status"], line.get("reason")) for line in read_journals(tmp_path) if line["kind"] == "sample"]
    assert ("failed", "error") in shown, "the journal shows what failed, too"
    assert shown[-2:] == [("trained", None)] * 2


def test_steps_in_the_making_do_not_mix(tmp_path: Path):
    journal = Journal(tmp_path, "orchestrator")
    progress = Progress(journal=journal, started_s=0.0)
    cut = BatchCut(groups_per_step=1, max_staleness=4, min_group_size=2, group_advantages=handmade.centred)
    for group_id, rewards in enumerate([(1.0, 1.0), (0.0, 0.0), (0.5, 0.5)]):
        progress.group_completed(cut.take(handmade.plain_group(group_id, rewards)), now_s=1.0)
    for step in range(3):
        progress.trained(StepDone(step=step, metrics={}), now_s=2.0)
    journal.close()
    assert progress.rewards == [1.0, 0.0, 0.5]


def test_pauses_are_kept_for_the_end(tmp_path: Path):
    journal = Journal(tmp_path, "orchestrator")
    progress = Progress(journal=journal, started_s=0.0)
    for pause_s in (0.25, 0.125):
        progress.swapped(WeightsCommitted(engine_id=0, version=1, pause_s=pause_s, stage_s=1.0, num_running=3))
    journal.close()
    assert progress.pauses_s == [0.25, 0.125]
    assert progress.last_pause_s == 0.125


def test_step_scores_stand_with_the_samples_that_have_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "orchestrator")
    progress = Progress(journal=journal, started_s=0.0)
    trace = TraceScores(ends=np.array([1], np.int32), scores=np.array([0.5], np.float32), version="prm")
    members = [handmade.scored(handmade.trajectory(sibling=sibling), float(sibling)) for sibling in range(2)]
    members[1] = msgspec.structs.replace(members[1], steps=trace)
    cut = BatchCut(groups_per_step=1, max_staleness=4, min_group_size=1, group_advantages=handmade.centred)
    progress.group_completed(cut.take(handmade.group(0, members)), now_s=1.0)
    progress.trained(StepDone(step=0, metrics={}), now_s=2.0)
    journal.close()
    told = {line["rollout_id"]: line["step_scores"] for line in read_journals(tmp_path) if line["kind"] == "sample"}
    assert told == {"0/0": [], "0/1": [[1, 0.5]]}


def test_an_alarm_is_in_the_journal_when_it_is_raised_and_when_it_is_over(tmp_path: Path):
    journal, told = Journal(tmp_path, "orchestrator"), []
    progress = Progress(journal=journal, started_s=0.0, on_alarm=told.append)
    for step in range(60):
        rewards = [0.0, 0.0] if step < 20 else [1.0, 0.0]
        cut = BatchCut(groups_per_step=1, max_staleness=100, min_group_size=2, group_advantages=handmade.centred, first_step=step)
        progress.group_completed(cut.take(handmade.plain_group(step, rewards)), now_s=1.0)
        progress.trained(StepDone(step=step, metrics={}), now_s=2.0)
    journal.close()
    lines = [line for line in read_journals(tmp_path) if line["kind"] == "alarm"]
    assert [(line["name"], line["began"], line["step"], line["is_over"]) for line in lines] == [
        ("no_signal", 0, 9, False),
        ("no_signal", 0, 31, True),  # the mean of ten is 0.8 at step 21: quiet from step 22 on, ten steps
    ]
    assert "equal rewards" in lines[0]["figure"]
    assert "data.difficulty" in lines[0]["change"]
    assert [alarm.name for alarm in told] == ["no_signal"]


def test_an_evaluation_is_heard_by_the_alarms(tmp_path: Path):
    with contextlib.closing(Journal(tmp_path, "orchestrator")) as journal:
        progress = Progress(journal=journal, started_s=0.0)
        for version, held_out in ((20, 0.6), (40, 0.2)):
            for step in range(version - 20, version):
                cut = BatchCut(groups_per_step=1, max_staleness=100, min_group_size=2, group_advantages=handmade.centred, first_step=step)
                progress.group_completed(cut.take(handmade.plain_group(step, [0.4 + 0.01 * step, 0.0])), now_s=1.0)
                progress.trained(StepDone(step=step, metrics={}), now_s=2.0)
            progress.evaluated({"version": version, "reward_mean": held_out, "num_prompts": 256})
        (line,) = [line for line in read_journals(tmp_path) if line["kind"] == "alarm"]
    assert line["name"] == "reward_hacking"

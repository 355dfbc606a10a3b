"""The whole orchestrator on simulated time, among simulated peers: its promises hold in calm and over a bad network, and it never hangs."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.rules.batch import Filtered, Siblings, StepRules
from orchestrator.rules.curriculum import Curriculum, Rest, epoch_and_number
from pipelinerl.algorithms.methods import resolve
from pipelinerl.config import Config, RewardSection
from pipelinerl.errors import DataError, PeerRefused, PeerSilent, PipelineError, Stalled
from pipelinerl.messages import (
    EndTraining,
    Failed,
    Generate,
    LayoutFixed,
    Message,
    MicroBatch,
    PolicyPublished,
    Prompt,
    ScoredTrajectory,
    ScorerReady,
    StepClosed,
    StepDone,
    TakeMicroBatch,
    TrainerReady,
)
from tests.sim import peers
from tests.sim.memory import MemoryLink, NetworkFaults
from tests.sim.peers import World
from tests.sim.run import Cast, Prompts, Simulated, config, mean_baseline, run

MODES = ["streaming", "one_step_off", "sync"]
STORM = NetworkFaults(delay_s=0.05, jitter_s=0.2, seed=3)
"""Up to a quarter of a second for each message, against 10 ms for a forward pass."""


def identity(simulated: Simulated) -> dict[str, int]:
    return dataclasses.asdict(simulated.ending.rollouts)


def rescored(member: ScoredTrajectory, reward: float) -> ScoredTrajectory:
    """The same rollout with another reward."""
    return msgspec.structs.replace(member, score=msgspec.structs.replace(member.score, reward=reward))


# --- what holds ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_calm_run_trains_every_step_whole_and_breaks_no_promise(tmp_path: Path, mode: str):
    simulated = run(config(pipeline={"mode": mode, "max_staleness": 4}), folder=tmp_path)
    assert simulated.problems() == []
    assert identity(simulated) == {
        "admitted": 320,
        "in_flight": 0,
        "trained": 320,
        "filtered": 0,
        "stale": 0,
        "failed": 0,
        "cancelled": 0,
    }
    assert simulated.ending.reason == simulated.record.stopped_for == "finished"
    assert len(simulated.ending.pauses_s) == 2 * 10, "both engines took every policy"


@pytest.mark.slow
def test_generation_hides_behind_training_only_where_the_mode_lets_it(tmp_path: Path):
    seconds = {mode: run(config(pipeline={"mode": mode}), folder=tmp_path / mode).seconds for mode in MODES}
    assert seconds["streaming"] < 0.9 * seconds["one_step_off"] < 0.9 * 1.01 * seconds["sync"]


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("network", ["calm", "storm"])
def test_no_token_is_older_than_the_bound_and_the_bound_is_used(tmp_path: Path, max_staleness: int, network: str):
    simulated = run(
        config(pipeline={"max_staleness": max_staleness}, trainer={"steps": 12}),
        folder=tmp_path,
        network=STORM if network == "storm" else NetworkFaults(),
        world=World(token_s=2e-3),
    )
    assert simulated.problems() == []
    ages = {step - simulated.record.oldest[rollout] for rollout, step in simulated.record.trained.items()}
    assert max(ages) == max_staleness


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_what_is_not_overtaken_is_not_thrown_away(tmp_path: Path, max_staleness: int):
    """Rollouts of one length arrive in order: the bound is then kept by admitting late, not by generating what will be too old."""
    settings = config(pipeline={"max_staleness": max_staleness}, rollout={"group_size": 4, "max_tokens": 16})
    simulated = run(settings, folder=tmp_path, world=World(mean_tokens=10**6))
    assert simulated.problems() == []
    assert identity(simulated)["stale"] == 0


async def engine_1_swaps_late(link: MemoryLink, *, engine_id: int, world: World, max_running: int) -> None:
    """Engine 1 needs three seconds to stage a policy."""
    world = dataclasses.replace(world, stage_s=3.0) if engine_id == 1 else world
    await peers.engine(link, engine_id=engine_id, world=world, max_running=max_running)


def test_an_engine_that_swaps_late_is_given_only_what_its_own_version_may_generate(tmp_path: Path):
    """With K = 0 whatever it generated under an older policy would be thrown away; the other one does the work meanwhile."""
    settings = config(pipeline={"max_staleness": 0}, rollout={"group_size": 4, "max_tokens": 16})
    simulated = run(settings, folder=tmp_path, world=World(mean_tokens=10**6), cast=Cast(engine=engine_1_swaps_late))
    assert simulated.problems() == []
    assert identity(simulated)["stale"] == 0


FAULTS: dict[str, dict[str, Any]] = {
    "engine": {"world": World(engine_error_fraction=0.02)},
    "scorer": {"world": World(bad_score_fraction=0.2)},
    "network": {"network": STORM},
    "slow scorer": {"world": World(score_s=2.0)},
    "slow trainer": {"world": World(token_s=2e-3)},
    "slow staging": {"world": World(stage_s=3.0)},
    "everything": {"world": World(engine_error_fraction=0.02, bad_score_fraction=0.2, score_s=0.3, stage_s=0.7), "network": STORM},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("faults", FAULTS)
def test_faults_cost_rollouts_and_time_and_break_no_promise(tmp_path: Path, mode: str, faults: str):
    simulated = run(config(pipeline={"mode": mode}), folder=tmp_path, **FAULTS[faults])
    assert simulated.problems() == []
    failed = collections.Counter(row[4] for row in simulated.rows if row[3] == "failed")
    if faults in ("scorer", "everything"):
        assert {"timeout", "invalid", "error"} <= failed.keys()
    elif faults == "engine":
        assert failed["error"] > 0
    else:
        assert not failed


def test_a_group_is_trained_with_its_survivors(tmp_path: Path):
    simulated = run(config(), folder=tmp_path, world=World(bad_score_fraction=0.2))
    sizes = collections.Counter(collections.Counter(rollout.split("/")[0] for rollout in simulated.record.trained).values())
    assert set(sizes) == {2, 3, 4}


def test_failed_and_stale_groups_are_made_up_for(tmp_path: Path):
    """Whatever is given up, every step trains its eight groups, and nothing more is generated than that takes."""
    simulated = run(config(), folder=tmp_path, world=World(bad_score_fraction=0.4, seed=1))
    assert simulated.problems() == []
    given_up = identity(simulated)["admitted"] // 4 - 10 * 8
    groups = collections.defaultdict(set)
    for row in simulated.rows:
        groups[row[1]].add(row[3])
    assert given_up == sum(fates == {"failed"} for fates in groups.values()) > 5


def test_a_method_that_filters_half_of_the_groups_trains_on_the_other_half(tmp_path: Path):
    def picky(siblings):
        odd = siblings[0].trajectory.group_id % 2
        columns = mean_baseline(siblings)
        return Filtered(reason="odd", advantages=columns) if odd else columns

    simulated = run(config(), folder=tmp_path, group_advantages=picky)
    assert simulated.problems() == []
    assert {row[1] % 2 for row in simulated.rows if row[3] == "filtered"} == {1}
    assert {row[1] % 2 for row in simulated.rows if row[3] == "trained"} == {0}
    assert {row[4] for row in simulated.rows if row[3] == "filtered"} == {"odd"}


# --- stop tokens ---


def test_training_and_evaluations_ask_for_the_same_stop_tokens(tmp_path: Path):
    asked: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}

    async def listening_engine(link: MemoryLink, **options: Any) -> None:
        receive, wait = link.receive, link.wait

        def note(message: Any) -> Any:
            if isinstance(message, Generate):
                asked[message.rollout_id.startswith("evaluation")].add(message.sampling.stop_token_ids)
            return message

        async def waited() -> Any:
            return note(await wait())

        vars(link).update(receive=lambda timeout: note(receive(timeout)), wait=waited)
        await peers.engine(link, **options)

    simulated = run(
        config(trainer={"steps": 2}), folder=tmp_path, held_out=HELD_OUT, stop_token_ids=(0, 2), cast=Cast(engine=listening_engine)
    )
    assert simulated.problems() == []
    assert asked == {True: {(0, 2)}, False: {(0, 2)}}


# --- dynamic sampling against an adversarial reward ------------------------------------------------------------------------------


def same_for_siblings(group_id: int, sibling: int) -> float:
    return float(group_id % 3)


def one_group_in_fifty_has_signal(group_id: int, sibling: int) -> float:
    return float(group_id % 50 == 0 and sibling == 0)


def no_signal_for_a_long_while(group_id: int, sibling: int) -> float:
    return float(sibling == 0 and not 20 < group_id < 300)


def signal_only_in_the_sibling_that_fails(group_id: int, sibling: int) -> float:
    return float(sibling)


ADVERSARIES = [same_for_siblings, one_group_in_fifty_has_signal, no_signal_for_a_long_while, signal_only_in_the_sibling_that_fails]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reward", ADVERSARIES, ids=lambda reward: reward.__name__)
def test_dynamic_sampling_never_starves_and_never_splits_a_group(tmp_path: Path, mode: str, reward: Callable[[int, int], float]):
    """DAPO's filter with its budget of ten batches: steps of eight groups, whatever the rewards, and nothing hangs or fails."""
    method = resolve("dapo", {}, group_size=4)
    credit = MethodAdvantages(method, (RewardSection.model_validate({"function": "unused:reward"}),))

    def adversarial(siblings: Siblings):
        if reward is signal_only_in_the_sibling_that_fails and len(siblings) == 4:
            return credit(tuple(rescored(member, 0.0) for member in siblings))
        identities = [(member, member.trajectory.group_id, member.trajectory.sibling) for member in siblings]
        return credit(tuple(rescored(member, reward(group_id, sibling)) for member, group_id, sibling in identities))

    faulty = World(bad_score_fraction=0.002 if reward is signal_only_in_the_sibling_that_fails else 0.0)
    num_steps = 6 if reward is no_signal_for_a_long_while else 3  # the others' steps are all alike
    simulated = run(
        config(pipeline={"mode": mode}, trainer={"steps": num_steps}),
        folder=tmp_path,
        group_advantages=adversarial,
        step_rules=credit.step_rules(),
        world=faulty,
        limit_s=7200.0,
    )
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    lines = [line for line in simulated.lines if line["kind"] == "step"]
    assert max(line["filtered_groups"] for line in lines) == 80, "ten batches of eight groups"
    assert any(line["unfiltered_groups"] for line in lines)
    fates: dict[str, set[str]] = collections.defaultdict(set)
    for row in simulated.rows:
        if row[3] != "failed":
            fates[row[1]].add(row[3])
    assert all(len(found) == 1 for found in fates.values()), "the siblings with a score of one group end alike"


def test_a_step_with_signal_enough_lets_nothing_through(tmp_path: Path):
    method = resolve("dapo", {}, group_size=4)
    credit = MethodAdvantages(method, (RewardSection.model_validate({"function": "unused:reward"}),))
    simulated = run(config(), folder=tmp_path, group_advantages=credit, step_rules=credit.step_rules())
    assert simulated.problems() == []
    lines = [line for line in simulated.lines if line["kind"] == "step"]
    assert sum(line["filtered_groups"] for line in lines) == identity(simulated)["filtered"] // 4 > 0
    assert not any(line["unfiltered_groups"] for line in lines)
    assert not any(line["zero_variance_fraction"] for line in lines)


# --- rules over the whole step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_over_the_whole_step_breaks_no_promise_and_holds_rows_until_their_step_closes(tmp_path: Path, mode: str):
    method = resolve("reinforce_pp_baseline", {}, group_size=4)
    credit = MethodAdvantages(method, (RewardSection.model_validate({"function": "unused:reward"}),))
    seen: list[int] = []
    rows: list[MicroBatch] = []

    def over_step(groups: Sequence[Siblings]):
        seen.append(len(groups))
        columns = credit.over_step(groups)
        assert sum(row.step == len(seen) - 1 for row in rows) == 0, "no row of the step has left"
        return [[np.where(column != 0, np.float32(len(seen)), column) for column in group] for group in columns]

    async def listening_trainer(link: MemoryLink, **options: Any) -> None:
        wait = link.wait

        async def heard() -> Message:
            message = await wait()
            if isinstance(message, MicroBatch):
                rows.append(message)
            return message

        link.wait = heard
        await peers.trainer(link, **options)

    simulated = run(
        config(pipeline={"mode": mode}, trainer={"steps": 6}),
        folder=tmp_path,
        group_advantages=credit,
        step_rules=StepRules(step_advantages=over_step),
        cast=Cast(trainer=listening_trainer),
        world=World(bad_score_fraction=0.1),
        network=STORM,
    )
    assert simulated.problems() == []
    assert seen == [8] * 6
    assert all(set(np.unique(row.advantages)) <= {0.0, row.step + 1.0} for row in rows), "what the trainer gets is the rule's"


# --- withholding stale tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_withholding_trains_groups_that_would_be_dropped_for_their_oldest_token(tmp_path: Path):
    """Small batches beside long rollouts: now and then a group is overtaken, and its first tokens are over the bound, its last are not."""
    settings = config(
        engine={"max_running": 48},
        batch={"groups_per_step": 2},
        pipeline={"max_staleness": 1},
        trainer={"steps": 12},
        rollout={"max_tokens": 80},
    )
    num_stale = {"drop": 0, "withhold": 0}
    oldest = 0
    for seed in range(4):
        world = World(mean_tokens=40, stage_s=0.0, seed=seed)
        dropping = run(settings, folder=tmp_path / f"drop-{seed}", world=world)
        withholding = run(settings, folder=tmp_path / f"withhold-{seed}", world=world, step_rules=StepRules(withhold=1))
        assert dropping.problems() == []
        assert [problem for problem in withholding.problems() if "with a token of version" not in problem] == []
        num_stale["drop"] += identity(dropping)["stale"]
        num_stale["withhold"] += identity(withholding)["stale"]
        oldest = max(oldest, *(line["staleness_max"] for line in withholding.lines if line["kind"] == "step"))
    assert num_stale["drop"] >= 8
    assert num_stale["withhold"] == 0
    assert oldest > 1


def test_the_same_seed_gives_the_same_run_to_the_last_column_and_another_does_not(tmp_path: Path):
    def once(number: int, seed: int) -> list[tuple[Any, ...]]:
        world = World(engine_error_fraction=0.02, bad_score_fraction=0.2, seed=seed)
        return run(config(), folder=tmp_path / str(number), world=world, network=STORM).rows

    first = once(0, seed=5)
    assert len(first) >= 320
    assert once(1, seed=5) == first
    assert once(2, seed=6) != first


# --- what the journal tells ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """A run of every fate but `cancelled`."""
    world = World(engine_error_fraction=0.01, bad_score_fraction=0.2, token_s=2e-4, stage_s=0.5)
    return run(config(pipeline={"max_staleness": 1}), folder=tmp_path_factory.mktemp("eventful"), world=world, network=STORM)


def test_the_identity_holds_at_every_status_line(eventful: Simulated):
    statuses = [line for line in eventful.lines if line["kind"] == "status"]
    assert len(statuses) > 20
    in_flight = []
    for line in statuses:
        counts = line["rollouts"]
        assert counts["admitted"] == sum(count for name, count in counts.items() if name != "admitted")
        assert min(counts.values()) >= 0
        in_flight.append(counts["in_flight"])
    assert in_flight[0] == in_flight[-1] == 0
    assert max(in_flight) > 32, "more than the engines decode at once"
    assert [line["rollouts"]["admitted"] for line in statuses] == sorted(line["rollouts"]["admitted"] for line in statuses)


def test_queues_stay_within_their_bounds_at_every_status_line(tmp_path: Path):
    """Bounds so small that everybody waits for everybody; a single item may be larger than its bound, but only by itself."""
    simulated = run(config(pipeline={"queue_bytes": 2000}), folder=tmp_path, world=World(score_s=0.2, token_s=1e-3))
    assert simulated.problems() == []
    fullest: dict[str, float] = collections.defaultdict(float)
    for line in simulated.lines:
        for name, queue in line.get("queues", {}).items():
            assert queue["bytes"] <= queue["bound_bytes"] or queue["items"] == 1
            fullest[name] = max(fullest[name], queue["bytes"] / queue["bound_bytes"])
    assert fullest["prompts"] == 1.0


def test_every_step_has_its_line_and_the_end_says_what_came_of_everything(eventful: Simulated):
    steps = [line for line in eventful.lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(10))
    for line in steps:
        assert line["num_groups"] == 8
        assert line["num_trained_tokens"] == eventful.record.tokens[line["step"]]
        assert line["num_samples"] == eventful.record.samples[line["step"]]
        assert line["staleness_max"] <= 1
        assert sum(line["staleness"].values()) == line["num_trained_tokens"]
    (end,) = [line for line in eventful.lines if line["kind"] == "end"]
    assert end["reason"] == "finished"
    assert end["rollouts"] == identity(eventful)


def test_every_swap_has_its_line(eventful: Simulated):
    swaps = [(line["engine_id"], line["version"]) for line in eventful.lines if line["kind"] == "swap"]
    for engine_id in range(2):
        versions = [version for engine, version in swaps if engine == engine_id]
        assert versions == sorted(set(versions)), "each version once, in order; a slow engine may skip some"
        assert versions[-1] == 10


def test_the_two_gauges_tell_who_is_slow(tmp_path: Path):
    """A slow trainer makes dispatch wait for credits; slow engines make the trainer wait for rows."""

    def waited(world: World, name: str) -> dict[str, float]:
        last = [line for line in run(config(), folder=tmp_path / name, world=world).lines if line["kind"] == "status"][-1]
        return {key: seconds / last["elapsed_s"] for key, seconds in last["waited_s"].items()}

    slow_trainer = waited(World(token_s=2e-3), "trainer")
    slow_engines = waited(World(step_s=0.1), "engines")
    assert slow_trainer["generation: an admission credit"] > 0.5
    assert slow_engines["training: rows"] > 0.5


# --- stopping and evaluating -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at_s", [0.5, 2.0, 2.5])
def test_a_run_that_is_stopped_ends_everything_in_flight_and_tells_everyone(tmp_path: Path, stop_at_s: float):
    simulated = run(config(), folder=tmp_path, stop_at_s=stop_at_s)
    assert simulated.ending.reason == simulated.record.stopped_for == "stopped by hand"
    counts = identity(simulated)
    assert counts["in_flight"] == 0
    assert counts["cancelled"] > 0
    assert counts["admitted"] == counts["trained"] + counts["cancelled"] == len(simulated.rows)
    assert {row[4] for row in simulated.rows if row[3] == "cancelled"} == {"the run ended"}


HELD_OUT = tuple(Prompt(prompt_id=f"held:{n}", text="", token_ids=np.arange(3 + n, 9 + n, dtype=np.int32)) for n in range(12))


@pytest.mark.slow
@pytest.mark.parametrize("stop_at_s", [1.0, 1.3, 1.7, 2.0, 2.6, 3.1])
def test_what_a_stopped_trainer_goes_on_to_finish_is_booked_published_and_evaluated(tmp_path: Path, stop_at_s: float):
    """What is printed is what the checkpoint holds: the trainer may take a step that it has begun after the run was stopped."""
    simulated = run(config(), folder=tmp_path, stop_at_s=stop_at_s, held_out=HELD_OUT, world=World(token_s=3e-4))
    record, version = simulated.record, simulated.record.last_version
    assert version is not None
    in_weights = {name for name, step in record.trained.items() if step < version}
    assert {row[0] for row in simulated.rows if row[3] == "trained"} == in_weights
    assert identity(simulated)["trained"] == len(in_weights)
    assert simulated.ending.evaluations[-1][0] == version
    assert [line["version"] for line in simulated.lines if line["kind"] == "checkpoint"][-1:] == [version][:version]
    assert simulated.lines[-1]["kind"] == "end"
    assert simulated.lines[-1]["rollouts"] == identity(simulated)


def test_a_run_that_goes_on_soon_is_not_evaluated_first(tmp_path: Path):
    simulated = run(config(), folder=tmp_path, stop_at_s=2.0, stop_evaluates=False, held_out=HELD_OUT)
    assert [version for version, _ in simulated.ending.evaluations] == [0]
    assert simulated.record.last_version


def test_a_trainer_that_does_not_answer_a_stop_is_waited_for_and_then_left(tmp_path: Path):
    async def deaf(link: MemoryLink, **options: Any) -> None:
        wait = link.wait

        async def hear() -> Any:
            while isinstance(message := await wait(), EndTraining):
                pass
            return message

        link.wait = hear
        await peers.trainer(link, **options)

    settings = config(trainer={"silent_after_s": 40.0})
    simulated = run(settings, folder=tmp_path, stop_at_s=2.0, held_out=HELD_OUT, cast=Cast(trainer=deaf))
    assert simulated.ending.reason == "stopped by hand"
    assert 40 < simulated.seconds < 60
    (told,) = [line["text"] for line in simulated.lines if line["kind"] == "choice" and "evaluation" in line["text"]]
    assert "waited 40 s for trainer to save what it has trained" in told


@pytest.mark.slow
@pytest.mark.parametrize("network", ["calm", "storm"])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_evaluations_cover_the_first_and_the_last_policy_and_stay_out_of_the_accounts(tmp_path: Path, every: int, network: str):
    simulated = run(
        config(evaluation={"every": every}),
        folder=tmp_path,
        held_out=HELD_OUT,
        network=STORM if network == "storm" else NetworkFaults(),
    )
    assert simulated.problems() == []
    versions = [version for version, _ in simulated.ending.evaluations]
    assert versions[0] == 0
    assert versions[-1] == 10
    assert versions == sorted(set(versions))
    assert (len(versions) > 2) == (every > 0)
    lines = [line for line in simulated.lines if line["kind"] == "evaluation"]
    assert [(line["version"], line["reward_mean"]) for line in lines] == list(simulated.ending.evaluations)
    assert (lines[-1]["oldest_version"], lines[-1]["newest_version"], lines[-1]["num_prompts"]) == (10, 10, 12)
    for line in lines:
        assert line["oldest_version"] == line["newest_version"] == line["version"], "whatever was published meanwhile"
    counts = identity(simulated)
    assert counts["trained"] == 320
    assert counts["admitted"] - counts["trained"] == counts["stale"] <= 8, "what a pinned engine samples may be overtaken now and then"
    assert not any(row[0].startswith("evaluation") for row in simulated.rows)


# --- slow is not stalled ---------------------------------------------------------------------------------------------------------


def test_peers_may_take_their_whole_deadline_to_start(tmp_path: Path):
    """500 s of 600: longer than the watchdog's 300."""
    simulated = run(config(), folder=tmp_path, world=World(start_s=500.0))
    assert simulated.problems() == []
    assert simulated.seconds > 500.0


@pytest.mark.slow
def test_rollouts_that_take_longer_than_the_watchdogs_limit_are_no_stall(tmp_path: Path):
    """A token every 15 s for an engine: 64 of them last 960 s, and nothing else happens meanwhile."""
    simulated = run(config(trainer={"steps": 2}), folder=tmp_path, world=World(step_s=15.0, mean_tokens=10**6))
    assert simulated.problems() == []


@pytest.mark.slow
def test_an_evaluation_that_takes_longer_than_the_watchdogs_limit_is_no_stall(tmp_path: Path):
    simulated = run(config(trainer={"steps": 2}), folder=tmp_path, held_out=HELD_OUT * 10, world=World(step_s=5.0, mean_tokens=10**6))
    assert simulated.problems() == []


# --- a peer that misbehaves is named ---------------------------------------------------------------------------------------------


def leaves(error: BaseException) -> list[BaseException]:
    return [leaf for inner in error.exceptions for leaf in leaves(inner)] if isinstance(error, BaseExceptionGroup) else [error]


def failure_of(settings: Config, **circumstances: Any) -> list[PipelineError]:
    """The errors that end a run: all of our own tree, so none is an accident on the way."""
    with pytest.raises(BaseExceptionGroup) as caught:
        run(settings, limit_s=7200.0, **circumstances)
    errors = [leaf for leaf in leaves(caught.value) if isinstance(leaf, PipelineError)]
    assert len(errors) == len(leaves(caught.value)), caught.value
    return errors


async def announced(link: MemoryLink) -> None:
    """Start as a trainer does."""
    link.send(TrainerReady(replica=0, num_replicas=1, process_id=0, version=0))
    assert isinstance(await link.wait(), LayoutFixed)


async def trainer_that_stops_pulling(link: MemoryLink, **_: Any) -> None:
    """Take three rows of step 0 and never another, but send signs of life."""
    await announced(link)
    for index in range(3):
        link.send(TakeMicroBatch(replica=0, step=0, index=index))
        assert isinstance(await link.wait(), MicroBatch)
    await peers.live_on(link)


async def trainer_that_never_finishes(link: MemoryLink, **_: Any) -> None:
    """Take all of step 0 and never say that it is done, but send signs of life."""
    await announced(link)
    index = 0
    while True:
        link.send(TakeMicroBatch(replica=0, step=0, index=index))
        index += 1
        if isinstance(await link.wait(), StepClosed):
            await peers.live_on(link)


async def trainer_that_falls_silent(link: MemoryLink, **_: Any) -> None:
    await announced(link)


async def trainer_that_never_gets_ready(link: MemoryLink, **_: Any) -> None:
    await peers.live_on(link)


async def trainer_that_fails(link: MemoryLink, **_: Any) -> None:
    await announced(link)
    link.send(Failed(error="MismatchError: engine and trainer disagree by 3.5"))


async def trainer_without_a_start(link: MemoryLink, **_: Any) -> None:
    """Its process never comes up."""


async def scorer_that_never_answers(link: MemoryLink, **_: Any) -> None:
    link.send(ScorerReady(scorer_id=0, process_id=0, num_slots=4))
    await peers.beat(link)


async def scorer_that_falls_silent(link: MemoryLink, **_: Any) -> None:
    link.send(ScorerReady(scorer_id=0, process_id=0, num_slots=4))


async def no_engine_commits(link: MemoryLink, *, engine_id: int, world: World, max_running: int) -> None:
    world = dataclasses.replace(world, stage_s=1e7)
    await peers.engine(link, engine_id=engine_id, world=world, max_running=max_running)


async def engine_1_never_commits(link: MemoryLink, *, engine_id: int, world: World, max_running: int) -> None:
    world = dataclasses.replace(world, stage_s=1e7) if engine_id == 1 else world
    await peers.engine(link, engine_id=engine_id, world=world, max_running=max_running)


async def engine_1_falls_silent(link: MemoryLink, *, engine_id: int, world: World, max_running: int) -> None:
    serving = peers.engine(link, engine_id=engine_id, world=world, max_running=max_running)
    if engine_id == 1:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(serving, 2.0)
    else:
        await serving


async def trainer_of_corrupt_policies(link: MemoryLink, **_: Any) -> None:
    """Train step 0 and publish into a weight buffer whose bytes engines refuse."""
    await announced(link)
    index = 0
    while True:
        link.send(TakeMicroBatch(replica=0, step=0, index=index))
        index += 1
        if isinstance(await link.wait(), StepClosed):
            link.send(StepDone(step=0, metrics={}))
            link.send(PolicyPublished(version=1, buffer="corrupt", digest="ff", num_bytes=8, publish_s=0.0))
            await peers.live_on(link)


MISBEHAVIOUR: dict[str, tuple[dict[str, Any], type[PipelineError], str]] = {
    "trainer stops pulling": ({"cast": Cast(trainer=trainer_that_stops_pulling)}, Stalled, "trainer"),
    "trainer never finishes a step": ({"cast": Cast(trainer=trainer_that_never_finishes)}, Stalled, "trainer"),
    "trainer falls silent": ({"cast": Cast(trainer=trainer_that_falls_silent)}, PeerSilent, "trainer-0 was last heard"),
    "trainer never gets ready": ({"cast": Cast(trainer=trainer_that_never_gets_ready)}, PeerSilent, "trainer"),
    "trainer never starts": ({"cast": Cast(trainer=trainer_without_a_start)}, PeerSilent, "waited 600 s for trainer-0 to start"),
    "trainer fails": ({"cast": Cast(trainer=trainer_that_fails)}, PeerRefused, "trainer-0 failed: MismatchError: .* disagree by 3.5"),
    "policies are corrupt": (
        {"cast": Cast(trainer=trainer_of_corrupt_policies)},
        PeerRefused,
        "engine-[01] refused policy 1: WeightsError: weight buffer corrupt",
    ),
    "no engine commits": ({"cast": Cast(engine=no_engine_commits)}, PeerSilent, r"for engine-[01] \(.*\) to commit policy 1"),
    "an engine falls silent": ({"cast": Cast(engine=engine_1_falls_silent)}, PeerSilent, "engine-1 was last heard"),
    "scorer never answers": ({"cast": Cast(scorer=scorer_that_never_answers)}, Stalled, "scor"),
    "scorer never answers an evaluation": (  # that is given up, and then nor does it answer anything else
        {"cast": Cast(scorer=scorer_that_never_answers), "held_out": HELD_OUT},
        Stalled,
        "scoring waits for room in a scorer",
    ),
    "scorer falls silent": ({"cast": Cast(scorer=scorer_that_falls_silent)}, PeerSilent, "scorer-0 was last heard"),
    "every score fails": (
        {"world": World(bad_score_fraction=1.0)},
        Stalled,
        r'failed: (?s:.*)\n  reward failed at least \d+ times: ValueError\("my verifier broke"\) at rewards.py:12',
    ),
    "every forward pass fails": ({"world": World(engine_error_fraction=1.0)}, Stalled, "failed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MISBEHAVIOUR)
def test_a_run_that_cannot_go_on_ends_and_names_the_reason(tmp_path: Path, what: str):
    """Within two hours of simulated time, whatever the peer still says; a hang would be a `TimeoutError`."""
    circumstances, error, match = MISBEHAVIOUR[what]
    errors = failure_of(config(trainer={"silent_after_s": 200.0}), folder=tmp_path, **circumstances)
    assert [one for one in errors if isinstance(one, error) and re.search(match, str(one))], errors


def test_the_verdict_on_a_stall_names_who_waits_for_what(tmp_path: Path):
    (stalled,) = failure_of(config(), folder=tmp_path, cast=Cast(scorer=scorer_that_never_answers))
    assert re.match(r"nothing moved for 3\d\d s\n", str(stalled))
    for wait in (
        "generation waits for an admission credit",
        "scoring waits for room in a scorer",
        "batching waits for scored",
        "training waits for rows",
    ):
        assert wait in str(stalled)


def test_an_evaluation_larger_than_the_engines_may_hold_does_not_stop_the_run(tmp_path: Path):
    """Held-out prompts fill the engines beyond `pipeline.max_running`; once they are answered, training goes on, whoever was last."""
    settings = config(pipeline={"max_staleness": 4, "max_running": 8}, evaluation={"source": "unused", "every": 2})
    prompts = Prompts(7)
    simulated = run(settings, folder=tmp_path, held_out=[prompts.next() for _ in range(60)])
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"


def test_an_engine_that_never_commits_is_left_behind_and_the_run_finishes_without_it(tmp_path: Path):
    simulated = run(config(), folder=tmp_path, cast=Cast(engine=engine_1_never_commits))
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    (fence,) = [line for line in simulated.lines if line["kind"] == "fence"]
    assert (fence["engine_id"], fence["version"]) == (1, 0)
    assert {line["engine_id"] for line in simulated.lines if line["kind"] == "swap"} == {0}


def test_engines_that_refuse_half_of_all_policies_are_refilled_and_break_no_promise(tmp_path: Path):
    simulated = run(config(trainer={"steps": 20}), folder=tmp_path, world=World(refused_fraction=0.5, seed=3))
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    assert {line["engine_id"] for line in simulated.lines if line["kind"] == "fence"} == {0, 1}
    assert {line["engine_id"] for line in simulated.lines if line["kind"] == "swap"} == {0, 1}


# --- size ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_rollouts_are_trained_and_checked(tmp_path: Path):
    settings = config(
        rollout={"group_size": 8, "max_tokens": 24},
        engine={"kind": "fake", "count": 4, "max_running": 128},
        batch={"groups_per_step": 64, "max_tokens": 2048},
        trainer={"steps": 20},
    )
    simulated = run(settings, folder=tmp_path, world=World(mean_tokens=8, bad_score_fraction=0.02))
    assert simulated.problems() == []
    assert len(simulated.rows) >= 10_000


def test_the_source_hears_how_every_group_went(tmp_path: Path):
    source = Prompts(0)
    simulated = run(config(data={"difficulty": [0.0, 1.0]}), folder=tmp_path, source=source)
    assert simulated.problems() == []
    assert sorted(prompt for prompt, _ in source.heard) == sorted({row[2] for row in simulated.rows})
    rewards: dict[str, list[bool]] = collections.defaultdict(list)
    for row in simulated.rows:
        rewards[row[2]].append(row[6] >= 1.0)
    assert {prompt: sum(correct) / 4 for prompt, correct in rewards.items()} == dict(source.heard)


class Banded(Prompts):
    """Eight prompts, of which those that teach nothing rest."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._curriculum = Curriculum(low=0.3, high=0.7)
        self.resting = self._curriculum.resting

    def measured(self, prompt_id: str, *, success: float) -> None:
        super().measured(prompt_id, success=success)
        epoch, number = epoch_and_number(prompt_id)
        self._curriculum.measured(number, epoch=epoch, success=success)

    def next(self) -> Prompt:
        epoch, row = self.position
        prompt = super().next()
        if row == 7:
            self.position = (epoch + 1, 0)
        return prompt


@pytest.mark.parametrize("was_kept", [True, False])
def test_a_source_that_goes_on_knows_what_rested(tmp_path: Path, was_kept: bool):
    """Also where the first life had no `data.difficulty`: then the history tells."""
    lives = [Banded(0), Banded(0)]
    banded = config(data={"difficulty": [0.3, 0.7]})
    among: dict[str, Any] = {"is_recorded": True, "stop_evaluates": False, "folder": tmp_path}
    run(banded if was_kept else config(), source=lives[0], stop_at_s=1.5, **among)
    left = dict(lives[0].resting)
    assert len(left) >= 3

    found: list[tuple[dict[int, Rest], bool]] = []

    def first_draw() -> Prompt:
        found.append((dict(lives[1].resting), bool(lives[1].heard)))
        raise DataError("this is all there is to see")

    lives[1].next = first_draw
    with pytest.raises(ExceptionGroup):
        run(banded, source=lives[1], **among)
    assert found == [(left, not was_kept)]


@pytest.mark.parametrize("adapts", [False, True])
def test_with_full_kv_caches_promises_hold_and_fewer_rollouts_push_each_other_out(tmp_path: Path, adapts: bool):
    """Caches hold about 12 of the 32 sequences that an engine has slots for."""
    settings = config(pipeline={"adaptive_concurrency": adapts}, engine={"kind": "fake", "count": 2, "max_running": 32})
    simulated = run(settings, folder=tmp_path, world=World(kv_tokens=400, token_s=1e-5, prefill_s=2e-4))
    assert simulated.problems() == []
    limits = {line["max_running"] for line in simulated.lines if line["kind"] == "status"}
    assert (min(limits) < 80) == adapts, "80 is what 64 slots are given"
    assert max(limits) == 80


def test_an_alarm_of_learning_is_told_and_ends_the_run_saved_where_the_settings_say_so(tmp_path: Path):
    """Of steps as small as these, engines hold so many at once that more than a quarter of the groups are dropped for their age."""
    settings = {"rollout": {"group_size": 2}, "batch": {"groups_per_step": 4}, "trainer": {"steps": 25}}
    told = run(config(**settings), folder=tmp_path / "told")
    alarm = next(line for line in told.lines if line["kind"] == "alarm")
    assert (alarm["name"], alarm["is_over"]) == ("stale", False)
    assert told.ending.reason == "finished"
    ended = run(config(run={"fatal_alarms": ["stale"]}, **settings), folder=tmp_path / "ended")
    assert ended.ending.reason.startswith(f"alarm: stale since step {alarm['began']}: ")
    assert [problem for problem in ended.problems() if "were sealed, not" not in problem] == [], "it ended early, and nothing else"

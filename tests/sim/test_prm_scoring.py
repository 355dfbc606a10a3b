"""A process reward model in whole simulated runs: every sample trains with the scores of its own steps, whoever is killed meanwhile."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.rules.batch import Siblings
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.messages import Outcome, StepsScored
from tests.sim import peers
from tests.sim.chaos import Faults, survive
from tests.sim.memory import MemoryLink
from tests.sim.peers import World
from tests.sim.run import Cast, config, mean_baseline, run

WORLD = World(token_s=1e-3, bad_score_fraction=0.02)


def followed(**sections: dict[str, Any]) -> Config:
    return config(**{"prm": {"path": "unused", "chunk_tokens": 3}, "trainer": {"steps": 6}} | sections)


def credit(siblings: Siblings):
    """A mean baseline that looks whether the steps are those of the very tokens."""
    for member in siblings:
        assert member.steps is not None
        ends, scores = peers.step_scores(member.trajectory.token_ids[len(member.trajectory.prompt.token_ids) :])
        assert member.steps.ends.tolist() == ends
        assert member.steps.scores == pytest.approx(scores)
        assert member.steps.version == "simulated"
    return mean_baseline(siblings)


def test_every_sample_trains_with_the_scores_of_its_own_steps(tmp_path: Path) -> None:
    simulated = run(followed(), folder=tmp_path, world=WORLD, group_advantages=credit)
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"


KILLS = {
    "prm": Faults(seed=1, prm_s=2.0),
    "engine": Faults(seed=2, engine_s=2.0),
    "orchestrator": Faults(seed=3, orchestrator_s=3.0),
    "everything": Faults(seed=4, engine_s=6.0, scorer_s=5.0, prm_s=5.0, trainer_s=6.0, orchestrator_s=8.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_step_scores_survive_whoever_is_killed_and_count_once(tmp_path: Path, who: str) -> None:
    world = World(token_s=1e-3)
    survived = survive(followed(trainer={"steps": 20}), folder=tmp_path, faults=KILLS[who], world=world, group_advantages=credit)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert who != "prm" or not survived.ending.rollouts.failed, "all is told again at once: no trace waits until it counts as the killer"
    assert survived.kills[who] >= 2 if who != "everything" else len(survived.kills) == 5, survived.kills


def test_steps_and_comparisons_go_together(tmp_path: Path) -> None:
    settings = followed()
    rewards = tuple(
        settings.reward[0].model_copy(update={"function": f"unused:{name}", "per": per})
        for name, per in (("reward", "sample"), ("rank", "group"))
    )
    faults = KILLS["everything"]
    survived = survive(
        settings.model_copy(update={"reward": rewards}), folder=tmp_path, faults=faults, world=WORLD, group_advantages=credit
    )
    assert survived.problems() == []


def test_a_slow_model_slows_admission_and_never_an_engine(tmp_path: Path) -> None:
    """Its 3 s a batch are 300 forward passes: engines go on meanwhile, and no more is admitted than may wait for it."""
    bound = 200
    settings = followed(prm={"path": "unused", "chunk_tokens": 3, "max_waiting_tokens": bound})
    simulated = run(settings, folder=tmp_path, world=dataclasses.replace(WORLD, prm_s=3.0), group_advantages=credit)
    assert simulated.problems() == []
    lines = [line for line in simulated.lines if line["kind"] == "status"]
    held = [wait for line in lines for wait in line["waits"] if wait == wait | {"stage": "generation", "what": "the process reward model"}]
    assert held, "admission waited for it by name"
    waiting = [line["prm"]["num_waiting_tokens"] for line in lines if line["prm"]]
    in_flight = settings.max_running_rollouts * settings.rollout.max_tokens
    assert bound < max(waiting) <= bound + in_flight
    assert waiting[-1] == 0


async def over_length_prm(link: MemoryLink, *, world: World, prm_id: int) -> None:
    """Cannot take traces of more than 30 tokens, which it says of the whole trace."""

    class Link:
        def __getattr__(self, name: str) -> Any:
            return getattr(link, name)

        def send(self, message: Any) -> None:
            if isinstance(message, StepsScored) and message.num_taken > 30:
                nothing = np.zeros(0)
                message = StepsScored(
                    rollout_id=message.rollout_id,
                    attempt=message.attempt,
                    num_taken=message.num_taken,
                    first=message.first,
                    ends=nothing.astype(np.int32),
                    scores=nothing.astype(np.float32),
                    is_last=message.is_last,
                    version=message.version,
                    outcome=Outcome.INVALID,
                    error="too long",
                )
            link.send(message)

    await peers.prm(Link(), world=world, prm_id=prm_id)  # pyright: ignore[reportArgumentType]


def test_a_trace_that_cannot_be_scored_fails_with_its_reason_and_trains_nothing(tmp_path: Path) -> None:
    def short_ones(siblings: Siblings):
        assert all(member.trajectory.num_trained_tokens <= 30 for member in siblings)
        return credit(siblings)

    simulated = run(followed(), folder=tmp_path, world=WORLD, cast=Cast(prm=over_length_prm), group_advantages=short_ones)
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    assert simulated.ending.rollouts.failed > 0


def stopping(*, below: float, keep: float, group_size: int = 4, name: str = "rloo_early_stop") -> Config:
    """Most rollouts of the simulation have four or five steps with scores that are as good as drawn from 0 to 1."""
    stop = {"threshold": below, "keep_probability": keep, "min_steps": 1, "max_false_stop_fraction": 1.0}
    prm = {"path": "unused", "chunk_tokens": 3, "early_stop": stop}
    algorithm = {"name": name, "overrides": {"aggregation": "seq-mean-token-sum-norm"}}
    return followed(prm=prm, algorithm=algorithm, rollout={"group_size": group_size}, trainer={"steps": 12})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "faults"),
    [
        (stopping(below=0.1, keep=0.25), Faults()),
        (stopping(below=0.9, keep=0.2, group_size=2, name="step_reinforce"), Faults()),
        (stopping(below=0.1, keep=0.25), KILLS["everything"]),
    ],
    ids=["few", "most", "few, and everybody is killed"],
)
def test_stopped_rollouts_are_counted_and_survivors_weigh_for_them(tmp_path: Path, settings: Config, faults: Faults) -> None:
    rule = MethodAdvantages(method_of(settings), settings.reward)
    survived = survive(settings, folder=tmp_path, faults=faults, world=World(token_s=1e-3), group_advantages=rule)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        said = ledger.execute("SELECT rollout_id, attempt, data FROM events WHERE kind = 'early_stop' ORDER BY seq").fetchall()
        cut_off = {name for (name,) in ledger.execute("SELECT rollout_id FROM events WHERE kind = 'generated' AND reason = 'cancelled'")}
        last = dict(ledger.execute("SELECT rollout_id, max(attempt) FROM events WHERE kind = 'issued' GROUP BY rollout_id").fetchall())
    flags = {name: json.loads(reason) for name, attempt, reason in said if attempt == last[name]}
    fates = {row[0]: (row[3], row[4]) for row in survived.rows}
    keep = settings.prm.early_stop.keep_probability
    weights = survived.disk.record.weights
    assert weights == {name: pytest.approx(1 / keep if name in flags else 1.0) for name in weights}
    stopped = {name for name, flag in flags.items() if flag["stops"]}
    assert len(cut_off) > len(stopped) / 2, "engines are told while they write"
    assert faults != Faults() or cut_off <= stopped, "and nobody else is"
    assert not stopped & weights.keys(), "what was stopped trains nothing"
    done = {name for name, (fate, _) in fates.items() if fate in ("trained", "filtered")}
    assert {name for name in done if fates[name] == ("filtered", "stopped early")} == stopped & done
    # Over all that were started: what is left in flight when a run ends are rather siblings, which take longer than what was stopped.
    mean = np.mean([(0.0 if flags[name]["stops"] else 1 / keep) if name in flags else 1.0 for name in fates])
    print(f"{len(flags)} flagged and {len(stopped)} stopped of {len(fates)} rollouts; their weights have a mean of {mean:.2f}")
    assert mean == pytest.approx(1.0, abs=0.25)


def test_a_step_of_which_everything_was_stopped_is_a_step(tmp_path: Path) -> None:
    """Nothing trains in it, and it is done all the same: otherwise hopeless prompts would be made up for by others."""
    settings = stopping(below=2.0, keep=1e-6)
    simulated = run(
        settings, folder=tmp_path, world=World(token_s=1e-3), group_advantages=MethodAdvantages(method_of(settings), settings.reward)
    )
    assert simulated.problems() == []
    identity = simulated.ending.rollouts
    assert identity.trained < 4 * identity.filtered / 10, "all but rollouts of one step, which are whole before it is scored"


def turn_credit(siblings: Siblings):
    """A mean baseline that looks whether every turn has the model's score of the episode up to it."""
    for member in siblings:
        assert member.steps is not None
        turns = member.trajectory.turns
        assert turns is not None
        after = member.trajectory.token_ids[len(member.trajectory.prompt.token_ids) :]
        ends, scores = peers.step_scores(after, turn_ends=turns.ends.tolist())
        assert member.steps.ends.tolist() == ends
        assert member.steps.scores == pytest.approx(scores)
    return mean_baseline(siblings)


@pytest.mark.parametrize("who", ["nobody", "prm", pytest.param("everything", marks=pytest.mark.slow)])
def test_the_turns_of_an_episode_are_its_steps_whoever_is_killed(tmp_path: Path, who: str) -> None:
    environment = {"function": "unused:reply", "max_turns": 4}
    settings = followed(environment=environment, rollout={"group_size": 4, "max_tokens": 96}, algorithm={"name": "step_reinforce"})
    world = dataclasses.replace(WORLD, mean_tokens=8, bad_reply_fraction=0.02)
    survived = survive(settings, folder=tmp_path, faults=KILLS.get(who, Faults()), world=world, group_advantages=turn_credit)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert max(survived.disk.record.turns.values()) > 1

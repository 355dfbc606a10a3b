"""Episodes in whole simulated runs: every turn goes on from all before it, whoever is killed between or during turns."""

from __future__ import annotations

import collections
import dataclasses
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.rules.batch import Siblings
from orchestrator.stages.evaluation import Evaluation
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.messages import Finish, Message, Request, Result, ScorerTask
from tests.sim import peers
from tests.sim.chaos import Faults, survive
from tests.sim.memory import MemoryLink, NetworkFaults
from tests.sim.peers import World
from tests.sim.run import Cast, Prompts, config, mean_baseline, run

MAX_TURNS, MAX_TOKENS = 4, 96
WORLD = World(token_s=1e-3, mean_tokens=8)


def episodes(**sections: dict[str, Any]) -> Config:
    environment = {"function": "unused:reply", "max_turns": MAX_TURNS}
    return config(
        **{"environment": environment, "rollout": {"group_size": 4, "max_tokens": MAX_TOKENS}, "trainer": {"steps": 6}} | sections
    )


def credit(siblings: Siblings):
    """A mean baseline that looks whether turns are what they say."""
    for member in siblings:
        trajectory, turns = member.trajectory, member.trajectory.turns
        assert turns is not None
        num_prompt = len(trajectory.prompt.token_ids)
        after = trajectory.token_ids[num_prompt:]
        assert trajectory.loss_mask[num_prompt:].tolist() == turns.mask(len(after)).tolist()
        assert len(turns.starts) <= MAX_TURNS
        assert len(after) <= MAX_TOKENS
        assert trajectory.loss_mask[-1], "an episode ends with the model's words"
        said = [after[end + 1 : start].tolist() for end, start in zip(turns.ends, turns.starts[1:], strict=False)]
        assert turns.states == ("prompt", *(f"state {tokens[-1] % 3}" for tokens in said))
        is_cut_off = trajectory.finish is Finish.LENGTH
        assert is_cut_off or len(turns.starts) == MAX_TURNS or peers.reply(after) is None, "it ends when it may, and not before"
    return mean_baseline(siblings)


@pytest.mark.slow
def test_engines_write_other_episodes_while_an_environment_takes_its_time(tmp_path: Path) -> None:
    def seconds(reply_s: float) -> float:
        settings = episodes(engine={"count": 1, "max_running": 16}, pipeline={"max_staleness": 8}, scorer={"slots": 64})
        folder = tmp_path / str(reply_s)
        folder.mkdir()
        simulated = run(settings, folder=folder, world=World(reply_s=reply_s), group_advantages=credit)
        assert simulated.problems() == []
        return simulated.seconds

    # An episode takes about half a second to write and, at the slower of the two, three times as long to be replied to.
    assert seconds(0.5) < 1.2 * seconds(0.0)


def test_an_evaluation_that_was_interrupted_is_made_anew_from_first_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends while its last policy is evaluated evaluates it once more: engines still have later turns of the same episodes."""
    begun, work = collections.Counter[int](), Evaluation._work

    async def counted(evaluation: Evaluation, version: int, engine_ids: Collection[int]) -> float:
        begun[version] += 1
        return await work(evaluation, version, engine_ids)

    monkeypatch.setattr(Evaluation, "_work", counted)
    held_out, settings = Prompts(seed=9), episodes(evaluation={"every": 1})
    prompts = tuple(held_out.next() for _ in range(12))
    simulated = run(settings, folder=tmp_path, world=WORLD, group_advantages=credit, held_out=prompts, stop_at_s=2.3)
    last = simulated.record.last_version
    assert last is not None
    assert begun[last] == 2, "the stop falls into the evaluation of the last policy"
    assert simulated.ending.evaluations[-1][0] == last
    assert not [line for line in simulated.lines if line["kind"] == "evaluation_dropped"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["streaming", "one_step_off", "sync"])
def test_every_turn_goes_on_from_all_before_it_in_evaluations_too(tmp_path: Path, mode: str) -> None:
    replied: dict[str, list[int]] = collections.defaultdict(list)

    async def scorer(link: MemoryLink, **options: Any) -> None:
        send, wait = link.send, link.wait
        asked: dict[int, ScorerTask] = {}

        async def hear() -> Message:
            if isinstance(message := await wait(), Request):
                asked[message.request_id] = message.task
            return message

        def said(message: Any) -> None:
            if (
                isinstance(message, Result)
                and (turns := asked[message.request_id].turns[0]) is not None
                and asked[message.request_id].kind == "environment"
            ):
                replied[asked[message.request_id].rollout_id].append(len(turns.starts) - 1)
            send(message)

        vars(link).update(send=said, wait=hear)
        await peers.scorer(link, **options)

    held_out, settings = Prompts(seed=9), episodes(pipeline={"mode": mode})
    among = {"world": WORLD, "group_advantages": credit, "cast": Cast(scorer=scorer), "held_out": tuple(held_out.next() for _ in range(8))}
    simulated = run(settings, folder=tmp_path, **among)
    assert simulated.problems() == []
    first = [simulated.record.turns[name] for name, step in simulated.record.trained.items() if step == 0]
    line = next(line for line in simulated.lines if line["kind"] == "step")
    assert line["turns_mean"] == pytest.approx(sum(first) / len(first))
    assert [version for version, _ in simulated.ending.evaluations] == [0, 6]
    turns = [turns for name, turns in replied.items() if name.startswith("evaluation-")]
    assert all(turns == list(range(len(turns))) for turns in turns)
    assert max(map(len, turns)) == MAX_TURNS - 1
    assert simulated.ending.reason == "finished"
    assert set(simulated.record.turns.values()) == {1, 2, 3, 4}
    gauges = [line["environment"] for line in simulated.lines if line["kind"] == "status"]
    assert gauges[-1]["num_observations"] == sum(map(len, (turns for name, turns in replied.items() if not name.startswith("evaluation-"))))
    assert max(gauge["num_awaiting_reply"] for gauge in gauges) > 0


KILLS = {
    "engine": Faults(seed=2, engine_s=1.0),
    "scorer": Faults(seed=3, scorer_s=1.5),
    "orchestrator": Faults(seed=5, orchestrator_s=2.0, until_s=12.0),
    "everything": Faults(seed=4, engine_s=5.0, scorer_s=5.0, trainer_s=6.0, orchestrator_s=7.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_episodes_survive_whoever_is_killed_and_an_environment_that_hangs_fails_its_rollout_alone(tmp_path: Path, who: str) -> None:
    settings = episodes(algorithm={"name": "gigpo"}, trainer={"steps": 16})
    rule = MethodAdvantages(method_of(settings), settings.reward)

    def both(siblings: Siblings):
        credit(siblings)
        return rule(siblings)

    world = World(token_s=1e-3, mean_tokens=8, bad_reply_fraction=0.02, bad_score_fraction=0.02)
    survived = survive(settings, folder=tmp_path, faults=KILLS[who], world=world, group_advantages=both)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.kills[who] >= 2 if who != "everything" else len(survived.kills) == 4, survived.kills
    reasons = collections.Counter(row[4] for row in survived.rows if row[3] == "failed")
    assert {"timeout", "error", "invalid"} <= reasons.keys()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        replied = ledger.execute("SELECT rollout_id, attempt, turn FROM events WHERE kind = 'observed' ORDER BY seq").fetchall()
        lost = {(name, attempt) for name, attempt in ledger.execute("SELECT rollout_id, attempt FROM events WHERE kind = 'lost'")}
    went_on = [(name, attempt) for name, attempt, place in replied if place > 0 and (name, attempt - 1) in lost]
    assert who != "engine" or went_on, "an engine that dies takes one turn with it, not the turns before"


def with_state(max_alive: int, **sections: dict[str, Any]) -> Config:
    environment = {"cls": "unused:Game", "max_turns": MAX_TURNS, "concurrency": max_alive}
    return episodes(environment=environment, **sections)


def credit_with_state(siblings: Siblings):
    """A mean baseline that looks whether turns are what they say, and rewards those of the environment."""
    for member in siblings:
        trajectory, turns = member.trajectory, member.trajectory.turns
        assert turns is not None
        num_prompt = len(trajectory.prompt.token_ids)
        after = trajectory.token_ids[num_prompt:]
        assert after[:2].tolist() == peers.OPENING
        assert trajectory.loss_mask[num_prompt:].tolist() == turns.mask(len(after)).tolist()
        assert turns.rewards is not None
        num_heard = len(turns.starts) - (trajectory.finish is Finish.LENGTH and turns.rewards[-1] == 0.0)
        assert turns.rewards[:num_heard].tolist() == [peers.turn_reward(number) for number in range(1, num_heard + 1)]
        assert member.score.components["environment"] == turns.rewards.sum()
        assert member.score.reward == member.score.components["reward"] + turns.rewards.sum()
    return mean_baseline(siblings)


def test_environments_with_state_hold_back_groups_and_reward_each_turn(tmp_path: Path) -> None:
    """Fewer may live than a group has siblings: they are played one after the other, and nobody waits for ever."""
    held_out = Prompts(seed=9)
    simulated = run(
        with_state(3),
        folder=tmp_path,
        world=dataclasses.replace(WORLD, num_environments=3),
        group_advantages=credit_with_state,
        held_out=tuple(held_out.next() for _ in range(8)),
    )
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    gauges = [line["environment"] for line in simulated.lines if line["kind"] == "status"]
    assert max(gauge["num_alive"] for gauge in gauges) == 3
    waited_s = [line["waited_s"] for line in simulated.lines if line["kind"] == "status"][-1]
    assert waited_s["generation: one of the 3 environments that may live at once"] > 0.0
    assert [version for version, _ in simulated.ending.evaluations] == [0, 6]


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_an_episode_whose_environment_is_lost_begins_again_from_its_prompt(tmp_path: Path, who: str) -> None:
    world = World(
        token_s=1e-3, mean_tokens=8, bad_reply_fraction=0.02, bad_score_fraction=0.02, num_environments=16, lost_environment_fraction=0.05
    )
    settings = with_state(16, trainer={"steps": 16})
    survived = survive(settings, folder=tmp_path, faults=KILLS[who], world=world, group_advantages=credit_with_state)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        lost = ledger.execute("SELECT rollout_id, attempt, seq FROM events WHERE kind = 'lost' AND reason LIKE 'environment:%'").fetchall()
        assert len(lost) > 20
        name, attempt, seq = lost[0]
        after = (
            "SELECT kind, attempt, turn FROM events WHERE rollout_id = ? AND seq > ? AND kind IN ('reset', 'issued', 'observed') LIMIT 3"
        )
        again = ledger.execute(after, (name, seq)).fetchall()
    assert again[:2] == [("reset", attempt + 1, None), ("issued", attempt + 1, None)]
    assert len(again) < 3 or again[2][2] in (0, None), "and hears its first turn again"


@pytest.mark.slow
def test_versions_never_fall_along_an_episode_that_goes_on_with_another_engine(tmp_path: Path) -> None:
    """Engines refuse policies, and are then given no new turns; engine 1 is slow to take one, so it is often the older."""

    async def engine(link: MemoryLink, *, engine_id: int, world: World, **options: Any) -> None:
        await peers.engine(link, engine_id=engine_id, world=dataclasses.replace(world, stage_s=0.5 if engine_id else 0.02), **options)

    world = World(token_s=1e-4, mean_tokens=16, refused_fraction=0.4)
    settings = episodes(trainer={"steps": 12}, pipeline={"max_staleness": 8})
    simulated = run(settings, folder=tmp_path, world=world, group_advantages=credit, cast=Cast(engine=engine))
    assert simulated.problems() == []
    waited_s = [line["waited_s"] for line in simulated.lines if line["kind"] == "status"][-1]
    assert waited_s.get("generation: an engine that may go on with what another one has begun", 0.0) > 0.0


def test_answers_that_come_twice_and_late_are_to_their_own_turn(tmp_path: Path) -> None:
    """Each engine and the scorer say everything twice, the second time two seconds later, when other turns are out."""

    def twice(link: MemoryLink) -> MemoryLink:
        send = link.send

        def repeat(message: Any) -> None:
            import asyncio

            send(message)
            if type(message).__name__ in ("Completion", "Result"):
                asyncio.get_running_loop().call_later(0.1, send, message)

        vars(link).update(send=repeat)
        return link

    async def engine(link: MemoryLink, **options: Any) -> None:
        await peers.engine(twice(link), **options)

    async def scorer(link: MemoryLink, **options: Any) -> None:
        await peers.scorer(twice(link), **options)

    cast = Cast(engine=engine, scorer=scorer)
    simulated = run(
        episodes(),
        folder=tmp_path,
        world=WORLD,
        group_advantages=credit,
        cast=cast,
        network=NetworkFaults(delay_s=0.02, jitter_s=0.1, seed=1),
    )
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"

"""ReMax in whole simulated runs: every group has a greedy sibling whose reward is the others' baseline, whoever is killed meanwhile."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.rules.batch import Siblings
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.messages import Generate
from tests.sim import peers
from tests.sim.chaos import Faults, survive
from tests.sim.memory import MemoryLink
from tests.sim.peers import World
from tests.sim.run import Cast, config, run

GROUP_SIZE = 4


def remax(**sections: dict[str, Any]) -> Config:
    return config(**{"algorithm": {"name": "remax"}} | sections)


def credit_of(settings: Config) -> tuple[MethodAdvantages, list[str]]:
    """The method's advantages, and the greedy rollouts that were their baselines; the simulated scorer's rewards are known."""
    rule, baselines = MethodAdvantages(method_of(settings), settings.reward), list[str]()
    inner = rule._group

    def group(siblings: Siblings, *, greedy: Any) -> Any:
        baselines.append(greedy.trajectory.rollout_id)
        found = inner(siblings, greedy=greedy)
        assert found.greedy_reward == greedy.trajectory.token_ids[greedy.trajectory.loss_mask].sum() % 2
        return found

    rule._group = group
    return rule, baselines


def test_the_greedy_sibling_alone_is_sampled_at_temperature_0_by_the_engine_of_the_others(tmp_path: Path) -> None:
    asked: dict[str, tuple[float, int]] = {}

    async def listening_engine(link: MemoryLink, *, engine_id: int, **options: Any) -> None:
        receive, wait = link.receive, link.wait

        def note(message: Any) -> Any:
            if isinstance(message, Generate) and "/" in message.rollout_id:
                asked[message.rollout_id] = (message.sampling.temperature, engine_id)
            return message

        async def waited() -> Any:
            return note(await wait())

        vars(link).update(receive=lambda timeout: note(receive(timeout)), wait=waited)
        await peers.engine(link, engine_id=engine_id, **options)

    settings = remax(trainer={"steps": 4})
    rule, _ = credit_of(settings)
    simulated = run(settings, folder=tmp_path, cast=Cast(engine=listening_engine), group_advantages=rule, step_rules=rule.step_rules())
    assert simulated.problems() == []
    groups: dict[str, dict[int, tuple[float, int]]] = collections.defaultdict(dict)
    for name, how in asked.items():
        group_id, _, sibling = name.partition("/")
        groups[group_id][int(sibling)] = how
    assert len(groups) >= 4 * 8
    for siblings in groups.values():
        assert [siblings[number][0] for number in range(GROUP_SIZE + 1)] == [1.0] * GROUP_SIZE + [0.0]
        assert len({engine_id for _, engine_id in siblings.values()}) == 1
    line = next(line for line in simulated.lines if line["kind"] == "step")
    assert line["num_samples"] == 8 * GROUP_SIZE
    assert 0.0 <= line["greedy_reward_mean"] <= 1.0


EVERYBODY: dict[str, Any] = {"engine_s": 5.0, "scorer_s": 5.0, "trainer_s": 6.0, "orchestrator_s": 8.0}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"batch": "whiten_tokens"}], ids=["as they come", "whole steps"])
def test_every_sample_has_the_baseline_of_its_own_group_whoever_is_killed(tmp_path: Path, overrides: dict[str, str]) -> None:
    settings = remax(algorithm={"name": "remax", "overrides": overrides}, trainer={"steps": 20})
    rule, baselines = credit_of(settings)
    survived = survive(
        settings,
        folder=tmp_path,
        faults=Faults(seed=3, until_s=60.0, **EVERYBODY),
        world=World(token_s=1e-3, bad_score_fraction=0.05),
        group_advantages=rule,
        step_rules=rule.step_rules(),
    )
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert len(survived.kills) == 4, survived.kills
    trained = {row[0] for row in survived.rows if row[3] == "trained"}
    fates = {row[0]: (row[3], row[4]) for row in survived.rows}
    greedy = {name for name in fates if name.endswith(f"/{GROUP_SIZE}")}
    assert not greedy & trained, "a baseline never trains"
    placed = {f"{name.partition('/')[0]}/{GROUP_SIZE}" for name in trained}
    assert placed <= set(baselines)
    assert all(fates[name] == ("filtered", "greedy baseline") for name in placed)
    assert len(placed) == 20 * 8
    without = {name.partition("/")[0] for name in greedy if fates[name][0] == "failed"}
    assert without, "some greedy sibling failed"
    assert not without & {name.partition("/")[0] for name in trained}, "and its group with it"

"""The simulated trainer's seconds, on numbers worked by hand."""

from __future__ import annotations

import pytest

from orchestrator.simulate.cores import Cores
from orchestrator.simulate.events import Events
from orchestrator.simulate.rollouts import Rollout, column
from orchestrator.simulate.trainer import Trainer
from orchestrator.simulate.world import SyncWorld, TrainerWorld
from pipelinerl.messages import Sample
from tests.orchestrator.simulate.test_parts import workload


def rollout(group_id: int, sibling: int, *, num_sampled: int, num_observed: int = 0) -> Rollout:
    """A prompt of 9 tokens, so many that were sampled, and so many that an environment said."""
    name, draws = f"{group_id}/{sibling}", workload().group(group_id)
    made = Rollout(group_id=group_id, sibling=sibling, name=name, prompt_id="0:0", draws=draws, is_greedy=False, admitted_s=0.0, version=0)
    made.runs, made.num_sampled, made.num_observed = [(0, num_sampled)], num_sampled, num_observed
    return made


def sample(group_id: int, sibling: int, *, num_sampled: int, num_observed: int = 0, has_gradient: bool = True) -> Sample:
    """What is trained of such a rollout."""
    trajectory = rollout(group_id, sibling, num_sampled=num_sampled, num_observed=num_observed).trajectory()
    return Sample(trajectory=trajectory, reward=0.0, advantages=column(float(has_gradient), 9 + num_observed + num_sampled))


@pytest.mark.parametrize(("world", "expected_s"), [(TrainerWorld(token_s=1.0), 42.0), (TrainerWorld(token_s=0.0, square_s=1.0), 848.0)])
def test_a_prompt_that_siblings_of_a_row_share_is_computed_once(world: TrainerWorld, expected_s: float):
    """Samples of 12, 13 and 11 tokens of one group and one of 24 of another: 12 + (13 - 9) + (11 - 9) + 24 = 42 tokens.

    Squares, less those of the two prompts that are shared: 144 + 169 + 121 + 576 - 2 * 81 = 848.
    """
    row = [sample(0, 0, num_sampled=3), sample(0, 1, num_sampled=4), sample(0, 2, num_sampled=2), sample(1, 0, num_sampled=15)]
    assert seconds_of(row, world) == pytest.approx(expected_s)


def test_replies_of_an_environment_are_nobodys_but_their_episodes():
    """Two siblings of 3 and 4 sampled tokens, to whom an environment said 5 and 6: (9 + 3 + 5) + (4 + 6) = 27 tokens."""
    row = [sample(0, 0, num_sampled=3, num_observed=5), sample(0, 1, num_sampled=4, num_observed=6)]
    assert seconds_of(row, TrainerWorld(token_s=1.0)) == pytest.approx(27.0)


@pytest.mark.parametrize(("num_sampled", "expected_s", "without"), [(153, 176.0, 0.0), (152, 164.5, 23.0), (0, 3.5, 23.0)])
def test_what_has_no_gradient_takes_a_forward_pass_where_there_is_enough_of_it(num_sampled: int, expected_s: float, without: float):
    """Two siblings of 9 + 2 and 9 + 3 tokens have none: 23 of the row's tokens, 14 computed ones, a quarter of the seconds for each.

    Beside a sample of 9 + 153 tokens that is less than an eighth of the row, 185 / 8, which is not split; beside one of 9 + 152 it is not.
    """
    row = [sample(0, 0, num_sampled=2, has_gradient=False), sample(0, 1, num_sampled=3, has_gradient=False)]
    row += [sample(1, 0, num_sampled=num_sampled)] if num_sampled else []
    metrics = metrics_of(row, TrainerWorld(token_s=1.0, forward_part=0.25))
    assert metrics["forward_backward_s"] == pytest.approx(expected_s)
    assert metrics["num_tokens_without_gradient"] == without


def seconds_of(row: list[Sample], world: TrainerWorld) -> float:
    """Return the seconds that a step of one row takes."""
    return metrics_of(row, world)["forward_backward_s"]


def metrics_of(row: list[Sample], world: TrainerWorld) -> dict[str, float]:
    """Return the metrics of a step of one row."""
    events = Events()
    trainer = trainer_of(world, events)
    done: list[dict[str, float]] = []
    trainer.on_done = lambda step, metrics: done.append(metrics)
    trainer.add(0, row)
    trainer.close(0)
    events.run(until=lambda: bool(done), limit_s=1e6)
    return done[0]


def trainer_of(world: TrainerWorld, events: Events) -> Trainer:
    """Return a trainer of one replica and one step."""
    return Trainer(world, SyncWorld(), cores=Cores(events), num_replicas=1, num_steps=1, holds_batches=False, checkpoint_every=9)

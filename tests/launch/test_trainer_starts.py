"""Which trainer a launcher starts: one for each change of its ranks, with the ranks and on the GPUs that it may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import parse, write_run
from pipelinerl.errors import ConfigError
from pipelinerl.launch.gpus import place, place_joined, place_trainer
from pipelinerl.launch.roles import TRAINER, Role, joined_engines, peers_of, roles_of, trainer_of
from pipelinerl.launch.scaling import Wanted, check
from pipelinerl.launch.trainer_starts import END_S, TrainerStarts
from pipelinerl.runtime.membership import Kind, Member, Members, ScaleFolder, StartedBy, State
from pipelinerl.runtime.trainer_ranks import Phase, TrainerRanks
from tests.launch.test_gpus import some, uuid


def settings(**sections: Any) -> Config:
    tree = {"model": {"path": "m"}, "data": {"source": "d"}, "reward": [{"function": "f:g"}], "engine": {"count": 3}}
    return parse(tree | sections, origin="test")


def record(**changed: Any) -> TrainerRanks:
    return TrainerRanks(**({"ranks": 2, "wanted": 2, "before": 1, "configured": 1, "phase": Phase.STARTING, "epoch": 1} | changed))


@pytest.fixture
def given() -> Role:
    return next(role for role in roles_of(settings(), Path("run")) if role.name == TRAINER)


def test_each_change_starts_one_trainer_with_its_ranks(tmp_path: Path, given: Role) -> None:
    folder, starts = ScaleFolder(tmp_path), TrainerStarts(settings(), tmp_path)
    assert starts.role(given, ()) == given
    folder.publish_trainer(record(phase=Phase.SAVING, ranks=1))
    assert not starts.is_due()
    assert starts.role(given, ()).command[-2:] == ("--ranks", "1"), "one that is killed while it saves comes again as it was"
    folder.publish_trainer(record(epoch=2))
    assert starts.is_due()
    grown = starts.role(given, ())
    assert grown.command[2:] == ("trainer.parallel.rendezvous", "--run-folder", str(tmp_path), "--ranks", "2")
    assert not starts.is_due(), "an order is carried out once"
    assert starts.is_on_trial()
    folder.publish_trainer(record(phase=Phase.SETTLED, epoch=2))
    assert not starts.is_on_trial()
    assert starts.role(given, ()).command == grown.command, "one that is killed later comes again in this layout"
    folder.publish_trainer(record(epoch=3, ranks=1, is_back=True))
    shrunk = starts.role(given, ())
    assert shrunk.command[2] == "trainer"
    assert not starts.is_on_trial(), "there is nothing left to fall back to"


def test_a_trainer_that_is_started_again_while_it_is_to_save_ends_for_the_one_of_that_change(tmp_path: Path, given: Role) -> None:
    folder, starts = ScaleFolder(tmp_path), TrainerStarts(settings(), tmp_path)
    starts.role(given, ())
    folder.publish_trainer(record(phase=Phase.SAVING, ranks=1))
    starts.role(given, ())
    folder.publish_trainer(record())
    assert not starts.is_on_trial(), "it is the one before"
    assert starts.is_due()
    starts.role(given, ())
    assert starts.is_on_trial()
    assert not starts.is_due()


def test_another_launcher_of_the_run_starts_what_was_settled_last(tmp_path: Path, given: Role) -> None:
    ScaleFolder(tmp_path).publish_trainer(record(phase=Phase.SETTLED, epoch=4))
    assert TrainerStarts(settings(), tmp_path).role(given, ()).command[-2:] == ("--ranks", "2")
    assert TrainerStarts(settings(trainer={"ranks": 3}), tmp_path).role(given, ()) == given, "other settings begin anew"


def test_a_trainer_has_its_time_to_end_and_one_that_never_started_has_none(tmp_path: Path, given: Role) -> None:
    now = [0.0]
    starts = TrainerStarts(settings(), tmp_path, clock=lambda: now[0])
    starts.role(given, ())
    ScaleFolder(tmp_path).publish_trainer(record())
    assert not starts.is_overdue()
    now[0] = END_S + 1
    assert starts.is_overdue()
    starts.role(given, ())
    ScaleFolder(tmp_path).publish_trainer(record(epoch=2, is_back=True))
    assert starts.is_overdue()


def test_who_starts_it_leaves_word_of_the_change_that_does_not_start(tmp_path: Path, given: Role) -> None:
    starts = TrainerStarts(settings(), tmp_path)
    ScaleFolder(tmp_path).publish_trainer(record(epoch=7))
    starts.role(given, ())
    starts.tell_failed("no room")
    found = ScaleFolder(tmp_path).trainer_failed()
    assert found is not None
    assert (found.epoch, found.reason) == (7, "no room")


def test_a_gpu_of_an_engine_that_has_left_is_dealt_to_the_trainer_and_back(tmp_path: Path) -> None:
    config = settings()
    roles, _ = place(config, roles_of(config, tmp_path), some(4))
    engines, trainer = (next(role for role in roles if role.name == name) for name in ("engines", TRAINER))
    assert trainer.command[-2:] == ("--gpus", uuid(3))
    role = trainer_of(config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 2})}), tmp_path)
    with pytest.raises(ConfigError, match=r"a trainer of 2 ranks needs as many GPUs of this machine, and .* leave 1 of 4"):
        place_trainer(config, role, [engines], some(4), ranks=2)
    grown = place_trainer(config, role, [engines], some(4), ranks=2, gone={(Kind.ENGINES, 2)})
    assert grown.command[-2:] == ("--gpus", f"{uuid(2)},{uuid(3)}")
    joins = joined_engines(tmp_path, [Member(engine_id=2, state=State.JOINING, started_by=StartedBy.LAUNCHER, request_id=1)])
    with pytest.raises(ConfigError, match="every GPU of this machine is taken"):
        place_joined(config, joins, [engines, grown], some(4), gone={(Kind.ENGINES, 2)})
    assert place_joined(config, joins, [engines, trainer], some(4), gone={(Kind.ENGINES, 2)}).command[-2:] == ("--gpus", uuid(2))


def test_keys_are_made_for_the_replicas_that_may_come():
    assert [name for name in peers_of(settings()) if name.startswith("trainer")] == [f"trainer-{number}" for number in range(8)]
    cut = settings(trainer={"ranks": 2, "max_ranks": 6, "parallel": {"tensor": 2}})
    assert [name for name in peers_of(cut) if name.startswith("trainer")] == ["trainer-0", "trainer-1", "trainer-2"]
    adapters = settings(lora={"rank": 4}, trainer={"ranks": 2})
    assert [name for name in peers_of(adapters) if name.startswith("trainer")] == ["trainer-0", "trainer-1"]


@pytest.mark.parametrize(
    ("sections", "ranks", "said"),
    [
        ({"lora": {"rank": 4}}, 2, "keeps its 1 ranks of the trainer: lora.rank is 4"),
        ({"pipeline": {"placement": "colocated"}}, 2, "pipeline.placement"),
        ({}, 9, "trainer=9: expected 1 to 8"),
        ({"trainer": {"ranks": 2, "parallel": {"shard": 2}}}, 3, "parallel.shard = 2 does not divide the 3 replicas"),
    ],
)
def test_ranks_that_the_trainer_cannot_have_are_refused_by_name(tmp_path: Path, sections: dict[str, Any], ranks: int, said: str) -> None:
    write_run(tmp_path, settings(**sections))
    with pytest.raises(ConfigError) as refused:
        check(tmp_path, Wanted(trainer=ranks), drain_s=1.0, started_by=StartedBy.LAUNCHER)
    assert said in str(refused.value)


@pytest.mark.parametrize(("name", "said"), [("roles.json", "dealt to the nodes of a job"), ("script.json", "is a script's")])
def test_jobs_and_scripts_keep_their_trainers_ranks(tmp_path: Path, name: str, said: str) -> None:
    write_run(tmp_path, settings())
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=said):
        check(tmp_path, Wanted(trainer=2), drain_s=1.0, started_by=StartedBy.LAUNCHER)


def test_fewer_ranks_at_most_than_at_first_and_a_bound_without_effect_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.max_ranks is 1 but trainer\.ranks is 2"):
        settings(trainer={"ranks": 2, "max_ranks": 1})
    with pytest.raises(ConfigError, match=r"trainer\.max_ranks is 4, and no rank can join 1: lora\.rank is 4"):
        settings(trainer={"max_ranks": 4}, lora={"rank": 4})


def test_engines_that_have_left_are_known_by_the_orchestrators_record(tmp_path: Path, given: Role) -> None:
    from pipelinerl.launch.trainer_starts import gone_engines

    assert gone_engines(tmp_path) == frozenset()
    states = (State.LIVE, State.LEFT, State.LOST, State.DRAINING)
    members = tuple(Member(engine_id=number, state=state, started_by=StartedBy.RUN) for number, state in enumerate(states))
    ScaleFolder(tmp_path).publish(Members(members=members, num_wanted=1, count=4))
    assert gone_engines(tmp_path) == {(Kind.ENGINES, 1), (Kind.ENGINES, 2)}

"""Which engines a live run has, on numbers worked by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from orchestrator.rules.membership import Membership, membership_of, prm_membership_of, reward_memberships_of
from orchestrator.rules.weight_transport import why_unreached
from pipelinerl.config.file import parse
from pipelinerl.config.scoring import RewardSection
from pipelinerl.errors import ConfigError
from pipelinerl.messages import EngineReady
from pipelinerl.runtime.membership import Gone, Kind, Members, ScaleFolder, ScaleRequest, StartedBy, State, is_own
from tests.sim.run import config


def request(number: int, engines: int, *, started_by: StartedBy = StartedBy.LAUNCHER) -> ScaleRequest:
    return ScaleRequest(request_id=number, engines=engines, drain_s=1.0, started_by=started_by)


def live(count: int, *, num_here: int | None = None) -> Membership:
    """A run whose engines have all announced themselves."""
    found = Membership(count=count, most=8, num_here=num_here)
    for number in range(count):
        found.joined(number)
    found.take_news()
    return found


def states(membership: Membership) -> str:
    """`LLJ.`: the first letter of each state, `.` of none."""
    known = [membership.state(number) for number in range(6)]
    letters = {State.JOINING: "J", State.LIVE: "L", State.DRAINING: "D", State.LEFT: "x", State.LOST: "?", None: "."}
    return "".join(letters[state] for state in known).rstrip(".")


def test_the_lowest_free_ids_join_and_the_highest_leave() -> None:
    engines = live(2)
    assert engines.scale(request(1, 4)) == []
    assert states(engines) == "LLJJ"
    assert (engines.present(), engines.awaited(), engines.num_serving()) == ({0, 1, 2, 3}, {0, 1}, 2)
    engines.joined(2)
    assert engines.num_serving() == 3, "a spare counts once it is live"
    assert engines.scale(request(2, 1)) == [2, 1], "3 has not come, and need not drain"
    assert states(engines) == "LDDx"
    engines.left(2, "done")
    assert engines.scale(request(3, 3)) == []
    assert states(engines) == "LLJx", "one that drains stays, and the lowest free id comes"


def test_a_request_is_answered_once() -> None:
    engines = live(2)
    assert engines.scale(request(2, 1)) == [1]
    for repeated in (request(2, 4), request(1, 5)):
        assert engines.scale(repeated) == [], "that number was answered"
    assert states(engines) == "LD"


@pytest.mark.parametrize("wanted", [0, 9])
def test_what_cannot_be_had_is_refused_and_changes_nothing(wanted: int) -> None:
    engines = live(2)
    assert engines.scale(request(1, wanted)) == []
    assert engines.record().refused.startswith(f"engines={wanted}: expected 1 to 8")
    assert (states(engines), engines.record().request_id, engines.num_wanted) == ("LL", 1, 2)


def test_a_spare_may_be_lost_while_another_is_live_and_comes_again_unless_one_took_its_place() -> None:
    engines = live(2)
    assert not engines.may_be_lost(1), "the run began with it, and somebody starts it again"
    engines.scale(request(1, 3))
    engines.joined(2)
    assert engines.may_be_lost(2)
    engines.lost(2, "silent")
    assert (states(engines), engines.may_join(2)) == ("LL?", True)
    engines.scale(request(2, 3))
    assert states(engines) == "LL?J", "another one, as the lost one may still be somewhere"
    assert not engines.may_join(2)
    alone = live(1, num_here=0)
    assert not alone.may_be_lost(0), "the last one"


def test_a_killed_engine_is_awaited_again_and_one_that_was_leaving_is_not() -> None:
    engines = live(3)
    engines.scale(request(1, 2))
    engines.ended(1)
    engines.ended(2)
    assert states(engines) == "LJx"
    assert engines.awaited() == {0, 1}
    assert not engines.may_join(2)


def test_the_orchestrator_that_follows_goes_on_with_the_same_engines() -> None:
    engines = live(3)
    engines.scale(request(5, 5))
    engines.joined(3)
    engines.lost(4, "gone")
    engines.scale(request(6, 3))
    assert states(engines) == "LLLD?"
    after = Membership(count=3, most=8)
    after.restore(engines.record())
    assert states(after) == "JJJx?"
    assert after.scale(request(6, 1)) == [], "it was answered before"
    other = Membership(count=2, most=8)
    other.restore(engines.record())
    assert states(other) == "JJ", "the settings name another number since"


def test_a_run_that_keeps_its_engines_says_why() -> None:
    for sections, why in (
        ({"weights": {"transport": "sharded"}, "trainer": {"ranks": 2, "parallel": {"shard": 2}}}, "pass policies along"),
        ({"pipeline": {"placement": "colocated"}, "engine": {"count": 1}}, "the trainer's devices"),
    ):
        fixed = membership_of(config(**sections), earlier=None)
        assert fixed.scale(request(1, 2)) == []
        assert why in fixed.record().refused


def test_a_number_that_nothing_could_reach_is_refused_in_the_settings() -> None:
    tree = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
    with pytest.raises(ConfigError, match=r"engine\.max_count is 2 but engine\.count is 3"):
        parse(tree | {"engine": {"count": 3, "max_count": 2}}, origin="test")
    with pytest.raises(ConfigError, match=r"engine\.max_count is 4, and no engine can join 1: pipeline\.placement"):
        parse(tree | {"engine": {"max_count": 4}, "pipeline": {"placement": "colocated"}}, origin="test")
    assert parse(tree | {"engine": {"count": 5}}, origin="test").engine.most == 10


def test_an_engine_that_no_policy_could_reach_is_told_so() -> None:
    ready = EngineReady(engine_id=2, process_id=1, max_model_tokens=1, max_running=1, tensors=(), machine="there")
    assert "does not reach another machine" in (why_unreached(ready, "shared_memory", trainer="here") or "")
    assert why_unreached(ready, "shared_memory", trainer="there") is None
    assert why_unreached(ready, "gloo", trainer="here") is None
    assert "no CUDA device" in (why_unreached(ready, "nccl", trainer="here") or "")


def test_a_damaged_file_of_the_folder_is_named(tmp_path: Path) -> None:
    folder = ScaleFolder(tmp_path)
    assert (folder.asked(after=0), folder.members(), folder.take_gone()) == (None, None, [])
    gone = [Gone(kind=kind, engine_id=3, request_id=request_id, reason="no GPU") for kind in ("engines", "prm") for request_id in (1, 2)]
    for one in gone:
        folder.tell_gone(one)
    assert (folder.take_gone(), folder.take_gone()) == (gone, [])
    for number in (1, 2, 10):
        folder.ask(request(number, 2))
    assert [folder.asked(after=after) for after in (0, 2, 10)] == [request(1, 2), request(10, 2), None]
    assert not list((tmp_path / "scale").iterdir()), "what was answered is removed"
    (tmp_path / "scale" / "request-11.json").write_text("{")
    folder.ask(request(12, 3))
    with pytest.raises(ConfigError, match=r"request-11\.json is not what this program writes there"):
        folder.asked(after=10)
    assert folder.asked(after=10) == request(12, 3), "it holds up no other"


def short(*, started_by: StartedBy = StartedBy.JOB) -> Membership:
    """A run of two engines that a spare has joined, which is lost."""
    engines = live(2)
    engines.scale(request(1, 3, started_by=started_by))
    engines.joined(2)
    engines.lost(2, "its machine was taken")
    return engines


def test_a_lost_spare_is_given_up_its_place_stays_open_and_it_is_taken_back() -> None:
    engines = short()
    assert [one.engine_id for one in engines.absent()] == [2]
    engines.give_up_absent("it has not come within 60 s")
    assert (engines.num_wanted, engines.num_given_up, engines.missing(), engines.absent()) == (3, 1, [], [])
    engines.scale(request(2, 2), keeps_places=True)
    assert (states(engines), engines.num_wanted) == ("LD?", 2), "one leaves, though two were wanted and two are there"
    engines.left(1, "done")
    assert engines.may_join(2)
    engines.joined(2)
    assert (states(engines), engines.num_given_up, engines.missing()) == ("LxL", 0, [])


def test_who_asks_for_a_number_has_others_take_the_place_of_who_is_given_up() -> None:
    engines = short()
    engines.give_up_absent("")
    engines.scale(request(2, 3))
    assert (states(engines), engines.num_given_up) == ("LL?J", 0)
    engines.joined(3)
    assert not engines.may_join(2)


def test_a_spare_that_never_comes_is_given_up_and_one_that_the_run_awaits_is_not() -> None:
    engines = live(2)
    engines.scale(request(1, 3))
    engines.give_up_absent("it has not come within 60 s")
    assert (states(engines), engines.num_given_up, engines.missing()) == ("LL?", 1, [])
    awaited = live(2)
    awaited.ended(1)
    assert (states(awaited), awaited.absent()) == ("LJ", [])
    both = short()
    both.ended(1)
    assert both.absent() == [], "its launcher starts it again, and then it is seen what there is"


def test_who_follows_knows_who_was_given_up() -> None:
    engines = short()
    engines.give_up_absent("")
    follows = Membership(count=2, most=8)
    follows.restore(engines.record())
    assert (follows.num_wanted, follows.num_given_up, follows.goes_on) == (3, 1, True)
    assert {one.engine_id for one in follows.missing()} == {0, 1}, "everybody has to announce themselves anew"
    follows.joined(2)
    assert follows.num_given_up == 0
    other = Membership(count=4, most=8)
    other.restore(engines.record())
    assert (other.num_wanted, other.num_given_up, other.goes_on) == (4, 0, False)


def test_the_process_reward_models_engines_are_counted_apart_from_the_first_scorer_on() -> None:
    prm = prm_membership_of(config(prm={"path": "p", "count": 2}), earlier=None)
    for number in (1, 2):
        prm.joined(number)
    assert (prm.names, prm.present()) == (range(1, 9), {1, 2})
    assert prm.scale(request(1, 1)) == [], "engines=1 is about others"
    assert prm.present() == {1, 2}
    assert prm.scale(ScaleRequest(request_id=2, engines=5, prm=3)) == []
    assert prm.state(3) is State.JOINING
    assert not prm.may_be_lost(1), "the run began with it"
    prm.joined(3)
    assert prm.may_be_lost(3)
    assert prm.scale(ScaleRequest(request_id=3, prm=1)) == [3, 2]
    assert [(one.engine_id, one.state, one.reason) for one in prm.record().members] == [
        (1, State.LIVE, ""),
        (2, State.DRAINING, "prm=1 was asked for"),
        (3, State.DRAINING, "prm=1 was asked for"),
    ]
    assert prm.scale(ScaleRequest(request_id=4, prm=0)) == []
    assert prm.record().refused.startswith("prm=0: expected 1 to 8 (prm.count)")


def test_the_processes_of_each_reward_model_are_counted_apart_by_the_key_of_its_section() -> None:
    found = config().model_copy(update={"reward": rewards(("f.py:f", None), ("orm", None), ("other", 5))})
    orm, other = reward_memberships_of(found, earlier=None)
    assert [(one.kind, one.names, one.present()) for one in (orm, other)] == [
        ("reward.1", range(8), {0}),
        ("reward.2", range(10), {0, 1, 2, 3, 4}),
    ]
    for one in (orm, other):
        one.joined(0)
        assert one.scale(ScaleRequest(request_id=1, engines=4, rewards={"reward.1": 2})) == []
    assert (orm.num_wanted, other.num_wanted) == (2, 5)
    assert not orm.may_be_lost(0), "the run began with it"
    orm.joined(1)
    assert orm.scale(ScaleRequest(request_id=2, rewards={"reward.1": 1})) == [1]
    why = orm.why_not(9)
    assert why is not None
    assert why.startswith("reward.1=9: expected 1 to 8 (reward.1.concurrency). More need a run")
    members = Members(members=(), num_wanted=2, count=2, rewards={"reward.1": orm.record(), "reward.2": other.record()})
    follows, _ = reward_memberships_of(found, earlier=members)
    assert [(one.engine_id, one.state) for one in follows.record().members] == [(0, State.JOINING), (1, State.LEFT)]


def rewards(*given: tuple[str, int | None]) -> tuple[RewardSection, ...]:
    keys = ({"function" if ":" in name else "model": name, "concurrency": count} for name, count in given)
    return tuple(RewardSection.model_validate(one) for one in keys)


def test_engines_of_both_kinds_are_told_in_one_file(tmp_path: Path) -> None:
    engines, folder = live(2), ScaleFolder(tmp_path)
    engines.scale(request(1, 1))
    prm = prm_membership_of(config(prm={"path": "p"}), earlier=None)
    folder.publish(msgspec.structs.replace(engines.record(), prm=prm.record()))
    assert folder.with_state(State.DRAINING, State.JOINING) == {(Kind.ENGINES, 1), (Kind.PRM, 1)}
    assert [is_own(tmp_path, 1, StartedBy.RUN, kind) for kind in Kind] == [False, True]

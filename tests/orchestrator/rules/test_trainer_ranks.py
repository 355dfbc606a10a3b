"""What a change of the trainer's ranks goes through, and what it falls back to."""

from __future__ import annotations

from orchestrator.rules.trainer_ranks import TrainerChange
from pipelinerl.runtime.trainer_ranks import Phase, TrainerRanks


def change(earlier: TrainerRanks | None = None, *, ranks: int = 2) -> TrainerChange:
    return TrainerChange(ranks=ranks, most=8, per_replica=2, earlier=earlier)


def test_a_trainer_has_its_old_ranks_until_it_has_saved_and_then_those_that_were_asked_for():
    one = change()
    one.begin(4)
    assert (one.record.phase, one.record.ranks, one.record.wanted, one.num_replicas) == (Phase.SAVING, 2, 4, 1)
    one.saved()
    assert (one.record.phase, one.record.ranks, one.record.before, one.num_replicas) == (Phase.STARTING, 4, 2, 2)
    one.done()
    assert (one.record.phase, one.record.ranks, one.record.epoch) == (Phase.SETTLED, 4, 1)


def test_a_trainer_that_does_not_save_goes_on_as_it_was():
    one = change()
    one.begin(4)
    assert one.give_up("the disk is full")
    assert (one.record.phase, one.record.ranks, one.record.wanted, one.record.epoch) == (Phase.SETTLED, 2, 2, 1)
    assert one.record.reason == "the disk is full"


def test_a_layout_that_does_not_start_is_taken_back_as_a_change_of_its_own_and_once_only():
    one = change()
    one.begin(4)
    one.saved()
    assert one.give_up("no room")
    assert (one.record.phase, one.record.ranks, one.record.epoch, one.record.is_back) == (Phase.STARTING, 2, 2, True)
    assert not one.give_up("that one neither"), "there is nothing left to fall back to"
    one.done()
    one.begin(6)
    assert (one.record.epoch, one.record.is_back, one.record.reason) == (3, False, "")


def test_one_change_at_a_time_within_the_bounds():
    one = change()
    assert one.why_not(8) is None
    assert one.why_not(9) == (
        "trainer=9: expected 1 to 8 (trainer.max_ranks). More need a run that was started, or resumed, with a larger trainer.max_ranks"
    )
    assert "expected 1 to 8" in (one.why_not(0) or "")
    one.begin(4)
    assert one.why_not(6) == "trainer=6: the trainer changes to 4 ranks; ask again once it has"


def test_another_orchestrator_drops_what_was_not_saved_and_awaits_what_was():
    one = change()
    one.begin(4)
    dropped = change(one.record)
    assert (dropped.record.phase, dropped.record.ranks, dropped.record.epoch) == (Phase.SETTLED, 2, 1)
    assert "another orchestrator took the place" in dropped.record.reason
    one.saved()
    assert change(one.record).record == one.record


def test_settings_with_another_number_begin_anew_but_for_the_epoch():
    one = change()
    one.begin(4)
    one.saved()
    one.done()
    anew = change(one.record, ranks=6)
    assert (anew.record.ranks, anew.record.phase, anew.record.epoch) == (6, Phase.SETTLED, 1)
    assert change(one.record).record.ranks == 4


def test_engines_of_before_are_to_come_back_where_a_change_is_given_up_and_nobody_has_asked_since():
    saving, starting = change(), change()
    for one in (saving, starting):
        one.begin(4, engines_before={"engines": 3, "prm": 1})
        assert one.engines_back == {}, "while it is under way they are not"
    assert saving.give_up("the disk is full")
    assert saving.engines_back == {"engines": 3, "prm": 1}
    assert saving.keep_engines(["engines"])
    assert saving.engines_back == {"prm": 1}, "somebody has asked for other engines, and of the model for none"
    assert saving.keep_engines(["engines", "prm"])
    assert not saving.keep_engines(["prm"])
    assert saving.engines_back == {}
    starting.saved()
    starting.give_up("no room")
    assert starting.engines_back == {}, "the trainer of before is still to start"
    starting.done()
    assert starting.engines_back == {"engines": 3, "prm": 1}
    carried_out = change()
    carried_out.begin(4, engines_before={"engines": 3, "prm": 1})
    carried_out.saved()
    carried_out.done()
    assert carried_out.engines_back == {}


def test_engines_of_before_come_back_too_where_another_orchestrator_gives_the_change_up():
    one = change()
    one.begin(4, engines_before={"engines": 3, "prm": 1})
    assert change(one.record).engines_back == {"engines": 3, "prm": 1}
    one.keep_engines(["engines", "prm"])
    assert change(one.record).engines_back == {}, "somebody has asked for another number"

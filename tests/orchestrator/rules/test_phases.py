"""Who has the devices, and when the trainer may begin; every case by hand."""

from orchestrator.rules.phases import Phase, Phases


def change(phases: Phases, *, num_closed: int, published: int | None, is_pinned: bool = False) -> Phase | None:
    return phases.next_phase(num_closed=num_closed, published=published, is_pinned=is_pinned)


def test_the_trainer_has_the_devices_while_a_closed_step_is_not_in_the_newest_policy():
    phases = Phases()
    assert phases.phase is Phase.GENERATION
    assert change(phases, num_closed=3, published=3) is None
    assert change(phases, num_closed=4, published=3) is Phase.TRAINING
    assert change(phases, num_closed=5, published=4) is None, "another step was closed meanwhile"
    assert change(phases, num_closed=5, published=5) is Phase.GENERATION


def test_a_trainer_that_starts_has_the_devices_until_it_is_where_the_ledger_is():
    phases = Phases()
    assert change(phases, num_closed=4, published=None) is Phase.TRAINING
    assert change(phases, num_closed=4, published=2) is None, "its checkpoint is of version 2: it trains steps 2 and 3 again"
    assert change(phases, num_closed=4, published=4) is Phase.GENERATION


def test_the_trainer_waits_for_every_engine_that_is_awake():
    phases = Phases()
    for engine_id in (0, 1):
        phases.woke(engine_id)
    assert change(phases, num_closed=1, published=0) is Phase.TRAINING
    assert not phases.may_train
    phases.fell_asleep(0)
    assert not phases.may_train
    phases.fell_asleep(1)
    assert phases.may_train
    phases.woke(1)
    assert not phases.may_train, "its process was replaced"
    phases.fell_asleep(1)
    assert change(phases, num_closed=1, published=1) is Phase.GENERATION
    assert not phases.may_train, "all sleep still, and the devices are theirs"
    for engine_id in (0, 1):
        phases.woke(engine_id)
    assert change(phases, num_closed=2, published=1) is Phase.TRAINING
    assert not phases.may_train


def test_an_engine_that_must_keep_its_policy_holds_up_the_training_phase_and_not_its_own():
    phases = Phases()
    assert change(phases, num_closed=1, published=0, is_pinned=True) is None
    assert change(phases, num_closed=1, published=0) is Phase.TRAINING
    assert change(phases, num_closed=1, published=1, is_pinned=True) is Phase.GENERATION


def test_a_phase_ends_when_the_next_step_is_the_last_for_what_sleeps_and_the_next_begins_when_that_is_closed():
    phases = Phases(bound=3)

    def change(num_closed: int, published: int) -> Phase | None:
        return phases.next_phase(num_closed=num_closed, published=published, is_pinned=False, num_closable=published + 4)

    assert change(1, 0) is Phase.TRAINING
    assert change(3, 0) is None, "nothing is trained yet"
    assert [step for step in range(4) if phases.has_turn(step)] == [0], "policy 1 may end the phase, and is asked for after its rows"
    assert change(2, 1) is None, "tokens of policy 0 fit into step 2 and step 3"
    assert phases.has_turn(1)
    assert change(3, 1) is None, "step 1 is being trained"
    assert change(3, 2) is Phase.GENERATION, "and into step 3 alone"
    assert change(3, 2) is None, "step 2 waits for its turn"
    assert change(4, 2) is Phase.TRAINING
    assert phases.has_turn(2)


def test_the_trainer_goes_on_where_engines_could_close_no_step_with_their_turn():
    phases = Phases(bound=1)
    assert phases.next_phase(num_closed=1, published=0, is_pinned=False, num_closable=2) is Phase.TRAINING
    assert not phases.has_turn(1)
    assert phases.next_phase(num_closed=2, published=1, is_pinned=False, num_closable=2) is None, "the last step of the run"
    assert phases.has_turn(1)


def test_engines_that_were_given_a_turn_lose_it_to_a_trainer_that_starts():
    phases = Phases(bound=1)
    assert phases.next_phase(num_closed=1, published=0, is_pinned=False, num_closable=9) is Phase.TRAINING
    assert phases.next_phase(num_closed=2, published=1, is_pinned=False, num_closable=9) is Phase.GENERATION
    assert phases.next_phase(num_closed=2, published=None, is_pinned=False) is Phase.TRAINING
    assert phases.has_turn(0), "whatever it begins with"
    assert phases.next_phase(num_closed=2, published=0, is_pinned=False, num_closable=9) is None, "it has rows of step 0 maybe"
    assert phases.next_phase(num_closed=2, published=1, is_pinned=False, num_closable=9) is Phase.GENERATION


def test_a_trainer_that_starts_in_its_phase_is_not_interrupted_in_the_step_it_begins_with():
    phases = Phases(bound=1)
    assert phases.next_phase(num_closed=1, published=0, is_pinned=False, num_closable=9) is Phase.TRAINING
    assert phases.next_phase(num_closed=3, published=None, is_pinned=False) is None
    assert phases.next_phase(num_closed=3, published=1, is_pinned=False, num_closable=9) is None, (
        "its rows may be out before policy 1 is heard of"
    )
    assert phases.next_phase(num_closed=3, published=2, is_pinned=False, num_closable=9) is Phase.GENERATION

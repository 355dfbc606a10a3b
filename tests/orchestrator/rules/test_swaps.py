"""Who stages what, who is fenced, and which buffers are free; every case by hand."""

from orchestrator.rules.swaps import MAX_REFILLS, MAX_UNORDERED, Policy, Swaps


def policy(version: int, *, rollback_epoch: int = 0) -> Policy:
    return Policy(age=(rollback_epoch, version), buffer=f"buffer-{rollback_epoch}.{version}", digest=f"d{version}")


def published(swaps: Swaps, *versions: int, rollback_epoch: int = 0, engines: tuple[int, ...] = (0, 1)) -> list[tuple[int, int]]:
    """Publish versions; the (engine, version) orders that follow."""
    orders = []
    for version in versions:
        swaps.published(policy(version, rollback_epoch=rollback_epoch))
        orders += [(engine, order.age[1]) for engine in engines if (order := swaps.next_order(engine)) is not None]
    return orders


def test_an_engine_has_one_order_at_a_time_and_then_gets_the_newest():
    swaps = Swaps()
    assert published(swaps, 1, 2, 3) == [(0, 1), (1, 1)]
    assert swaps.committed(0, (0, 1))
    order = swaps.next_order(0)
    assert order is not None
    assert order.age == (0, 3), "policy 2 was overtaken"
    assert swaps.next_order(0) is None
    assert swaps.next_order(1) is None, "its first order is still open"


def test_a_buffer_is_free_once_no_engine_serves_from_it_or_fetches_it():
    swaps = Swaps()
    published(swaps, 1)
    for engine in (0, 1):
        swaps.committed(engine, (0, 1))
    published(swaps, 2)
    assert swaps.take_free_buffers() == []
    swaps.committed(0, (0, 2))
    assert swaps.take_free_buffers() == [], "engine 1 serves from buffer 1"
    published(swaps, 3, 4)
    assert swaps.take_free_buffers() == [], "engine 0 fetches 3, engine 1 serves 1 and fetches 2, and 4 is the newest"
    swaps.committed(1, (0, 2))
    assert swaps.take_free_buffers() == ["buffer-0.1"]
    swaps.next_order(1)
    assert swaps.take_free_buffers() == []
    swaps.committed(1, (0, 4))
    swaps.committed(0, (0, 3))
    assert swaps.take_free_buffers() == ["buffer-0.2"]
    swaps.next_order(0)
    swaps.committed(0, (0, 4))
    assert swaps.take_free_buffers() == ["buffer-0.3"], "each once, and never the newest"


def test_what_nobody_was_told_to_fetch_is_free_as_soon_as_it_is_overtaken():
    swaps = Swaps()
    published(swaps, 1, 2, 3)
    assert swaps.take_free_buffers() == ["buffer-0.2"]


def test_repeated_and_older_news_change_nothing():
    swaps = Swaps()
    published(swaps, 1, 2)
    swaps.published(policy(1))
    assert swaps.newest == policy(2)
    assert swaps.committed(0, (0, 1))
    assert not swaps.committed(0, (0, 1))
    assert swaps[0].held == (0, 1)
    swaps.next_order(0)
    assert swaps.committed(0, (0, 2))
    assert not swaps.committed(0, (0, 1)), "a commit that arrives late"
    assert swaps[0].held == (0, 2)
    assert not swaps.refused(0, (0, 1), "a refusal that arrives late")
    assert not swaps[0].fault


def test_a_refused_policy_is_ordered_again_a_few_times_and_the_next_one_is_a_new_chance():
    swaps = Swaps()
    published(swaps, 1)
    for _ in range(MAX_REFILLS):
        assert swaps.refused(0, (0, 1), "no")
        assert not swaps[0].is_hopeless
        assert swaps.next_order(0) == policy(1)
    swaps.refused(0, (0, 1), "no")
    assert swaps.next_order(0) is None
    assert (swaps[0].fault, swaps[0].is_hopeless) == ("refused policy 1: no", True)
    assert not swaps[1].fault
    assert published(swaps, 2) == [(0, 2)]
    assert swaps[0].fault, "fenced until it holds a policy again"
    assert swaps.committed(0, (0, 2))
    assert not swaps[0].fault


def test_an_engine_whose_refused_policy_was_overtaken_gets_the_newest():
    swaps = Swaps()
    published(swaps, 1, 2)
    swaps.refused(0, (0, 1), "no")
    assert swaps.next_order(0) == policy(2)
    assert swaps[0].num_refusals == 0


def test_a_late_engine_is_fenced_until_it_answers():
    swaps = Swaps()
    published(swaps, 1)
    assert swaps.late(0, (0, 1), "waited 60 s")
    assert swaps[0].is_hopeless
    assert published(swaps, 2) == [], "both orders are open"
    assert swaps.take_free_buffers() == [], "it may be reading buffer 1 to this day"
    assert swaps.committed(0, (0, 1))
    assert not swaps[0].fault
    assert not swaps.late(0, (0, 1), "its deadline comes after its answer")
    assert not swaps[0].fault


def test_a_rollback_is_a_later_lineage_and_orders_of_the_earlier_one_are_no_news():
    swaps = Swaps()
    published(swaps, 1, 2, engines=(0,))
    swaps.committed(0, (0, 1))
    assert published(swaps, 1, rollback_epoch=1, engines=(0,)) == [(0, 1)]
    swaps.published(policy(3))
    assert swaps.newest == policy(1, rollback_epoch=1)
    assert not swaps.committed(0, (0, 1))
    assert swaps.committed(0, (1, 1))
    assert swaps.take_free_buffers() == ["buffer-0.1", "buffer-0.2", "buffer-0.3"]


def test_what_every_engine_holds_is_the_oldest_and_unknown_while_one_needs_a_whole_policy():
    swaps = Swaps()
    assert swaps.held_by_all() is None
    published(swaps, 1)
    swaps.committed(0, (0, 1))
    assert swaps.held_by_all() == 0
    swaps.committed(1, (0, 1))
    published(swaps, 2)
    swaps.committed(0, (0, 2))
    assert swaps.held_by_all() == 1
    swaps.refused(1, (0, 2), "no")
    assert swaps.held_by_all() is None
    swaps.next_order(1)
    swaps.committed(1, (0, 2))
    assert swaps.held_by_all() == 2
    published(swaps, 1, rollback_epoch=1)
    assert swaps.held_by_all() is None, "of the earlier rollback epoch"
    for engine in (0, 1):
        swaps.committed(engine, (1, 1))
    assert swaps.held_by_all() == 1


def test_a_replaced_engine_starts_over_and_lets_go_of_its_predecessors_buffers():
    swaps = Swaps()
    published(swaps, 1)
    for engine in (0, 1):
        swaps.committed(engine, (0, 1))
    published(swaps, 2)
    swaps.committed(0, (0, 2))
    swaps.joined(1)
    assert swaps.held_by_all() == 0
    assert swaps.next_order(1) == policy(2)
    assert swaps.take_free_buffers() == ["buffer-0.1"]


def test_an_engine_may_refuse_a_few_policies_that_nobody_here_told_it_of_and_any_that_it_was_told_of():
    swaps = Swaps()
    swaps.joined(0)
    assert all(swaps.may_refuse(0, (0, 1)) for _ in range(MAX_UNORDERED))
    assert not swaps.may_refuse(0, (0, 1))
    swaps.joined(0)
    assert swaps.may_refuse(0, (0, 1)), "another process has its own count"
    swaps.published(Policy(age=(0, 2), buffer="b", digest=""))
    assert swaps.next_order(0) is not None
    assert all(swaps.may_refuse(0, (0, 2)) for _ in range(2 * MAX_UNORDERED))


def test_a_staged_policy_is_news_once():
    swaps = Swaps()
    assert [swaps.staged(0, age) for age in ((0, 1), (0, 1), (0, 2), (0, 2))] == [True, False, True, False]


def test_an_engine_that_is_asleep_holds_nothing_and_takes_any_policy_even_one_that_it_had():
    swaps = Swaps()
    published(swaps, 1, engines=(0,))
    assert swaps.committed(0, (0, 1))
    swaps.fell_asleep(0)
    assert swaps.is_asleep(0)
    assert swaps.held_by_all() is None
    assert not swaps.committed(0, (0, 1)), "said before it fell asleep"
    assert swaps.is_asleep(0)
    order = swaps.next_order(0)
    assert order is not None
    assert order.age == (0, 1)
    assert swaps.committed(0, (0, 1))
    assert not swaps.is_asleep(0)


def test_an_engine_that_is_asleep_is_woken_for_an_evaluation_before_it_keeps_its_policy():
    swaps = Swaps()
    published(swaps, 1, engines=())
    swaps.fell_asleep(0)
    swaps.pin(0, is_pinned=True)
    assert swaps.next_order(0) is not None
    swaps.committed(0, (0, 1))
    assert published(swaps, 2, engines=(0,)) == []


def test_older_policies_that_are_told_of_after_a_new_one_give_their_buffers_back_once():
    """A trainer that outlives its orchestrator may publish before it tells the next one what it still has."""
    swaps = Swaps()
    swaps.joined(0, (0, 2))
    for version in (3, 1, 2):
        swaps.published(policy(version))
    order = swaps.next_order(0)
    assert order is not None
    assert order.age == (0, 3), "an older one is no news to engines"
    assert swaps.take_free_buffers() == ["buffer-0.1"], "the engine serves from 2"
    swaps.committed(0, (0, 3))
    assert swaps.take_free_buffers() == ["buffer-0.2"]
    for version in (1, 2, 3):
        swaps.published(policy(version))
    assert swaps.take_free_buffers() == [], "what was handed back may hold a newer policy by now"


def test_a_buffer_that_holds_every_policy_in_turn_is_never_handed_back():
    swaps = Swaps()
    for version in (1, 2, 3):
        swaps.published(Policy(age=(0, version), buffer="in place", digest=f"d{version}"))
        swaps.next_order(0)
        swaps.committed(0, (0, version))
        assert swaps.take_free_buffers() == []


def test_a_copy_is_handed_back_by_the_engines_that_read_copies_alone():
    swaps = Swaps(reads_copies=lambda engine_id: engine_id == 1)

    def publish(version: int) -> None:
        swaps.published(Policy(age=(0, version), buffer="in place", digest=f"d{version}", copy=f"copy-{version}"))

    publish(1)
    orders = {engine: swaps.next_order(engine) for engine in (0, 1)}
    assert {engine: swaps.buffer_of(order, engine) for engine, order in orders.items() if order} == {0: "in place", 1: "copy-1"}
    swaps.committed(0, (0, 1))
    publish(2)
    assert swaps.take_free_buffers() == [], "engine 1 fetches copy 1 still"
    swaps.committed(1, (0, 1))
    assert swaps.next_order(1) is not None
    assert swaps.committed(1, (0, 2))
    assert swaps.take_free_buffers() == ["copy-1"], "engine 0 holds policy 1, and reads it where it is trained"
    swaps.forget_buffers()
    swaps.left(1)
    assert swaps.take_free_buffers() == [], "they are gone with their trainer"

"""The order in which rollouts go to engines, and to which, on numbers worked by hand."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from orchestrator.rules.dispatch import Dispatch, Serving, dispatch_of
from orchestrator.rules.lengths import Lengths
from tests.orchestrator.simulate.worlds import config


def dispatch(*, group_size: int = 2, groups_per_step: int = 2, max_tokens: int = 1000, **parts: bool) -> Dispatch[str]:
    chosen = {"longest_first": False, "least_loaded": False, "kv_admission": False} | parts
    lengths = Lengths(group_size=group_size, max_tokens=max_tokens)
    return Dispatch(**chosen, lengths=lengths, groups_per_step=groups_per_step, group_size=group_size)


def add(it: Dispatch[str], group_id: int, *, num: int = 2, num_prompt: int = 10, version: int = 0) -> None:
    it.add(group_id, [f"{group_id}/{sibling}" for sibling in range(num)], num_prompt=num_prompt, version=version)


class Engines:
    """Counts what is outstanding, as the orchestrator does."""

    def __init__(self, it: Dispatch[str], *, num: int = 1, versions: tuple[int, ...] = ()) -> None:
        self.it, self.versions = it, versions or (0,) * num
        self.outstanding = [0] * len(self.versions)
        self.where: dict[str, int] = {}

    def send(self, *, max_running: int = 100, num_prompt: int = 10) -> str | None:
        serving = [
            Serving(engine_id=number, version=version, num_outstanding=self.outstanding[number])
            for number, version in enumerate(self.versions)
        ]
        found = self.it.next(serving, max_running=max_running)
        if found is None:
            return None
        name, engine_id = found
        self.outstanding[engine_id] += 1
        self.where[name] = engine_id
        self.it.sent(name, group_id=int(name.split("/")[0]), num_prompt=num_prompt, engine_id=engine_id)
        return name

    def end(self, name: str, num_tokens: int | None) -> None:
        self.outstanding[self.where[name]] -= 1
        self.it.ended(name, engine_id=self.where[name], num_tokens=num_tokens)

    def send_all(self, **options: Any) -> list[str]:
        return [name for name in iter(lambda: self.send(**options), None) if name]


def test_probes_go_first_then_the_siblings_of_the_longest():
    it = dispatch(longest_first=True, groups_per_step=3)
    engines = Engines(it)
    for group_id in range(3):
        add(it, group_id, num=3)
    probes = [engines.send() for _ in range(3)]
    assert probes == ["0/0", "1/0", "2/0"]
    for name, num_tokens in zip(probes, (5, 80, 30), strict=True):
        engines.end(str(name), num_tokens)
    assert engines.send_all() == ["1/1", "1/2", "2/1", "2/2", "0/1", "0/2"]


def test_a_group_whose_probe_still_runs_is_expected_to_be_as_long_as_any():
    """Ended: 5 and 80, mean 42.5. With k = 1 group 0 is expected at 23.75, group 1 at 61.25 and
    group 2, of which nothing is known, at 42.5.
    """
    it = dispatch(longest_first=True, groups_per_step=3)
    engines = Engines(it)
    for group_id in range(3):
        add(it, group_id)
    for _ in range(3):
        engines.send()
    engines.end("0/0", 5)
    engines.end("1/0", 80)
    assert engines.send() == "1/1"


def test_no_rollout_of_an_earlier_step_waits_for_a_later_one():
    it = dispatch(longest_first=True, groups_per_step=1)
    engines = Engines(it)
    add(it, 0, num=3)
    add(it, 1, num=3)
    assert engines.send() == "0/0"
    engines.end("0/0", 1)
    assert engines.send_all() == ["0/1", "0/2", "1/0", "1/1", "1/2"]


def test_engines_get_their_part_of_what_may_run_and_none_an_older_version():
    it = dispatch(kv_admission=True)
    engines = Engines(it, versions=(3, 4))
    add(it, 0, num=9, version=4)
    sent = engines.send_all(max_running=6)
    assert len(sent) == 3
    assert set(engines.where.values()) == {1}


def test_siblings_go_where_their_prompt_is_until_that_engine_is_a_group_ahead():
    """Groups of 2: with three rollouts more than the other engine, the first is over by more than one group."""
    it = dispatch(least_loaded=False, kv_admission=True, group_size=2)
    engines = Engines(it, num=2)
    add(it, 0, num=5)
    assert [engines.where[str(engines.send())] for _ in range(5)] == [0, 0, 1, 0, 1]


def test_the_least_loaded_engine_has_the_fewest_predicted_tokens_not_the_fewest_rollouts():
    """Siblings are always equal, so one that has ended tells all: engine 0 has a rollout with 900 tokens to come, engine 1 three with 4."""
    it = dispatch(least_loaded=True)
    engines = Engines(it, num=2)
    for group_id in range(8):
        for sibling in range(2):
            send_to(engines, f"{group_id}/{sibling}", 0)
            engines.end(f"{group_id}/{sibling}", (4, 900)[group_id % 2])
    for group_id, num_tokens, engine_id in ((20, 900, 0), (30, 4, 1), (31, 4, 1), (32, 4, 1)):
        for sibling in range(2):
            send_to(engines, f"{group_id}/{sibling}", engine_id)
        engines.end(f"{group_id}/0", num_tokens)
    assert engines.outstanding == [1, 3]
    add(it, 40, num=1)
    assert engines.send() == "40/0"
    assert engines.where["40/0"] == 1


def send_to(engines: Engines, name: str, engine_id: int) -> None:
    engines.outstanding[engine_id] += 1
    engines.where[name] = engine_id
    engines.it.sent(name, group_id=int(name.split("/")[0]), num_prompt=10, engine_id=engine_id)


def test_a_rollout_waits_while_the_cache_would_overflow_before_the_others_have_ended():
    """Lengths are 40. The cache is 0.4 full with a prompt of 10 and 30 tokens, so it holds 100. Two more peak at 2 * (10 + 40) = 100, when
    the first has long ended: they fit. Three would peak at 150.
    """
    it = dispatch(kv_admission=True, group_size=1)
    engines = Engines(it)
    for number in range(9):
        it.sent(f"before/{number}", group_id=100 + number, num_prompt=10, engine_id=0)
        it.ended(f"before/{number}", engine_id=0, num_tokens=40)
    for group_id in range(4):
        add(it, group_id, num=1)
    assert engines.send() == "0/0"
    it.reported(0, num_passes=30, kv_used=0.4, num_running=1, num_queued=0)
    assert it.gauges()["kv_room_tokens"] == 100
    assert [engines.send() for _ in range(4)] == ["1/0", "2/0", None, None]
    assert it.gauges()["num_held_by_kv"] == 1, "the same rollout waits"
    engines.end("0/0", 40)
    assert engines.send() is None
    engines.end("1/0", 40)
    assert engines.send() == "3/0"


def test_siblings_hold_their_prompt_once_and_what_is_queued_holds_nothing():
    """Two siblings with a prompt of 10 have written 20 each: 50 tokens. Half of what the engine has is queued, so 25 are half of
    its room.
    """
    it = dispatch(kv_admission=True)
    engines = Engines(it)
    for sibling in range(2):
        send_to(engines, f"0/{sibling}", 0)
    it.reported(0, num_passes=20, kv_used=0.5, num_running=1, num_queued=1)
    assert it.gauges()["kv_room_tokens"] == 50


def test_an_engine_without_a_rollout_takes_one_that_is_too_long_for_it():
    it = dispatch(kv_admission=True, group_size=1)
    engines = Engines(it)
    for group_id in range(3):
        add(it, group_id, num=1, num_prompt=1000)
    assert engines.send(num_prompt=1000) == "0/0"
    it.reported(0, num_passes=0, kv_used=1.0, num_running=1, num_queued=0)
    assert engines.send() is None, "the first fills it"
    engines.end("0/0", 900)
    assert engines.send_all(num_prompt=1000) == ["1/0"]


def test_what_was_lost_with_its_engine_tells_no_length():
    it = dispatch(longest_first=True)
    engines = Engines(it)
    add(it, 0)
    engines.send()
    engines.end("0/0", None)
    assert it.gauges()["length_tokens"] == 0
    it.lost(0)
    assert engines.send() == "0/1"


def test_every_rollout_is_sent_once_whatever_the_order():
    it = dispatch(longest_first=True, least_loaded=True, kv_admission=True, group_size=4, groups_per_step=3)
    engines = Engines(it, num=3)
    ended: collections.Counter[str] = collections.Counter()
    running: list[str] = []
    for group_id in range(40):
        add(it, group_id, num=4)
        for name in engines.send_all(max_running=9):
            running.append(name)
        while len(running) > 5:
            name = running.pop(0)
            engines.end(name, 1 + sum(name.encode()) % 50)
            ended[name] += 1
    while it.num_waiting or running:
        running += engines.send_all(max_running=9)
        name = running.pop(0)
        engines.end(name, 7)
        ended[name] += 1
    assert len(ended) == 160
    assert set(ended.values()) == {1}
    assert engines.send() is None
    assert not it._groups, "nothing is kept of groups that are sent"


@pytest.mark.parametrize(
    ("keys", "gauges"),
    [
        ({"dispatch": "longest_first"}, {"length_error_tokens", "length_tokens"}),
        ({"routing": "least_loaded"}, {"num_at_home"}),
        ({"kv_admission": True}, {"num_held_by_kv", "kv_room_tokens"}),
    ],
)
def test_each_part_is_off_until_its_key_is_set_and_tells_of_itself_alone(keys: dict[str, Any], gauges: set[str]):
    assert dispatch_of(config(), num_siblings=2) is None
    found = dispatch_of(config(pipeline=keys), num_siblings=2)
    assert found is not None
    assert set(found.gauges()) == {"num_waiting", "num_dispatched"} | gauges

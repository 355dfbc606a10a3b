"""One end of the talk: in order and once, whatever happens to frames; credit and bound in bytes; restarts on either side. Pure, no loop."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import PeerFull, WireError
from pipelinerl.transport import session
from pipelinerl.transport.frame import HEADER_BYTES, MAX_BATCH_FRAME_BYTES, OVERHEAD_BYTES, Kind, pack, unpack
from pipelinerl.transport.session import Session


class Pair:
    """A peer and the orchestrator, with everything between them in two lists of frames."""

    def __init__(self) -> None:
        self.to_hub: collections.deque[bytes] = collections.deque()
        self.to_link: collections.deque[bytes] = collections.deque()
        self.link = self.new_link()
        self.hub = self.new_hub()
        self.at_hub: list[int] = []
        self.at_link: list[int] = []

    def new_link(self) -> Session:
        return Session("the orchestrator", transmit=self.to_hub.append, introduction=lambda kept: kept)

    def new_hub(self) -> Session:
        return Session("engine-0", transmit=self.to_link.append, introduction=lambda kept: ())

    def deliver(self) -> None:
        """Carry everything, and what is answered, until nothing is on its way."""
        while self.to_hub or self.to_link:
            if self.to_hub:
                note(self.hub.receive_frame(self.to_hub.popleft()), self.at_hub)
            if self.to_link:
                note(self.link.receive_frame(self.to_link.popleft()), self.at_link)

    def settle(self) -> None:
        """As `deliver`, with reminders until nobody owes anything."""
        for _ in range(20):
            self.deliver()
            self.link.probe()
            self.hub.probe()
        assert not self.to_hub
        assert not self.to_link


def number(value: int, *, size: int = 2) -> bytes:
    return value.to_bytes(2, "little") + bytes(size - 2)


def note(bodies: Sequence[memoryview], into: list[int]) -> None:
    into += [int.from_bytes(body[:2], "little") for body in bodies]


def kinds(frames: collections.deque[bytes]) -> list[Kind]:
    return [unpack(frame).kind for frame in frames]


def test_messages_pass_in_order_in_both_directions_without_any_other_frame():
    pair = Pair()
    for value in range(5):
        pair.link.send(number(value))
        pair.deliver()
        pair.hub.send(number(100 + value))
        pair.deliver()
    assert (pair.at_hub, pair.at_link) == ([0, 1, 2, 3, 4], [100, 101, 102, 103, 104])
    assert pair.link.unacked_bytes == 0, "an answer acknowledges what it follows"
    assert pair.hub.unacked_bytes == OVERHEAD_BYTES + 2


def test_small_messages_sent_at_once_share_frames_and_large_ones_do_not():
    pair = Pair()
    small, half = 100, MAX_BATCH_FRAME_BYTES // 2
    pair.link.send(*(number(value, size=size) for value, size in enumerate([small, small, half, half, 2 * half, small])))
    sizes = [2 * small + half + 3 * 4, half + 4, 2 * half + 4, small + 4]
    assert [len(frame) for frame in pair.to_hub] == [HEADER_BYTES + size for size in sizes]
    assert pair.link.unacked_bytes == sum(map(len, pair.to_hub))
    pair.settle()
    assert pair.at_hub == [0, 1, 2, 3, 4, 5]
    assert pair.link.unacked_bytes == 0
    pair.link.send()
    assert not pair.to_hub


def test_a_frame_that_ends_within_a_message_is_refused_and_comes_again():
    pair = Pair()
    pair.link.send(number(1), number(2))
    whole = pair.to_hub.popleft()
    for cut, complaint in (
        (1, "a frame ends after 5 bytes, within its message 1, which has 6"),
        (4, "ends after 2 bytes, within its message 1"),
    ):
        with pytest.raises(WireError, match=complaint):
            pair.hub.receive_frame(whole[:-cut])
    pair.settle()
    assert pair.at_hub == [1, 2]


def test_many_messages_in_a_large_frame_are_refused_before_they_are_taken_apart():
    pair = Pair()
    pair.link.send(number(1), number(2))
    frame = pair.to_hub.popleft()
    with pytest.raises(WireError, match=f"several messages in {MAX_BATCH_FRAME_BYTES + 1} bytes, expected {MAX_BATCH_FRAME_BYTES} at most"):
        pair.hub.receive_frame(frame + bytes(MAX_BATCH_FRAME_BYTES + 1 - (len(frame) - HEADER_BYTES)))
    pair.settle()
    assert pair.at_hub == [1, 2]


def test_who_is_owed_an_acknowledgement_asks_and_is_answered():
    pair = Pair()
    pair.link.send(number(7))
    pair.deliver()
    pair.link.probe()
    assert not pair.to_hub, "not yet: an answer may be on its way"
    pair.link.probe()
    assert kinds(pair.to_hub) == [Kind.PROBE]
    pair.hub.receive_frame(pair.to_hub.popleft())
    assert kinds(pair.to_link) == [Kind.ACK]
    pair.deliver()
    assert pair.link.unacked_bytes == 0
    pair.link.probe()
    pair.link.probe()
    assert not pair.to_hub, "nothing is owed any more"


def test_a_repeated_message_is_taken_once():
    pair = Pair()
    pair.link.send(number(1))
    pair.to_hub.append(pair.to_hub[0])
    pair.deliver()
    assert pair.at_hub == [1]


def test_a_gap_is_told_once_and_all_that_follows_is_sent_again():
    pair = Pair()
    pair.link.send(number(0))
    pair.deliver()
    for value in range(1, 6):
        pair.link.send(number(value))
    pair.to_hub.popleft()
    for _ in range(4):
        pair.hub.receive_frame(pair.to_hub.popleft())
    assert kinds(pair.to_link) == [Kind.RESEND]
    pair.deliver()
    assert pair.at_hub == [0, 1, 2, 3, 4, 5]


def test_what_was_lost_last_comes_again_after_a_reminder():
    """As after a connection that broke: nothing follows that would show the gap."""
    pair = Pair()
    pair.link.send(number(1))
    pair.link.send(number(2))
    pair.to_hub.clear()
    pair.settle()
    assert pair.at_hub == [1, 2]
    assert pair.link.unacked_bytes == 0


def test_a_lost_reminder_or_answer_is_made_up_for_by_the_next():
    pair = Pair()
    pair.link.send(number(1))
    for _ in range(3):
        pair.to_hub.clear()
        pair.link.probe()
    pair.settle()
    pair.link.send(number(2))
    pair.hub.receive_frame(pair.to_hub.popleft())
    for _ in range(3):
        pair.link.probe()
        pair.hub.receive_frame(pair.to_hub.popleft()) if pair.to_hub else None
        pair.to_link.clear()
    pair.settle()
    assert pair.link.unacked_bytes == 0


def test_on_its_way_is_no_more_than_the_credit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "WINDOW_BYTES", 1000)
    pair = Pair()
    for value in range(20):
        pair.link.send(number(value, size=200 - OVERHEAD_BYTES))
    assert len(pair.to_hub) == 5, "5 times 200 bytes"
    assert pair.link.unacked_bytes == 4000
    most = 0
    while len(pair.at_hub) < 20:
        most = max(most, len(pair.to_hub))
        note(pair.hub.receive_frame(pair.to_hub.popleft()), pair.at_hub)
        while pair.to_link:
            pair.link.receive_frame(pair.to_link.popleft())
    assert pair.at_hub == list(range(20))
    assert most == 5
    pair.settle()
    assert pair.link.unacked_bytes == 0


def test_an_end_without_credit_still_says_what_it_heard(monkeypatch: pytest.MonkeyPatch):
    """It stands in messages that wait for credit themselves: two ends could wait for each other."""
    size = OVERHEAD_BYTES + 2
    monkeypatch.setattr(session, "WINDOW_BYTES", 8 * size)
    pair = Pair()
    pair.link.send(number(0))
    pair.deliver()
    for value in range(1, 8):
        pair.link.send(number(value))
    for value in range(8):
        pair.hub.send(number(100 + value))
    pair.to_link.clear()
    for _ in range(4):
        pair.hub.receive_frame(pair.to_hub.popleft())
        pair.hub.send(number(0))  # waits
    assert kinds(pair.to_link) == [Kind.ACK, Kind.ACK], "after every second message, a quarter of the credit"


def test_a_message_larger_than_the_credit_goes_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "WINDOW_BYTES", 1000)
    pair = Pair()
    for value in range(3):
        pair.link.send(number(value, size=5000))
    assert len(pair.to_hub) == 1
    pair.settle()
    assert pair.at_hub == [0, 1, 2]


def test_a_peer_that_takes_nothing_costs_the_bound_and_then_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "LIMIT_BYTES", 1000)
    monkeypatch.setattr(session, "WINDOW_BYTES", 400)
    pair = Pair()
    for value in range(5):
        pair.hub.send(number(value, size=200 - OVERHEAD_BYTES))
    with pytest.raises(PeerFull, match=r"engine-0 has not taken the last 1000 bytes sent to it, and 200 more would exceed .* 1000"):
        pair.hub.send(number(5, size=200 - OVERHEAD_BYTES))
    assert pair.hub.unacked_bytes == 1000
    assert sum(map(len, pair.to_link)) == 400
    pair.settle()
    assert pair.at_link == [0, 1, 2, 3, 4]
    pair.hub.send(number(6, size=200 - OVERHEAD_BYTES))


def test_a_restarted_peer_gets_nothing_that_was_meant_for_its_predecessor():
    pair = Pair()
    pair.link.send(number(1))
    pair.deliver()
    pair.hub.send(number(100))
    late = pair.to_link.popleft()
    old, pair.link = pair.link, pair.new_link()
    pair.link.send(number(2))
    pair.deliver()
    assert not pair.link.receive_frame(late)
    assert pair.hub.unacked_bytes == 0
    pair.hub.send(number(101))
    pair.settle()
    assert (pair.at_hub, pair.at_link) == ([1, 2], [101])
    old.send(number(3))
    pair.settle()
    assert pair.at_hub == [1, 2], "what the dead one still has on its way is known for what it is"
    pair.hub.send(number(102))
    pair.settle()
    assert pair.at_link == [101, 102], "and does not bring it back"


def test_what_the_orchestrator_never_took_is_sent_to_its_successor_once():
    pair = Pair()
    for value in range(3):
        pair.link.send(number(value))
    pair.deliver()
    pair.hub.send(number(100))
    pair.deliver()
    pair.link.send(number(3))
    pair.link.send(number(4), number(5))
    pair.to_hub.popleft()
    pair.hub, pair.at_hub = pair.new_hub(), []
    pair.settle()
    assert pair.at_hub == [3, 4, 5], "0 to 2 were acknowledged by the one that is gone"
    pair.hub.send(number(101))
    pair.link.send(number(6))
    pair.settle()
    assert (pair.at_hub, pair.at_link) == ([3, 4, 5, 6], [100, 101])


def test_with_an_introduction_that_alone_is_what_a_successor_hears_of_before():
    pair = Pair()
    given: list[Sequence[bytes]] = []

    def introduce(kept: Sequence[bytes]) -> list[bytes]:
        given.append(kept)
        return [number(50), number(51)]

    pair.link.introduction = introduce
    for value in range(3):
        pair.link.send(number(value))
    pair.deliver()
    pair.hub.send(number(100))
    pair.deliver()
    pair.link.send(number(3), number(4))
    assert given == [], "the first orchestrator is told by whoever introduces"
    pair.to_hub.clear()
    pair.hub, pair.at_hub = pair.new_hub(), []
    pair.settle()
    assert (pair.at_hub, given) == ([50, 51], [[number(3), number(4)]])
    pair.link.send(number(5))
    pair.settle()
    assert pair.at_hub == [50, 51, 5]


def test_a_goodbye_is_remembered_until_somebody_comes_back():
    pair = Pair()
    pair.link.send(number(1))
    pair.link.say_goodbye()
    pair.deliver()
    assert pair.hub.has_left
    pair.link = pair.new_link()
    pair.link.send(number(2))
    pair.deliver()
    assert not pair.hub.has_left


def test_an_acknowledgement_of_what_was_never_sent_is_refused():
    pair = Pair()
    pair.link.send(number(1))
    pair.deliver()
    forged = pack(Kind.ACK, sender=pair.link.identity, receiver=pair.hub.identity, number=0, acked=1)
    with pytest.raises(WireError, match="engine-0 says it received frame 1; 0 were sent"):
        pair.hub.receive_frame(forged)


@given(seed=st.integers(0, 2**32), drop=st.floats(0, 0.6), repeat=st.floats(0, 0.5), shuffle=st.booleans())
def test_whatever_is_lost_doubled_and_reordered_everything_arrives_once_and_in_order(seed: int, drop: float, repeat: float, shuffle: bool):
    pair, chance = Pair(), random.Random(seed)
    for value in range(0, 40, 2):
        pair.link.send(number(value), number(value + 1)) if chance.random() < 0.5 else send_apart(pair.link, value, value + 1)
        if value % 3 == 0:
            pair.hub.send(number(1000 + value)) if pair.hub.has_met else None
        carry(pair, chance, drop=drop, repeat=repeat, shuffle=shuffle)
        if value % 4 == 0:
            pair.link.probe()
            pair.hub.probe()
    sent = [1000 + value for value in range(0, 40, 6)]
    pair.settle()
    assert pair.at_hub == list(range(40))
    assert pair.at_link == sent[len(sent) - len(pair.at_link) :]
    assert pair.link.unacked_bytes == pair.hub.unacked_bytes == 0


def send_apart(link: Session, *values: int) -> None:
    for value in values:
        link.send(number(value))


def carry(pair: Pair, chance: random.Random, *, drop: float, repeat: float, shuffle: bool) -> None:
    """Carry some of what is on its way through bad weather."""
    for frames, end, into in ((pair.to_hub, pair.hub, pair.at_hub), (pair.to_link, pair.link, pair.at_link)):
        if shuffle:
            mixed = list(frames)
            chance.shuffle(mixed)
            frames.clear()
            frames.extend(mixed)
        for _ in range(chance.randrange(len(frames) + 1)):
            frame = frames.popleft()
            if chance.random() < drop:
                continue
            note(end.receive_frame(frame), into)
            if chance.random() < repeat:
                note(end.receive_frame(frame), into)

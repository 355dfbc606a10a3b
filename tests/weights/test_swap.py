"""How a policy takes effect: what each mode leaves in place, and which mode is chosen for what reason."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipelinerl.errors import ConfigError
from pipelinerl.messages import Tensor
from pipelinerl.weights import swap as swaps
from pipelinerl.weights.swap import CopySwap, Placed, PointerSwap, SparseSwap, Staging, SwapMode, WeightSwap, choose_swap_mode, make_swap


def placed(*sizes: int) -> list[Placed]:
    """Float32 parameters of zeros, laid 256 bytes apart."""
    return [
        Placed(parameter=torch.nn.Parameter(torch.zeros(size), requires_grad=False), offset_bytes=256 * number, num_bytes=4 * size)
        for number, size in enumerate(sizes)
    ]


def policy(value: float, *, num_bytes: int = 256 + 12) -> torch.Tensor:
    return torch.full((num_bytes // 4,), value).view(torch.uint8)


def values(parameters: list[Placed]) -> list[list[float]]:
    return [one.parameter.tolist() for one in parameters]


@pytest.fixture(params=list(SwapMode))
def mode(request: pytest.FixtureRequest) -> SwapMode:
    return request.param


def commit(by: WeightSwap, buffer: torch.Tensor) -> None:
    by.stage(buffer)
    by.commit()


def test_parameters_change_at_the_commit_and_not_before(mode: SwapMode):
    parameters = placed(2, 3)
    by = make_swap(mode, parameters)
    by.stage(policy(1.0))
    assert values(parameters) == [[0.0] * 2, [0.0] * 3]
    by.commit()
    assert values(parameters) == [[1.0] * 2, [1.0] * 3]


def test_the_spare_buffer_is_never_the_one_the_model_reads(mode: SwapMode):
    parameters = placed(2, 3)
    by = make_swap(mode, parameters)
    for number in range(1, 5):
        by.spare().view(torch.float32).fill_(number)
        assert values(parameters) == [[number - 1.0] * 2, [number - 1.0] * 3]
        commit(by, by.spare())
        assert values(parameters) == [[float(number)] * 2, [float(number)] * 3]


def test_changes_find_their_parameter_in_whatever_order_it_was_given():
    parameters = placed(2, 3)
    by = SparseSwap(parameters[::-1])
    tensor = Tensor(name="part", shape=(2,), dtype="float32", offset_bytes=256 + 4, num_bytes=8)
    bits = by.bits_of(tensor)
    assert len(bits) == 2
    by.stage_delta([(bits, torch.tensor([1]), torch.tensor([1.0]).view(torch.int32))])
    assert values(parameters) == [[0.0] * 2, [0.0] * 3]
    by.commit()
    assert values(parameters) == [[0.0] * 2, [0.0, 0.0, 1.0]]
    commit(by, policy(2.0))
    assert values(parameters) == [[2.0] * 2, [2.0] * 3], "a whole policy after changes"


def test_a_flip_moves_nothing_and_a_copy_keeps_the_addresses():
    for mode, keeps in ((SwapMode.POINTER, False), (SwapMode.COPY, True), (SwapMode.SPARSE, True)):
        parameters = placed(2, 3)
        by = make_swap(mode, parameters)
        before = [one.parameter.data_ptr() for one in parameters]
        buffer = policy(1.0)
        commit(by, buffer)
        after = [one.parameter.data_ptr() for one in parameters]
        assert (after == before) is keeps
        assert (after == [buffer.data_ptr(), buffer.data_ptr() + 256]) is not keeps


@pytest.mark.parametrize("mode", [SwapMode.COPY, SwapMode.SPARSE])
def test_parameters_whose_addresses_were_kept_are_written_where_they_are(mode: SwapMode):
    parameters = placed(2, 3)
    before = [one.parameter.data_ptr() for one in parameters]
    by = make_swap(mode, parameters, gathers=False)
    commit(by, policy(1.0))
    assert values(parameters) == [[1.0] * 2, [1.0] * 3]
    assert [one.parameter.data_ptr() for one in parameters] == before
    by.save(saved := torch.zeros(256 + 12, dtype=torch.uint8))
    assert [one.view(saved).tolist() for one in parameters] == [[1.0] * 2, [1.0] * 3]


def test_a_buffer_that_nobody_else_holds_lives_while_the_model_reads_it():
    parameters = placed(2, 3)
    by = make_swap(SwapMode.POINTER, parameters)
    for number in range(1, 4):
        commit(by, policy(float(number)))
        noise = [torch.full((268,), 255, dtype=torch.uint8) for _ in range(8)]
        assert values(parameters) == [[float(number)] * 2, [float(number)] * 3]
        del noise


def test_a_flip_holds_no_more_than_two_buffers_of_its_own():
    by = PointerSwap(placed(2, 3))
    seen = set()
    for _ in range(6):
        seen.add(by.spare().data_ptr())
        commit(by, by.spare())
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("wanted", "obstacles", "mode", "why"),
    [
        ("auto", {}, SwapMode.POINTER, "nothing stands against the shortest pause"),
        ("auto", {SwapMode.POINTER: ["graphs"]}, SwapMode.COPY, "pointer would break: graphs"),
        ("copy", {}, SwapMode.COPY, "weights.swap_mode says so"),
        ("copy", {SwapMode.POINTER: ["graphs"]}, SwapMode.COPY, "weights.swap_mode says so"),
    ],
)
def test_the_shortest_pause_that_breaks_nothing_is_chosen_and_says_why(
    wanted: str, obstacles: dict[SwapMode, list[str]], mode: SwapMode, why: str
):
    assert choose_swap_mode(wanted, obstacles) == (mode, f"policies are committed by {mode}: {why}")


def test_changes_are_scattered_only_where_they_are_sent_and_a_flip_is_impossible():
    graphs = {SwapMode.POINTER: ["graphs"]}
    assert choose_swap_mode("auto", graphs, sends_deltas=True)[0] is SwapMode.SPARSE
    assert choose_swap_mode("auto", {}, sends_deltas=True)[0] is SwapMode.POINTER
    assert choose_swap_mode("sparse", {}) == (SwapMode.SPARSE, "policies are committed by sparse: weights.swap_mode says so")


def test_what_breaks_every_way_is_said_at_start():
    everything = {mode: [f"{mode} is broken", "packed"] for mode in SwapMode}
    with pytest.raises(ConfigError) as caught:
        choose_swap_mode("auto", everything, sends_deltas=True)
    assert all(f"  - {mode}: {reason}" in str(caught.value) for mode in SwapMode for reason in everything[mode])
    with pytest.raises(ConfigError, match=r"cannot take new weights by pointer here:\n  - pointer: graphs$"):
        choose_swap_mode("pointer", {SwapMode.POINTER: ["graphs"]})


class _Recorded:
    """A timeline that notes what is asked of it, over parameters without memory."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def mark(self) -> object:
        return None

    @contextlib.contextmanager
    def beside(self, after: object = None) -> Iterator[None]:
        self.asked.append("beside")
        yield
        self.asked.append("brought")

    def finish(self) -> None:
        self.asked.append("finished")

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.asked.append(f"pinned {num_bytes}")
        return torch.zeros(num_bytes, dtype=torch.uint8)


def on_a_device() -> list[Placed]:
    """The meta device stands for one: it takes no copy by pointer, and its tensors are not the host's."""
    return [Placed(parameter=torch.nn.Parameter(torch.zeros(64, device="meta"), requires_grad=False), offset_bytes=0, num_bytes=256)]


@pytest.mark.parametrize("kind", [CopySwap, SparseSwap])
def test_a_device_has_done_the_copies_when_a_commit_returns(kind: type[CopySwap]):
    """Else the pause is that of the launches, and the next policy is brought over what the copies still read."""
    timeline = _Recorded()
    by = kind(on_a_device(), timeline=timeline)
    for _ in range(2):
        by.stage(torch.zeros(256, dtype=torch.uint8))
        by.commit()
    assert timeline.asked == ["beside", "brought", "finished"] * 2


def test_a_delta_is_written_when_a_commit_returns():
    timeline = _Recorded()
    by = SparseSwap(on_a_device(), timeline=timeline)
    by.stage_delta([])
    by.commit()
    assert timeline.asked == ["finished"]


def test_the_room_of_the_next_policy_is_taken_at_the_start_where_it_was_planned():
    timeline = _Recorded()
    by = CopySwap(on_a_device(), timeline=timeline)
    assert by._beside is not None
    assert (by._beside.device.type, by._beside.nbytes) == ("meta", 256)
    by = CopySwap(on_a_device(), staging=Staging.HOST, timeline=timeline)
    assert by._beside is not None
    assert by._beside.device.type == "cpu"
    policy = torch.arange(256, dtype=torch.uint8)
    by.stage(policy)
    assert by._staged is not None
    assert torch.equal(by._staged, policy), "the trainer's buffer is not what the device reads in the pause"
    assert timeline.asked == ["pinned 256", "beside", "brought"]


def test_a_policy_that_a_network_brings_comes_into_memory_that_the_device_reads_by_itself():
    timeline = _Recorded()
    by = CopySwap(on_a_device(), timeline=timeline)
    by.stage(by.spare())
    assert timeline.asked == ["pinned 256", "beside", "brought"]
    timeline.asked.clear()
    by = CopySwap(on_a_device(), staging=Staging.HOST, timeline=timeline)
    by.stage(by.spare())
    assert by._staged is not None
    assert by._staged.data_ptr() == by.spare().data_ptr()
    assert timeline.asked == ["pinned 256", "pinned 256"], "it waits where it came"


def test_a_device_that_is_full_after_all_leaves_the_next_policy_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    empty = torch.empty

    def full(*sizes: int, device: torch.device | str = "cpu", **options: Any) -> torch.Tensor:
        if torch.device(device).type == "meta":
            raise torch.OutOfMemoryError("2 GiB are free")
        return empty(*sizes, device=device, **options)

    timeline = _Recorded()
    monkeypatch.setattr(swaps, "timeline_of", lambda device: timeline)
    parameters = on_a_device()
    monkeypatch.setattr(torch, "empty", full)
    make_swap(SwapMode.COPY, parameters)
    assert timeline.asked == ["pinned 256"]
    assert "2 GiB are free" in caplog.text


def test_a_model_on_a_device_is_not_moved_together_because_two_would_have_to_fit():
    parameters = on_a_device()
    before = parameters[0].parameter.untyped_storage()
    CopySwap(parameters, gathers=True, timeline=_Recorded())
    assert parameters[0].parameter.untyped_storage()._cdata == before._cdata


@pytest.mark.parametrize("mode", [SwapMode.POINTER, SwapMode.COPY])
def test_what_is_discarded_takes_no_memory_and_the_next_policy_is_taken_all_the_same(mode: SwapMode):
    size = 1 << 20
    parameters = [Placed(parameter=torch.nn.Parameter(torch.ones(size), requires_grad=False), offset_bytes=0, num_bytes=4 * size)]
    by = make_swap(mode, parameters)
    assert isinstance(by, PointerSwap | CopySwap)
    assert 4 * size - 2 * 4096 <= by.discard() <= 4 * size
    assert not parameters[0].parameter[1024:-1024].any(), "the pages were given back, and read as zeros"
    buffer = torch.full((size,), 2.0).view(torch.uint8)
    commit(by, buffer)
    assert parameters[0].parameter.eq(2.0).all()
    by.discard()
    assert buffer.view(torch.float32).eq(2.0).all(), "it is the trainer's"

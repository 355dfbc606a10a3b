"""A policy is written down beside the training of the next step, and is the weights of its own version all the same."""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.errors import NoRoom
from pipelinerl.messages import Failed, MicroBatch, PolicyPublished, StepClosed, StepDone, Stop
from pipelinerl.observe.journal import Journal
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.files import FilesReceiver
from pipelinerl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tests.trainer.full_disk import fill_up, small_disk
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step, steps_of
from trainer.data.loader import LoadedPart, LoadedRow
from trainer.data.rows_in_progress import RowsInProgress
from trainer.data.sample_digest import SampleDigest
from trainer.loop import Loop
from trainer.step_timer import StepTimer
from trainer.weights.async_publisher import AsyncPublisher
from trainer.weights.publisher import Publisher


def _wave(batch: MicroBatch) -> LoadedRow:
    return LoadedRow(batch=batch, parts=(LoadedPart(batch=batch, row=None, has_gradient=True),))


def test_a_step_does_not_change_what_is_being_written_of_the_one_before(folders: dict[str, Path], tmp_path: Path) -> None:
    """Whoever reads the weights waits until the next step's first row was taken: if that waited, too, none would go on."""
    model = make_model(folders["qwen3"])
    samples = [make_sample(np.random.default_rng(3), prompt=3, completion=5)]
    samples[0]["advantages"][:] = 1  # its ratios are far below 1: a negative one would be clipped, and nothing move
    step, _ = make_step(model, learning_rate=1e-2)
    after: list[dict[str, torch.Tensor]] = []

    taken = [threading.Event() for _ in range(4)]

    def read() -> Mapping[str, torch.Tensor]:
        if after:
            assert taken[len(after)].wait(20), "the training loop stood still"
            time.sleep(0.1)  # time enough for an update that nothing holds back
        return model.tensors()

    def told(message: Any) -> None:
        after.append({name: tensor.clone() for name, tensor in model.tensors().items()})

    publisher = Publisher(read, tied_names=model.tied_names, run_folder=tmp_path, deadline_s=10.0)
    layout = plan_layout({name: tensor for name, tensor in model.tensors().items() if name not in model.tied_names})
    publisher.fix_layout(layout, num_engines=4)
    rows = [_wave(make_batch(samples, step=number)) for number in range(3)]
    seals = [make_seal(samples, step=number) for number in range(3)]
    items = iter([*(item for pair in zip(rows, seals, strict=True) for item in pair), Stop(reason="the test is over")])

    def take() -> Any:
        item = next(items)
        if not isinstance(item, StepClosed):
            taken[len(after)].set()
        return item

    loader: Any = SimpleNamespace(take=take, busy_with="")
    published: list[Any] = []
    try:
        with (
            contextlib.closing(Journal(tmp_path, "trainer-0")) as journal,
            AsyncPublisher(publisher, sharded=None, send=published.append) as async_publisher,
        ):
            loop = Loop(
                loader=loader,
                steps=steps_of(step),
                async_publisher=async_publisher,
                send=told,
                timer=StepTimer(journal, loader=loader),
                sample_digest=SampleDigest(),
                checkpoint=lambda version, commit: None,
                take_news=lambda: (),
                wait_for_checkpoint=lambda: None,
                checkpoint_every=100,
                in_progress=RowsInProgress(tmp_path, rank=0, replica=0, num_replicas=1),
            )
            loop.run(0, 10)
        assert [policy.version for policy in published] == [1, 2, 3]
        assert not torch.equal(*(weights["model.norm.weight"] for weights in after[:2])), "a step moves the weights"
        for policy, expected in zip(published, after, strict=True):
            found = SharedMemoryReceiver().fetch(policy.buffer, policy.digest, lambda manifest: torch.zeros(0))
            for name, tensor in views(found.data, layout).items():
                assert torch.equal(tensor, expected[name]), (policy.version, name)
    finally:
        publisher.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["files", "shared_memory"])
def test_a_policy_without_room_is_passed_over_or_tried_until_there_is_and_the_one_before_serves_on(
    transport: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk is full when policy 2 is published, has room for 3, is full for 4 until the loop waits for rows, and again for 5."""
    model = make_model(folders["qwen3"])
    samples = [make_sample(np.random.default_rng(3), prompt=3, completion=5)]
    step, _ = make_step(model, learning_rate=1e-2)
    layout = plan_layout({name: tensor for name, tensor in model.tensors().items() if name not in model.tied_names})
    published: list[PolicyPublished] = []
    done: list[StepDone] = []
    with small_disk(tmp_path / "weights", size_bytes=5 * num_bytes(layout)) as disk:
        monkeypatch.setattr("pipelinerl.weights.shared_memory.SharedMemorySender", functools.partial(SharedMemorySender, folder=disk))
        receiver = FilesReceiver(disk) if transport == "files" else SharedMemoryReceiver(folder=disk)
        publisher = Publisher(model.tensors, tied_names=model.tied_names, run_folder=tmp_path, deadline_s=10.0)
        publisher.fix_layout(layout, num_engines=4, transport=transport)
        filler = disk / "filler"

        def wait_for(what: Any) -> None:
            deadline = time.monotonic() + 20
            while not what():
                assert time.monotonic() < deadline
                time.sleep(0.01)

        def has_no_room() -> bool:
            return async_publisher._no_room_since is not None

        def first_is_served() -> bool:
            fetched = receiver.fetch(
                published[0].buffer, published[0].digest, lambda manifest: torch.zeros(num_bytes(layout), dtype=torch.uint8)
            )
            return fetched.manifest.version == 1

        def before_row(number: int) -> None:
            match number:
                case 1:
                    wait_for(lambda: published)
                    fill_up(disk)
                case 3:
                    wait_for(lambda: len(published) == 2)
                    fill_up(disk)
                case 4:
                    wait_for(has_no_room)
                    filler.unlink()
                    wait_for(lambda: len(published) == 3)
                    fill_up(disk)

        def told(message: Any) -> None:
            done.append(message)
            if message.step == 2:
                assert has_no_room()
                assert first_is_served()
                filler.unlink()

        def items() -> Iterator[Any]:
            for number in range(5):
                before_row(number)
                yield _wave(make_batch(samples, step=number))
                yield make_seal(samples, step=number)
            threading.Timer(0.3, filler.unlink).start()
            yield Stop(reason="the test is over")

        loader: Any = SimpleNamespace(take=functools.partial(next, items()), busy_with="")
        with (
            contextlib.closing(Journal(tmp_path, "trainer-0")) as journal,
            contextlib.closing(publisher),
            AsyncPublisher(publisher, sharded=None, send=published.append) as async_publisher,  # pyright: ignore[reportArgumentType]
        ):
            Loop(
                loader=loader,
                steps=steps_of(step),
                async_publisher=async_publisher,
                send=told,
                timer=StepTimer(journal, loader=loader),
                sample_digest=SampleDigest(),
                checkpoint=lambda version, commit: None,
                take_news=lambda: (),
                wait_for_checkpoint=lambda: None,
                checkpoint_every=100,
                in_progress=RowsInProgress(tmp_path, rank=0, replica=0, num_replicas=1),
            ).run(0, 10)
    assert [policy.version for policy in published] == [1, 3, 4, 5]
    assert [message.metrics.get("policies_skipped") for message in done] == [None, None, 1.0, None, None]
    assert "policy 2" in (said := capfd.readouterr().err) or "no room for pipelinerl-" in said


def test_a_run_ends_once_no_policy_had_room_for_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.weights.async_publisher.RETRY_AFTER_S", 0.01)
    tensors = {"norm": torch.ones(4096)}
    sent: list[PolicyPublished | Failed] = []
    now_s, tried_at = 0.0, list[float]()

    def clock() -> float:
        tried_at.append(now_s)
        return now_s

    def let_it_be(seconds: float) -> None:
        """It is so late, and was tried so late."""
        nonlocal now_s
        now_s = seconds
        deadline = time.monotonic() + 20
        while tried_at[-1:] != [seconds]:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    with small_disk(tmp_path / "weights", size_bytes=1 << 16) as disk:
        publisher = Publisher(lambda: tensors, tied_names=frozenset(), run_folder=tmp_path, deadline_s=10.0)
        publisher.fix_layout(plan_layout(tensors), transport="files")
        with contextlib.closing(publisher), AsyncPublisher(publisher, sharded=None, send=sent.append, clock=clock) as async_publisher:
            filler = fill_up(disk)
            async_publisher.begin(1)
            let_it_be(0.0)
            let_it_be(59.9)
            filler.unlink()
            async_publisher.wait(is_last=True)
            fill_up(disk)
            now_s = 100.0
            async_publisher.begin(2)
            let_it_be(100.0)
            async_publisher.begin(3)
            let_it_be(159.9)
            now_s = 160.0
            with pytest.raises(NoRoom, match="cannot write policy 3"):
                async_publisher.wait(is_last=True)
    assert [type(message) for message in sent] == [PolicyPublished, Failed], "policy 1 had room at last, and the minute began anew"
    assert "NoRoom for 60 s: cannot write policy 3" in sent[1].error  # pyright: ignore


class _Timeline:
    """Notes who asks for what, of a device that is not there."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    def mark(self) -> object:
        self.asked.append(("mark", threading.current_thread() is threading.main_thread()))
        return "the update"

    @contextlib.contextmanager
    def beside(self, after: object = None) -> Iterator[None]:
        self.asked.append(("beside", after))
        yield
        self.asked.append(("done", after))

    def finish(self) -> None:
        raise NotImplementedError

    def pinned(self, num_bytes: int) -> torch.Tensor:
        raise NotImplementedError


def test_what_a_publication_copies_waits_for_the_update_and_for_nothing_launched_after_it(tmp_path: Path) -> None:
    timeline = _Timeline()
    tensors = {"a": torch.zeros(3)}

    def read() -> dict[str, torch.Tensor]:
        timeline.asked.append(("read", threading.current_thread() is threading.main_thread()))
        return tensors

    publisher = Publisher(read, tied_names=frozenset(), run_folder=tmp_path, deadline_s=10.0)
    publisher.fix_layout(plan_layout(tensors), transport="files")
    timeline.asked.clear()
    sent: list[Any] = []
    with contextlib.closing(publisher), AsyncPublisher(publisher, sharded=None, send=sent.append, timeline=timeline) as async_publisher:
        async_publisher.begin(1)
        async_publisher.wait(is_last=True)
    assert timeline.asked == [("mark", True), ("beside", "the update"), ("read", False), ("done", "the update")]
    assert [policy.version for policy in sent] == [1]

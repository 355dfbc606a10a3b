"""A model spread over ranks is published bit for bit as one that is not, and no rank gathers what it need not."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import contextlib
import functools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.config.layout import Layout
from pipelinerl.errors import NoRoom
from pipelinerl.messages import Failed, PolicyPublished
from pipelinerl.weights import manifest
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.files import FilesReceiver
from pipelinerl.weights.manifest import check, verify
from pipelinerl.weights.reshard import Box, whole
from pipelinerl.weights.sharded.plan import BUCKET_BYTES
from pipelinerl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender, attach_to_write
from pipelinerl.weights.transports import AutoReceiver
from tests.trainer.full_disk import fill_up, small_disk
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_model
from tests.weights.shards import EngineRanks
from trainer.model.lora import Adapters
from trainer.parallel.replicas import Replicas
from trainer.weights import publisher as publishing
from trainer.weights.async_publisher import AsyncPublisher
from trainer.weights.publisher import Publisher
from trainer.weights.sharded_weights import ShardedWeights

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time"),
]


ADAPTERS = Adapters(rank=3, alpha=6.0, targets=("q_proj", "down_proj"), seed=1)


def publish(
    replicas: Replicas, *, folder: Path, run_folder: Path, transport: str, adapters: Adapters | None = None, are_separate: bool = False
) -> dict[str, Any]:
    """Publish a model, or its adapters alone, twice, with a change between; what an engine fetches of both, and what was gathered."""
    model = make_model(folder, replicas=replicas, adapters=adapters)
    sharded = ShardedWeights(model, replicas=replicas)
    publisher = None
    if replicas.rank == 0:
        published = model.described_adapters() if are_separate else sharded.described()
        described = {name: tensor for name, tensor in published.items() if name not in model.tied_names}
        layout = plan_layout({name: torch.empty(tensor.shape, dtype=torch.float32) for name, tensor in sorted(described.items())})
        publisher = Publisher(
            sharded.described,
            tied_names=model.tied_names,
            run_folder=run_folder,
            deadline_s=20.0,
            write=sharded.lead,
            adapters=model.described_adapters if are_separate else None,
        )
        publisher.fix_layout(layout, transport=transport)
    found = []
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(version) if adapters is None or are_separate else parameter.fill_(version)
        if publisher is None:
            sharded.follow()
            continue
        policy = publisher.publish(version)
        sharded.end()
        assert policy is not None
        receivers = AutoReceiver(folder=run_folder / "weights")
        payload = receivers.fetch(policy.buffer, policy.digest, lambda manifest: torch.zeros(num_bytes(layout), dtype=torch.uint8))
        check(payload.manifest, version=version, layout=layout, name=policy.buffer)
        verify(payload.manifest, payload.data, name=policy.buffer)
        found.append({name: view.clone() for name, view in views(payload.data, layout).items()})
    replicas.all_agree(True, what="to end together")
    if publisher is not None:
        publisher.close()
    return {"found": found, "gathered": sorted(sharded._gathered), "num_moves": len(sharded._moves or ())}


def publish_shards(replicas: Replicas, *, folder: Path, adapters: Adapters | None = None, are_separate: bool = False) -> dict[str, Any]:
    """Publish a model, or its adapters alone, from shard to shard, to two engines, the second after the first; rank 0 has them.

    Weights change before the second time, and not before the third, when engines are known to hold the second.

    An engine has two ranks, each with a half, or one that takes adapters whole.
    """
    model = make_model(folder, replicas=replicas, adapters=adapters)
    sharded = ShardedWeights(model, replicas=replicas, address="127.0.0.1")
    publisher, engines = None, []
    if replicas.rank == 0:
        published = model.described_adapters() if are_separate else sharded.described()
        described = {name: tensor for name, tensor in published.items() if name not in model.tied_names}
        layout = plan_layout({name: torch.empty(tensor.shape, dtype=torch.float32) for name, tensor in sorted(described.items())})
        halves = [{name: [_half(tuple(tensor.shape), rank)] for name, tensor in described.items()} for rank in range(2)]
        if are_separate:
            halves = [{name: [whole(tuple(tensor.shape))] for name, tensor in described.items()}]
        engines = [
            EngineRanks(layout, halves, who=f"engine {number}", bucket_bytes=BUCKET_BYTES, takes_changes=True) for number in range(2)
        ]
        publisher = Publisher(
            sharded.described,
            tied_names=model.tied_names,
            run_folder=folder,
            deadline_s=20.0,
            write=sharded.lead,
            shards=sharded.sender,
            adapters=model.described_adapters if are_separate else None,
            sends_deltas=True,
        )
        shards = () if are_separate else tuple({name: tuple(boxes) for name, boxes in half.items()} for half in halves)
        publisher.fix_layout(layout, transport="sharded+gloo", shards=shards)
    found, num_sent = [], []
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters() if version < 3 else ():
                parameter.mul_(version) if adapters is None or are_separate else parameter.fill_(version)
        if publisher is None:
            sharded.follow()
        else:
            policy = publisher.publish(version)
            sharded.end()
            assert policy is not None
            for engine in engines:
                assert engine.fetch(policy.buffer, policy.digest) == version
                found.append(engine.whole())
            publisher.held(version if version > 1 else None)
        replicas.all_agree(True, what="to have the engines take it")
        source = sharded.sender._source
        assert source is not None
        num_sent.append(source.num_sent)
    sizes = [len(held.memory) for held in source._held.values()]
    for end in (*engines, sharded):
        end.close()
    if publisher is not None:
        publisher.close()
    return {"found": found, "sizes": sizes, "num_sent": num_sent}


def _half(shape: tuple[int, ...], rank: int) -> Box:
    """As tensor parallelism cuts: matrices in two by rows, vectors not at all."""
    cut = shape[0] // 2
    return ((rank * cut, cut + rank * (shape[0] - cut)), *((0, size) for size in shape[1:])) if len(shape) > 1 else whole(shape)


def publish_without_room(replicas: Replicas, *, folder: Path, disk: Path, transport: str) -> dict[str, Any]:
    """Publish three policies: the second on a full disk, the third once that has room again; then one on a disk that stays full."""
    model = make_model(folder, replicas=replicas)
    sharded = ShardedWeights(model, replicas=replicas)
    sent: list[PolicyPublished | Failed] = []
    now_s, is_patient = 0.0, True

    def clock() -> float:
        """Stand still, and at the end run a minute at every look: the thread may not have looked before."""
        nonlocal now_s
        now_s += 0.0 if is_patient else 60.0
        return now_s

    publisher = None
    if replicas.rank == 0:
        described = {name: tensor for name, tensor in sharded.described().items() if name not in model.tied_names}
        layout = plan_layout({name: torch.empty(tensor.shape, dtype=torch.float32) for name, tensor in described.items()})
        publisher = Publisher(sharded.described, tied_names=model.tied_names, run_folder=disk.parent, deadline_s=20.0, write=sharded.lead)
        publisher.fix_layout(layout, num_engines=2, transport=transport)
    found: dict[str, Any] = {"found": []}
    goes_on = threading.Event()

    def sealed(*arguments: Any, **options: Any) -> manifest.Manifest:
        assert goes_on.wait(20.0), "the training loop waits for the digests of what it has written"
        return manifest.seal(*arguments, **options)

    publishing.seal = sealed  # in this rank's own process
    with AsyncPublisher(publisher, sharded=sharded, send=sent.append, clock=clock) as async_publisher:
        for version in (1, 2, 3, 4):
            async_publisher.wait()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(version)
            if publisher is not None and version in (2, 4):
                fill_up(disk)
            goes_on.clear()
            async_publisher.begin(version)
            goes_on.set()
            if publisher is not None and version == 3:
                (disk / "filler").unlink()
                async_publisher.wait(is_last=True)
                policy = sent[-1]
                assert isinstance(policy, PolicyPublished)
                receiver = FilesReceiver(disk) if transport == "files" else SharedMemoryReceiver(folder=disk)
                payload = receiver.fetch(policy.buffer, policy.digest, lambda manifest: torch.zeros(num_bytes(layout), dtype=torch.uint8))
                verify(payload.manifest, payload.data, name=policy.buffer)
                found["found"] = [{name: view.clone() for name, view in views(payload.data, layout).items()}]
        is_patient = False
        if publisher is not None:
            found["skipped"] = async_publisher.take_metrics()["policies_skipped"]
            with pytest.raises(NoRoom), contextlib.closing(publisher):
                async_publisher.wait(is_last=True)
            (disk / "filler").unlink()
    replicas.all_agree(True, what="to end together")
    return found | {"sent": [[type(one).__name__, getattr(one, "version", -1)] for one in sent]}


def check_published(
    folder: Path, jobs: list[tuple[Layout, Any]], tmp_path: Path, *, adapters: dict[str, torch.Tensor] | None = None
) -> list[list[Any]]:
    expected = make_model(folder).tensors() | (adapters or {})
    results = run_jobs(jobs, tmp_path)
    for (layout, _), (first, *_) in zip(jobs, results, strict=True):
        for version, found in enumerate(first["found"], start=1):
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name] * version), (str(layout), name)
    return results


def test_shards_go_straight_to_engine_ranks_and_no_rank_gathers_a_policy(folders: dict[str, Path], tmp_path: Path) -> None:
    """Experts among them, of which the trainer holds those of a layer in one tensor, and engines each by its name."""
    cases = [("qwen3", Layout(ranks=2, shard=2)), ("qwen3", Layout(ranks=2, tensor=2)), ("qwen3", Layout(ranks=2, pipeline=2))]
    cases += [("qwen3_moe", Layout(ranks=2, shard=2, expert=2)), ("qwen3_moe", Layout(ranks=2, shard=2))]
    results = run_jobs([(layout, functools.partial(publish_shards, folder=folders[family])) for family, layout in cases], tmp_path)
    for (family, layout), ranks in zip(cases, results, strict=True):
        model = make_model(folders[family])
        expected = model.tensors()
        policy = sum(tensor.numel() * 4 for name, tensor in expected.items() if name not in model.tied_names)
        for number, found in enumerate(ranks[0]["found"]):
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name] * (1, 1, 2, 2, 2, 2)[number]), (str(layout), name)
        assert len(ranks[0]["found"]) == 6
        assert all(size < 0.8 * policy for rank in ranks for size in rank["sizes"]), "a rank has its shard alone"
        assert sum(rank["num_sent"][1] for rank in ranks) < 2 * 1.1 * policy, "the second engine has it from the first"
        assert sum(rank["num_sent"][2] - rank["num_sent"][1] for rank in ranks) < 1e-3 * policy, "nothing has changed"


def test_adapters_go_from_shard_to_shard_alone_or_merged_by_whoever_holds_their_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    """Merged, A and B of nothing but v add 6 / 3 * 3 v^2 to every weight."""
    layouts = [Layout(ranks=2, shard=2), Layout(ranks=2, tensor=2), Layout(ranks=2, pipeline=2)]
    job = functools.partial(publish_shards, folder=folders["qwen3"], adapters=ADAPTERS)
    results = run_jobs([(layout, functools.partial(job, are_separate=alone)) for layout in layouts for alone in (True, False)], tmp_path)
    model = make_model(folders["qwen3"], adapters=ADAPTERS)
    adapters, base = model.adapters(), make_model(folders["qwen3"]).tensors()
    size = sum(tensor.numel() * 4 for tensor in adapters.values())
    for number, ((first, *_), layout) in enumerate(zip(results, [one for one in layouts for _ in range(2)], strict=True)):
        assert len(first["found"]) == 6
        for version, found in zip((1, 1, 2, 2, 2, 2), first["found"], strict=True):
            assert found.keys() == (base.keys() - model.tied_names if number % 2 else adapters.keys())
            for name, tensor in found.items():
                if number % 2:
                    is_adapted = model.is_adapted(name)
                    assert torch.equal(tensor, base[name]) if not is_adapted else torch.allclose(tensor, base[name] + 6 * version**2), name
                else:
                    assert torch.equal(tensor, adapters[name] * version), (str(layout), name)
        if not number % 2:
            assert sum(rank["num_sent"][1] for rank in results[number]) < 2 * 1.1 * size, "adapters alone, and once"


@pytest.mark.parametrize("transport", ["shared_memory", "files"])
def test_two_ranks_publish_what_one_would(folders: dict[str, Path], tmp_path: Path, transport: str) -> None:
    layouts = [Layout(ranks=2, shard=2), Layout(ranks=2, tensor=2), Layout(ranks=2, pipeline=2)]
    job = functools.partial(publish, folder=folders["qwen3"], run_folder=tmp_path / "run", transport=transport)
    jobs: list[tuple[Layout, Any]] = [(layout, job) for layout in layouts]
    jobs += [(layout, functools.partial(job, adapters=ADAPTERS, are_separate=True)) for layout in layouts]
    expected = make_model(folders["qwen3"], adapters=ADAPTERS).adapters()
    published = check_published(folders["qwen3"], jobs, tmp_path, adapters=expected)
    for adapters in published[len(layouts) :]:
        assert len(adapters[0]["found"][0]) == len(adapters[0]["found"][1]) == 2 * 2 * 2
    for ranks in published[: len(layouts)]:
        assert all(rank["gathered"] == [] for rank in ranks)
        assert all(bool(rank["num_moves"]) == (transport == "shared_memory") for rank in ranks), "each writes its own"


def test_adapters_are_merged_by_the_rank_that_has_their_layer(folders: dict[str, Path], tmp_path: Path) -> None:
    """A and B of nothing but v add 6 / 3 * 3 v^2 to every weight."""
    adapters = Adapters(rank=3, alpha=6.0, targets=("v_proj",))
    job = functools.partial(publish, folder=folders["qwen3"], run_folder=tmp_path / "run", transport="shared_memory", adapters=adapters)
    base = make_model(folders["qwen3"]).tensors()
    for first, *_ in run_jobs([(layout, job) for layout in (Layout(ranks=2, pipeline=2), Layout(ranks=2, tensor=2))], tmp_path):
        assert first["gathered"] == [f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (0, 1)]
        for version, found in enumerate(first["found"], start=1):
            for name, tensor in found.items():
                assert torch.allclose(tensor, base[name] + 6 * version**2 * ("v_proj.weight" in name)), name


def test_four_ranks_of_two_kinds_publish_what_one_would(folders: dict[str, Path], tmp_path: Path) -> None:
    job = functools.partial(publish, folder=folders["qwen3"], run_folder=tmp_path / "run", transport="shared_memory")
    (ranks,) = check_published(folders["qwen3"], [(Layout(ranks=4, shard=2, tensor=2), job)], tmp_path)
    assert all(rank["gathered"] == [] for rank in ranks)


def test_experts_that_engines_name_one_by_one_are_gathered_and_nothing_else(folders: dict[str, Path], tmp_path: Path) -> None:
    job = functools.partial(publish, folder=folders["qwen3_moe"], run_folder=tmp_path / "run", transport="shared_memory")
    (ranks,) = check_published(folders["qwen3_moe"], [(Layout(ranks=2, shard=2, expert=2), job)], tmp_path)
    assert all(name.rpartition(".")[0].endswith("experts") for name in ranks[0]["gathered"])
    assert ranks[0]["gathered"]
    assert all(rank["num_moves"] for rank in ranks)


def test_sharded_weights_without_room_are_passed_over_or_tried_by_one_rank_until_there_is(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk is full before any rank has written (no buffer can be made), or after (the file cannot be).

    Each transport has a disk of its own: what one maps may give back its room while the other fills up.
    """
    monkeypatch.setattr("trainer.weights.async_publisher.RETRY_AFTER_S", 0.01)
    expected = make_model(folders["qwen3"]).tensors()
    size = 5 * sum(tensor.numel() * 4 for tensor in expected.values())
    shared = tmp_path / "shared" / "weights"
    files = tmp_path / "files" / "weights"
    monkeypatch.setattr("pipelinerl.weights.shared_memory.SharedMemorySender", functools.partial(SharedMemorySender, folder=shared))
    monkeypatch.setattr("trainer.weights.sharded_weights.attach_to_write", functools.partial(attach_to_write, folder=shared))
    with small_disk(shared, size_bytes=size), small_disk(files, size_bytes=size):
        job = functools.partial(publish_without_room, folder=folders["qwen3"])
        jobs = [functools.partial(job, disk=shared, transport="shared_memory"), functools.partial(job, disk=files, transport="files")]
        results = run_jobs([(Layout(ranks=2, shard=2), one) for one in jobs], tmp_path)
    for first, other in results:
        assert other["sent"] == []
        assert [kind for kind, _ in first["sent"]] == ["PolicyPublished", "PolicyPublished", "Failed"]
        assert [version for _, version in first["sent"][:2]] == [1, 3], "policy 2 was passed over"
        assert first["skipped"] == 1.0
        for name, tensor in first["found"][0].items():
            assert torch.equal(tensor, expected[name] * 6), name

"""A published policy is the model's weights, tensor by tensor, in the layout the engines asked for."""

import threading
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import PeerSilent, WeightsError
from pipelinerl.messages import PolicyPublished, Tensor
from pipelinerl.weights.adapters import AdapterShape, adapter_layout
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.manifest import check, verify
from pipelinerl.weights.shared_memory import SharedMemoryReceiver
from pipelinerl.weights.transport import Payload
from tests.trainer.tiny import FAMILIES, make_model
from trainer.model.lora import Adapters
from trainer.model.model import Model
from trainer.weights.publisher import Publisher


def _publisher(model: Model, run_folder: Path, *, deadline_s: float = 10.0) -> Publisher:
    return Publisher(model.tensors, tied_names=model.tied_names, run_folder=run_folder, deadline_s=deadline_s)


def _fused_layout(tensors: dict[str, torch.Tensor], *, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A layout in another order and dtype, with gaps: what an engine asks for that fuses parameters."""
    return plan_layout({name: torch.empty(tensors[name].shape, dtype=dtype) for name in sorted(tensors, reverse=True)})


def _fetch(policy: PolicyPublished, layout: tuple[Tensor, ...]) -> Payload:
    """What an engine would take."""
    payload = SharedMemoryReceiver().fetch(policy.buffer, policy.digest, lambda manifest: torch.zeros(0))
    check(payload.manifest, version=policy.version, layout=layout, name=policy.buffer)
    verify(payload.manifest, payload.data, name=policy.buffer)
    return payload


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_bytes_are_the_model_by_name(folders: dict[str, Path], tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = make_model(folders[family])
    tensors = {name: tensor for name, tensor in model.tensors().items() if name not in model.tied_names}
    layout = _fused_layout(tensors, dtype=dtype)
    publisher = _publisher(model, tmp_path)
    publisher.fix_layout(layout)
    try:
        policy = publisher.publish(5)
        assert policy is not None
        assert (policy.version, policy.num_bytes) == (5, num_bytes(layout))
        found = views(_fetch(policy, layout).data, layout)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor.to(dtype)), name
    finally:
        publisher.close()


def test_the_weights_of_the_moment_are_published_and_earlier_ones_stay(folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_model(folders["qwen3"])
    layout = plan_layout(model.tensors())
    publisher = _publisher(model, tmp_path)
    publisher.fix_layout(layout)
    try:
        first = publisher.publish(1)
        with torch.no_grad():
            model.parameters()[0].add_(1.0)
        second = publisher.publish(2)
        assert first is not None
        assert second is not None
        arrivals = [_fetch(policy, layout) for policy in (first, second)]
        before, after = (views(payload.data, layout)["model.embed_tokens.weight"] for payload in arrivals)
        assert torch.allclose(after - before, torch.ones_like(before), atol=1e-6)
    finally:
        publisher.close()


def test_tied_names_may_be_left_out_and_others_may_not(folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_model(folders["qwen3"])
    assert model.tied_names == {"lm_head.weight"}
    tensors = model.tensors()
    publisher = _publisher(model, tmp_path)
    try:
        with pytest.raises(WeightsError, match=r"missing: model\.norm\.weight"):
            publisher.fix_layout(plan_layout({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}))
        publisher.fix_layout(plan_layout({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}))
    finally:
        publisher.close()


def test_publication_waits_for_the_layout_and_says_so_when_none_comes(folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_model(folders["llama"])
    with pytest.raises(PeerSilent, match="which layout the engines want, and policy 1 is ready"):
        _publisher(model, tmp_path, deadline_s=0.01).publish(1)
    publisher = _publisher(model, tmp_path)
    late = threading.Timer(0.05, publisher.fix_layout, (plan_layout(model.tensors()),))
    late.start()
    assert publisher.publish(1) is not None
    late.join()
    publisher.close()


def test_publication_ends_quietly_when_the_run_does(folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_model(folders["llama"])
    publisher = _publisher(model, tmp_path)
    end = threading.Timer(0.05, publisher.give_up)
    end.start()
    assert publisher.publish(1) is None
    end.join()


def test_a_release_before_any_publication_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no buffer was ever published"):
        _publisher(make_model(folders["llama"]), tmp_path).release("pipelinerl-a-0")


def test_changes_are_sent_once_every_engine_holds_a_policy_and_whole_ones_where_one_does_not(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = make_model(folders["qwen3"])
    layout = plan_layout({name: tensor for name, tensor in model.tensors().items() if name not in model.tied_names})
    publisher = Publisher(model.tensors, tied_names=model.tied_names, run_folder=tmp_path, deadline_s=10.0, sends_deltas=True)
    publisher.fix_layout(layout)
    try:
        sizes = []
        for version, held in enumerate([None, None, 2, 3, None], start=1):
            publisher.held(held)
            with torch.no_grad():
                model.parameters()[0].view(-1)[:5] += 1.0
            policy = publisher.publish(version)
            assert policy is not None
            payload = SharedMemoryReceiver().fetch(policy.buffer, policy.digest, lambda manifest: torch.zeros(0))
            assert (payload.manifest.base_version, policy.num_bytes) == (held, len(payload.data))
            sizes.append(policy.num_bytes)
            publisher.release(policy.buffer)
        whole = num_bytes(layout)
        assert [size == whole for size in sizes] == [True, True, False, False, True]
        assert max(sizes[2:4]) < 200
    finally:
        publisher.close()


def test_engines_that_ask_for_adapters_get_these_alone_and_a_trainer_of_all_weights_refuses(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = make_model(folders["qwen3"], adapters=Adapters(rank=3, alpha=6.0, targets=("q_proj", "down_proj"), seed=1))
    shapes = {name: tuple(tensor.shape) for name, tensor in make_model(folders["qwen3"]).tensors().items()}
    layout = adapter_layout(shapes, AdapterShape(rank=3, alpha=6.0, targets=("q_proj", "down_proj")), dtype="float32")
    publisher = Publisher(model.tensors, tied_names=model.tied_names, run_folder=tmp_path, deadline_s=10.0, adapters=model.adapters)
    try:
        wider = adapter_layout(shapes, AdapterShape(rank=4, alpha=6.0, targets=("q_proj", "down_proj")), dtype="float32")
        with pytest.raises(WeightsError, match=r"misshapen: .*q_proj\.lora_A\.weight is \[4, "):
            publisher.fix_layout(wider)
        publisher.fix_layout(layout)
        policy = publisher.publish(1)
        assert policy is not None
        found = views(_fetch(policy, layout).data, layout)
        expected = model.adapter_state()
        assert len(found) == len(expected) == 2 * 2 * 2
        for name, tensor in expected.items():
            assert torch.equal(found[f"base_model.model.{name}.weight"], tensor), name
        whole = _publisher(make_model(folders["qwen3"]), tmp_path)
        with pytest.raises(WeightsError, match=r"ask for adapters alone \(base_model.* and 7 more\), and this trainer trains all weights"):
            whole.fix_layout(layout)
    finally:
        publisher.close()

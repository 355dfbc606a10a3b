"""What the trainer sends of a policy, for engines at any version since the delta_base."""

# pyright: reportPossiblyUnboundVariable=false

import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.delta import Space
from pipelinerl.weights.delta_base import DeltaBase
from pipelinerl.weights.manifest import DigestKind, Manifest, compare, digests
from pipelinerl.weights.receiver import WeightReceiver
from pipelinerl.weights.swap import Placed, SparseSwap
from pipelinerl.weights.transport import Payload

LAYOUT = plan_layout({"a": torch.zeros(96, dtype=torch.bfloat16), "b": torch.zeros(8)})
SPACE = Space(LAYOUT)


def policies(*changed: int) -> list[torch.Tensor]:
    """Policies 0, 1, ...: each changes one byte, by number, of the one before."""
    made = [torch.zeros(num_bytes(LAYOUT), dtype=torch.uint8)]
    for byte in changed:
        made.append(made[-1].clone())
        made[-1][byte] += 1
    return made


def test_the_first_policies_are_whole_until_every_engine_holds_one():
    delta_base = DeltaBase(LAYOUT)
    buffers = policies(0, 2, 4)
    assert delta_base.delta_of(1, buffers[1]) is None
    assert delta_base.delta_of(2, buffers[2]) is None
    delta_base.move(1)
    changes = delta_base.delta_of(3, buffers[3])
    assert changes is not None
    assert changes.positions[2].tolist() == [1, 2], "policies 2 and 3 against 1"


def test_changes_hold_over_every_policy_since_the_baseline_and_the_baseline_moves_only_when_told():
    delta_base = DeltaBase(LAYOUT)
    buffers = policies(0, 2, 2, 4, 6)
    delta_base.delta_of(1, buffers[1])
    delta_base.move(1)
    for version in (2, 3, 4):
        changes = delta_base.delta_of(version, buffers[version])
        assert changes is not None
        assert delta_base.version == 1
        for held in range(1, version + 1):
            buffer = buffers[held].clone()
            SPACE.lay_over(buffer, changes)
            assert torch.equal(buffer, buffers[version]), (held, version)
    delta_base.move(3)
    changes = delta_base.delta_of(5, buffers[5])
    assert changes is not None
    assert changes.positions[2].tolist() == [2, 3], "policies 4 and 5 against 3"


@pytest.mark.parametrize("news", [None, 0, 2])
def test_an_engine_that_lost_its_policy_makes_the_next_one_whole(news: int | None):
    """None: it needs a whole one; 0: it was replaced and holds the first; 2: it holds one whose steps are forgotten."""
    delta_base = DeltaBase(LAYOUT)
    buffers = policies(0, 2, 4, 6, 8)
    for version in (1, 2, 3):
        delta_base.delta_of(version, buffers[version])
    delta_base.move(3)
    delta_base.move(news)
    assert delta_base.delta_of(4, buffers[4]) is None
    delta_base.move(4)
    changes = delta_base.delta_of(5, buffers[5])
    assert changes is not None
    assert changes.positions[2].tolist() == [4]


def test_a_policy_that_changes_much_is_sent_whole_and_nothing_grows_without_end():
    delta_base = DeltaBase(LAYOUT)
    buffers = policies(0, 2)
    delta_base.delta_of(1, buffers[1])
    delta_base.move(1)
    assert delta_base.delta_of(2, buffers[1] + 1) is None, "all of it changed"
    delta_base.move(2)
    for version in range(3, 100):
        buffer = buffers[1] + 1
        buffer[2 * (version % 96)] = 7
        delta_base.delta_of(version, buffer)
    assert sum(len(found) for step in delta_base._steps.values() for found in step.values()) <= 26
    assert delta_base.version is None
    delta_base.move(99)
    assert delta_base.delta_of(100, buffer) is not None


def sealed(delta_base: DeltaBase, version: int, policy: torch.Tensor) -> tuple[Manifest, torch.Tensor]:
    """What is sent of a policy."""
    delta_base.policy.copy_(policy)
    target = torch.zeros_like(policy)
    manifest = delta_base.fill(target, version)
    return manifest, target[: manifest.num_bytes]


def test_what_is_sent_to_devices_has_the_digests_that_they_compute_and_goes_on_having_them():
    delta_base = DeltaBase(LAYOUT, for_devices=True)
    buffers = policies(0, 2, 3, 200)
    for version in (1, 2, 2, 3, 4):
        manifest, _ = sealed(delta_base, version, buffers[version])
        assert [proof.sums for proof in manifest.proofs] == list(digests(buffers[version], LAYOUT, kind=DigestKind.SUMS))
        assert [proof.digest for proof in manifest.proofs] == list(digests(buffers[version], LAYOUT)), "and those of a host"
        delta_base.move(version)
    assert manifest.base_version == 3
    assert manifest.kind_on(torch.device("cuda", 0)) is DigestKind.SUMS
    assert manifest.kind_on(torch.device("cpu")) is DigestKind.XXH3
    whole, _ = sealed(DeltaBase(LAYOUT), 1, buffers[1])
    assert whole.kind_on(torch.device("cuda", 0)) is DigestKind.XXH3, "who asks for no device pays for none"
    assert not any(proof.sums for proof in whole.proofs)


def test_changes_in_a_model_are_proved_by_the_sums_of_what_it_will_hold():
    """The path of a device, on the host: each tensor with its changes, none of it anywhere else than where the model is."""
    delta_base = DeltaBase(LAYOUT, for_devices=True)
    buffers = policies(0, 2, 4)
    parameters = {name: torch.nn.Parameter(view.clone(), requires_grad=False) for name, view in views(buffers[1], LAYOUT).items()}
    swap = SparseSwap([Placed(parameter=parameters[one.name], offset_bytes=one.offset_bytes, num_bytes=one.num_bytes) for one in LAYOUT])
    receiver = WeightReceiver(swap, layout=LAYOUT, receiver=_Nobody())
    receiver._held = 1
    sealed(delta_base, 1, buffers[1])
    delta_base.move(1)
    manifest, data = sealed(delta_base, 2, buffers[2])
    step = receiver._open(Payload(manifest=manifest, data=data), name="s")
    changed = receiver._changed(step.changes, swap)
    compare(manifest, receiver._digests_with(changed, swap, DigestKind.SUMS), name="s", kind=DigestKind.SUMS)
    parameters["b"].data.view(torch.int32)[3] ^= 1
    with pytest.raises(WeightsError, match=r"1 of 2 tensors of policy 2: b \[8\] float32: digest is [0-9a-f]{32}, published was"):
        compare(manifest, receiver._digests_with(changed, swap, DigestKind.SUMS), name="s", kind=DigestKind.SUMS)


class _Nobody:
    def fetch(self, name: str, digest: str, spare: object) -> Payload:
        raise NotImplementedError

    def close(self) -> None: ...

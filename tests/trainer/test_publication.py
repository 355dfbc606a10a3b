"""A policy is written down beside the training of the next step, and is the weights of its own version all the same."""

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pipelinerl.messages import PolicyPublished, StepSealed, Stop
from pipelinerl.metrics import Journal
from pipelinerl.weights.base import plan_layout, views
from pipelinerl.weights.shared_memory import SharedMemoryReceiver
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step
from trainer.lineage import Lineage
from trainer.loop import Loop
from trainer.phases import Phases
from trainer.publication import Publication
from trainer.publish import Publisher


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

    publisher = Publisher(read, tied_names=model.tied_names(), run_folder=tmp_path, deadline_s=10.0)
    layout = plan_layout({name: tensor for name, tensor in model.tensors().items() if name not in model.tied_names()})
    publisher.fix_layout(layout, num_engines=4)
    rows = [(make_batch(samples, step=number), None) for number in range(3)]
    seals = [make_seal(samples, step=number) for number in range(3)]
    items = iter([*(item for pair in zip(rows, seals, strict=True) for item in pair), Stop(reason="the test is over")])

    def take() -> Any:
        item = next(items)
        if not isinstance(item, StepSealed):
            taken[len(after)].set()
        return item

    waves: Any = SimpleNamespace(take=take, busy_with="")
    published: list[PolicyPublished] = []
    try:
        with (
            contextlib.closing(Journal(tmp_path, "trainer-0")) as journal,
            Publication(publisher, spread=None, send=published.append) as publication,
        ):
            loop = Loop(
                waves=waves,
                step=step,
                publication=publication,
                send=told,
                phases=Phases(journal, waves=waves),
                lineage=Lineage(),
                checkpoint=lambda version, commit: None,
                take_news=lambda: (),
                checkpoint_every=100,
            )
            loop.run(0, 10)
        assert [policy.version for policy in published] == [1, 2, 3]
        assert not torch.equal(*(weights["model.norm.weight"] for weights in after[:2])), "a step moves the weights"
        for policy, expected in zip(published, after, strict=True):
            found = SharedMemoryReceiver().fetch(policy.slot, policy.digest, lambda manifest: torch.zeros(0))
            for name, tensor in views(found.payload, layout).items():
                assert torch.equal(tensor, expected[name]), (policy.version, name)
    finally:
        publisher.close()

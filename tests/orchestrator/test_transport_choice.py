"""The transport of a run, chosen from its config and from what trainer and engines say of themselves."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.peers.transport_choice import TransportChoice
from pipelinerl.config.file import parse
from pipelinerl.messages import TrainerReady
from pipelinerl.observe.journal import Journal


class EnginesOn(list[Any]):
    """Engines of one rank, one on each of these machines."""

    def __init__(self, *machines: str, transports: tuple[str, ...] = ()) -> None:
        for number, machine in enumerate(machines):
            self.append(SimpleNamespace(peer=f"engine-{number}", ready=SimpleNamespace(machine=machine, transports=transports)))

    def layout(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ({"trainer": {"ranks": 2, "parallel": {"shard": 2}}}, True),
        ({"trainer": {"ranks": 2}}, False),
        ({"trainer": {"ranks": 2, "parallel": {"shard": 2}}, "engine": {"quantization": "int8"}}, False),
    ],
)
def test_a_sharded_trainer_whose_engines_are_elsewhere_hears_of_the_way_from_shard_to_shard(
    settings: dict[str, Any], is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Not where each rank holds the whole model, nor for engines that are made of whole policies."""
    config = parse({"model": {"path": str(tmp_path)}} | settings, origin="test", for_run=False)
    ready = TrainerReady(replica=0, num_replicas=1, process_id=1, version=0, machine="a")
    engines: Any = EnginesOn("a", "b")
    with contextlib.closing(Journal(tmp_path, "orchestrator")) as journal:
        assert TransportChoice(config=config, journal=journal).layout_for(ready, engines).transport == "gloo"
    assert ('weights.transport = "sharded"' in capsys.readouterr().out) == is_told


@pytest.mark.parametrize(("sizes", "chosen"), [([], "cuda_ipc"), ([2], "shared_memory")])
def test_engines_whose_ranks_the_rule_may_change_get_policies_by_a_transport_that_takes_several_ranks(
    sizes: list[int], chosen: str, tmp_path: Path
):
    pipeline = {"elastic": True, "elastic_tensor_parallel_sizes": sizes}
    config = parse(
        {"model": {"path": str(tmp_path)}, "engine": {"kind": "fake", "count": 2}, "pipeline": pipeline}, origin="test", for_run=False
    )
    ready = TrainerReady(replica=0, num_replicas=1, process_id=1, version=0, machine="a", transports=("cuda_ipc",))
    engines: Any = EnginesOn("a", "a", transports=("cuda_ipc",))
    with contextlib.closing(Journal(tmp_path, "orchestrator")) as journal:
        choice = TransportChoice(config=config, journal=journal)
        assert choice.layout_for(ready, engines).transport == chosen
    assert (choice.why_not_width(2) is None) == (sizes == [2])

"""Which transport is taken, and why; by hand."""

import pytest

from orchestrator.rules.weight_transport import choose_transport
from pipelinerl.errors import ConfigError

HERE = {"engine-0": "a", "engine-1": "a"}
APART = {"engine-0": "a", "engine-1": "b", "engine-2": "c"}


@pytest.mark.parametrize(
    ("wanted", "engines", "transport", "why"),
    [
        ("auto", HERE, "shared_memory", "the engines run on the trainer's machine"),
        ("auto", APART, "gloo", "2 of 3 engines run on another machine than the trainer (engine-1)"),
        ("gloo", HERE, "gloo", "weights.transport says so"),
        ("files", APART, "files", "weights.transport says so"),
    ],
)
def test_the_shortest_road_that_reaches_every_engine_is_taken(wanted: str, engines: dict[str, str], transport: str, why: str):
    assert choose_transport(wanted, trainer="a", engines=engines, address="10.0.0.7") == (
        transport,
        f"policies travel by {transport}: {why}",
    )


def test_a_road_that_does_not_reach_every_engine_is_refused_with_what_to_do():
    with pytest.raises(
        ConfigError, match=r"shared_memory cannot reach engine-1, engine-2: .* Set weights.transport to gloo, nccl or files"
    ):
        choose_transport("shared_memory", trainer="a", engines=APART, address="10.0.0.7")
    for wanted in ("auto", "gloo"):
        with pytest.raises(ConfigError, match=r"weights.address is 127.0.0.1, which only this machine reaches"):
            choose_transport(wanted, trainer="a", engines=APART, address="127.0.0.1")


def test_engines_that_share_the_trainers_device_read_its_memory_or_are_refused():
    assert choose_transport("auto", trainer="a", engines=HERE, address=None, is_colocated=True)[0] == "shared_memory"
    for wanted, engines, why in (
        ("auto", APART, "gloo: 2 of 3 engines run on another machine"),
        ("gloo", HERE, "gloo: weights.transport says so"),
    ):
        with pytest.raises(ConfigError, match=f'pipeline.placement is "colocated", and policies would travel by {why}'):
            choose_transport(wanted, trainer="a", engines=engines, address=None, is_colocated=True)


def test_without_an_address_the_trainer_uses_the_one_that_engines_reach_anyway():
    assert choose_transport("auto", trainer="a", engines=APART, address=None)[0] == "gloo"


def test_a_trainer_that_could_send_its_shards_from_where_they_lie_is_told_how():
    def why(wanted: str, engines: dict[str, str], *, could_be_sharded: bool = True) -> str:
        return choose_transport(wanted, trainer="a", engines=engines, address=None, could_be_sharded=could_be_sharded)[1]

    assert 'with weights.transport = "sharded" none does' in why("auto", APART)
    for others in (why("auto", APART, could_be_sharded=False), why("auto", HERE), why("gloo", APART), why("sharded", APART)):
        assert "gathers" not in others, "who chose, shares memory, or gathers nothing is not told"


def test_gloo_on_one_machine_may_use_the_loopback():
    assert choose_transport("gloo", trainer="a", engines=HERE, address="127.0.0.1")[0] == "gloo"


@pytest.mark.parametrize(
    ("wanted", "engines", "device_transports", "transport", "why"),
    [
        ("auto", HERE, ("cuda_ipc", "nccl"), "cuda_ipc", "the engines run on the trainer's machine, and all have a device"),
        ("auto", HERE, ("nccl",), "shared_memory", "the engines run on the trainer's machine"),
        (
            "auto",
            APART,
            ("cuda_ipc", "nccl"),
            "nccl",
            "2 of 3 engines run on another machine than the trainer (engine-1), and all have a device",
        ),
        ("nccl", HERE, ("nccl",), "nccl", "weights.transport says so"),
    ],
)
def test_roads_between_devices_are_taken_where_all_have_one(
    wanted: str, engines: dict[str, str], device_transports: tuple[str, ...], transport: str, why: str
):
    found = choose_transport(wanted, trainer="a", engines=engines, address="10.0.0.7", device_transports=device_transports)
    assert found == (transport, f"policies travel by {transport}: {why}")


def test_a_road_between_devices_that_some_lack_is_refused():
    with pytest.raises(ConfigError, match="cuda_ipc needs a CUDA device in trainer and engines"):
        choose_transport("cuda_ipc", trainer="a", engines=HERE, address="10.0.0.7", device_transports=("nccl",))
    with pytest.raises(ConfigError, match="cuda_ipc cannot reach engine-1, engine-2"):
        choose_transport("cuda_ipc", trainer="a", engines=APART, address="10.0.0.7", device_transports=("cuda_ipc",))


def test_shards_travel_by_nccl_where_every_process_has_it_and_by_gloo_elsewhere():
    def choose(*device_transports: str) -> str:
        return choose_transport("sharded", trainer="a", engines=APART, address=None, device_transports=device_transports)[0]

    assert choose() == choose("cuda_ipc", "nccl") == "sharded+gloo"
    assert choose("nccl", "sharded+nccl") == "sharded+nccl"
    with pytest.raises(ConfigError, match=r"weights\.address is 127\.0\.0\.1"):
        choose_transport("sharded", trainer="a", engines=APART, address="127.0.0.1")

"""Where a run listens and where it is kept is looked at before its processes load anything."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.file import parse
from pipelinerl.launch.places import look_at_places
from pipelinerl.runtime.findings import Level, collect, sentences


def told(level: Level = Level.FAIL, *, otherwise: Level = Level.FAIL, **sections: Any) -> list[str]:
    smallest = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
    return sentences(collect(look_at_places(parse(smallest | sections, origin="test", for_run=False), otherwise=otherwise)), level)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of loopback that somebody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        yield somebody.getsockname()[1]


def test_a_run_that_can_listen_and_be_kept_is_told_nothing(tmp_path: Path):
    assert not told(run={"folder": str(tmp_path / "made" / "later")}, gateway={})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"run": {"interface": "203.0.113.9"}}, "run.interface is 203.0.113.9: cannot listen there: Cannot assign requested address"),
        ({"run": {"interface": "no.such.host.invalid"}}, "run.interface: 'no.such.host.invalid' is no IPv4 address"),
        ({"gateway": {"interface": "203.0.113.9"}}, "gateway.interface is 203.0.113.9: cannot listen there"),
        ({"tinker": {"interface": "no.such.host.invalid"}}, "tinker.interface is no.such.host.invalid: cannot listen there"),
        (
            {"tracking": {"to": ["prometheus"], "prometheus_interface": "203.0.113.9"}},
            "tracking.prometheus_interface is 203.0.113.9: cannot listen there",
        ),
    ],
)
def test_an_address_that_is_not_this_machines_is_named_with_its_key_and_those_there_are(sections: dict[str, Any], said: str):
    (problem,) = told(**sections)
    assert said in problem
    assert "127.0.0.1" in problem or "there are lo" in problem
    assert "port = 0" not in problem, "another port would not help"
    assert told(Level.NOTE, otherwise=Level.NOTE, **sections) == [problem], "a dry run may be for another machine"


@pytest.mark.parametrize(
    ("section", "key"), [("gateway", "gateway.port"), ("tinker", "tinker.port"), ("tracking", "tracking.prometheus_port")]
)
def test_a_port_that_is_in_use_is_named_with_its_key(section: str, key: str, taken: int):
    values = {"to": ["prometheus"], "prometheus_port": taken} if section == "tracking" else {"port": taken}
    sections: dict[str, Any] = {section: values}
    (problem,) = told(**sections)
    assert problem == f"{key} is {taken}: cannot listen there on 127.0.0.1: Address already in use. {key} = 0 takes a free one"


def test_an_address_that_nobody_listens_at_is_not_tried(taken: int):
    assert not told(tracking={"to": ["tensorboard"], "prometheus_interface": "203.0.113.9", "prometheus_port": taken})


def test_a_file_in_the_place_of_the_run_folder_is_no_folder(tmp_path: Path):
    (tmp_path / "my.toml").touch()
    for folder in (tmp_path / "my.toml", tmp_path / "my.toml" / "below", Path("/dev/null")):
        (problem,) = told(run={"folder": str(folder)}, otherwise=Level.NOTE)
        assert f"run.folder: {folder}: " in problem
        assert "is a file" in problem


def test_a_folder_that_this_user_may_not_write_to_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    (problem,) = told(run={"folder": str(tmp_path / "below")})
    assert f"this user may not write to {tmp_path}" in problem


def test_a_transport_between_gpus_wants_some(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelinerl.launch.places.has_gpu", lambda: False)
    for transport in ("nccl", "cuda_ipc"):
        (problem,) = told(weights={"transport": transport})
        assert f"weights.transport: {transport} takes policies from GPU to GPU, and this machine has none" in problem
    monkeypatch.setattr("pipelinerl.launch.places.has_gpu", lambda: True)
    assert not told(weights={"transport": "nccl"})

"""Fixtures of the transports' contract tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.wires import MemoryWire, Program, ZmqWire, run


@pytest.fixture(params=[MemoryWire, ZmqWire], ids=["memory", "zmq"])
def on_wire(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Program], None]:
    """Run a program over each transport."""
    return lambda program: run(request.param, tmp_path, program)


@pytest.fixture
def on_zmq(tmp_path: Path) -> Callable[[Program], None]:
    return lambda program: run(ZmqWire, tmp_path, program)

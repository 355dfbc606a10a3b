"""Simulated runs leave what they write in memory: they are killed and go on many times a second, and every time the disk is waited for."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """As everywhere, but that it is gone at the end of a test."""
    return memory_path


@pytest.fixture(autouse=True)
def _seldom_collected() -> Iterator[None]:
    """Looking for garbage after every 700 new objects takes a tenth of the processor time of a simulated run."""
    before = gc.get_threshold()
    gc.set_threshold(20_000)
    yield
    gc.set_threshold(*before)

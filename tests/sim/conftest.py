"""Simulated runs leave what they write in memory: they are killed and go on many times a second, and every time the disk is waited for."""

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """As everywhere, but that it is gone at the end of a test."""
    return memory_path

"""Folders of tiny models, made once."""

from pathlib import Path

import pytest

from tests.trainer.tiny import FAMILIES, make_folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family."""
    return {family: make_folder(tmp_path_factory.mktemp(family), family=family) for family in FAMILIES}

"""Which clusters a run is handed to: those that ask for a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.launch.ray.access import show_token, without_ray


@pytest.mark.parametrize("mode", ["disabled", "k8s", ""])
def test_another_mode_than_token_is_refused_and_the_right_one_taught(mode: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        show_token({"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "secret"}, home=tmp_path)
    assert f"RAY_AUTH_MODE is '{mode}', expected 'token'" in str(error.value)
    for step in ("ray get-auth-token --generate", "copy ~/.ray/auth_token to every node", "RAY_AUTH_MODE=token ray start"):
        assert step in str(error.value)
    assert "secret" not in str(error.value)


def test_a_token_is_found_where_ray_looks_for_it_and_turned_on(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    with pytest.raises(ConfigError, match=r"there is no token: RAY_AUTH_TOKEN is not set, and .*/\.ray/auth_token holds none"):
        show_token({}, home=tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"there is no token: .*empty holds none"):
        show_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "empty")}, home=tmp_path)
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    for named in ({}, {"RAY_AUTH_TOKEN": "secret"}, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / ".ray" / "auth_token")}):
        environment = dict(named)
        show_token(environment, home=tmp_path)
        assert environment == named | {"RAY_AUTH_MODE": "token"}


def test_no_process_of_a_run_is_given_the_token() -> None:
    assert without_ray({"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_MODE": "token", "HOME": "/root"}) == {"HOME": "/root"}

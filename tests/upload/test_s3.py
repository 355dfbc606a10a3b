"""A run's copies on S3's own wire: s3fs, unmodified, and moto's server, each written by others.

Skipped where they are not installed: pip install -r scripts/lock/outside.txt.
"""

from __future__ import annotations

import importlib
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.storage.checkpoint_folder import newest_whole
from pipelinerl.upload import check_store, upload, uploader
from tests import processes
from tests.upload.test_uploads import checkpoint

pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("moto", reason="moto is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = "from moto.server import main; import sys; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen([sys.executable, "-c", program, "-p", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            with socket.socket() as probe:
                processes.wait_until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, what="moto's server does not listen")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
                patch.setenv("AWS_ACCESS_KEY_ID", "key")
                patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
                patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
                urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/runs", method="PUT")).close()
                yield importlib.import_module("s3fs").S3FileSystem(skip_instance_cache=True)
        finally:
            server.terminate()


def test_a_run_is_followed_to_its_model_and_what_is_in_the_store_is_whole(bucket: Any, tmp_path: Path) -> None:
    run = tmp_path / "demo-1"
    (run / "model").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    checkpoint(run, 20, content=bytes(70 << 20))
    to = "s3://runs/team"
    with subprocess.Popen(uploader(run, to, keep=2).command) as process:
        try:
            processes.wait_until(lambda: bool(found(bucket, "demo-1/checkpoints/step-000020/manifest.json")), what="no checkpoint arrives")
            checkpoint(run, 40)
            (run / "model" / "model.safetensors").write_bytes(b"trained")
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert upload(run, to, keep=2), "nothing is left to send"
    bucket.get("runs/team/demo-1", str(tmp_path / "copy"), recursive=True)
    newest = newest_whole(tmp_path / "copy" / "checkpoints")
    assert newest is not None
    assert (newest[1].version, newest[2]) == (40, [])
    assert sorted(path.name for path in (tmp_path / "copy" / "checkpoints").iterdir()) == ["step-000020", "step-000040"]
    assert (tmp_path / "copy" / "model" / "model.safetensors").read_bytes() == b"trained"


def test_a_store_is_tried_before_a_run_begins(bucket: Any) -> None:
    check_store("s3://runs/team")
    assert not found(bucket, ".pipelinerl-probe")
    with pytest.raises(ConfigError, match=r"checkpoint\.to: nothing can be written to s3://nobodys/team: .*(bucket|exist)"):
        check_store("s3://nobodys/team")


def found(bucket: Any, name: str) -> list[Any]:
    bucket.invalidate_cache()
    return bucket.glob(f"runs/team/{name}")

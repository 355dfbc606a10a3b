"""What is copied to an object store, in which order, and what becomes of it when the run goes on or the store fails."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.storage import checksum
from pipelinerl.storage.checkpoint_folder import MANIFEST, File, Manifest, name_of, newest_whole, read_manifest, write_manifest
from pipelinerl.upload.object_store import ObjectStore
from pipelinerl.upload.uploads import FILES, LAST_TRIES, Uploads, follow


def checkpoint(run: Path, version: int, *, content: bytes = b"weights") -> Path:
    folder = run / "checkpoints" / name_of(version)
    folder.mkdir(parents=True)
    contents = {".metadata": b"shapes", "__0_0.distcp": content}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    files = {name: File(bytes=len(data), xxh3=checksum.of_bytes(data)) for name, data in contents.items()}
    write_manifest(folder, Manifest(version=version, commit="c", num_samples=1, samples="00", files=files))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "demo-1"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


class Store(ObjectStore):
    """A store in a folder that notes every write, and fails where it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"file://{folder}")
        self.written: list[str] = []
        self.before: Callable[[str], None] = lambda name: None

    def send(self, path: Path, name: str) -> File:
        self.before(name)
        self.written.append(name)
        return super().send(path, name)

    def write(self, name: str, data: bytes) -> None:
        self.before(name)
        self.written.append(name)
        super().write(name, data)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_the_newest_checkpoint_goes_once_and_its_list_last(run: Path, store: Store, tmp_path: Path) -> None:
    checkpoint(run, 20)
    checkpoint(run, 40, content=b"newer")
    uploads = Uploads(run, store, keep=2)
    for _ in range(3):
        uploads.look()
    assert store.written == [
        "demo-1/config.json",
        "demo-1/checkpoints/step-000040/.metadata",
        "demo-1/checkpoints/step-000040/__0_0.distcp",
        "demo-1/checkpoints/step-000040/manifest.json",
    ]
    found = newest_whole(tmp_path / "store" / "demo-1" / "checkpoints")
    assert found is not None
    assert found[1].version == 40
    Uploads(run, store, keep=2).look()
    assert store.written[4:] == ["demo-1/config.json"], "another process asks the store what is there"


def test_as_many_stay_in_the_store_as_on_the_disk(run: Path, store: Store, tmp_path: Path) -> None:
    uploads = Uploads(run, store, keep=2)
    for version in (20, 40, 60):
        checkpoint(run, version)
        uploads.look()
    assert sorted(path.name for path in (tmp_path / "store/demo-1/checkpoints").iterdir()) == ["step-000040", "step-000060"]


def test_a_checkpoint_of_the_same_name_and_another_content_takes_its_place_without_a_mixture(
    run: Path, store: Store, tmp_path: Path
) -> None:
    """A resumed run began before a checkpoint that a disk damaged, and writes that version anew."""
    Uploads(run, store, keep=2).look()
    shutil.rmtree(checkpoint(run, 20).parent)
    checkpoint(run, 20, content=b"first life")
    Uploads(run, store, keep=2).look()
    shutil.rmtree(run / "checkpoints")
    checkpoint(run, 20, content=b"second")
    there = tmp_path / "store/demo-1/checkpoints/step-000020"

    def while_sent(name: str) -> None:
        if name.endswith(".distcp"):
            assert not (there / MANIFEST).exists(), "the old list beside new files"

    store.before = while_sent
    Uploads(run, store, keep=2).look()
    assert (there / "__0_0.distcp").read_bytes() == b"second"
    assert read_manifest(there).files["__0_0.distcp"].bytes == 6


def test_one_that_is_removed_while_it_is_sent_is_left_out(run: Path, store: Store, tmp_path: Path) -> None:
    old = checkpoint(run, 20)

    def overtaken(name: str) -> None:
        if old.exists() and name.endswith(".distcp"):
            shutil.rmtree(old)
            checkpoint(run, 40)

    store.before = overtaken
    uploads = Uploads(run, store, keep=2)
    uploads.look()
    assert not (tmp_path / "store/demo-1/checkpoints/step-000020").exists()
    uploads.look()
    assert (tmp_path / "store/demo-1/checkpoints/step-000040" / MANIFEST).exists()


def test_a_checkpoint_that_a_disk_damaged_gets_no_list_and_is_told(
    run: Path, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint(run, 20) / "__0_0.distcp").write_bytes(b"wEights")
    until = threading.Event()
    until.set()
    assert not follow(Uploads(run, store, keep=2), until=until)
    assert not (tmp_path / "store/demo-1/checkpoints/step-000020" / MANIFEST).exists()
    assert "__0_0.distcp was damaged after it was written" in caplog.text


def test_a_damaged_checkpoint_is_forgotten_once_a_newer_whole_one_is_sent(run: Path, store: Store) -> None:
    (checkpoint(run, 20) / "__0_0.distcp").write_bytes(b"wEights")
    uploads, until = Uploads(run, store, keep=2), threading.Event()
    uploads.look()
    assert "__0_0.distcp was damaged" in uploads.damaged["checkpoints"]
    checkpoint(run, 40)
    until.set()
    assert follow(uploads, until=until)


def test_a_model_goes_with_all_its_files_and_a_list_of_them(run: Path, store: Store, tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        (run / name).mkdir()
        (run / name / "config.json").write_text(name)
    uploads = Uploads(run, store, keep=2)
    uploads.look()
    assert [name.removeprefix("demo-1/") for name in store.written[1:]] == [
        *("model/config.json", "model/files.json", "adapter/config.json", "adapter/files.json")
    ]
    listed = json.loads((tmp_path / "store/demo-1/model" / FILES).read_bytes())
    assert listed == {"config.json": {"bytes": 5, "xxh3": checksum.of_bytes(b"model")}}
    (run / "model").rename(run / "model.old")
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("trained on")
    uploads.look()
    assert (tmp_path / "store/demo-1/model/config.json").read_text() == "trained on"


def test_a_store_that_fails_is_tried_again_with_growing_pauses_and_after_the_run_three_times(run: Path, store: Store) -> None:
    checkpoint(run, 20)
    failures: list[str] = []

    def fails(name: str) -> None:
        failures.append(name)
        raise ConnectionError("no route")

    store.before = fails
    until, pauses = Until(after=3), list[float]()
    assert not follow(Uploads(run, store, keep=2), until=until, sleep=pauses.append)
    assert until.pauses == [5.0, 10.0, 20.0]
    assert len(failures) == 3 + LAST_TRIES
    assert pauses == [5.0] * (LAST_TRIES - 1)
    store.before = lambda name: None
    assert follow(Uploads(run, store, keep=2), until=until)
    assert store.written[-1].endswith(MANIFEST)


class Until(threading.Event):
    """An event that is set after some waits, and notes them."""

    def __init__(self, *, after: int) -> None:
        super().__init__()
        self._after = after
        self.pauses: list[float] = []

    def is_set(self) -> bool:
        return len(self.pauses) >= self._after

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return self.is_set()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("backup/models", "is not a URL of an object store: expected one such as s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", "holds a user or a key"),
        ("nowhere://bucket", "Protocol not known: nowhere"),
        ("ftp://no.such.host.invalid/x", "ftp://no.such.host.invalid/x cannot be opened: "),
    ],
)
def test_a_url_that_nothing_can_open_is_refused_and_no_key_is_repeated(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        ObjectStore(url)
    assert said in str(error.value)
    assert "secret" not in str(error.value).replace("AWS_SECRET", "")


def test_a_protocol_whose_package_is_missing_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"Install s3fs to access S3\. For S3: pip install 'pipelinerl\[store\]'"):
        ObjectStore("s3://bucket")

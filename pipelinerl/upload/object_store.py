"""A folder of an object store, named by a URL that fsspec knows: `s3://bucket/prefix`, `gs://`, `az://`, `file:///folder`.

Who is let in is the business of the protocol's package, which looks where its own tools look (for S3 the variables `AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY` and `AWS_ENDPOINT_URL`, `~/.aws`, or the machine's role): a URL holds no key, since settings are written down.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash

from pipelinerl.errors import ConfigError
from pipelinerl.storage.checkpoint_folder import File

CHUNK_BYTES = 64 << 20
"""Bytes of one part of an object: S3 takes 10,000 parts, and this memory is held once or twice while a file is sent."""


class ObjectStore:
    """Reads and writes objects under one URL. Every method but `__init__` may raise whatever the protocol's package raises."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` for a URL that nothing here can open. Does not connect."""
        parts = urlsplit(url)
        if "://" not in url:
            raise ConfigError(
                f"{url!r} is not a URL of an object store: expected one such as s3://bucket/prefix, or file:///folder for a folder"
            )
        if "@" in parts.netloc:
            raise ConfigError(
                f"the URL of {parts.scheme}://{parts.hostname} holds a user or a key, and settings are written down in plain text: leave it"
                " out, and give it by the environment (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
            )
        options = {"auto_mkdir": True} if parts.scheme in ("file", "local") else {}
        try:
            self._files, root = importlib.import_module("fsspec.core").url_to_fs(url, **options)
        except ImportError as error:
            raise ConfigError(f"{url}: {error}. For S3: pip install 'pipelinerl[store]'") from None
        except Exception as error:  # what a protocol's package raises where its URL leads nowhere: some connect at once
            raise ConfigError(f"{url} cannot be opened: {error}") from None
        self._root = str(root).rstrip("/")

    def send(self, path: Path, name: str) -> File:
        """Copy a file to the object `name`; its size and digest, of the very bytes that were sent."""
        digest, num_bytes = xxhash.xxh3_128(), 0
        with open(path, "rb") as source, self._files.open(f"{self._root}/{name}", "wb", block_size=CHUNK_BYTES) as target:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
                target.write(chunk)
        return File(bytes=num_bytes, xxh3=digest.hexdigest())

    def write(self, name: str, data: bytes) -> None:
        """Make `data` the object `name`."""
        self._files.pipe_file(f"{self._root}/{name}", data)

    def read(self, name: str) -> bytes | None:
        """The object `name`; None where there is none."""
        try:
            return self._files.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None

    def folders(self, name: str) -> list[str]:
        """The names of what lies directly under `name`, sorted."""
        self._files.invalidate_cache()
        try:
            found: list[Any] = self._files.ls(f"{self._root}/{name}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(one).rstrip("/").rpartition("/")[2] for one in found)

    def remove(self, name: str) -> None:
        """Remove an object, or everything under a name; nothing where there is none."""
        self._files.invalidate_cache()
        if self._files.exists(f"{self._root}/{name}"):
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def probe(self) -> None:
        """Write an object, read it and remove it, as a run will."""
        name = ".pipelinerl-probe"
        self.write(name, b"probe")
        found = self.read(name)
        self.remove(name)
        if found != b"probe":
            raise OSError(f"what was written is read back as {found!r}")

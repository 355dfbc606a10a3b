"""An image travels to an engine once, however many siblings of its group ask about it there.

Both ends keep a list of the images that the engine holds: those used last, up to `HELD_BYTES`. Each request changes both in the same way,
since a session carries every message once and in order. So the orchestrator knows, without asking, which images it may leave out of a
request: the digest of an image then stands for it. An orchestrator begins with an empty list for each process of an engine. One that takes
another's place finds more there than it knows of: what it does not know of was used before all that it knows, and goes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from pipelinerl.errors import EngineError
from pipelinerl.messages import MAX_IMAGE_BYTES, Generate, Images

HELD_BYTES = 64 * MAX_IMAGE_BYTES
"""Images that an engine holds. At least those of one request; a smaller value sends the images of a group again where more groups than fit
are generated in turns."""

T = TypeVar("T")


class _Recent(Generic[T]):
    """What was used last, by name: as many as fit."""

    def __init__(self, *, limit_bytes: int, size: Callable[[T], int]) -> None:
        self.held: dict[bytes, T] = {}
        """The oldest first."""
        self._limit_bytes = limit_bytes
        self._size = size
        self._num_bytes = 0

    def use(self, values: dict[bytes, T]) -> None:
        """Take what a request has; what was used longest ago goes, as far as there is no room."""
        for name, value in values.items():
            self._num_bytes += self._size(value) - (self._size(self.held.pop(name)) if name in self.held else 0)
            self.held[name] = value
        while self._num_bytes > self._limit_bytes:
            self._num_bytes -= self._size(self.held.pop(next(iter(self.held))))


class ImagesSent:
    """The orchestrator's end, for one process of an engine."""

    def __init__(self, *, limit_bytes: int = HELD_BYTES) -> None:
        self._sizes: _Recent[int] = _Recent(limit_bytes=limit_bytes, size=int)

    def stripped(self, request: Generate) -> Generate:
        """Return the request as it travels: without the images that the engine holds."""
        if not request.images:
            return request
        digests = tuple(hashlib.blake2b(image, digest_size=16).digest() for image in request.images)
        known = self._sizes.held.keys()
        images: Images = tuple(b"" if digest in known else image for digest, image in zip(digests, request.images, strict=True))
        self._sizes.use({digest: len(image) for digest, image in zip(digests, request.images, strict=True)})
        return msgspec.structs.replace(request, images=images, image_digests=digests)


class ImagesHeld:
    """The engine's end."""

    def __init__(self, *, limit_bytes: int = HELD_BYTES) -> None:
        self._images: _Recent[bytes] = _Recent(limit_bytes=limit_bytes, size=len)

    def restored(self, request: Generate) -> Generate:
        """Return a request with all its images; one that is not here stays empty (`check_images`)."""
        if not request.image_digests:
            return request
        pairs = zip(request.image_digests, request.images, strict=True)
        images = tuple(image or self._images.held.get(digest, b"") for digest, image in pairs)
        self._images.use(dict(zip(request.image_digests, images, strict=True)))
        return msgspec.structs.replace(request, images=images, image_digests=())


def check_images(request: Generate) -> None:
    """Raise `EngineError` where an image of a request is missing: it was asked of the process that this one follows."""
    if not all(request.images):
        raise EngineError("an image was left out as one that this engine has, and it has not: it was sent to the process before this one")

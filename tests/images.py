"""Pictures for tests: small, and no two of one seed alike."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def png(seed: int, *, width: int = 40, height: int = 30) -> bytes:
    """A PNG file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def row(*parts: bytes | str, **columns: Any) -> dict[str, Any]:
    """A row whose prompt is one message of these parts, images and texts."""
    content = [{"type": "image"} if isinstance(part, bytes) else {"type": "text", "text": part} for part in parts]
    return {"prompt": [{"role": "user", "content": content}], "images": [part for part in parts if isinstance(part, bytes)], **columns}

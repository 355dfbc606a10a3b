"""Images of prompts: how rows bring them, and what stands for them among a prompt's tokens.

A chat message with a part `{"type": "image"}` takes the next entry of the row's column `images`: a path, the bytes of a file, or what
`datasets` stores for an image ({"bytes": ..., "path": ...}). The file travels byte for byte to engines and trainer, each of which makes
pixels of it by the image processor in the model's folder.

One family is written, Idefics3 (the first SmolVLM is one): its image processor runs on Pillow alone, and vLLM loads it without torchvision,
which a CPU build of torch cannot have beside it. Others are refused by name.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from pipelinerl.config.families import takes_images
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import MAX_IMAGE_BYTES, MAX_IMAGES, Images

COLUMN = "images"
PLACEHOLDER = "<image>"
MAX_PIXELS = 16 << 20
"""Pixels of one image. A small file may hold many more, which would fill the memory of whoever reads it."""
_SURROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


def num_images(messages: Any) -> int:
    """Count the images in chat messages."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return 0
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, Sequence) and not isinstance(content, str) for part in content]
    return sum(isinstance(part, Mapping) and str(part.get("type", "")).startswith("image") for part in parts)


def read_images(row: Mapping[str, Any], *, num: int, where: str) -> Images:
    """Return the files of the `num` images that the prompt of a row asks for. Raises `DataError`."""
    if num == 0:
        return ()
    entries = row.get(COLUMN)
    entries = list(entries) if isinstance(entries, list | tuple) else [] if entries is None else [entries]
    if len(entries) != num or num > MAX_IMAGES:
        raise DataError(
            f"{where}: the messages ask for {num} images, and column {COLUMN!r} has {len(entries)}: expected as many, {MAX_IMAGES} at most"
        )
    images = tuple(_file(entry, f"{where}: image {number} of column {COLUMN!r}") for number, entry in enumerate(entries))
    if (num_bytes := sum(map(len, images))) > MAX_IMAGE_BYTES:
        raise DataError(f"{where}: images of {num_bytes} bytes together, at most {MAX_IMAGE_BYTES} are allowed. Make them smaller")
    return images


def _file(entry: Any, what: str) -> bytes:
    if isinstance(entry, Mapping):
        entry = entry.get("bytes") or entry.get("path")
    if isinstance(entry, str):
        try:
            return Path(entry).read_bytes()
        except OSError as error:
            raise DataError(f"{what}: {entry} cannot be read (looked from {Path.cwd()}): {error}") from error
    if not isinstance(entry, bytes):
        raise DataError(f"{what} is a {type(entry).__name__}, expected a path, or the bytes of an image file")
    return entry


def each_once(samples: Sequence[Images]) -> tuple[Images, tuple[tuple[int, ...], ...]]:
    """Return the images of several samples, each once, and which of them each sample has; nothing at all where none has any."""
    numbers: dict[bytes, int] = {}
    found = tuple(tuple(numbers.setdefault(image, len(numbers)) for image in images) for images in samples)
    return tuple(numbers), found if numbers else ()


def open_image(data: bytes, *, what: str = "an image") -> Image.Image:
    """Decode an image file, as red, green and blue. Raises `DataError`."""
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise DataError(f"{what} has {image.width} x {image.height} pixels, at most {MAX_PIXELS} are allowed. Make it smaller")
        return image.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{what} cannot be read as an image: {error}") from error


class ImageProcessor:
    """The image processor of a model's folder, and the text that stands for an image."""

    def __init__(self, folder: Path) -> None:
        """Read the folder. Raises `ConfigError` for a family that takes no images here, and for a folder without an image processor."""
        if not takes_images(folder):
            raise ConfigError(
                f"model.path {folder}: no images can be trained or served with this family; they can with Idefics3 (model_type idefics3,"
                " as the first SmolVLM has), see docs/models.md. Choose such a model, or leave images out of the messages"
            )
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        try:
            self.pillow = Idefics3ImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
            self.num_tokens = int(json.loads((folder / "processor_config.json").read_text())["image_seq_len"])
            self.token_id = int(json.loads((folder / "config.json").read_text())["image_token_id"])
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model.path {folder}: its image processor cannot be loaded: {type(error).__name__}: {error}") from error

    def expand(self, text: str, images: Images) -> str:
        """Return a prompt's text with each placeholder as the model reads it: a run of them for each patch. Raises `DataError`."""
        pieces = text.split(PLACEHOLDER)
        if len(pieces) != len(images) + 1:
            raise DataError(f"the chat template writes {PLACEHOLDER} {len(pieces) - 1} times for {len(images)} images. Keep it out of text")
        runs = [self._run(data, what=f"image {number}") for number, data in enumerate(images)]
        return pieces[0] + "".join(run + piece for run, piece in zip(runs, pieces[1:], strict=True))

    def _run(self, data: bytes, *, what: str) -> str:
        """Write what transformers' `Idefics3Processor` writes: patches row by row, then the whole image."""
        image = open_image(data, what=what)
        _, num_rows, num_columns = self.pillow.get_number_of_image_patches(image.height, image.width, {})
        features = PLACEHOLDER * self.num_tokens
        rows = [
            "".join(f"{_SURROUND}<row_{row + 1}_col_{column + 1}>{features}" for column in range(num_columns)) + "\n"
            for row in range(num_rows)
        ]
        return "".join(rows) + "\n" * bool(rows) + f"{_SURROUND}{_GLOBAL}{features}{_SURROUND}"

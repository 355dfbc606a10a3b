"""The images of a packed row: pixels, and which token of the row stands for which of their features.

Legend: `R` tokens of the packed row, `n` patches of all its images (an image is one or several), `S` pixels of a patch's side, `F` features
of all patches, as many of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipelinerl.data.images import ImageProcessor, open_image
from pipelinerl.errors import DataError
from pipelinerl.messages import Images, MicroBatch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """The images of the samples of a row, each once."""

    pixels: torch.Tensor
    """[n, 3, S, S] float32."""
    mask: torch.Tensor
    """[n, S, S] int64, 1 where a pixel is the image's, and not padding."""
    feature_of: np.ndarray
    """[R] int64, the feature that takes the place of the token's embedding, of F; -1 for a token that is none."""


def images_of_row(batch: MicroBatch, *, processor: ImageProcessor | None) -> RowImages | None:
    """Return the images of a row; None where it has none. Raises `DataError` where placeholders and features do not match."""
    return row_images(
        batch.images,
        batch.images_of,
        token_ids=batch.token_ids,
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        names=batch.rollout_ids,
        processor=processor,
    )


def row_images(
    images: Images,
    images_of: Sequence[Sequence[int]],
    *,
    token_ids: np.ndarray,
    loss_mask: np.ndarray,
    lengths: np.ndarray,
    names: Sequence[str],
    processor: ImageProcessor | None,
) -> RowImages | None:
    """Return the images of samples laid end to end, each with those of `images` that `images_of` says; raises as `images_of_row`."""
    numbers = sorted({number for own in images_of for number in own})
    if not numbers:
        return None
    if processor is None:
        raise DataError(f"{names[0]} has images, and the model that is trained takes none")
    make: Any = processor.pillow  # transformers annotates images as anything but what it takes
    made = [make(images=[[open_image(images[number])]], return_tensors="pt") for number in numbers]
    pixels, mask = (torch.cat([one[name][0] for one in made]) for name in ("pixel_values", "pixel_attention_mask"))
    sizes = [one["pixel_values"].shape[1] * processor.num_tokens for one in made]
    first = dict(zip(numbers, np.cumsum([0, *sizes]).tolist(), strict=False))
    size = dict(zip(numbers, sizes, strict=True))
    feature_of = np.full(len(token_ids), -1)
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    for name, start, end, own in zip(names, [0, *ends[:-1]], ends, images_of, strict=True):
        given = np.logical_and.accumulate(~loss_mask[start:end])  # the policy may sample a placeholder: that one shows nothing
        places = start + np.flatnonzero(given & (token_ids[start:end] == processor.token_id))
        features = [np.arange(first[number], first[number] + size[number]) for number in own]
        if len(places) != (expected := sum(map(len, features))):
            raise DataError(f"{name}: {len(places)} placeholders for {len(own)} images, expected {expected}, one for each feature")
        feature_of[places] = np.concatenate([*features, np.zeros(0, np.int64)])
    return RowImages(pixels=pixels, mask=mask, feature_of=feature_of)

"""Both ends of the list of images that an engine holds, with any requests, and whichever end begins anew."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pipelinerl.engine.held_images import ImagesHeld, ImagesSent, check_images
from pipelinerl.errors import EngineError
from pipelinerl.messages import Generate, Images, Sampling

LIMIT = 100


def request(*images: bytes) -> Generate:
    return Generate(rollout_id="0/0", attempt=0, token_ids=np.ones(3, np.int32), sampling=Sampling(max_tokens=1), images=images)


def num_bytes(images: Images) -> int:
    return sum(map(len, images))


@pytest.mark.parametrize("seed", range(5))
def test_every_request_has_its_images_whichever_end_begins_anew(seed: int) -> None:
    chance = random.Random(seed)
    images = [chance.randbytes(chance.randrange(1, 40)) for _ in range(12)]
    sent, held, carried, asked = ImagesSent(limit_bytes=LIMIT), ImagesHeld(limit_bytes=LIMIT), 0, 0
    for _ in range(500):
        if chance.random() < 0.02:  # another process of the engine
            sent, held = ImagesSent(limit_bytes=LIMIT), ImagesHeld(limit_bytes=LIMIT)
        if chance.random() < 0.02:  # another orchestrator
            sent = ImagesSent(limit_bytes=LIMIT)
        one = request(*chance.choices(images, k=chance.randrange(4)))
        wire = sent.stripped(one)
        restored = held.restored(wire)
        assert restored.images == one.images
        check_images(restored)
        carried, asked = carried + num_bytes(wire.images), asked + num_bytes(one.images)
    assert carried < 0.8 * asked


def test_siblings_carry_their_image_once_as_long_as_it_fits() -> None:
    sent = ImagesSent(limit_bytes=LIMIT)
    first, second = b"a" * 60, b"b" * 30
    assert [sent.stripped(request(first)).images for _ in range(3)] == [(first,), (b"",), (b"",)]
    assert sent.stripped(request(first, second)).images == (b"", second)
    assert sent.stripped(request(b"c" * 50)).images == (b"c" * 50,), "the first is the one that was used longest ago"
    assert sent.stripped(request(second)).images == (b"",)
    assert sent.stripped(request(first)).images == (first,)


def test_a_request_for_the_process_before_is_refused_by_name() -> None:
    sent = ImagesSent()
    sent.stripped(request(b"cat"))
    with pytest.raises(EngineError, match="it was sent to the process before this one"):
        check_images(ImagesHeld().restored(sent.stripped(request(b"cat"))))

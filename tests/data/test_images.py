"""Images in the messages of a row: what the prompt becomes, as transformers' own processor has it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.data.sources import PromptBuilder
from pipelinerl.data import images
from pipelinerl.data.images import ImageProcessor, open_image
from pipelinerl.data.tokenizer import TextEncoder, load_tokenizer
from pipelinerl.errors import DataError
from tests.images import png, row
from tests.tiny_models import make_idefics3, make_qwen2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("idefics3")
    make_idefics3(path, splits=True)
    return path


def builder(folder: Path) -> PromptBuilder:
    encoder = TextEncoder(load_tokenizer(folder), image_processor=lambda: ImageProcessor(folder))
    return PromptBuilder(prompt_column="prompt", encoder=encoder)


def test_a_prompt_with_images_has_the_tokens_of_transformers_own_processor(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor

    wide, small = png(0, width=60, height=40), png(1, width=20, height=20)
    path = tmp_path / "small.png"
    path.write_bytes(small)
    asked = row(wide, "and", small, "?", answer="a") | {"images": [{"bytes": wide, "path": None}, str(path)]}
    prompt = builder(folder).prompt(3, asked, epoch=0, where="row 3")
    processor: Any = AutoProcessor.from_pretrained(folder)
    opened = [open_image(wide), open_image(small)]
    theirs = processor(text="<image>and<image>?", images=opened, add_special_tokens=False)
    assert prompt.token_ids.tolist() == theirs["input_ids"][0]
    assert prompt.images == (wide, small)
    assert prompt.columns == {"answer": "a"}, "bytes are no JSON, and no reward is told them"


def test_a_row_without_an_image_in_its_messages_keeps_its_column_of_that_name(folder: Path) -> None:
    prompt = builder(folder).prompt(0, {"prompt": "what?", "images": ["a.png"]}, epoch=0, where="row 0")
    assert (prompt.images, prompt.columns) == ((), {"images": ["a.png"]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": []}, r"row 0: the messages ask for 1 images, and column 'images' has 0"),
        ({"images": ["missing.png"]}, r"image 0 of column 'images': missing\.png cannot be read"),
        ({"images": [b"GIF89a"]}, r"image 0 cannot be read as an image"),
        ({"images": [3]}, r"is a int, expected a path, or the bytes"),
        ({"images": [png(0) + bytes(3 << 20)]}, r"images of \d+ bytes together, at most 2097152"),
        ({"prompt": row(png(0), "is <image> a word?")["prompt"]}, r"writes <image> 2 times for 1 images"),
    ],
)
def test_what_is_wrong_with_a_rows_images_is_said(folder: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        builder(folder).prompt(0, row(png(0), "?") | change, epoch=0, where="row 0")


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 40 * 30 - 1)
    with pytest.raises(DataError, match="has 40 x 30 pixels, at most 1199"):
        open_image(png(0))


def test_a_model_of_another_family_is_refused_images_by_name(tmp_path: Path) -> None:
    make_qwen2(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | length }}")
    with pytest.raises(DataError, match=r"row 0: its messages have an image, and model\.path .* no images can be trained or served"):
        builder(tmp_path).prompt(0, row(png(0), "?"), epoch=0, where="row 0")


def test_a_folder_without_an_image_processor_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "idefics3", "image_token_id": 1}))
    made = PromptBuilder(prompt_column="prompt", encoder=TextEncoder(None, image_processor=lambda: ImageProcessor(tmp_path)))
    with pytest.raises(DataError, match=r"its image processor cannot be loaded"):
        made.prompt(0, row(png(0), "?"), epoch=0, where="row 0")


def test_who_has_no_place_for_images_refuses_them(folder: Path) -> None:
    """Demonstrations, the replies of environments, agents: they hand on text alone."""
    with pytest.raises(DataError, match="the messages have an image, and here they may have none"):
        TextEncoder(load_tokenizer(folder)).prompt(row(png(0), "?")["prompt"])

"""A row with images against transformers' own model class, sample by sample: log-probabilities and gradients, the vision tower's too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from pipelinerl.config.file import parse
from pipelinerl.data.demonstrations import DemonstrationEncoder
from pipelinerl.data.images import ImageProcessor, open_image
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import MicroBatch
from tests.images import png
from tests.images import row as image_row
from tests.tiny_models import make_idefics3, make_qwen2
from tests.trainer.tiny import make_folder, make_model, make_step
from trainer.data.sft_rows import SftRows
from trainer.data.split import split_by_gradient
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import arrange
from trainer.rows.images import images_of_row
from trainer.rows.packed_row import PackedRow

FILES = (png(0, width=60, height=40), png(1, width=24, height=24), png(2, width=24, height=24))
SAMPLES = (("<image>what?", (1,), "blue"), ("<image>what?", (1,), "bl"), ("<image>what?", (2,), "red"), ("<image>or<image>?", (0, 1), "no"))
"""Siblings; the same text with another image; two images, one of them seen before, in patches. Text, images, completion."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("idefics3")
    make_idefics3(path, splits=True)
    return path


def batch_of(folder: Path) -> tuple[MicroBatch, list[tuple[dict[str, Any], int]]]:
    """The samples as a row, and each as transformers' processor gives it, with the tokens of its prompt."""
    processor: Any = AutoProcessor.from_pretrained(folder)
    own, ids, masks = [], [], []
    for text, numbers, completion in SAMPLES:
        given = [open_image(FILES[number]) for number in numbers]
        prompt = processor(text=text, images=given, add_special_tokens=False, return_tensors="pt")
        said = processor.tokenizer(completion + "<image>", add_special_tokens=False)["input_ids"]  # a policy may sample a placeholder
        size = prompt["input_ids"].shape[1]
        whole = torch.cat((prompt["input_ids"], torch.tensor([said])), 1)
        own.append((dict(prompt) | {"input_ids": whole, "attention_mask": torch.ones_like(whole)}, size))
        ids.append(whole[0].numpy().astype(np.int32))
        masks.append(np.arange(len(ids[-1])) >= size)
    nothing = np.zeros(sum(map(len, ids)), np.float32)
    batch = MicroBatch(
        step=0,
        index=0,
        token_ids=np.concatenate(ids),
        loss_mask=np.concatenate(masks),
        logprobs=nothing,
        versions=np.where(np.concatenate(masks), 0, -1).astype(np.int32),
        advantages=nothing,
        lengths=np.array([len(one) for one in ids], np.int32),
        rollout_ids=("0/0", "0/1", "1/0", "2/0"),
        images=FILES,
        images_of=tuple(numbers for _, numbers, _ in SAMPLES),
    )
    return batch, own


def laid_out(batch: MicroBatch, folder: Path) -> PackedRow:
    images = images_of_row(batch, processor=ImageProcessor(folder))
    row = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids, images=images)
    assert row is not None
    return row


def theirs(module: Any, inputs: dict[str, Any], num_prompt: int) -> torch.Tensor:
    """Log-probabilities of a sample's completion; a placeholder in it is a token like others, which transformers' merging would refuse."""
    ids = inputs["input_ids"]
    found = module.get_image_features(inputs["pixel_values"], inputs["pixel_attention_mask"]).pooler_output
    prompt = ids[:, :num_prompt]
    merged = module.model.inputs_merger(prompt, module.get_input_embeddings()(prompt), found)
    embedded = torch.cat((merged, module.get_input_embeddings()(ids[:, num_prompt:])), 1)
    logits = module(inputs_embeds=embedded, attention_mask=inputs["attention_mask"], use_cache=False).logits[0, num_prompt - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, num_prompt:, None])[:, 0]


def test_a_row_with_images_says_and_learns_what_transformers_model_does(folder: Path) -> None:
    batch, own = batch_of(folder)
    model = make_model(folder)
    row = laid_out(batch, folder)
    assert len(row.token_ids) < len(batch.token_ids) - 20, "siblings share their prompt"
    logprobs, _ = model.logprobs(row)
    module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    expected = torch.cat([theirs(module, inputs, num_prompt) for inputs, num_prompt in own])
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    ours, others = model.named_parameters(), dict(module.named_parameters())
    (-logprobs.sum()).backward()
    (-expected.sum()).backward()
    for name, parameter in ours.items():
        assert (parameter.grad is None) == (others[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, others[name].grad, atol=2e-4, rtol=1e-3)
    towers = [parameter.grad for name, parameter in ours.items() if "vision_model.encoder" in name]
    assert towers
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in towers), "the vision tower learns, too"


def test_the_same_text_with_another_image_is_computed_anew(folder: Path) -> None:
    """Prompts of the same tokens share their computation only where they show the same."""
    batch, _ = batch_of(folder)
    ends = np.cumsum(batch.lengths)
    first, third = (batch.token_ids[end - length : end] for end, length in zip(ends[[0, 2]], batch.lengths[[0, 2]], strict=True))
    assert first[:10].tolist() == third[:10].tolist()
    logprobs, _ = make_model(folder).logprobs(laid_out(batch, folder))
    same = dataclasses.replace(laid_out(batch, folder), vision=None)
    assert (make_model(folder).logprobs(same)[0] - logprobs).abs().max() > 0.01


def test_half_a_row_has_the_images_of_its_own_samples(folder: Path) -> None:
    batch, _ = batch_of(folder)
    advantages = np.where(np.repeat([0, 1, 0, 1], batch.lengths) & batch.loss_mask, 1, 0).astype(np.float32)
    whole, _ = make_model(folder).logprobs(laid_out(batch, folder))
    halves = split_by_gradient(msgspec.structs.replace(batch, advantages=advantages))
    assert [half.images_of for half in halves] == [((1,), (0, 1)), ((1,), (2,))]
    chosen = np.repeat([0, 1, 0, 1], batch.lengths)[batch.loss_mask].astype(bool)
    for half, mask in zip(halves, (chosen, ~chosen), strict=True):
        torch.testing.assert_close(make_model(folder).logprobs(laid_out(half, folder))[0], whole[mask], atol=1e-5, rtol=0)


def test_placeholders_that_do_not_match_the_images_name_their_rollout(folder: Path) -> None:
    batch, _ = batch_of(folder)
    wrong = msgspec.structs.replace(batch, images_of=((1,), (1, 2), (2,), (0, 1)))
    with pytest.raises(DataError, match=r"0/1: 20 placeholders for 2 images, expected 40"):
        images_of_row(wrong, processor=ImageProcessor(folder))
    with pytest.raises(DataError, match="0/0 has images, and the model that is trained takes none"):
        images_of_row(batch, processor=None)


def test_a_value_model_that_takes_images_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="takes images, and value models are not written"):
        make_model(folder, gives_values=True)


def test_a_reference_of_another_family_is_refused_a_row_with_images(folder: Path, tmp_path: Path) -> None:
    batch, _ = batch_of(folder)
    model = make_model(make_folder(tmp_path, family="llama", vocab_size=128))
    with pytest.raises(ConfigError, match="takes no images"):
        model.logprobs(laid_out(batch, folder))


def test_demonstrations_with_images_give_the_gradient_of_transformers_model(folder: Path) -> None:
    rows = [(FILES[0], "blue"), (FILES[1], "red"), (FILES[1], "r")]
    tree = {
        "model": {"path": str(folder)},
        "data": {"source": "unused"},
        "rollout": {"max_tokens": 256},
        "batch": {"max_tokens": 512},
        "sft": {"source": "unused"},
    }
    encoder = DemonstrationEncoder(parse(tree, origin="test", for_run=False), tokenizer=load_tokenizer(folder), has_images=True)
    batch = [encoder.encode(image_row(image, "what?", completion=said), where="row") for image, said in rows]
    replicas = Replicas(ranks=1, deadline_s=60)
    model = make_model(folder, replicas=replicas)
    step, _ = make_step(model, replicas=replicas)
    total = SftRows(step.backend, replicas=replicas, max_tokens=512, image_processor=ImageProcessor(folder)).train(batch)
    step.backend.complete()
    processor: Any = AutoProcessor.from_pretrained(folder)
    module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    expected = torch.zeros(())
    for image, said in rows:
        prompt = processor(text="<image>what?", images=[open_image(image)], add_special_tokens=False, return_tensors="pt")
        ids = torch.tensor([[*processor.tokenizer(said, add_special_tokens=False)["input_ids"], 2]])
        inputs = dict(prompt) | {"input_ids": torch.cat((prompt["input_ids"], ids), 1)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        expected = expected - theirs(module, inputs, prompt["input_ids"].shape[1]).sum()
    expected.backward()
    torch.testing.assert_close(total, expected.detach(), atol=1e-4, rtol=0)
    others = dict(module.named_parameters())
    for name, parameter in model.named_parameters().items():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, others[name].grad, atol=2e-4, rtol=1e-3)


def test_a_demonstration_is_refused_an_image_by_its_row(folder: Path, tmp_path: Path) -> None:
    make_qwen2(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | length }}")
    for path, has_images, words in (
        (tmp_path, True, r"demo, row 3: model\.path .* no images can be trained or served"),
        (folder, False, "demo, row 3: the messages have an image, and here they may have none"),
        (folder, True, "demo, row 3: the messages ask for 1 images, and column 'images' has 0"),
    ):
        tree = {"model": {"path": str(path)}, "data": {"source": "unused"}, "sft": {"source": "unused"}}
        encoder = DemonstrationEncoder(parse(tree, origin="test", for_run=False), tokenizer=load_tokenizer(path), has_images=has_images)
        row = image_row(FILES[0], "what?", completion="blue")
        with pytest.raises(DataError, match=words):
            encoder.encode(row | ({"images": []} if "column" in words else {}), where="demo, row 3")

"""Images in prompts, by a real engine and the trainer: the same pixels, tokens and log-probabilities, before a swap and after it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from orchestrator.data.sources import PromptBuilder
from orchestrator.rollouts.micro_batch import micro_batch_of
from pipelinerl.data.images import ImageProcessor
from pipelinerl.data.tokenizer import TextEncoder, load_tokenizer
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.messages import Completion, Finish, Generate, Prompt, Sample, Sampling, StageWeights, Trajectory
from tests.images import png, row
from tests.tiny_models import make_idefics3

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

MAX_GAP = 5e-5
"""Nats, of any token, in float32."""
ROWS = (
    row(png(0, width=60, height=40), "what?"),
    row(png(1, width=60, height=40), "what?"),
    row(png(2, width=20, height=24), "or", png(0), "?"),
)
"""Two of the same tokens, and one of two images, of which the first is cut into fewer patches."""


def ask(loop: EngineLoop, prompts: list[Prompt], *, name: str, max_tokens: int) -> None:
    """Two siblings of each prompt."""
    for number in range(2 * len(prompts)):
        prompt, sampling = prompts[number // 2], Sampling(max_tokens=max_tokens, seed=number)
        loop.handle(Generate(rollout_id=f"{name}/{number}", attempt=0, token_ids=prompt.token_ids, sampling=sampling, images=prompt.images))


def answers(loop: EngineLoop) -> list[Completion]:
    while loop.has_work or loop.is_swapping:
        loop.advance()
    found = sorted((message for message in loop.outbox if isinstance(message, Completion)), key=lambda message: message.rollout_id)
    loop.outbox.clear()
    return found


def sample_of(prompt: Prompt, completion: Completion) -> Sample:
    num_prompt, num_said = len(prompt.token_ids), len(completion.token_ids)
    trajectory = Trajectory(
        rollout_id=completion.rollout_id,
        group_id=0,
        sibling=0,
        attempt=0,
        prompt=prompt,
        token_ids=np.concatenate((prompt.token_ids, completion.token_ids)),
        loss_mask=np.repeat([False, True], [num_prompt, num_said]),
        logprobs=np.concatenate((np.zeros(num_prompt, np.float32), completion.logprobs)),
        versions=np.concatenate((np.full(num_prompt, -1, np.int32), completion.versions)),
        finish=completion.finish,
    )
    return Sample(trajectory=trajectory, reward=0.0, advantages=np.zeros(num_prompt + num_said, np.float32))


def test_engine_and_trainer_see_the_same_images_before_and_after_a_swap(tmp_path: Path) -> None:
    import torch

    from tests import real_engine
    from trainer.model.model import Model
    from trainer.rows.arrange import arrange
    from trainer.rows.images import images_of_row
    from trainer.weights.publisher import Publisher

    folder = tmp_path / "model"
    make_idefics3(folder, splits=True)
    processor = ImageProcessor(folder)
    builder = PromptBuilder(prompt_column="prompt", encoder=TextEncoder(load_tokenizer(folder), image_processor=lambda: processor))
    prompts = [builder.prompt(number, one, epoch=0, where=f"row {number}") for number, one in enumerate(ROWS)]
    assert prompts[0].token_ids.tolist() == prompts[1].token_ids.tolist()
    model = Model(folder, dtype="float32", temperature=1.0, device=torch.device("cpu"))

    def gap(completions: list[Completion]) -> float:
        """The largest difference between engine and trainer, of one packed row of all siblings."""
        batch = micro_batch_of(tuple(sample_of(prompts[number // 2], one) for number, one in enumerate(completions)), step=0, index=0)
        images = images_of_row(batch, processor=processor)
        laid_out = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids, images=images)
        assert laid_out is not None
        with torch.no_grad():
            return float(np.abs(model.logprobs(laid_out)[0].numpy() - batch.logprobs[batch.loss_mask]).max())

    publisher = Publisher(model.tensors, tied_names=model.tied_names, run_folder=tmp_path, deadline_s=10.0, address="127.0.0.1")
    with contextlib.closing(publisher), real_engine.vllm_engine(folder) as engine, StagingThread(engine) as stager:
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        publisher.fix_layout(engine.limits.tensors)
        ask(loop, prompts, name="first", max_tokens=24)
        first = answers(loop)
        assert gap(first) <= MAX_GAP
        chance = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.module.get_submodule("model.vision_model").parameters():
                parameter += torch.randn(parameter.shape, generator=chance) * 0.1
        assert gap(first) > 1e-3, "a vision tower that says the same would swap unseen"
        ask(loop, prompts, name="meanwhile", max_tokens=64)
        loop.advance()
        policy = publisher.publish(1)
        assert policy is not None
        loop.handle(StageWeights(version=1, buffer=policy.buffer, digest=policy.digest))
        meanwhile = answers(loop)
        assert {tuple(np.unique(one.versions)) for one in meanwhile} == {(0, 1)}, "the swap fell into every sequence"
        ask(loop, prompts, name="second", max_tokens=24)
        gaps = gap(answers(loop))
        print(f"largest gap after a swap of the vision tower: {gaps:.1e}")
        assert gaps <= MAX_GAP, "features of an older policy may not serve the next"

        other = msgspec.structs.replace(prompts[0], images=prompts[2].images[:1], token_ids=prompts[0].token_ids[3:])
        ask(loop, [other], name="wrong", max_tokens=4)
        ask(loop, [msgspec.structs.replace(prompts[0], images=())], name="without", max_tokens=4)
        refused = answers(loop)
        assert [one.finish for one in refused] == [Finish.ERROR] * 4
        assert "has placeholders of images in its prompt (token 98), and no images" in refused[0].error
        assert "read different image processors" in refused[2].error

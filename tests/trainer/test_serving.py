"""The trainer of outside training loops: gradients against transformers' own, models apart, what is saved and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.messages import (
    CloseModel,
    ForwardBackward,
    ForwardBackwardDone,
    LoadModel,
    Message,
    OpenModel,
    OptimizerStep,
    OptimizerStepDone,
    PublishModel,
    RequestDone,
    RequestFailed,
    SaveModel,
)
from tests.trainer.tiny import VOCABULARY, make_folder
from trainer.build import build_served
from trainer.parallel.replicas import Replicas
from trainer.serving.loop import ModelServer

LENGTHS = (5, 3, 9, 2)


class RecordingPublisher:
    """Keeps a copy of what is published."""

    def __init__(self, tensors: Any) -> None:
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self._tensors = tensors

    def publish(self, version: int) -> None:
        self.published[version] = {name: tensor.clone() for name, tensor in self._tensors().items()}


class Served:
    """A model server in this process."""

    def __init__(self, folder: Path, *, rank: int = 0, max_tokens: int = 16, alpha: float = 8.0) -> None:
        lora = {"rank": rank, "alpha": alpha, "targets": ["q_proj", "v_proj"]}
        model = {"path": str(folder), "dtype": "float32"}
        tree = {"model": model, "lora": lora, "batch": {"max_tokens": max_tokens}, "rollout": {"max_tokens": 8}}
        self.config: Config = parse(tree, origin="test", for_run=False)
        replicas = Replicas(ranks=1, deadline_s=10.0)
        self.trained = build_served(self.config, replicas=replicas)
        model_tensors = self.trained.model.adapters if rank else self.trained.model.tensors
        self.publisher: Any = RecordingPublisher(model_tensors)
        self._server = ModelServer(self.trained, replicas=replicas, publisher=self.publisher, config=self.config)

    def ask(self, request: Message) -> Any:
        return self._server.answer(request)

    def open(self, model_id: str, *, seed: int | None = None) -> None:
        assert self.ask(OpenModel(request_id=1, model_id=model_id, seed=seed)) == RequestDone(request_id=1)

    def step(self, model_id: str, *, learning_rate: float = 1e-2, **settings: float) -> OptimizerStepDone:
        plain = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0} | settings
        return self.ask(OptimizerStep(request_id=2, model_id=model_id, learning_rate=learning_rate, **plain))

    def weights(self, model_id: str) -> dict[str, torch.Tensor]:
        """A copy of what a model trains."""
        self.passes(model_id, loss="cross_entropy", is_forward_only=True)
        return {name: parameter.detach().clone() for name, parameter in self.trained.model.named_parameters().items()}

    def passes(self, model_id: str, *, loss: str = "cross_entropy", is_forward_only: bool = False, **changes: Any) -> Any:
        fields = data() | {"model_id": model_id, "loss": loss, "is_forward_only": is_forward_only} | changes
        return self.ask(ForwardBackward(request_id=3, options={}, **fields))


def data(seed: int = 0) -> dict[str, Any]:
    """Four data whose targets are not always the next token, and whose first five tokens two of them share."""
    generator = np.random.default_rng(seed)
    parts = [generator.integers(0, VOCABULARY, length).astype(np.int32) for length in LENGTHS]
    parts[2][:5] = parts[0]
    tokens = np.concatenate(parts)
    targets = generator.integers(0, VOCABULARY, len(tokens)).astype(np.int32)
    weights = generator.normal(size=len(tokens)).astype(np.float32)
    return {
        "token_ids": tokens,
        "targets": targets,
        "wanted": np.ones(len(tokens), np.bool_),
        "lengths": np.array(LENGTHS, np.int32),
        "columns": {"weights": weights},
    }


def by_transformers(folder: Path, fields: dict[str, Any]) -> tuple[np.ndarray, dict[str, torch.Tensor], float]:
    """Log-probabilities of the targets, gradients and loss, each datum by itself through the Hugging Face model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found, loss, end = [], torch.zeros(()), 0
    for length in fields["lengths"].tolist():
        part, end = slice(end, end + length), end + length
        logits = model(torch.from_numpy(fields["token_ids"][part]).long()[None]).logits[0]
        logprobs = torch.log_softmax(logits, -1)[torch.arange(length), torch.from_numpy(fields["targets"][part]).long()]
        loss = loss - (logprobs * torch.from_numpy(fields["columns"]["weights"][part])).sum()
        found.append(logprobs.detach().numpy())
    loss.backward()
    return np.concatenate(found), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, float(loss.detach())


def test_log_probabilities_loss_and_gradient_are_those_of_transformers(tmp_path: Path):
    folder = make_folder(tmp_path, family="qwen2")
    served = Served(folder)
    served.open("a")
    done = served.passes("a")
    logprobs, gradients, loss = by_transformers(folder, data())
    assert isinstance(done, ForwardBackwardDone)
    np.testing.assert_allclose(done.logprobs, logprobs, atol=2e-5)
    assert done.loss == pytest.approx(loss, abs=1e-3)
    for name, parameter in served.trained.model.named_parameters().items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], atol=2e-4, rtol=2e-3)


def test_what_data_begin_with_alike_is_computed_once(tmp_path: Path):
    folder = make_folder(tmp_path, family="qwen2")
    served = Served(folder)
    served.open("a")
    tokens = np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 6], np.int32)
    wanted = np.tile([False, False, False, True, True], 2)
    columns = {"weights": np.where(wanted, 1.0, 0.0).astype(np.float32)}
    fields: dict[str, Any] = {"token_ids": tokens, "targets": tokens[::-1].copy(), "columns": columns}
    done = served.passes("a", wanted=wanted, lengths=np.array([5, 5], np.int32), **fields)
    logprobs, _, _ = by_transformers(folder, fields | {"lengths": np.array([5, 5], np.int32)})
    assert done.num_computed == 4 + 1 + 1
    np.testing.assert_allclose(done.logprobs, np.where(wanted, logprobs, 0), atol=2e-5)


def test_gradients_of_several_requests_add_up_and_a_forward_pass_adds_none(tmp_path: Path):
    served = Served(make_folder(tmp_path, family="llama"))
    served.open("a")
    served.passes("a")
    once = served.trained.optimizer.gradient.clone()
    served.passes("a", is_forward_only=True)
    assert torch.equal(served.trained.optimizer.gradient, once)
    served.passes("a")
    torch.testing.assert_close(served.trained.optimizer.gradient, 2 * once)


def test_a_step_is_adam_with_the_settings_it_brings(tmp_path: Path):
    folder = make_folder(tmp_path, family="qwen2")
    served = Served(folder)
    served.open("a")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for learning_rate, beta in ((1e-2, 0.9), (3e-3, 0.5)):
        served.passes("a")
        done = served.step("a", learning_rate=learning_rate, beta1=beta, eps=1e-6)
        for name, gradient in by_current(model, data()).items():
            dict(model.named_parameters())[name].grad = gradient
        for group in plain.param_groups:
            group.update(lr=learning_rate, betas=(beta, 0.95), eps=1e-6)
        plain.step()
        assert done.learning_rate == learning_rate
    own = served.trained.model.named_parameters()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(own[name].detach(), parameter.detach(), atol=2e-4, rtol=2e-3)


def by_current(model: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    end = 0
    loss = torch.zeros(())
    for length in fields["lengths"].tolist():
        part, end = slice(end, end + length), end + length
        logits = model(torch.from_numpy(fields["token_ids"][part]).long()[None]).logits[0]
        logprobs = torch.log_softmax(logits, -1)[torch.arange(length), torch.from_numpy(fields["targets"][part]).long()]
        loss = loss - (logprobs * torch.from_numpy(fields["columns"]["weights"][part])).sum()
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def test_models_that_are_trained_in_turn_know_nothing_of_each_other(tmp_path: Path):
    folder = make_folder(tmp_path, family="qwen2")

    def train(served: Served, model_id: str, *, seed: int) -> None:
        served.passes(model_id, **data(seed))
        served.step(model_id)

    together, alone = Served(folder, rank=2), Served(folder, rank=2)
    for served, models in ((together, "ab"), (alone, "b")):
        for model_id in models:
            served.open(model_id, seed=7 if model_id == "b" else 3)
        for number in range(3):
            for model_id in models:
                train(served, model_id, seed=number if model_id == "b" else 50 + number)
    for name, parameter in together.weights("b").items():
        assert torch.equal(parameter, alone.weights("b")[name]), name
    together.ask(CloseModel(model_id="b"))
    gone = together.passes("b")
    assert isinstance(gone, RequestFailed)
    assert gone.is_asker_wrong


def test_a_gradient_waits_for_its_step_while_another_model_is_in_use(tmp_path: Path):
    served = Served(make_folder(tmp_path, family="qwen2"), rank=2)
    served.open("a")
    served.passes("a")
    collected = served.trained.optimizer.gradient.clone()
    assert collected.any()
    served.open("b")
    assert not served.trained.optimizer.gradient.any()
    served.passes("a", is_forward_only=True)
    assert torch.equal(served.trained.optimizer.gradient, collected)


def test_a_seed_draws_the_adapter(tmp_path: Path):
    served = Served(make_folder(tmp_path, family="qwen2"), rank=2)
    drawn = []
    for model_id, seed in (("a", 1), ("b", 2), ("c", 1)):
        served.open(model_id, seed=seed)
        drawn.append(served.weights(model_id))
    name = next(name for name in drawn[0] if name.endswith("lora_A"))
    assert torch.equal(drawn[0][name], drawn[2][name])
    assert not torch.equal(drawn[0][name], drawn[1][name])


@pytest.mark.parametrize("rank", [0, 2])
def test_a_model_goes_on_from_what_was_saved_of_it(tmp_path: Path, rank: int):
    served = Served(make_folder(tmp_path / "model", family="qwen2"), rank=rank)
    served.open("a")
    served.passes("a")
    served.step("a")
    saved = tmp_path / "saved" / "one"
    save = SaveModel(request_id=4, model_id="a", folder=str(saved), has_optimizer=True)
    assert served.ask(save) == RequestDone(request_id=4)
    again = served.ask(save)
    assert isinstance(again, RequestFailed)
    assert "a checkpoint of that name" in again.error
    for number in (1, 2):
        served.passes("a", **data(number))
        served.step("a")
    load = LoadModel(request_id=5, model_id="b", folder=str(saved), has_optimizer=True)
    assert served.ask(load) == RequestDone(request_id=5)
    for number in (1, 2):
        served.passes("b", **data(number))
        served.step("b")
    expected = served.weights("a")
    for name, parameter in served.weights("b").items():
        assert torch.equal(parameter, expected[name]), name


def test_a_checkpoint_holds_the_gradient_that_waits_for_its_step(tmp_path: Path):
    served = Served(make_folder(tmp_path / "model", family="qwen2"), rank=2)
    served.open("a")
    served.passes("a")
    saved = tmp_path / "checkpoint"
    served.ask(SaveModel(request_id=4, model_id="a", folder=str(saved), has_optimizer=True, has_gradient=True))
    assert served.ask(LoadModel(request_id=5, model_id="b", folder=str(saved), has_optimizer=True)) == RequestDone(request_id=5)
    assert served.step("b").grad_norm == served.step("a").grad_norm > 0
    expected = served.weights("a")
    for name, parameter in served.weights("b").items():
        assert torch.equal(parameter, expected[name]), name


def test_a_save_that_is_asked_for_again_is_the_one_that_was_made(tmp_path: Path):
    served = Served(make_folder(tmp_path / "model", family="qwen2"), rank=2)
    served.open("a")
    save = SaveModel(request_id=4, model_id="a", folder=str(tmp_path / "one"), has_optimizer=True, save_id="a/4")
    assert served.ask(save) == served.ask(save) == RequestDone(request_id=4)
    another = served.ask(SaveModel(request_id=4, model_id="a", folder=str(tmp_path / "one"), has_optimizer=True, save_id="a/5"))
    assert isinstance(another, RequestFailed), "another save of the same name is the client's mistake, as before"


def test_damage_to_what_was_saved_is_found(tmp_path: Path):
    served = Served(make_folder(tmp_path / "model", family="qwen2"), rank=2)
    served.open("a")
    saved = tmp_path / "saved" / "one"
    served.ask(SaveModel(request_id=4, model_id="a", folder=str(saved), has_optimizer=False))
    asks_for_more = served.ask(LoadModel(request_id=5, model_id="b", folder=str(saved), has_optimizer=True))
    assert "holds no optimizer" in asks_for_more.error
    path = saved / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    damaged = served.ask(LoadModel(request_id=5, model_id="b", folder=str(saved), has_optimizer=False))
    assert "its checksum is not the one it was written with" in damaged.error


def test_what_is_published_is_the_model_asked_for_and_the_one_in_use_stays(tmp_path: Path):
    served = Served(make_folder(tmp_path / "model", family="qwen2"))
    served.open("a")
    served.ask(PublishModel(request_id=1, version=1))
    served.passes("a")
    served.step("a")
    before = served.weights("a")
    served.ask(SaveModel(request_id=2, model_id="a", folder=str(tmp_path / "saved"), has_optimizer=False))
    served.passes("a", **data(3))
    served.step("a")
    served.ask(PublishModel(request_id=3, version=2, model_id="a"))
    served.ask(PublishModel(request_id=4, version=3, folder=str(tmp_path / "saved")))
    served.ask(PublishModel(request_id=5, version=4))
    name = "model.layers.0.self_attn.q_proj.weight"
    versions = {version: tensors[name] for version, tensors in served.publisher.published.items()}
    assert torch.equal(versions[1], versions[4]), "what all models begin with"
    assert torch.equal(versions[3], before[name])
    assert torch.equal(versions[2], served.weights("a")[name])
    assert not torch.equal(versions[2], versions[3])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "stable_reinforce"}, "not published"),
        ({"token_ids": np.full(sum(LENGTHS), VOCABULARY, np.int32)}, "the model knows 0 to"),
        ({"lengths": np.array([sum(LENGTHS)], np.int32)}, "does not fit a row of 15"),
        ({"model_id": "nobody"}, "there is none of this name"),
    ],
)
def test_what_a_client_does_wrong_is_its_answer_and_nothing_is_computed(tmp_path: Path, changes: dict[str, Any], words: str):
    served = Served(make_folder(tmp_path, family="qwen2"))
    served.open("a")
    fields: dict[str, Any] = {"model_id": "a", "loss": "cross_entropy", **data(), **changes}
    failed = served.ask(ForwardBackward(request_id=3, options={}, **fields))
    assert isinstance(failed, RequestFailed)
    assert failed.is_asker_wrong
    assert words in failed.error
    assert not served.trained.optimizer.gradient.any()


def test_a_gradient_that_is_not_finite_changes_no_weights(tmp_path: Path):
    served = Served(make_folder(tmp_path, family="qwen2"))
    served.open("a")
    before = served.weights("a")
    served.trained.optimizer.gradient.fill_(float("inf"))
    failed: Any = served.step("a")
    assert "not finite" in failed.error or "finite number" in failed.error
    assert not served.trained.optimizer.gradient.any()
    after = served.weights("a")
    assert all(torch.equal(after[name], before[name]) for name in before)

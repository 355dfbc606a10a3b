"""Training for clients: gradients, steps, saved models. What is asked is handed on at once, so that it is carried out in the order in which
it came; the answers are awaited apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pipelinerl.gateway.refusal import wrong
from pipelinerl.messages import (
    CloseModel,
    ForwardBackwardDone,
    LoadModel,
    OpenModel,
    OptimizerStep,
    OptimizerStepDone,
    RequestFailed,
    SaveModel,
    TrainingAnswer,
)
from pipelinerl.tinker import wire
from pipelinerl.tinker.asks import CreateModel, LoadWeights, OptimStep, SaveForSampler, SaveWeights
from pipelinerl.tinker.backend import Backend, Refusal, Weights
from pipelinerl.tinker.data import Gradient
from pipelinerl.tinker.futures import Answer
from pipelinerl.tinker.provenance import Facts, Provenance
from pipelinerl.tinker.sessions import SAMPLING, TRAINING, Sessions, TrainedModel

Journal = Callable[..., None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Carries out what is asked about models. Each method hands its request on before it returns, and returns its answer to be awaited.

    All raise `RequestRefused` for what is malformed, and `Refusal` for what is not served.
    """

    backend: Backend
    sessions: Sessions
    provenance: Provenance
    journal: Journal
    rank: int
    """Of adapters; 0 where all weights are trained."""
    max_staleness: int | None
    """Oldest age of a token that may be trained on."""
    is_base: Callable[[str], bool]
    """Whether a client's name of a model is that of ours."""

    def create(self, ask: CreateModel, *, model_id: str) -> Awaitable[Answer]:
        if not self.is_base(ask.base_model):
            raise Refusal(
                f"base_model {ask.base_model!r} is not served here; get_server_capabilities names the one that is", is_asker_wrong=True
            )
        if ask.optimizer_config.type != "adamw":
            raise Refusal(f"optimizer {ask.optimizer_config.type!r}: this server has adamw alone", is_asker_wrong=True)
        lora = ask.lora_config
        if self.rank and lora is not None and lora.rank != self.rank:
            raise Refusal(f"lora rank {lora.rank}: this server's adapters are of rank {self.rank} (lora.rank)", is_asker_wrong=True)
        if self.rank and lora is not None and not (lora.train_mlp and lora.train_attn):
            words = "train_mlp or train_attn is false: which matrices have adapters is the server's to say, for all clients (lora.targets)"
            raise Refusal(words, is_asker_wrong=True)
        seed = None if lora is None else lora.seed
        self.sessions.models[model_id] = TrainedModel(model_id=model_id, session_id=ask.session_id)
        return self._opened(OpenModel(request_id=0, model_id=model_id, seed=seed), answer={"model_id": model_id, "type": "create_model"})

    def load(self, ask: LoadWeights) -> Awaitable[Answer]:
        folder = self.sessions.folder_of(ask.path)
        if ask.model_id is None:
            if ask.session_id is None or ask.model_seq_id is None:
                raise wrong("load_weights: expected model_id and seq_id, or session_id and model_seq_id")
            model = TrainedModel(model_id=f"{ask.session_id}:train:{ask.model_seq_id}", session_id=ask.session_id)
            self.sessions.models[model.model_id] = model
        else:
            model = self.sessions.model(ask.model_id)
        request = LoadModel(request_id=0, model_id=model.model_id, folder=str(folder), has_optimizer=ask.optimizer)
        return self._opened(request, answer={"path": ask.path, "model_id": model.model_id, "type": "load_weights"}, is_new=not ask.model_id)

    def forward_backward(self, asked: Gradient) -> Awaitable[Answer]:
        model = self.sessions.model(asked.model_id)
        facts = Facts()
        for number, spans in enumerate(asked.spans):
            of_datum = self.provenance.look(spans, targets=asked.targets_of(number), model_id=model.model_id, num_steps=model.num_steps)
            if self.max_staleness is not None and of_datum.max_age > self.max_staleness:
                raise Refusal(
                    f"data[{number}] holds tokens that were sampled {of_datum.max_age} optimizer steps ago; the server's bound is"
                    f" {self.max_staleness} (tinker.max_staleness)",
                    is_asker_wrong=True,
                )
            facts.add(of_datum)
        answer = self.backend.train(asked.message())
        if not asked.is_forward_only:
            for spans in asked.spans:
                self.provenance.trained(spans, model_id=model.model_id)
            model.facts.add(facts)
        return self._passed(answer, asked)

    def optim_step(self, ask: OptimStep) -> Awaitable[Answer]:
        model = self.sessions.model(ask.model_id)
        if (adam := ask.adam_params) is None:
            raise Refusal("optim_step: this server has adamw alone, and expected adam_params", is_asker_wrong=True)
        request = OptimizerStep(
            request_id=0,
            model_id=model.model_id,
            learning_rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=max(adam.grad_clip_norm, 0.0),
        )
        answer = self.backend.train(request)
        facts, model.facts = model.facts, Facts()
        step, model.num_steps = model.num_steps, model.num_steps + 1
        return self._stepped(answer, model_id=model.model_id, step=step, facts=facts)

    def save(self, ask: SaveWeights) -> Awaitable[Answer]:
        model = self.sessions.model(ask.model_id)
        path = self.sessions.new_path(model, ask.path, kind=TRAINING)
        saved = self._save(model, path, has_optimizer=True, may_replace=ask.overwrite)
        return _then(saved, lambda _: {"path": path, "type": "save_weights"})

    def save_for_sampler(self, ask: SaveForSampler) -> Awaitable[Answer]:
        """Publish a model as it goes, or save it as it is: a sampler of that brings it to the engines when it is needed."""
        model = self.sessions.model(ask.model_id)
        if ask.kind not in ("snapshot", "inflight"):
            raise wrong(f"kind is {ask.kind!r}, expected snapshot or inflight", param="kind")
        if (ask.path is None) == (ask.sampling_session_seq_id is None):
            raise wrong("save_weights_for_sampler: expected a path or a sampling_session_seq_id, one of both")
        kind = "save_weights_for_sampler"
        number = ask.sampling_session_seq_id
        if ask.kind == "inflight" and number is not None:
            weights = Weights(model_id=model.model_id)
            published = self.backend.publish(weights)
            name = self.sessions.add_sampler(model.session_id, number, weights)
            return _then(published, lambda version: {"sampling_session_id": name, "path": None, "type": kind})
        path = self.sessions.new_path(model, ask.path, kind=SAMPLING)
        saved = self._save(model, path, has_optimizer=False, may_replace=False)

        def reply(_: object) -> Answer:
            if number is None:
                return {"path": path, "type": kind}
            self.sessions.remove_snapshots(model)
            name = self.sessions.add_sampler(model.session_id, number, self.sessions.weights_of(path), model_path=path)
            return {"sampling_session_id": name, "path": None, "type": kind}

        return _then(saved, reply)

    def unload(self, model_id: str) -> Answer:
        """Forget a model."""
        self.sessions.model(model_id)
        del self.sessions.models[model_id]
        self.close([model_id])
        return {"model_id": model_id, "type": "unload_model"}

    def close(self, model_ids: list[str]) -> None:
        """Have the trainer forget models."""
        for model_id in model_ids:
            self.backend.train(CloseModel(model_id=model_id))
            self.journal("model_closed", model_id=model_id)

    async def _opened_answer(self, done: Awaitable[TrainingAnswer], *, model_id: str, answer: Mapping[str, Any], is_new: bool) -> Answer:
        try:
            _unless_failed(await done)
        except Refusal:
            if is_new:
                self.sessions.models.pop(model_id, None)
            raise
        self.journal("model_opened", **answer)
        return answer

    def _opened(self, request: OpenModel | LoadModel, *, answer: Mapping[str, Any], is_new: bool = True) -> Awaitable[Answer]:
        return self._opened_answer(self.backend.train(request), model_id=request.model_id, answer=answer, is_new=is_new)

    def _save(self, model: TrainedModel, path: str, *, has_optimizer: bool, may_replace: bool) -> Awaitable[None]:
        folder, num_steps = str(self.sessions.folder_of(path)), model.num_steps
        request = SaveModel(request_id=0, model_id=model.model_id, folder=folder, has_optimizer=has_optimizer, may_replace=may_replace)
        done = self.backend.train(request)

        async def saved() -> None:
            _unless_failed(await done)
            self.sessions.was_saved(path, num_steps=num_steps)
            self.journal("model_saved", model_id=model.model_id, path=path, step=num_steps)

        return saved()

    async def _passed(self, answer: Awaitable[TrainingAnswer], asked: Gradient) -> Answer:
        done = _unless_failed(await answer)
        assert isinstance(done, ForwardBackwardDone), "a pass is answered with what it found"
        metrics = {
            "loss:sum": done.loss,
            "num_tokens_computed:sum": float(done.num_computed),
            "num_tokens:sum": float(len(asked.token_ids)),
        }
        return wire.forward_backward_output(done.logprobs, lengths=asked.lengths, metrics=metrics)

    async def _stepped(self, answer: Awaitable[TrainingAnswer], *, model_id: str, step: int, facts: Facts) -> Answer:
        done = _unless_failed(await answer)
        assert isinstance(done, OptimizerStepDone), "a step is answered with its numbers"
        numbers = {"grad_norm": done.grad_norm, "learning_rate": done.learning_rate}
        ages = {str(age): count for age, count in sorted(facts.ages.items())}
        self.journal("client_step", model_id=model_id, step=step, staleness=ages, **numbers, **facts.metrics())
        return {"metrics": {"grad_norm": done.grad_norm, **facts.metrics()}}


def _unless_failed(answer: TrainingAnswer) -> TrainingAnswer:
    if isinstance(answer, RequestFailed):
        raise Refusal(answer.error, is_asker_wrong=answer.is_asker_wrong)
    return answer


async def _then(done: Awaitable[Any], reply: Callable[[Any], Answer]) -> Answer:
    return reply(await done)

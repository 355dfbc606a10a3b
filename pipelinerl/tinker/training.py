"""Training for clients: gradients, steps, saved models. A request is *accepted* once, which decides all that depends on when that is, and
*carried out* as often as a trainer has to be given it (`pipelinerl.tinker.dispatch`); each time it is handed on at once, and its answer is
awaited apart."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from pipelinerl.gateway.refusal import wrong
from pipelinerl.messages import (
    ForwardBackwardDone,
    LoadModel,
    OpenModel,
    OptimizerStep,
    OptimizerStepDone,
    RequestFailed,
    SaveModel,
    TrainingAnswer,
)
from pipelinerl.tinker import asks, data, wire
from pipelinerl.tinker.asks import CreateModel, LoadWeights, OptimStep, SaveForSampler, SaveWeights
from pipelinerl.tinker.backend import Backend, Refusal, TrainerLost, Weights
from pipelinerl.tinker.data import Gradient
from pipelinerl.tinker.ledger import Accepted, Answer, Kind
from pipelinerl.tinker.provenance import Facts, Provenance
from pipelinerl.tinker.sessions import SAMPLING, TRAINING, Sessions

Journal = Callable[..., None]
Said = Gradient | CreateModel | LoadWeights | OptimStep | SaveWeights | SaveForSampler
"""What a request says."""
_ASKS: dict[Kind, type[CreateModel | LoadWeights | OptimStep | SaveWeights | SaveForSampler]] = {
    Kind.CREATE: CreateModel,
    Kind.LOAD: LoadWeights,
    Kind.STEP: OptimStep,
    Kind.SAVE: SaveWeights,
    Kind.SAVE_FOR_SAMPLER: SaveForSampler,
}


def read_said(kind: Kind, body: bytes) -> Said:
    """Read the body of a request that was accepted."""
    return data.read(body) if kind is Kind.PASS else asks.read(msgspec.json.decode(body), _ASKS[kind])


def model_of(ask: CreateModel | LoadWeights) -> str:
    """Return the name of the model that a request begins."""
    return f"{ask.session_id}:train:{ask.model_seq_id}"


def is_published(kind: Kind, said: Said) -> bool:
    """Return whether a model goes to the engines as it is, rather than to a folder."""
    return kind is Kind.SAVE_FOR_SAMPLER and isinstance(said, SaveForSampler) and _goes_on(said)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is asked about models."""

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

    def accept(self, kind: Kind, said: Said) -> tuple[str, dict[str, Any]]:
        """Check a request and count it; return its model, and what is decided of it.

        Raises `RequestRefused` for what is malformed, and `Refusal` for what is not served.
        """
        match said:
            case CreateModel():
                return self._accept_new(said)
            case LoadWeights():
                return self._accept_load(said)
            case Gradient():
                return self._accept_gradient(said)
            case OptimStep():
                return self._accept_step(said)
            case SaveWeights() | SaveForSampler():
                return self._accept_save(said)

    def carry_out(self, row: Accepted, said: Said) -> Callable[[], Awaitable[Answer]]:
        """Hand a request on; what waits for its answer. That fails with `Refusal`, `TrainerLost` among these."""
        steps = self.backend.num_steps
        match said:
            case CreateModel():
                steps[row.model_id] = 0
                seed = None if said.lora_config is None else said.lora_config.seed
                return self._open(row, OpenModel(request_id=0, model_id=row.model_id, seed=seed), model_id=row.model_id)
            case LoadWeights():
                steps[row.model_id] = row.about["num_steps"]
                folder = str(self.sessions.folder_of(said.path))
                request = LoadModel(request_id=0, model_id=row.model_id, folder=folder, has_optimizer=said.optimizer)
                return self._open(row, request, path=said.path, model_id=row.model_id)
            case Gradient():
                return functools.partial(self._passed, self.backend.train(said.message()), said)
            case OptimStep():
                steps[row.model_id] = row.about["step"] + 1
                return functools.partial(self._stepped, row, self.backend.train(_step_of(said)))
            case SaveForSampler() if _goes_on(said):
                return functools.partial(self._published, row, said, self.backend.publish(Weights(model_id=row.model_id)))
            case SaveWeights() | SaveForSampler():
                return self._save(row, said)

    # --- accepting ---

    def _accept_new(self, ask: CreateModel) -> tuple[str, dict[str, Any]]:
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
        self.sessions.add_model(model_of(ask), session_id=ask.session_id)
        return model_of(ask), {"is_new": True}

    def _accept_load(self, ask: LoadWeights) -> tuple[str, dict[str, Any]]:
        self.sessions.folder_of(ask.path)
        if ask.model_id is not None:
            model = self.sessions.model(ask.model_id)
        elif ask.session_id is None or ask.model_seq_id is None:
            raise wrong("load_weights: expected model_id and seq_id, or session_id and model_seq_id")
        else:
            model = self.sessions.add_model(model_of(ask), session_id=ask.session_id)
        return model.model_id, {"num_steps": model.num_steps, "is_new": ask.model_id is None}

    def _accept_gradient(self, asked: Gradient) -> tuple[str, dict[str, Any]]:
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
        if asked.is_forward_only:
            return model.model_id, {}
        self.provenance.trained([span for spans in asked.spans for span in spans], model_id=model.model_id)
        model.facts.add(facts)
        return model.model_id, {"facts": facts.record()}

    def _accept_step(self, ask: OptimStep) -> tuple[str, dict[str, Any]]:
        model = self.sessions.model(ask.model_id)
        if ask.adam_params is None:
            raise Refusal("optim_step: this server has adamw alone, and expected adam_params", is_asker_wrong=True)
        about = {"step": model.num_steps, "facts": model.facts.record()}
        model.facts, model.num_steps = Facts(), model.num_steps + 1
        return model.model_id, about

    def _accept_save(self, ask: SaveWeights | SaveForSampler) -> tuple[str, dict[str, Any]]:
        model = self.sessions.model(ask.model_id)
        if isinstance(ask, SaveForSampler):
            if ask.kind not in ("snapshot", "inflight"):
                raise wrong(f"kind is {ask.kind!r}, expected snapshot or inflight", param="kind")
            if (ask.path is None) == (ask.sampling_session_seq_id is None):
                raise wrong("save_weights_for_sampler: expected a path or a sampling_session_seq_id, one of both")
            if _goes_on(ask):
                return model.model_id, {}
        kind = TRAINING if isinstance(ask, SaveWeights) else SAMPLING
        path = self.sessions.new_path(model, ask.path, kind=kind, seq_id=ask.seq_id)
        return model.model_id, {"path": path, "num_steps": model.num_steps}

    # --- carrying out ---

    async def _opened(self, row: Accepted, done: Awaitable[TrainingAnswer], answer: Mapping[str, Any]) -> Answer:
        try:
            _unless_failed(await done)
        except TrainerLost:
            raise
        except Refusal:
            if row.about["is_new"] and not row.is_answered:
                self.sessions.models.pop(row.model_id, None)
            raise
        if not row.is_answered:
            self.journal("model_opened", **answer)
        return answer

    def _open(self, row: Accepted, request: OpenModel | LoadModel, **answer: Any) -> Callable[[], Awaitable[Answer]]:
        return functools.partial(self._opened, row, self.backend.train(request), {**answer, "type": str(row.kind)})

    def _save(self, row: Accepted, said: SaveWeights | SaveForSampler) -> Callable[[], Awaitable[Answer]]:
        """A sampler of a saved model brings it to the engines when it is needed."""
        path, num_steps = row.about["path"], row.about["num_steps"]
        request = SaveModel(
            request_id=0,
            model_id=row.model_id,
            folder=str(self.sessions.folder_of(path)),
            has_optimizer=isinstance(said, SaveWeights),
            may_replace=isinstance(said, SaveWeights) and said.overwrite,
            save_id=row.request_id,
        )
        done = self.backend.train(request)

        async def saved() -> Answer:
            _unless_failed(await done)
            self.sessions.was_saved(path, num_steps=num_steps)
            self.journal("model_saved", model_id=row.model_id, path=path, step=num_steps)
            if isinstance(said, SaveWeights) or (number := said.sampling_session_seq_id) is None:
                return {"path": path, "type": str(row.kind)}
            self.sessions.remove_snapshots(row.model_id)
            session_id = row.model_id.partition(":")[0]
            name = self.sessions.add_sampler(session_id, number, self.sessions.weights_of(path), model_path=path)
            return {"sampling_session_id": name, "path": None, "type": str(row.kind)}

        return saved

    async def _published(self, row: Accepted, said: SaveForSampler, published: Awaitable[int]) -> Answer:
        assert said.sampling_session_seq_id is not None, "it was checked"
        await published
        session_id = row.model_id.partition(":")[0]
        name = self.sessions.add_sampler(session_id, said.sampling_session_seq_id, Weights(model_id=row.model_id))
        return {"sampling_session_id": name, "path": None, "type": str(row.kind)}

    async def _passed(self, answer: Awaitable[TrainingAnswer], asked: Gradient) -> Answer:
        done = _unless_failed(await answer)
        assert isinstance(done, ForwardBackwardDone), "a pass is answered with what it found"
        metrics = {
            "loss:sum": done.loss,
            "num_tokens_computed:sum": float(done.num_computed),
            "num_tokens:sum": float(len(asked.token_ids)),
        }
        return wire.forward_backward_output(done.logprobs, lengths=asked.lengths, metrics=metrics)

    async def _stepped(self, row: Accepted, answer: Awaitable[TrainingAnswer]) -> Answer:
        done = _unless_failed(await answer)
        assert isinstance(done, OptimizerStepDone), "a step is answered with its numbers"
        facts = Facts.of(row.about["facts"])
        if not row.is_answered:
            numbers = {"grad_norm": done.grad_norm, "learning_rate": done.learning_rate}
            ages = {str(age): count for age, count in sorted(facts.ages.items())}
            step = row.about["step"]
            self.journal("client_step", model_id=row.model_id, step=step, staleness=ages, **numbers, **facts.metrics())
        return {"metrics": {"grad_norm": done.grad_norm, **facts.metrics()}}


def _goes_on(ask: SaveForSampler) -> bool:
    return ask.kind == "inflight" and ask.sampling_session_seq_id is not None


def _step_of(ask: OptimStep) -> OptimizerStep:
    adam = ask.adam_params
    assert adam is not None, "it was checked"
    return OptimizerStep(
        request_id=0,
        model_id=ask.model_id,
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=max(adam.grad_clip_norm, 0.0),
    )


def _unless_failed(answer: TrainingAnswer) -> TrainingAnswer:
    if isinstance(answer, RequestFailed):
        raise Refusal(answer.error, is_asker_wrong=answer.is_asker_wrong)
    return answer

"""Builds a rank of the trainer from the config: the policy, the models beside it, their optimizers, and the step over them."""

from __future__ import annotations

import dataclasses
import functools
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from pipelinerl.algorithms.loss.call import check_own_rules
from pipelinerl.algorithms.method import CRITICS, REFERENCE_OFFERS, Method, Need
from pipelinerl.algorithms.methods import method_of
from pipelinerl.algorithms.rules import specs_of
from pipelinerl.algorithms.step_loss import method_of_loss
from pipelinerl.config import Config, Offload, SftSection, TrainerSection
from pipelinerl.config.families import takes_images
from pipelinerl.data.images import ImageProcessor
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.errors import ConfigError
from pipelinerl.runtime import startup
from trainer.backend import Backend, Outputs
from trainer.checkpoint import portable
from trainer.controllers import Controllers
from trainer.critic import Critic, implicit_prm, value_critic
from trainer.data.demonstrations import Demonstrations
from trainer.data.sft_stream import SftStream
from trainer.logprob_mismatch import Agreement
from trainer.model.lora import Adapters
from trainer.model.model import Model
from trainer.model.reference import Reference
from trainer.model.teachers import Teachers
from trainer.optimizer import Optimizer, Schedule
from trainer.parallel.replicas import Replicas
from trainer.step import Step
from trainer.steps import Steps

MAX_LOGPROB_GAP = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.1}
"""Default of `trainer.max_logprob_gap`, by what an engine computes in: several times what rounding alone does; smaller would end healthy
runs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model that is trained, and its optimizer."""

    model: Model
    optimizer: Optimizer


def build_policy(config: Config, *, replicas: Replicas) -> Trained:
    """Load the policy. Raises `ConfigError`."""
    method = method_of(config)
    with startup.mark("loads the model"):
        return _trained(
            config,
            config.model.path,
            replicas=replicas,
            section=config.trainer,
            learning_rate=config.learning_rate,
            backend=config.trainer.backend,
            adapters=adapters_of(config),
            replay_routing=config.model.replay_routing,
            gives_square_sums=Need.SQUARE_SUM in method.needs,
            divergence_mix=divergence_mix(method),
        )


def build_critic(config: Config, *, replicas: Replicas) -> Trained | None:
    """Load the model from which the method makes advantages, where it does. Raises `ConfigError`."""
    needs = method_of(config).needs & CRITICS
    if not needs:
        return None
    folder, learning_rate = config.critic.path or config.model.path, config.critic.learning_rate
    gives_values = Need.CRITIC in needs
    return _trained(config, folder, replicas=replicas, section=config.trainer, learning_rate=learning_rate, gives_values=gives_values)


def build_sft(config: Config, *, replicas: Replicas) -> Trained:
    """Load the model to be fine-tuned, which learns at temperature 1. Raises `ConfigError`."""
    return _trained(
        config,
        config.model.path,
        replicas=replicas,
        section=config.sft,
        learning_rate=config.sft_learning_rate,
        temperature=1.0,
        backend=config.trainer.backend,
        adapters=adapters_of(config),
    )


def build_served(config: Config, *, replicas: Replicas) -> Trained:
    """Load the model that clients outside of this program train; each of their steps brings its own settings. Raises `ConfigError`."""
    return _trained(
        config,
        config.model.path,
        replicas=replicas,
        section=config.trainer,
        learning_rate=config.learning_rate,
        temperature=1.0,
        adapters=adapters_of(config),
    )


def divergence_mix(method: Method) -> float | None:
    """Give the mixture by which the policy is compared with its teacher's whole distributions; None where it is not."""
    return next((float(rule.options["mix"] or 0.0) for _, rule, spec in specs_of(method) if Need.DIVERGENCE in spec.needs), None)


def image_processor_of(config: Config) -> ImageProcessor | None:
    """Give the image processor of the model's folder; None for a model that takes no images. Raises `ConfigError`."""
    return ImageProcessor(config.model.path) if takes_images(config.model.path) else None


def adapters_of(config: Config) -> Adapters | None:
    """Give the adapters that are trained in place of all weights; None where all weights are."""
    section = config.lora
    return Adapters(rank=section.rank, alpha=section.alpha, targets=section.targets, seed=config.run.seed) if section.rank else None


def build_step(
    config: Config,
    *,
    policy: Trained,
    critic: Trained | None,
    replicas: Replicas,
    first_step: int,
    controllers: Controllers | None = None,
) -> Step:
    """Join the models to what trains them, step by step, from `first_step` on, with the coefficients that `controllers` hold."""
    method = method_of(config)
    check_own_rules(method)
    read = functools.partial(Outputs.of, extras=policy.model.extras)
    backend = Backend(policy.model, optimizer=policy.optimizer, replicas=replicas, read=read)
    return Step(
        backend,
        method=method,
        replicas=replicas,
        max_completion_tokens=config.rollout.max_tokens,
        agreement=Agreement(
            max_logprob_gap=config.trainer.max_logprob_gap or MAX_LOGPROB_GAP[_computes_in(config)],
            max_mismatch_kl=config.trainer.max_mismatch_kl,
            first_step=first_step,
            num_engines=config.engine.most,
            device=replicas.device,
        ),
        correct_reward=config.algorithm.correct_reward,
        epochs=config.trainer.epochs,
        reference=_reference(config, policy=policy.model, method=method, replicas=replicas) if method.needs & REFERENCE_OFFERS else None,
        critic=None if critic is None else critic_of(critic, method=method, replicas=replicas),
        critic_warmup_steps=config.critic.warmup_steps if critic is not None else 0,
        replay_routing=config.model.replay_routing,
        controllers=controllers,
        image_processor=image_processor_of(config),
        max_row_tokens=config.batch.max_tokens if config.gateway is not None and config.gateway.max_episode_tokens is not None else None,
        sft_stream=_sft_stream(config, backend=backend, replicas=replicas),
    )


def build_steps(
    config: Config, *, policy: Trained, critic: Trained | None, replicas: Replicas, first_step: int, controllers: Controllers
) -> Steps:
    """As `build_step`, for a run whose steps may each have a loss of their own."""
    own = build_step(config, policy=policy, critic=critic, replicas=replicas, first_step=first_step, controllers=controllers)

    @functools.cache
    def reference() -> Reference | Teachers | None:
        return own.reference or _reference(config, policy=policy.model, method=method_of(config), replicas=replicas)

    return Steps(
        own,
        method_of=functools.partial(method_of_loss, config),
        critic_of=lambda method: None if critic is None else critic_of(critic, method=method, replicas=replicas),
        reference=reference,
        max_tokens=config.batch.max_tokens,
    )


def critic_of(trained: Trained, *, method: Method, replicas: Replicas) -> Critic:
    """A model as the method's kind of critic."""
    options = {name: float(value or 0.0) for name, value in method.critic.options.items()}
    backend = Backend(trained.model, optimizer=trained.optimizer, replicas=replicas, read=itemgetter(0))
    return (implicit_prm if Need.IMPLICIT_PRM in method.needs else value_critic)(backend, **options)


def state_of(policy: Trained, critic: Trained | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint, see `trainer.checkpoint.portable`. `Optimizer.round` is due once they are loaded."""
    state = portable.state_of(policy.model, policy.optimizer)
    if critic is None:
        return state
    return state | {f"critic_{part}": tensors for part, tensors in portable.state_of(critic.model, critic.optimizer).items()}


def _trained(
    config: Config,
    folder: Path,
    *,
    replicas: Replicas,
    section: TrainerSection | SftSection,
    learning_rate: float,
    temperature: float | None = None,
    **options: Any,
) -> Trained:
    """Load a model to be trained by the schedule of `section`; `options` are further ones of `Model`."""
    trainer = config.trainer
    model = _load(
        config,
        folder,
        replicas=replicas,
        temperature=config.rollout.temperature if temperature is None else temperature,
        activation_checkpointing=trainer.activation_checkpointing,
        is_compiled=trainer.compile,
        prefetch_layers=trainer.prefetch_layers,
        is_offloaded=trainer.offload is Offload.WEIGHTS,
        **options,
    )
    optimizer = Optimizer(
        model.parameters(),
        schedule=Schedule(
            learning_rate=learning_rate,
            num_steps=section.steps,
            warmup_steps=section.warmup_steps,
            final_fraction=section.final_learning_rate_fraction,
        ),
        betas=trainer.betas,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        shardings=model.shardings,
        replicas=replicas,
        is_offloaded=trainer.offload is Offload.OPTIMIZER,
    )
    return Trained(model=model, optimizer=optimizer)


def _load(config: Config, folder: Path, *, replicas: Replicas, temperature: float, **options: Any) -> Model:
    return Model(
        folder,
        dtype=config.model.dtype,
        temperature=temperature,
        device=replicas.device,
        replicas=replicas,
        has_float32_head=config.trainer.float32_head,
        **options,
    )


def _sft_stream(config: Config, *, backend: Backend[Outputs], replicas: Replicas) -> SftStream | None:
    section = config.sft_stream
    if not section.coef:
        return None
    demonstrations = Demonstrations(config, beside_rl=True)
    return SftStream(
        demonstrations,
        backend=backend,
        replicas=replicas,
        max_tokens=config.batch.max_tokens,
        coef=section.coef,
        image_processor=image_processor_of(config),
    )


def _reference(config: Config, *, policy: Model, method: Method, replicas: Replicas) -> Reference | Teachers | None:
    """Load the frozen models that the config names; None where it names none."""
    found: list[Reference] = []
    for key, folder in config.reference.folders.items():
        found.append(_frozen(config, folder, key=key, policy=policy, method=method, replicas=replicas))
    return Teachers(found, replicas=replicas) if config.reference.teachers else found[0] if found else None


def _frozen(config: Config, folder: Path, *, key: str, policy: Model, method: Method, replicas: Replicas) -> Reference:
    gives_states = Need.DIVERGENCE in method.needs
    if folder == config.model.path and config.lora.rank:
        return Reference(policy, replicas=replicas, gives_states=gives_states)  # what the adapters were put on
    model = _load(config, folder, replicas=replicas, temperature=config.rollout.temperature, is_frozen=True)
    _check_words(model, policy=policy, key=key, folder=folder, own=config.model.path)
    if gives_states and model.num_words != policy.num_words:
        raise ConfigError(
            f"{key} {folder} has an output embedding of {model.num_words} words and model.path {config.model.path} one of"
            f" {policy.num_words}: their distributions are not over the same words. Choose a teacher of the same size of vocabulary, or"
            " a method that reads the sampled tokens alone: opd, or kl k3"
        )
    return Reference(model, replicas=replicas, offloads=config.reference.offload, gives_states=gives_states)


def _check_words(reference: Model, *, policy: Model, key: str, folder: Path, own: Path) -> None:
    """Raise `ConfigError` where a token id means another word to the reference, as far as that can be known."""
    if folder == own:
        return
    words = [model.module.config.get_text_config().vocab_size for model in (policy, reference)]
    vocabularies = [_vocabulary(path) for path in (own, folder)]
    if vocabularies[0] != vocabularies[1] if None not in vocabularies else words[0] != words[1]:
        raise ConfigError(
            f"{key} {folder} has other words than model.path {own} ({words[1]} and {words[0]} token ids): log-probabilities of the"
            " same ids would be of different texts. Choose a reference or teacher with the policy's tokenizer"
        )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    return load_tokenizer(folder).get_vocab() if (folder / "tokenizer.json").is_file() else None


def _computes_in(config: Config) -> str:
    return config.model.dtype if config.engine.quantization == "none" else config.engine.quantization

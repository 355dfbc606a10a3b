"""The run's settings: one section per part; a part is given its own section, never the whole.

`pipelinerl.config.file` reads them, and `validation` compares the sections with each other. Derived values are computed once, by
`Config.derived()`, and printed by `pipelinerl run --dry-run`. Imports neither torch nor vLLM, so a head node can check a config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic

from pipelinerl.config.base import Section as Section
from pipelinerl.config.engines import EngineSection as EngineSection
from pipelinerl.config.gateway import GatewaySection as GatewaySection
from pipelinerl.config.modes import Mode as Mode
from pipelinerl.config.modes import Placement as Placement
from pipelinerl.config.nodes import KubernetesSection as KubernetesSection
from pipelinerl.config.nodes import NodesSection as NodesSection
from pipelinerl.config.nodes import RaySection as RaySection
from pipelinerl.config.nodes import SlurmSection as SlurmSection
from pipelinerl.config.scheduling import why_sequences_stay
from pipelinerl.config.scoring import EnvironmentSection as EnvironmentSection
from pipelinerl.config.scoring import PrmJudgeSection as PrmJudgeSection
from pipelinerl.config.scoring import PrmSection as PrmSection
from pipelinerl.config.scoring import RewardSection as RewardSection
from pipelinerl.config.scoring import ScorerSection as ScorerSection
from pipelinerl.config.sections import AlgorithmSection as AlgorithmSection
from pipelinerl.config.sections import BatchSection as BatchSection
from pipelinerl.config.sections import CheckpointSection as CheckpointSection
from pipelinerl.config.sections import CriticSection as CriticSection
from pipelinerl.config.sections import DataSection as DataSection
from pipelinerl.config.sections import EvaluationSection as EvaluationSection
from pipelinerl.config.sections import LoraSection as LoraSection
from pipelinerl.config.sections import ModelSection as ModelSection
from pipelinerl.config.sections import PipelineSection as PipelineSection
from pipelinerl.config.sections import ReferenceSection as ReferenceSection
from pipelinerl.config.sections import RolloutSection as RolloutSection
from pipelinerl.config.sections import RunSection as RunSection
from pipelinerl.config.sections import SftSection as SftSection
from pipelinerl.config.sections import SftStreamSection as SftStreamSection
from pipelinerl.config.sections import TrackingSection as TrackingSection
from pipelinerl.config.sections import TrainerSection as TrainerSection
from pipelinerl.config.sections import WeightsSection as WeightsSection
from pipelinerl.config.tinker import TinkerSection as TinkerSection
from pipelinerl.config.trainer_memory import ActivationCheckpointing as ActivationCheckpointing
from pipelinerl.config.trainer_memory import Offload as Offload
from pipelinerl.config.validation import problems_between_sections


class Config(Section):
    """Everything a run is told; see each section's fields."""

    run: RunSection = RunSection()  # pyright: ignore[reportCallIssue]
    model: ModelSection
    data: DataSection = DataSection()  # pyright: ignore[reportCallIssue]
    rollout: RolloutSection = RolloutSection()  # pyright: ignore[reportCallIssue]
    engine: EngineSection = EngineSection()  # pyright: ignore[reportCallIssue]
    scorer: ScorerSection = ScorerSection()  # pyright: ignore[reportCallIssue]
    reward: tuple[RewardSection, ...] = ()
    environment: EnvironmentSection = EnvironmentSection()  # pyright: ignore[reportCallIssue]
    gateway: GatewaySection | None = None
    tinker: TinkerSection | None = None
    prm: PrmSection = PrmSection()  # pyright: ignore[reportCallIssue]
    algorithm: AlgorithmSection = AlgorithmSection()  # pyright: ignore[reportCallIssue]
    batch: BatchSection = BatchSection()  # pyright: ignore[reportCallIssue]
    pipeline: PipelineSection = PipelineSection()  # pyright: ignore[reportCallIssue]
    trainer: TrainerSection = TrainerSection()  # pyright: ignore[reportCallIssue]
    reference: ReferenceSection = ReferenceSection()  # pyright: ignore[reportCallIssue]
    critic: CriticSection = CriticSection()  # pyright: ignore[reportCallIssue]
    lora: LoraSection = LoraSection()  # pyright: ignore[reportCallIssue]
    evaluation: EvaluationSection = EvaluationSection()  # pyright: ignore[reportCallIssue]
    weights: WeightsSection = WeightsSection()  # pyright: ignore[reportCallIssue]
    checkpoint: CheckpointSection = CheckpointSection()  # pyright: ignore[reportCallIssue]
    tracking: TrackingSection = TrackingSection()  # pyright: ignore[reportCallIssue]
    slurm: SlurmSection = SlurmSection()  # pyright: ignore[reportCallIssue]
    kubernetes: KubernetesSection = KubernetesSection()  # pyright: ignore[reportCallIssue]
    ray: RaySection = RaySection()  # pyright: ignore[reportCallIssue]
    sft: SftSection = SftSection()  # pyright: ignore[reportCallIssue]
    sft_stream: SftStreamSection = SftStreamSection()  # pyright: ignore[reportCallIssue]
    policies: dict[str, dict[str, Any]] = pydantic.Field(
        default_factory=dict,
        description="several policies of one script (`pipelinerl.Policies`), a table for each: `[policies.alice]` sets sections of its own,"
        " as `engine.count`, in place of the file's; `frozen = true`: engines alone, nothing trains it",
    )

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Config:
        if problems := problems_between_sections(dict(self)):
            raise ValueError("\n".join(problems))
        return self

    @property
    def why_sequences_stay(self) -> tuple[str, ...]:
        """Each reason for which no sequence of this run goes on in another engine with its tokens."""
        return tuple(why_sequences_stay(self.rollout, self.model, self.prm, self.environment, self.gateway, self.tinker))

    @property
    def max_running_rollouts(self) -> int:
        """Rollouts in engines at once: enough to keep every engine full while finished ones are replaced."""
        return self.max_running_in(self.engine.count)

    def max_running_in(self, num_engines: int) -> int:
        """The same of so many engines, where some have joined or left."""
        if self.pipeline.max_running is not None:
            return self.pipeline.max_running
        return num_engines * self.engine.max_running * 5 // 4

    @property
    def dispatches_rollouts(self) -> bool:
        """True where rollouts wait for an engine one by one, see `orchestrator.rules.dispatch`."""
        pipeline = self.pipeline
        return pipeline.dispatch != "in_order" or pipeline.routing != "least_busy" or pipeline.kv_admission

    @property
    def stops_early(self) -> bool:
        """True where rollouts may be stopped while they are written; those that go on then weigh more."""
        return self.prm.early_stop.threshold is not None or self.rollout.cut_after is not None

    @property
    def is_colocated(self) -> bool:
        """True where engines and trainer take turns on the same devices."""
        return self.pipeline.placement is Placement.COLOCATED

    @property
    def is_mixed(self) -> bool:
        """True where some engines take turns with the trainer, and others have devices of their own."""
        return self.is_colocated and self.engine.apart > 0

    def takes_turns(self, engine_id: int) -> bool:
        """Return whether an engine shares its devices with the trainer, and sleeps while that has them."""
        return self.is_colocated and engine_id < self.engine.count - self.engine.apart

    @property
    def learning_rate(self) -> float:
        """Peak of the policy's. Adapters want about ten times what all weights want (arXiv:2405.09673)."""
        return self.trainer.learning_rate or (1e-5 if self.lora.rank else 1e-6)

    @property
    def sft_learning_rate(self) -> float:
        """Peak of fine-tuning's, by the same rule."""
        return self.sft.learning_rate or (2e-4 if self.lora.rank else 2e-5)

    @property
    def sft_output(self) -> Path:
        """Folder of the fine-tuned model, which RL starts from where `model.path` names it."""
        return self.sft.output or self.run.folder / f"{self.model.path.name}-sft"

    @property
    def compares_siblings(self) -> bool:
        """Return whether a reward function compares the rollouts of a group."""
        return any(reward.per == "group" for reward in self.reward)

    def derived(self) -> dict[str, Any]:
        """Values that follow from the settings, by the name they are printed under."""
        samples = self.batch.groups_per_step * self.rollout.group_size
        return {
            "samples per step": samples,
            "samples of the whole run": samples * self.trainer.steps,
            "peak learning rate": self.learning_rate,
            "rollouts in engines at once, at most": self.max_running_rollouts,
            "groups admitted before the first step, at most": (self.pipeline.max_staleness + 1) * self.batch.groups_per_step,
        }

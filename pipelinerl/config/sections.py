"""The sections of a run's settings: every key with its type, bounds, default and meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipelinerl.config.alarm_names import AlarmName
from pipelinerl.config.backends import TrainerBackend
from pipelinerl.config.base import PositiveFloat, PositiveInt, Section, Unit
from pipelinerl.config.layout import Layout, ParallelSection
from pipelinerl.config.modes import Mode, Placement
from pipelinerl.config.structured_outputs import StructuredOutputs
from pipelinerl.config.trainer_memory import ActivationCheckpointing, Offload


class RunSection(Section):
    name: Annotated[str, Field(min_length=1, max_length=200, pattern="^[^/]+$")] = Field(
        "run", description="names the run folder and the tracker's run; without slashes"
    )
    folder: Path = Field(Path("runs"), description="parent of the run folders")
    seed: int = Field(0, description="seeds prompt order, sampling and the trainer")
    restarts: Annotated[int, Field(ge=0)] = Field(10, description="restarts of one killed process within an hour before the run ends")
    restart_wait_s: Annotated[float, Field(ge=0)] = Field(1.0, description="wait before a restart; doubles while restarts follow quickly")
    record_groups: Annotated[int, Field(ge=0)] = Field(
        1024, description="groups, the newest, that stay recorded with tokens, scores and advantages: what `pipelinerl replay` works on"
    )
    fatal_alarms: tuple[AlarmName, ...] = Field(
        (), description=f"alarms of learning that end the run, saved, of {', '.join(AlarmName)}; the others are only told"
    )
    interface: str = Field(
        "127.0.0.1", description="address, host name or network interface (ib0) at which the orchestrator listens; never all of them"
    )
    cores: tuple[int, ...] = Field(
        (), description="CPU cores of the orchestrator and of each scorer with its reward calls, shared; empty lets the system choose"
    )


class ModelSection(Section):
    path: Path = Field(description="Hugging Face folder: config.json, *.safetensors, tokenizer files; or a Hub name: Qwen/Qwen3-0.6B")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="weights of engines and trainer")
    max_tokens: PositiveInt | None = Field(None, description="longest prompt plus completion; default: the model's own context length")
    replay_routing: bool = Field(False, description="mixtures of experts: the trainer sends each token to the experts its engine chose")


class DataSection(Section):
    source: str | dict[str, PositiveFloat] | None = Field(
        None,
        description="JSONL or Parquet file, a data set of the Hub (openai/gsm8k:main/train), a generator of reasoning-gym"
        " (reasoning-gym:chain_sum?max_terms=2&size=2000), or `path:name` of a Python function or datasets.Dataset that yields rows; or"
        " several, each with its weight: { 'a.jsonl' = 2, 'b.jsonl' = 1 }",
    )
    prompt_column: str = Field("prompt", description="text, or a list of chat messages, which then go through the chat template")
    chat: bool = Field(
        False,
        description="put prompts of plain text through the chat template, too, as a user's message; a system_prompt, tools or"
        " chat_template_kwargs do so by themselves",
    )
    system_prompt: str | None = Field(None, description="first message of every chat that does not begin with a system message")
    tools: str | tuple[dict[str, Any], ...] | None = Field(
        None, description="for the chat template: JSON schemas of functions, or the name of the column that has them (a list, or its JSON)"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="further arguments of the chat template, for example { enable_thinking = false }"
    )
    tool_call_parser: str | None = Field(
        None,
        description="vLLM's parser that reads the model's tool calls in environments and for agents: hermes, qwen3_coder, llama3_json,"
        " pythonic, ...; none: JSON between <tool_call> and </tool_call>",
    )
    shuffle: bool = Field(True, description="a new seeded order every epoch")
    limit: PositiveInt | None = Field(None, description="use only the first rows of the source, or of each")
    difficulty: tuple[Unit, Unit] | None = Field(
        None,
        description="prompts whose part of correct siblings (algorithm.correct_reward) was not strictly between these two rest for 1, then"
        " 2, 4, 8 epochs: [0.0, 1.0] rests what is all right or all wrong; none: every prompt comes in every epoch",
    )


class RolloutSection(Section):
    group_size: PositiveInt = Field(8, description="sibling rollouts per prompt")
    max_tokens: PositiveInt = Field(1024, description="longest completion; with an environment, all that follows the prompt")
    cut_after: PositiveInt | None = Field(
        None, description="ended siblings after which each of the others goes on by a coin alone; none: all are written to their end"
    )
    cut_keep_probability: Annotated[float, Field(gt=0, le=1)] = Field(
        0.25, description="of that coin; who goes on weighs 1 / cut_keep_probability in the loss, so that no length is preferred"
    )
    temperature: Annotated[float, Field(gt=0, le=2)] = Field(
        1.0, description="sampling temperature; the trainer divides its logits by it too"
    )
    stop_token_ids: tuple[int, ...] = Field(
        (), description="stop tokens beside those that tokenizer, chat template, config.json and generation_config.json name"
    )
    stop: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = Field(
        (),
        max_length=64,
        description="texts that end a completion, or a turn, with the token that completes one of them; they stay in what is scored",
    )
    structured_outputs: StructuredOutputs = ()


class AlgorithmSection(Section):
    name: str = Field("grpo", description="a row of the table that `pipelinerl algorithms` prints")
    overrides: dict[str, Any] = Field({}, description="columns of that row to change")
    correct_reward: float = Field(1.0, description="a completion with at least this reward is correct: for accuracy_band and positive_nll")


class BatchSection(Section):
    groups_per_step: PositiveInt = Field(32, description="groups trained per optimizer step")
    max_tokens: PositiveInt = Field(8192, description="tokens of one packed row, one row per replica and micro-batch")
    min_group_size: PositiveInt = Field(2, description="fewest scored siblings a group is trained with when others failed")


class PipelineSection(Section):
    mode: Mode = Field(Mode.STREAMING, description="streaming, one_step_off or sync")
    placement: Placement = Field(
        Placement.APART,
        description="colocated: engines and trainer take turns on the same devices and share one copy of the weights; apart: side by side",
    )
    max_staleness: Annotated[int, Field(ge=0)] = Field(4, description="K: versions between the oldest token and the policy it trains")
    max_running: PositiveInt | None = Field(None, description="rollouts in engines at once; default: 1.25 times what they decode at once")
    adaptive_concurrency: bool = Field(
        False, description="lower max_running while KV caches of engines are full, and raise it again while they have room"
    )
    elastic: bool = Field(False, description="let devices change between engines, trainer ranks and a model that scores, where it pays")
    elastic_tensor_parallel_sizes: tuple[PositiveInt, ...] = Field(
        (),
        description="tensor_parallel_size that pipeline.elastic may give engines, beside the one that they begin with; empty: no other",
    )
    dispatch: Literal["in_order", "longest_first"] = Field(
        "in_order", description="longest_first: of each group one rollout first, whose length predicts its siblings', then the longest"
    )
    routing: Literal["least_busy", "least_loaded"] = Field(
        "least_busy",
        description="engine of the next rollouts: the one with the fewest, or with the fewest predicted tokens in its KV cache",
    )
    kv_admission: bool = Field(False, description="send an engine only rollouts that its KV cache will hold, by their predicted lengths")
    migration: Literal["off", "waiting"] = Field("off", description="waiting: what waits for room goes on in an engine that has it")
    queue_bytes: PositiveInt = Field(256 << 20, description="bound of every queue: whoever fills one waits for room in it")
    stall_limit_s: PositiveFloat = Field(300.0, description="the watchdog ends the run after so long without progress")


class TrainerSection(Section):
    steps: PositiveInt = Field(100, description="optimizer steps of the whole run")
    backend: TrainerBackend = Field(
        TrainerBackend.FSDP2,
        description="whose code computes the policy: fsdp2 (transformers' models, every family), torchtitan or megatron (Megatron-Core)",
    )
    ranks: PositiveInt = Field(1, description="trainer processes; those that trainer.parallel leaves are copies of the whole model")
    max_ranks: PositiveInt | None = Field(
        None, description="ranks to which `pipelinerl scale RUN trainer=N` may bring a live run; default: twice ranks, and 8 at least"
    )
    min_ranks: PositiveInt | None = Field(
        None, description="ranks that pipeline.elastic leaves the trainer; default: one copy's, and ranks where parallel.shard is all"
    )
    parallel: ParallelSection = ParallelSection()  # pyright: ignore[reportCallIssue]
    epochs: PositiveInt = Field(1, description="updates made from a step's rows, each over all of them; above 1 rows wait for their step")
    learning_rate: PositiveFloat | None = Field(None, description="peak; default: 1e-6, and 1e-5 for adapters (lora.rank)")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(5, description="linear from 0")
    final_learning_rate_fraction: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="linear decay to this part at the last step")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW")
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    max_logprob_gap: PositiveFloat | None = Field(
        None,
        description="largest mean |engine - trainer| log-probability at the first step; ten times that for the 0.99 quantile; default 1e-4"
        " in float32, else 0.1, as with engine.quantization",
    )
    max_mismatch_kl: PositiveFloat = Field(
        0.03, description="at any step: largest mean KL between engine and trainer over sequences of one and the same version"
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        ActivationCheckpointing.NONE,
        description="what the backward pass computes again, to keep less: none, selective (all but matrix products and attention: about"
        " half the memory, little work) or full (every layer: its input alone is kept, a third more work)",
    )
    compile: bool = Field(False, description="torch.compile norms and feed-forward layers, once for rows of any length (fsdp2)")
    prefetch_layers: PositiveInt = Field(
        1, description="layers whose sharded weights are gathered ahead of the one that computes, forward and backward (fsdp2)"
    )
    offload: Offload = Field(Offload.NOTHING, description="what the trainer keeps on the host: nothing, optimizer or weights")
    float32_head: bool = Field(False, description="compute logits in float32 where the model is in bfloat16; the engine has to, too")
    cores: tuple[int, ...] = Field((), description="CPU core of each rank, one each; empty lets the system choose")
    gpus: tuple[int | str, ...] = Field(
        (), description="indices (as nvidia-smi counts) or UUIDs of the ranks' GPUs, one each; empty: those that engines leave"
    )
    ready_deadline_s: PositiveFloat = Field(600.0, description="longest wait for the trainer to load the model")
    silent_after_s: PositiveFloat = Field(600.0, description="a trainer not heard of for so long ends the run")

    @property
    def layout(self) -> Layout:
        """Return how the ranks share the model."""
        return self.parallel.layout(self.ranks)

    @property
    def least_ranks(self) -> int:
        """Ranks that the trainer of an elastic run always keeps: where all share one copy, those that it begins with hold most each."""
        return self.min_ranks or (self.ranks if self.layout.shards_all else 1)

    @property
    def most_ranks(self) -> int:
        """Ranks that the trainer of a live run may come to have: keys are made for as many. A larger number costs a small file for each."""
        return self.max_ranks or max(8, 2 * self.ranks)


class ReferenceSection(Section):
    path: Path | None = Field(
        None, description="Hugging Face folder of a frozen model whose log-probabilities a method reads: a reference, or a teacher"
    )
    teachers: dict[str, Path] = Field(
        {},
        description="several of them in place of path, by the name that the column teacher of a prompt's row says:"
        " { math = 'a', code = 'b' }",
    )
    offload: bool = Field(False, description="keep its weights on the host, and bring them to the device for each row")

    @property
    def folders(self) -> dict[str, Path]:
        """Return the folders of the models that are named, by their config keys."""
        single = {} if self.path is None else {"reference.path": self.path}
        return single | {f"reference.teachers.{name}": path for name, path in self.teachers.items()}


class CriticSection(Section):
    path: Path | None = Field(
        None, description="Hugging Face folder the value model, or implicit process reward model, starts from; default: model.path"
    )
    learning_rate: PositiveFloat = Field(1e-5, description="its schedule is the policy's, with this peak")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="first steps of the run that train the critic alone")


class LoraSection(Section):
    rank: Annotated[int, Field(ge=0)] = Field(0, description="of the adapters that are trained; 0 trains all weights")
    alpha: PositiveFloat = Field(32.0, description="adapters are multiplied by alpha / rank")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), description="names of the matrices that get one"
    )


class EvaluationSection(Section):
    source: str | None = Field(None, description="held-out prompts, as data.source; none: no evaluation")
    every: Annotated[int, Field(ge=0)] = Field(0, description="versions between evaluations; 0: only the first and the last policy")
    limit: PositiveInt = Field(256, description="prompts of one evaluation")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="0 is greedy")
    samples: PositiveInt = Field(1, description="answers to each prompt, n: avg@n, and pass@k for k up to n")
    deadline_s: PositiveFloat = Field(1800.0, description="an evaluation that takes longer is given up; the run goes on")


class WeightsSection(Section):
    transport: Literal["auto", "shared_memory", "cuda_ipc", "files", "gloo", "nccl", "sharded"] = Field(
        "auto",
        description="how a policy travels from trainer to engines; auto: cuda_ipc or shared memory on one machine, else nccl or gloo;"
        " sharded: from each trainer rank's shard straight to each engine rank's, over nccl or gloo, so that no rank gathers a policy",
    )
    address: str | None = Field(
        None,
        description="the trainer's address towards engines (gloo, nccl, sharded); default: the one on its way to the orchestrator",
    )
    delta: bool = Field(False, description="send what changed, bit for bit, where that is less; for slow transports and 16-bit weights")
    kv_max_staleness: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="versions the oldest part of a sequence's KV cache may lag before a swap recomputes it; 0: every swap does; none: none",
    )
    kv_max_kl: PositiveFloat | None = Field(
        None,
        description="KL per token between what a sequence with an older KV cache is sampled from and the policy, beyond which a swap"
        " recomputes it; predicted for each sequence by how far its cache lags, from what the trainer measures",
    )
    swap_mode: Literal["auto", "pointer", "sparse", "copy"] = Field(
        "auto", description="how a policy takes effect in an engine, between two forward passes"
    )
    adapters: Literal["auto", "separate", "merged"] = Field(
        "auto",
        description="with lora.rank: adapters travel alone and are served separately, or merged into the weights; auto: separate on a GPU",
    )
    adapter_versions: PositiveInt | None = Field(
        None,
        description="adapters served side by side, so that sequences end under the one they began with; 1: they go on under each new one,"
        " as they do under whole policies; default: max_staleness + 1, at most 8",
    )


class CheckpointSection(Section):
    every: PositiveInt = Field(20, description="steps between checkpoints; a killed trainer does at most as many again")
    keep: PositiveInt = Field(
        2, description="newest checkpoints that stay on the disk: a run whose newest is damaged falls back to the one before"
    )
    to: str | None = Field(
        None,
        description="also copy them, and the final model, to an object store: a URL that fsspec knows, such as s3://bucket/prefix; no step"
        " waits for it, and `pipelinerl upload` sends what is left",
    )


class TrackingSection(Section):
    to: tuple[Literal["wandb", "tensorboard", "prometheus"], ...] = Field(
        (), description="trackers that follow the run's journal, each in a process of its own; `pipelinerl track` sends what one missed"
    )
    project: str = Field("pipelinerl", description="Weights & Biases project; offline where there is no key")
    prometheus_interface: str = Field("127.0.0.1", description="address the Prometheus endpoint is bound to; it asks for no password")
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="its port; 0: a free one, told in <run>/endpoints/metrics.json"
    )


class SftSection(Section):
    source: str | None = Field(None, description="rows with a prompt and a completion, as data.source")
    completion_column: str = "completion"
    steps: PositiveInt = 200
    batch_size: PositiveInt = 128
    learning_rate: PositiveFloat | None = Field(None, description="peak; default: 2e-5, and 2e-4 for adapters (lora.rank)")
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    final_learning_rate_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    output: Path | None = Field(
        None, description="folder of the trained model, never model.path itself; default: <run.folder>/<name of model.path>-sft"
    )


class SftStreamSection(Section):
    source: str | None = Field(
        None,
        description="rows with a prompt and a completion (sft.completion_column) of which every step of RL trains some, in its own update:"
        " a JSONL file, or `path:name` of a Python function that yields rows; none: RL alone",
    )
    batch_size: PositiveInt = Field(32, description="rows of each step")
    coef: Annotated[float, Field(ge=0)] | None = Field(
        None, description="a step's loss is RL's plus coef times the mean negative log-likelihood per completion token of its rows; 0: off"
    )

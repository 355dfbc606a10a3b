"""The sections of a run's settings that say how completions are scored: scorer, rewards, environment, process reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipelinerl.config.base import Fraction, PositiveFloat, PositiveInt, Section


class ScorerSection(Section):
    slots: PositiveInt = Field(2, description="reward calls at once, each in a process of its own that can be killed")
    deadline_s: PositiveFloat = Field(30.0, description="longest reward call; after it the process is killed and the outcome is timeout")
    silent_after_s: PositiveFloat = Field(120.0, description="a scorer not heard of for so long ends the run")
    variables: tuple[str, ...] = Field(
        (),
        description="names of environment variables that rewards and environments see beside PATH, HOME, LANG, PYTHON*, OMP_* and the like",
    )


class RewardSection(Section):
    function: str | None = Field(None, description="`path:name`: a file or module and the function in it; a reward has this or a model")
    model: Path | None = Field(
        None, description="outcome reward model: a folder, or the Hub's name, of a sequence classifier with one logit"
    )
    weight: float = Field(1.0, description="of this component in the reward")
    per: Literal["sample", "group"] = Field("sample", description="group: called once for all siblings of a prompt, with lists")
    options: dict[str, Any] = Field(
        {}, description="further arguments of every call, by name; they go before columns of the row. Of a model: vLLM engine arguments"
    )
    concurrency: PositiveInt | None = Field(
        None,
        description="calls at once, in slots of its own; default: the slots all functions share. Of a model: the processes that it begins"
        " with; default 1",
    )
    per_s: PositiveFloat | None = Field(None, description="calls begun per second, at most")
    retries: Annotated[int, Field(ge=0)] = Field(0, description="further tries after an error or a timeout; arms the circuit breaker, too")
    deadline_s: PositiveFloat | None = Field(None, description="longest call, or batch of a model; default: scorer.deadline_s")
    format: Literal["chat", "text"] = Field("chat", description="what a model reads: messages by its own chat template, or the bare text")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="weights of a model")
    max_tokens: PositiveInt | None = Field(None, description="longest prompt and completion a model takes, in its tokens; default: its own")

    @property
    def reference(self) -> str:
        """The function's `path:name`, or the model's folder."""
        return str(self.model) if self.function is None else self.function

    @property
    def most(self) -> int:
        """Processes of a model that a live run may come to have."""
        return max(8, 2 * (self.concurrency or 1))


class EnvironmentSection(Section):
    function: str | None = Field(
        None, description="`path:name` of a function that replies to what the model said, turn by turn; none: a rollout is one turn"
    )
    cls: str | None = Field(
        None,
        description="in place of function: `path:name` of a class with reset(**columns), step(message) and, where it likes, close(); an"
        " object of it lives as long as its episode",
    )
    max_turns: Annotated[int, Field(ge=2)] = Field(8, description="turns of one rollout; rollout.max_tokens bounds all of them together")
    options: dict[str, Any] = Field(
        {}, description="further arguments of every call, by name; they go before columns of the row. Of cls: arguments of the class"
    )
    concurrency: PositiveInt | None = Field(
        None,
        description="calls at once, in slots of its own; default: scorer.slots. Of cls: environments alive at once, each in a process"
        " of its own; default 32",
    )
    deadline_s: PositiveFloat | None = Field(None, description="longest call; default: scorer.deadline_s")
    python: Path | None = Field(
        None, description="interpreter that runs cls, for example env/bin/python, where its packages exclude ours; default: this one"
    )

    @property
    def is_used(self) -> bool:
        """A rollout has several turns."""
        return self.reference is not None

    @property
    def reference(self) -> str | None:
        """The function's or the class's `path:name`."""
        return self.function or self.cls

    @property
    def key(self) -> str:
        """The key that names it."""
        return "environment.function" if self.cls is None else "environment.cls"

    @property
    def max_alive(self) -> int:
        """Environments with state that live at once. More take memory for what waits for the model; fewer leave engines idle."""
        return self.concurrency or 32


class EarlyStopSection(Section):
    threshold: float | None = Field(
        None, description="a step score under this flags a rollout while it is being written; none: none is stopped"
    )
    keep_probability: Fraction = Field(
        0.2, description="probability with which a flagged rollout goes on; it then weighs 1 / keep_probability in the loss"
    )
    min_steps: PositiveInt = Field(2, description="steps before which no score flags")
    max_false_stop_fraction: Fraction = Field(
        0.2, description="stopping ends where surely more than this part of flagged rollouts would have been right"
    )


class PrmJudgeSection(Section):
    url: str | None = Field(
        None, description="endpoint of a language model that judges each step, up to and with /v1, in place of prm.path"
    )
    model: str | None = Field(None, description="its name there")
    concurrency: PositiveInt = Field(16, description="questions at once")
    max_tokens: PositiveInt = Field(512, description="longest answer")
    key_file: Path | None = Field(None, description="file with the endpoint's key")
    extra: dict[str, Any] = Field({}, description="further fields of each request, as the endpoint takes them")


class PrmSection(Section):
    path: Path | None = Field(None, description="process reward model, a folder vLLM's pooling engines serve; none: steps have no scores")
    convention: Literal["qwen2.5-math-prm", "math-shepherd", "token-classification", "sigmoid-head"] = Field(
        "token-classification", description="what stands after a step, and how its row becomes a score"
    )
    tag: str | None = Field(None, description="what stands after a step; default: the convention's")
    separator: str | None = Field(None, description="text between two steps of a completion; default: a blank line")
    judge: PrmJudgeSection = PrmJudgeSection()  # pyright: ignore[reportCallIssue]
    early_stop: EarlyStopSection = EarlyStopSection()  # pyright: ignore[reportCallIssue]
    count: PositiveInt = Field(1, description="engines of the model, each on devices of its own; a completion stays with one")
    max_steps: PositiveInt = Field(256, description="steps of one completion; the rest of a longer one is its last step")
    chunk_tokens: PositiveInt = Field(32, description="tokens between two reports of an engine on a sequence being written")
    max_waiting_tokens: PositiveInt = Field(1 << 17, description="tokens that may wait for the model; with more, no prompt is admitted")
    deadline_s: PositiveFloat = Field(120.0, description="longest batch; after it the process is killed and started again")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="weights of the model")
    max_tokens: PositiveInt | None = Field(None, description="longest trace it takes, tags included; default: the model's own")
    cores: tuple[int, ...] = Field((), description="CPU core of each engine of the model, one each; empty lets the system choose")
    gpus: tuple[int | str, ...] = Field(
        (), description="indices or UUIDs of its GPUs, one for each rank of each engine; empty: those after the engines'"
    )
    options: dict[str, Any] = Field({}, description="further vLLM engine arguments, passed as they are")

    @property
    def most(self) -> int:
        """Engines of the model that a live run may come to have: keys are made for as many."""
        return max(8, 2 * self.count)

    @property
    def num_ranks(self) -> int:
        """Processes over which an engine of the model is spread."""
        return int(self.options.get("tensor_parallel_size", 1)) * int(self.options.get("pipeline_parallel_size", 1))

    @property
    def is_used(self) -> bool:
        """A model, or a judge, scores steps."""
        return self.path is not None or self.judge.url is not None

"""Messages between the scorer, its fork server and its workers: plain msgpack over socket pairs.

    scorer --Setup, Spawn, Kill--> fork server --Prepared, Ended, Refused--> scorer        packets, one message each
    scorer --Call, Withdraw--> worker --Loaded, Refused, Calling, CallResult, Skipped--> scorer    a stream of frames

A `pool` is a set of functions that share slots: all functions without limits of their own, or one function with limits.

Every `Call` gets exactly one `CallResult` or `Skipped`, in the order of the calls, sent as soon as it is known. So the scorer always knows
which call a worker is running, and when a worker hangs or dies, only that one call fails.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pipelinerl.config import RewardSection
from pipelinerl.messages import Message, Observation, Outcome, ScorerTask
from pipelinerl.runtime.function_errors import FunctionError

STACK_CHARACTERS = 16 << 10
"""Maximum length of the stack of a process that hung or crashed; with a few threads it is a tenth of this."""
PACKET_BYTES = 128 << 10
"""Maximum size of a control message. The system's default socket buffer holds one of 200 KiB."""


class RewardModel(Message, frozen=True):
    """How a reward model is loaded and what it reads: keys of its `[[reward]]` section by the same names."""

    path: str
    """Folder of a sequence classifier with one logit."""
    format: Literal["chat", "text"]
    dtype: str
    max_tokens: int | None


class Component(Message, frozen=True):
    """One reward function, reward model or environment, as the config names it."""

    function: str
    """`path:name`, or the reward model's folder."""
    name: str
    """The short name that `component_names` gives it."""
    options: dict[str, Any]
    """Arguments of every call beside the row's columns; for a reward model, vLLM's engine arguments."""
    is_environment: bool = False
    """True for an environment, which is alone in its pool."""
    is_stateful: bool = False
    """True for a class of environments with state."""
    python: str = ""
    """Interpreter of such a class; empty for the worker's own."""
    model: RewardModel | None = None
    """None for a function; a reward model is alone in its pool."""


def component_names(references: Sequence[str]) -> tuple[str, ...]:
    """Return the name of each of these in `Score.components`: the function's or the folder's; the whole reference where two share it."""
    short = [_short(reference) for reference in references]
    counts = collections.Counter(short)
    return tuple(reference if counts[name] > 1 else name for name, reference in zip(short, references, strict=True))


def reward_weights(rewards: Sequence[RewardSection]) -> dict[str, float]:
    """Return the weight of each reward by its name in `Score.components`."""
    names = component_names([reward.reference for reward in rewards])
    return {name: reward.weight for name, reward in zip(names, rewards, strict=True)}


def _short(reference: str) -> str:
    """Return the function's name of `path:name`; of a model's folder its last part, or the name that the Hub's cache keeps it under."""
    hub = re.search(r"models--(?:.*--)?(.+)/snapshots/[^/]+$", reference)
    return hub[1] if hub else reference.rpartition(":")[2].rpartition("/")[2]


class Setup(Message, frozen=True):
    """The functions and the tokenizer that workers must load. It holds no path of the run folder and no key."""

    model_path: str
    """Hugging Face folder with the tokenizer."""
    pools: tuple[tuple[Component, ...], ...]
    max_tokens: int
    """Maximum length of a completion in this run, for reward functions that ask for it by name."""
    chat: dict[str, Any] = msgspec.field(default_factory=dict)
    """The settings of chats, see `ChatOptions`; empty in a run without an environment with state."""


class Spawn(Message, frozen=True):
    """Fork a worker of a pool; its socket travels beside this message."""

    worker_id: int
    pool: int
    gpu: str = ""
    """UUID of the GPU that it computes on; empty where it was dealt none."""


class Kill(Message, frozen=True):
    """Kill a worker with everything it started."""

    worker_id: int
    wants_stack: bool = False
    """True to have it write down its stack first."""


class Prepared(Message, frozen=True):
    """The fork server has loaded the tokenizer and forks on demand."""


class Ended(Message, frozen=True):
    """A worker is gone, and so is everything it started."""

    worker_id: int
    how: str
    """A text for a person, for example `ended with exit code 3` or `was killed by SIGSEGV`."""
    stack: str = ""
    """Its stack when it crashed, or when `Kill` asked for it, as `faulthandler` writes it."""


class Refused(Message, frozen=True):
    """The tokenizer or a reward function cannot be loaded."""

    error: str


class Loaded(Message, frozen=True):
    """A worker has loaded every function."""

    places: dict[str, str]
    """`file:line` at which each function begins, by its name."""


class Call(Message, frozen=True):
    """Run every function of the pool on a task: each reward function, or the environment."""

    call_id: int
    task: ScorerTask
    closes: bool = False
    """True to close the environment of an episode that is over; the task is the one that it began with."""


class Withdraw(Message, frozen=True):
    """Skip these calls where they have not begun."""

    call_ids: tuple[int, ...]


class Calling(Message, frozen=True):
    """The worker enters the next function of the call it runs; it is not sent for the first function."""

    name: str


class Skipped(Message, frozen=True):
    """The answer to a withdrawn call, which was not run."""

    call_id: int


class CallResult(Message, frozen=True):
    """The result of one call, made by the worker, or by the scorer where the worker was lost over it."""

    call_id: int
    outcome: Outcome
    started_at: float
    """Unix seconds."""
    duration_s: float
    durations_s: dict[str, float]
    """Durations by name, for each function that was entered."""
    components: tuple[dict[str, float], ...] = ()
    """For each completion, the value of every function that applied, by name; empty unless `outcome` is `OK`, and for an environment."""
    observation: Observation | None = None
    """The same as in `Result`."""
    reward: float = 0.0
    """The same as in `Result`."""
    is_lost: bool = False
    """The same as in `Result`."""
    has_drifted: bool = False
    """The same as in `Result`."""
    error: str = ""
    failed: str = ""
    """The function that failed; empty where `outcome` is `OK`."""
    failure: FunctionError | None = None
    """Cause and place of the failure; None where `outcome` is `OK`, and where the worker was lost: its stack comes with `Ended`."""


ToForkServer = Setup | Spawn | Kill
FromForkServer = Prepared | Ended | Refused
ToWorker = Call | Withdraw
FromWorker = Loaded | Refused | Calling | Skipped | CallResult

"""What the scorer, its fork server and its workers say to each other: messages over socket pairs, as plain msgpack.

    scorer --Setup, Spawn, Kill--> fork server --Prepared, Ended, Refused--> scorer        packets, one message each
    scorer --Call, Withdraw--> worker --Loaded, Refused, Calling, CallResult, Skipped--> scorer    a stream of frames

A `pool` is a set of functions that share slots: all those without limits of their own, or one with.

Every `Call` gets exactly one `CallResult` or `Skipped`, in the order of the calls, sent the moment it is known. So the scorer always knows
which call a worker is busy with, and a worker that hangs or dies is charged for that one call only.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from pipelinerl.messages import Message, Observation, Outcome, ScorerTask
from pipelinerl.runtime.function_errors import FunctionError

STACK_CHARACTERS = 16 << 10
"""Of a process that hung or crashed, at most; with a few threads it is a tenth of this."""
PACKET_BYTES = 128 << 10
"""Largest control message. The system's default socket buffer holds one of 200 KiB."""


class Component(Message, frozen=True):
    """One reward function, as in the config."""

    function: str
    """`path:name`."""
    name: str
    """What it is known as; see `component_names`."""
    options: dict[str, Any]
    """Arguments of every call beside the row's columns."""
    is_environment: bool = False
    """It is no reward function, and alone in its pool."""


def component_names(references: Sequence[str]) -> tuple[str, ...]:
    """What each of these functions is known as in `Score.components`: its name, or its whole reference where two share a name."""
    short = [reference.rpartition(":")[2] for reference in references]
    counts = collections.Counter(short)
    return tuple(reference if counts[name] > 1 else name for name, reference in zip(short, references, strict=True))


class Setup(Message, frozen=True):
    """What a worker must load. Holds no path of the run folder and no key."""

    model_path: str
    """Hugging Face folder with the tokenizer."""
    pools: tuple[tuple[Component, ...], ...]
    max_tokens: int
    """Longest completion of this run, for reward functions that ask for it by name."""


class Spawn(Message, frozen=True):
    """Fork a worker of a pool; its socket travels beside this message."""

    worker_id: int
    pool: int


class Kill(Message, frozen=True):
    """Kill a worker with everything it started."""

    worker_id: int
    wants_stack: bool = False
    """Have it write down first where it is."""


class Prepared(Message, frozen=True):
    """The fork server has loaded the tokenizer and forks on demand."""


class Ended(Message, frozen=True):
    """A worker is gone, and so is everything it started."""

    worker_id: int
    how: str
    """For a person: `ended with exit code 3`, `was killed by SIGSEGV`."""
    stack: str = ""
    """Where it was when it crashed, or was asked by `Kill`, as `faulthandler` writes it."""


class Refused(Message, frozen=True):
    """The tokenizer or a reward function cannot be loaded."""

    error: str


class Loaded(Message, frozen=True):
    """A worker has loaded every function."""

    names: tuple[str, ...]
    """Of the functions, in order."""
    places: tuple[str, ...] = ()
    """`file:line` at which each begins."""


class Call(Message, frozen=True):
    """Run every function of the pool on a task: each reward function, or the environment."""

    call_id: int
    task: ScorerTask


class Withdraw(Message, frozen=True):
    """Skip these calls where they have not begun."""

    call_ids: tuple[int, ...]


class Calling(Message, frozen=True):
    """The worker enters a further function of the call it runs; the first goes without saying."""

    name: str


class Skipped(Message, frozen=True):
    """A withdrawn call, not run."""

    call_id: int


class CallResult(Message, frozen=True):
    """How one call ended."""

    call_id: int
    outcome: Outcome
    started_at: float
    """Unix seconds."""
    duration_s: float
    durations_s: dict[str, float]
    """Of each function that was entered, by its name."""
    components: tuple[dict[str, float], ...] = ()
    """For each completion the value of every function that applied, by its name; empty unless `outcome` is `OK`, and of an environment."""
    observation: Observation | None = None
    """As in `Result`."""
    error: str = ""
    failed: str = ""
    """The function that failed; empty where `outcome` is `OK`."""
    failure: FunctionError | None = None
    """Why, and where; None where `outcome` is `OK`."""


ToForkServer = Setup | Spawn | Kill
FromForkServer = Prepared | Ended | Refused
ToWorker = Call | Withdraw
FromWorker = Loaded | Refused | Calling | Skipped | CallResult

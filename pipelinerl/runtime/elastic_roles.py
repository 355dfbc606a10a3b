"""What the rule of elastic roles (`pipeline.elastic`) leaves to the orchestrator that follows: one file, `<run>/scale/elastic.json`.

It is written before an order is carried out, and whenever one is over. So whoever follows knows of every order that may have been begun,
and sees by what the run was asked for how far it came.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Numbers = Annotated[tuple[int, ...], msgspec.Meta(min_length=3, max_length=4)]
"""An order: engines, trainer ranks, engines or processes of the model that scores, and `tensor_parallel_size` of the engines, which files
of earlier releases leave out."""


class RoleChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is under way."""

    before: Numbers
    saved_s: float
    """0 where it takes back another one."""
    cost_s: float
    deadline_s: float
    """Seconds that it may take. They begin anew with another orchestrator, whose clock is another one."""


class EnginePasses(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes of engines of one width, as they were measured: a pass of n sequences of m tokens takes a + b n + c n m seconds."""

    a: float
    b: float
    c: float
    room: float | None = None
    """Tokens that an engine's KV cache holds; None where nobody has said."""
    slowness: float | None = None
    """Times as long as that which engines took for what they wrote in all; None where no window has ended with this width."""


class RolesRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The rule at one moment."""

    ordered: Numbers
    """What was ordered last, by this rule or by hand."""
    epoch: int = 0
    """Changes that it has ordered."""
    next_plan: int = 0
    """The first step after which it plans."""
    num_failed: int = 0
    """Changes in a row that were given up or taken back."""
    change: RoleChange | None = None
    first_s: float | None = None
    """Seconds in which everybody had loaded when the run began; None where nobody has seen it."""
    num_switches: int = 0
    """Changes that were carried out while one orchestrator watched."""
    switches_s: float = 0.0
    """Seconds of all of these."""
    num_trainer_switches: int = 0
    """Of these changes, those that gave the trainer other ranks."""
    away_s: float = 0.0
    """Their seconds without a trainer."""
    replicas: dict[int, float] = {}
    """Speed of a replica of the trainer by the units that train beside the core, over that of the first number that was seen."""
    replicas_context: float = 0.0
    """Mean tokens of a sequence when that was seen."""
    passes: dict[int, EnginePasses] = {}
    """By the ranks of an engine, of every width that the run has had."""

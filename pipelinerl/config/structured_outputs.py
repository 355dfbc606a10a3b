"""What turns may say: constraints on sampling, as vLLM's structured outputs take them (`rollout.structured_outputs`)."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field

KINDS = ("regex", "choice", "grammar", "json", "structural_tag")


def _checked(constraint: dict[str, Any]) -> dict[str, Any]:
    if not constraint:
        return constraint
    (kind, value), *others = constraint.items()
    if others or kind not in KINDS:
        raise ValueError(f"has the keys {', '.join(constraint)}, expected one of {', '.join(KINDS)}, or none, which leaves the turn free")
    is_right = isinstance(value, list) and all(isinstance(one, str) for one in value) if kind == "choice" else isinstance(value, str)
    if not value or not (is_right or (kind == "json" and isinstance(value, dict))):
        expected = {"choice": "a list of texts", "json": "a JSON schema, as a table or as text"}.get(kind, "a text")
        raise ValueError(f"{kind} is {json.dumps(value, default=str)[:80]}, expected {expected}")
    return constraint


Constraint = Annotated[dict[str, Any], AfterValidator(_checked)]
"""One constraint, `{ regex = "..." }` or another of `KINDS`; empty for a turn that is free."""
StructuredOutputs = Annotated[
    tuple[Constraint, ...],
    Field(
        max_length=64,
        description="what each turn of a conversation may say, the last for all that follow: vLLM's structured outputs, { regex = '...' },"
        " { choice = [...] }, { grammar = '...' }, { json = {...} }, { structural_tag = '...' }, or {} for a turn that is free. Tokens"
        " carry the log-probability under the constraint; evaluations are free",
    ),
]

"""Checks that a completion is JSON of the shape that the row asks for; `jsonschema` (extra `rewards`) knows the drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pipelinerl.errors import ConfigError

try:
    from jsonschema.validators import validator_for
    from referencing import Registry
except ImportError as error:
    raise ConfigError("the json_schema reward needs jsonschema: pip install 'pipelinerl[rewards]'") from error

_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?```\s*\Z", re.DOTALL)


def fits_schema(completion: str, schema: Mapping[str, Any] | str) -> float:
    """Return 1.0 where the completion, or the one fenced block it consists of, is JSON that the schema accepts; else 0.0.

    Raises `jsonschema.SchemaError` where the schema itself is wrong. NaN and Infinity, which JSON does not have, are not accepted, and
    references to schemas elsewhere are not fetched.
    """
    rules = json.loads(schema) if isinstance(schema, str) else dict(schema)
    kind = validator_for(rules)
    kind.check_schema(rules)
    fenced = _FENCE.match(completion)
    try:
        value = json.loads(fenced[1] if fenced else completion, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return float(kind(rules, registry=Registry()).is_valid(value))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

"""Several policies in one run: what each entry of `[policies]` sets, on top of the rest of the file.

Each policy is a whole run of its own but for the script that drives all of them, so each has whole settings of its own: those of the file,
with what its entry sets in their place. A frozen one has engines alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator
from typing import Any

from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_OF_THE_RUN = frozenset(("run", "gateway", "tinker", "tracking", "slurm", "kubernetes", "ray", "policies"))
"""Sections that are of the whole run."""
_OF_TRAINED = frozenset(Config.model_fields) - _OF_THE_RUN
_OF_FROZEN = frozenset(("model", "data", "rollout", "engine"))
"""Sections that act where engines are all there is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """One policy of a run."""

    name: str
    config: Config
    is_frozen: bool
    lends: bool = False
    """True for the first that is trained, in a run with a gateway: its orchestrator speaks with it for all policies."""


def policies_of(config: Config) -> tuple[PolicySettings, ...]:
    """The policies of a run, in the order of the file. Raises `ConfigError` with every problem of all of them."""
    problems = list(_problems(config.policies))
    if problems:
        raise ConfigError(_told(problems))
    found: list[PolicySettings] = []
    host = next(name for name, entry in config.policies.items() if not entry.get("frozen"))
    for name, entry in config.policies.items():
        try:
            found.append(_settings(config, name, entry, lends=config.gateway is not None and name == host))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(found)


def _settings(config: Config, name: str, entry: dict[str, Any], *, lends: bool) -> PolicySettings:
    own = {key: value for key, value in entry.items() if key != "frozen"}
    tree = _merged(config.model_dump(mode="json", exclude_unset=True, exclude={"policies"}), own)
    tree["run"] = tree.get("run", {}) | {"name": f"{config.run.name}-{name}"}
    return PolicySettings(name=name, config=parse(tree, origin=f"policies.{name}"), is_frozen=bool(entry.get("frozen")), lends=lends)


def _merged(below: Any, above: Any) -> Any:
    """`above`, with what it does not name of `below`: tables key by key, everything else whole."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


def _problems(policies: dict[str, dict[str, Any]]) -> Iterator[str]:
    if not policies:
        yield "there is none. Name each in a section of its own, [policies.alice]; a run of one policy is `pipelinerl.Controller`'s"
        return
    if all(entry.get("frozen") is True for entry in policies.values()):
        yield f"{', '.join(policies)}: all are frozen, and nothing would train. Leave `frozen` out of one"
    known: dict[str, str] = {}
    for name, entry in policies.items():
        if not _NAME.fullmatch(name):
            yield f"{name!r} is no name: expected a letter, then up to 31 letters, digits, - or _"
        if (other := known.setdefault(name.lower(), name)) != name:
            yield f"{other} and {name} are one name where a disk knows no capitals: call one of them otherwise"
        yield from _problems_of(name, entry)


def _problems_of(name: str, entry: dict[str, Any]) -> Iterator[str]:
    is_frozen = entry.get("frozen", False)
    if not isinstance(is_frozen, bool):
        yield f"policies.{name}.frozen is {is_frozen!r}, expected true or false"
    for section in entry:
        if section == "frozen" or section in (_OF_FROZEN if is_frozen else _OF_TRAINED):
            continue
        if section in _OF_TRAINED:
            has = ", ".join(sorted(_OF_FROZEN))
            yield f"policies.{name}.{section}: {name} is frozen: it has engines alone, and nothing trains or scores it. It may set {has}"
        elif section in _OF_THE_RUN:
            yield f"policies.{name}.{section} is of the whole run: set it in [{section}]"
        else:
            near = difflib.get_close_matches(section, ("frozen", *_OF_TRAINED), n=1)
            yield f"policies.{name}.{section} is not a known section" + (f"; did you mean {near[0]}?" if near else "")


def _told(problems: list[str]) -> str:
    plural = "problem" if len(problems) == 1 else "problems"
    return f"policies: {len(problems)} {plural}\n" + "\n".join(f"  - {line}" for line in problems)

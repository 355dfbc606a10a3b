"""Reads the settings from a TOML file and `section.key=value` overrides; tells every problem at once, with its path and nearest name."""

from __future__ import annotations

import contextlib
import difflib
import enum
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from pipelinerl.config import Config, Section
from pipelinerl.config.backends import check_model
from pipelinerl.config.layout import ModelShape, check_layout
from pipelinerl.config.renamed import renamed, renamed_value
from pipelinerl.config.validation import no_quantised_engine, problems_between_sections
from pipelinerl.errors import ConfigError
from pipelinerl.storage import checksum
from pipelinerl.storage.schema import OLDEST_MIGRATED, SCHEMA, refusal


def load(path: Path, *, overrides: Sequence[str] = (), for_run: bool = True) -> Config:
    """Read a TOML config and apply `section.key=value` overrides (values in TOML syntax; a bare word is a string).

    `for_run`: it is for RL, which needs prompts and rewards; fine-tuning needs neither.

    Relative paths in the file stay relative to the working directory. Raises `ConfigError` listing every problem at once.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no config file at {path}: name an existing TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Name a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply(tree, override)
    return parse(tree, origin=str(path), for_run=for_run)


def write_run(run_folder: Path, config: Config) -> None:
    """Write a run's resolved settings to its folder, with the number of their form and a checksum."""
    tree = config.model_dump(mode="json")
    draft = run_folder / "config.json.draft"
    draft.write_text(json.dumps({"schema": SCHEMA, "checksum": _checksum(tree)} | tree, indent=2))
    draft.rename(run_folder / "config.json")


def load_run(run_folder: Path, *, overrides: Sequence[str] = ()) -> Config:
    """The settings of a run, some of them changed. Raises `ConfigError`, also for those of another schema."""
    path = run_folder / "config.json"
    schema, tree = read_settings(run_folder)
    if (reason := refusal(schema, what=str(path))) is not None:
        raise ConfigError(reason)
    for override in overrides:
        _apply(tree, override)
    return parse(tree, origin=str(path), for_run=False)  # it was, when the run began


def with_ranks(config: Config, ranks: int) -> Config:
    """The same settings with another `trainer.ranks`. Raises `ConfigError` where they make no trainer, or the model cannot be cut so."""
    tree = config.model_dump(mode="json")
    tree["trainer"]["ranks"] = ranks
    changed = parse(tree, origin=f"with {ranks} ranks of the trainer", for_run=False)
    check_layout(changed.trainer.layout, changed.model.path)
    check_model(changed.trainer.backend, changed.trainer.layout, changed.model.path)
    return changed


def with_tensor_parallel(config: Config, size: int) -> Config:
    """The same settings with another `engine.options.tensor_parallel_size`. Raises `ConfigError` where no engine could serve so."""
    if size == config.engine.tensor_parallel_size:
        return config
    tree = config.model_dump(mode="json")
    tree["engine"]["options"]["tensor_parallel_size"] = size
    changed = parse(tree, origin=f"with engine.options.tensor_parallel_size={size}", for_run=False)
    if changed.engine.kind == "vllm" and size > 1 and (num_heads := ModelShape.read(changed.model.path).num_heads) % size:
        raise ConfigError(f"the {num_heads} attention heads of {changed.model.path} are not divided by {size}. Ask for a divisor of them")
    return changed


def read_settings(run_folder: Path) -> tuple[object, dict[str, Any]]:
    """The number of the form of a run's settings, and the settings as they stand in the file, under the names of their time.

    Raises `ConfigError` where there are none, or where they were changed after they were written.
    """
    path = run_folder / "config.json"
    try:
        tree = json.loads(path.read_text())
        if not isinstance(tree, dict):
            raise ValueError(f"it holds a {type(tree).__name__}")
    except FileNotFoundError:
        raise ConfigError(f"no settings at {path}: name the folder of a run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not the settings of a run: {error}. {_restore(run_folder)}") from None
    schema = tree.pop("schema", OLDEST_MIGRATED)  # it had no number
    if (said := tree.pop("checksum", None)) not in (None, found := _checksum(tree)):
        raise ConfigError(
            f"{path} was changed after it was written: its checksum is {found}, expected {said}. {_restore(run_folder)}; a file that"
            " was changed on purpose goes without `checksum`"
        )
    return schema, tree


def _restore(run_folder: Path) -> str:
    where = run_folder / "journal" / "orchestrator.jsonl"
    return f"Where it was damaged after it was written, restore it; the first line of {where} holds the same settings"


def _checksum(tree: dict[str, Any]) -> str:
    return checksum.of_bytes(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())


def parse(tree: dict[str, Any], *, origin: str, for_run: bool = True) -> Config:
    """Validate a plain dictionary of sections. Raises `ConfigError` listing every problem at once; `origin` names the file."""
    problems = list(_missing_for_run(tree)) if for_run else []
    try:
        config = Config.model_validate(tree)
        if not problems:
            return config
    except pydantic.ValidationError as error:
        problems += [line for item in error.errors() for line in _describe(item, others=error.errors())]
        if any(item["loc"] for item in error.errors()):  # then pydantic did not come to compare the sections
            problems += problems_between_sections(_valid_sections(tree))
    plural = "problem" if len(problems) == 1 else "problems"
    raise ConfigError(f"{origin}: {len(problems)} {plural}\n" + "\n".join(f"  - {line}" for line in problems))


def _missing_for_run(tree: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each setting that RL needs and other commands do not."""
    if "tinker" in tree:
        yield "section tinker is of `pipelinerl serve`, whose clients bring prompts and rewards. Start it with that, or leave it out"
    data = tree.get("data", {})
    if isinstance(data, dict) and data.get("source") is None:
        yield f"data.source is missing: {known_keys()['data.source']}"
    environment = tree.get("environment", {})
    has_its_own = (isinstance(environment, dict) and environment.get("cls")) or "gateway" in tree
    if not tree.get("reward") and not has_its_own:
        yield f"reward is missing: name a function in a [[reward]] section; function: {known_keys()['reward.function']}"


def known_keys(model: type[pydantic.BaseModel] = Config, prefix: str = "") -> dict[str, str]:
    """Every dotted key with its description; the list that documentation and tests hold."""
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is None:
            keys[prefix + name] = field.description or ""
        else:
            keys |= known_keys(inner, f"{prefix}{name}.")
    return keys


def described_keys(model: type[pydantic.BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every dotted key with its type, its default and its description, as `pipelinerl keys` prints them."""
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            yield from described_keys(inner, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _said(field.get_default(call_default_factory=True))
        yield prefix + name, _type_of(field), default, field.description or ""


def _type_of(field: Any) -> str:
    """A field's type as TOML has it, with its bounds."""
    bounds = [sign + f"{getattr(one, name):g}" for one in field.metadata for name, sign in _BOUNDS.items() if hasattr(one, name)]
    return " ".join([_named(field.annotation), *bounds])


def _named(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        bounds = [sign + f"{getattr(one, name):g}" for one in _flat(inner[1:]) for name, sign in _BOUNDS.items() if hasattr(one, name)]
        return " ".join([_named(inner[0]), *bounds])
    if origin is Literal:
        return "|".join(json.dumps(one) for one in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_named(one) for one in inner if one is not type(None))
    if origin is tuple:
        return f"list of {_named(inner[0])}"
    if origin is dict or annotation is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "|".join(json.dumps(one.value) for one in annotation)
    return _TOML_TYPES.get(annotation, str(annotation))


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    """Bounds, also those inside a pydantic `Field`."""
    for one in metadata:
        yield from getattr(one, "metadata", None) or [one]


def _said(default: Any) -> str:
    """A default in TOML's syntax."""
    if default is None:
        return "none"
    if isinstance(default, tuple):
        return json.dumps([one.value if isinstance(one, enum.Enum) else one for one in default])
    return json.dumps(default.value if isinstance(default, enum.Enum) else str(default) if isinstance(default, Path) else default)


_BOUNDS = {"gt": "> ", "ge": ">= ", "lt": "< ", "le": "<= "}
_TOML_TYPES = {str: "text", int: "integer", float: "number", bool: "true|false", Path: "path", Any: "value"}


def _apply(tree: dict[str, Any], override: object) -> None:
    """Set one key. An override is anything: a caller from Python may give a list of them in place of each."""
    key, equals, text = override.partition("=") if isinstance(override, str) else ("", "", "")
    parts = key.strip().split(".")
    if not isinstance(override, str) or not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not `section.key=value`, for example `trainer.steps=10`, as one text for each key")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text
    node: Any = tree
    for depth, part in enumerate(parts[:-1]):
        place = _place(node, part, ".".join(parts[:depth]), override)
        if isinstance(node, dict):
            node.setdefault(place, {})
        node = node[place]
    node[_place(node, parts[-1], ".".join(parts[:-1]), override)] = value


def _place(node: Any, part: str, name: str, override: str) -> str | int:
    """The key of a section, or the index into a list, that `part` of an override names."""
    if isinstance(node, dict):
        return part
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return int(part)
    kind = f"a list of {len(node)}, whose entries are named from {name}.0 on" if isinstance(node, list) else "a value, not a section"
    raise ConfigError(f"override {override!r}: {name} is {kind}")


def _valid_sections(tree: dict[str, Any]) -> dict[str, Any]:
    """The sections without a problem of their own, where others have one."""
    valid = {}
    for name, field in Config.model_fields.items():
        with contextlib.suppress(pydantic.ValidationError):
            absent = {} if field.default is not None else None
            valid[name] = pydantic.TypeAdapter[Any](field.annotation or Any).validate_python(tree.get(name, absent))
    return valid


def _describe(item: Any, *, others: list[Any]) -> list[str]:
    path = ".".join(str(part) for part in item["loc"])
    key = ".".join(part for part in item["loc"] if isinstance(part, str))
    if item["type"] == "extra_forbidden":
        if said := renamed(key):
            return [said]
        section, _, _ = key.rpartition(".")
        siblings = [known for known in (*known_keys(), *Config.model_fields) if known.rpartition(".")[0] == section]
        near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6 if not section else 0.8)
        return [f"{path} is not a known key" + (f"; did you mean {near[0]}?" if near else "")]
    if item["type"] == "missing":
        return [f"{path} is missing: {known_keys().get(key) or 'it has no default'}"]
    if item["type"] == "value_error":
        return str(item["ctx"]["error"]).splitlines()
    if item["type"] == "too_short" and any(len(other["loc"]) > len(item["loc"]) and other["loc"][0] == item["loc"][0] for other in others):
        return []  # its entries are there, and what is wrong with them is said
    if said := renamed_value(key, item["input"]):
        return [said]
    if key == "engine.quantization" and str(item["input"]).startswith("fp8"):
        return [no_quantised_engine(key, item["input"])]
    return [f"{path} is {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"]


def _section_of(annotation: Any) -> type[pydantic.BaseModel] | None:
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None

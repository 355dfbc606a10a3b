"""What the pages say of the code is there: links, files, modules, functions, config keys, commands, settings, error messages."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from pipelinerl.algorithms.methods import method_of
from pipelinerl.cli.entry import app
from pipelinerl.config.alarm_names import AlarmName
from pipelinerl.config.file import known_keys, parse

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
OF_THE_CODE = ("pipelinerl", "orchestrator", "trainer")
FOLDERS = (*OF_THE_CODE, "tests", "scripts", "docs", "examples")
SECTIONS = {key.partition(".")[0] for key in known_keys()}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def quoted(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


@every_page
def test_a_link_leads_somewhere(page: Path) -> None:
    missing: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        found = page if not path else page.parent / path
        if not found.exists() or (anchor and anchor not in anchors(found)):
            missing.append(target)
    assert not missing


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@every_page
def test_a_file_that_is_named_is_there(page: Path) -> None:
    if page.name == "metrics.md":
        return  # generated; `trainer/loss` and the like are names that trackers show
    named = [word for text in quoted(page) for word in text.split() if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/]", word)]
    made = set(re.findall(r"`([\w./]+)`:\n\n```python", page.read_text()))  # by a recipe
    assert [name for name in named if not (ROOT / name).exists() and name not in made] == []


@every_page
def test_a_module_or_function_that_is_named_is_there(page: Path) -> None:
    missing: list[str] = []
    for text in quoted(page):
        match = re.fullmatch(rf"((?:{'|'.join((*OF_THE_CODE, 'tests', 'scripts'))})(?:\.\w+)*)(?::([\w.]+))?(?:\(\))?", text)
        if match and ("." in match[1] or match[2]) and text.partition(" ")[0] not in key_prefixes() and not is_there(match[1], match[2]):
            missing.append(text)
    for module in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
        missing += [] if is_there(module, None) else [module]
    assert not missing


@every_page
def test_a_config_key_that_is_named_is_there(page: Path) -> None:
    keys = key_prefixes()
    named = [
        match[1]
        for text in quoted(page)
        if (match := re.match(rf"((?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+)(?: = .*)?$", text)) and not match[1].endswith((".py", ".toml"))
    ]
    assert [name for name in named if name not in keys and not is_there(name, None) and not free(name)] == []


def free(name: str) -> bool:
    """True for what lies within a table whose keys are the user's or a library's."""
    return any(name.startswith(f"{key}.") for key in known_keys() if key.endswith(("options", "overrides", "teachers", "extra")))


@functools.cache
def key_prefixes() -> frozenset[str]:
    return frozenset(key.rsplit(".", depth)[0] for key in known_keys() for depth in range(key.count(".")))


@functools.cache
def is_there(module: str, name: str | None) -> bool:
    """True for a module, or something that a module defines. Its source is read, and the module imported only where that does not tell."""
    path = ROOT / Path(*module.split("."))
    source = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()), None)
    if source is None:
        parent, _, attribute = module.rpartition(".")
        return bool(parent) and name is None and is_there(parent, attribute)
    if name is None:
        return True
    body: list[ast.stmt] = ast.parse(source.read_text()).body
    for part in name.split("."):
        found = next((node for node in body if part in _names_of(node)), None)
        if found is None:
            return "." not in name and hasattr(importlib.import_module(module), name)
        body = getattr(found, "body", [])
    return True


def _names_of(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


# --- commands and settings -----------------------------------------------------------------------------------------------------------


def commands() -> set[str]:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return set(group.commands)


@every_page
def test_a_command_that_is_named_is_there(page: Path) -> None:
    known = commands()
    lines = [
        *quoted(page),
        *(line for block in re.findall(r"```(?:sh|console)?\n(.*?)```", page.read_text(), re.DOTALL) for line in block.splitlines()),
    ]
    for line in lines:
        for word in re.findall(r"(?:^|&& )(?:\.venv/bin/)?pipelinerl ([a-z]\w*)", line):
            assert word in known, line
        for path in re.findall(r"(?:^|\s)((?:scripts|examples)/[\w./-]*\w)", line):
            assert (ROOT / path).exists(), line


TOML = [(page, block) for page in PAGES for block in blocks(page, "toml") if page.name != "CONTRIBUTING.md"]


@pytest.mark.parametrize(("page", "block"), TOML, ids=[f"{page.stem}-{number}" for number, (page, _) in enumerate(TOML)])
def test_settings_are_taken_as_they_are_printed(page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laid over the README's own run, beside the rules that the page on algorithms prints."""
    (rules,) = [text for text in blocks(ROOT / "docs" / "algorithms.md", "python") if "half_life" in text]
    (tmp_path / "rules.py").write_text(rules)
    monkeypatch.chdir(tmp_path)
    (own_run,) = [tomllib.loads(text) for text in blocks(ROOT / "README.md", "toml")]
    settings: dict[str, Any] = tomllib.loads(block)
    config = parse(own_run | settings, origin=str(page))
    assert method_of(config).name in settings.get("algorithm", {"name": "grpo"})["name"]


# --- troubleshooting -----------------------------------------------------------------------------------------------------------------


def test_every_message_that_troubleshooting_quotes_is_one_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    symptoms = [message.strip("`") for message in re.findall(r"^\*\*(``?.+?``?)\*\*", page, re.MULTILINE)]
    assert len(symptoms) >= 20
    said = [text for folder in OF_THE_CODE for path in (ROOT / folder).rglob("*.py") for text in texts_of(ast.parse(path.read_text()))]
    assert [symptom for symptom in symptoms if not any(symptom.strip() in text for text in said)] == []


def test_alarms_that_troubleshooting_explains_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    seen = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {name for cell in seen for name in re.findall(r"`(\w+)`", cell)} <= {str(name) for name in AlarmName}


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Texts that a module can say: its strings but for docstrings, each formatted value as `{}`."""
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def test_every_error_of_the_tree_is_explained_in_its_own_words() -> None:
    """The page prints the module's docstring, so an error that is added there is on the site."""
    assert "::: pipelinerl.errors" in (ROOT / "docs" / "reference" / "errors.md").read_text()


# --- the site ------------------------------------------------------------------------------------------------------------------------


def test_the_menu_leads_to_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def targets(item: Any) -> Iterator[str]:
        match item:
            case str():
                yield item
            case dict():
                for inner in item.values():
                    yield from targets(inner)
            case list():
                for inner in item:
                    yield from targets(inner)

    made = {"architecture.md", "contributing.md", "security.md", "changelog.md"}  # scripts/docs_pages.py
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(targets(site["nav"])) == there | made


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run([ROOT / "scripts" / "docs", "--site-dir", tmp_path / "site"], capture_output=True, text=True, check=False)
    if built.returncode and "from versions: none" in built.stderr:
        pytest.skip("the packages of scripts/lock/docs.txt cannot be fetched here")
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    outside = {link for page in pages for link in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())}
    assert not outside
    shutil.rmtree(tmp_path / "site")

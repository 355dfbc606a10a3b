"""Nobody gets in: no code of this tree can run bytes that came from elsewhere, and no secret stands where others look."""

from __future__ import annotations

import ast
import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError
from pipelinerl.launch.roles import roles_of
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.messages import FromEngine, FromGateway, FromScorer, FromTrainer, ToEngine
from pipelinerl.observe.journal import Journal
from pipelinerl.transport.keys import ROLES, read_keys
from pipelinerl.transport.zmq import ZmqHub, ZmqLink

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for part in ("pipelinerl", "orchestrator", "trainer", "scripts") for path in (ROOT / part).rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "recv_serialized",
    "unsafe_load",
    "broadcast_object_list",
    "all_gather_object",
    "system",
    "popen",
}
MUST_SAY = {("torch", "load"): ("weights_only", True), ("np", "load"): ("allow_pickle", False), ("numpy", "load"): ("allow_pickle", False)}
"""Calls that may stand only with this argument."""


def findings(source: str) -> Iterator[str]:
    """What a source file does that could run, or unpickle, what came from elsewhere."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Import(names=names):
                yield from (f"{line}: import {alias.name}" for alias in names if alias.name.partition(".")[0] in FORBIDDEN_MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in FORBIDDEN_MODULES:
                yield f"{line}: from {module}"
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                yield f"{line}: {name}()"
            case ast.Call(func=ast.Attribute(attr=attribute)) if attribute in FORBIDDEN_METHODS:
                yield f"{line}: .{attribute}()"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name), keywords=words) if (module, name) in MUST_SAY:
                argument, value = MUST_SAY[module, name]
                said = [word.value.value for word in words if word.arg == argument and isinstance(word.value, ast.Constant)]
                if said != [value]:
                    yield f"{line}: {module}.{name}() without {argument}={value}"
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield f"{line}: shell=True"
            case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=ast.Constant(value=True)):
                yield f"{line}: {node.arg}=True"
            case _:
                pass


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_unpickles_evaluates_or_asks_a_shell(path: Path):
    assert list(findings(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import cloudpickle.fast",
        "from pickle import loads",
        "eval(x)",
        "exec(x)",
        "__import__(x)",
        "socket.recv_pyobj()",
        "dist.broadcast_object_list(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "torch.load(x, weights_only=flag)",
        "np.load(x)",
        "np.load(x, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
        "f(trust_remote_code=True)",
    ],
)
def test_what_is_forbidden_is_found(source: str):
    assert len(list(findings(source))) >= 1


@pytest.mark.parametrize("source", ["torch.load(x, weights_only=True)", "np.load(x, allow_pickle=False)", "model.eval()", "re.compile(x)"])
def test_what_is_harmless_is_not_found(source: str):
    assert list(findings(source)) == []


def config(folder: Path, **engine: object):
    return parse(
        {
            "run": {"folder": str(folder)},
            "model": {"path": "unused"},
            "data": {"source": "unused"},
            "reward": [{"function": "unused:reward"}],
            "engine": {"kind": "fake", **engine},
        },
        origin="test",
    )


def test_no_secret_key_stands_on_a_command_line_in_a_file_others_read_or_in_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    settings = config(tmp_path)
    folder = make_run_folder(settings)
    commands = "\n".join(str(role) for role in roles_of(settings, folder))

    async def talk() -> None:
        with contextlib.ExitStack() as stack:
            for role, accepts in zip(ROLES, (FromEngine, FromScorer, FromTrainer, FromGateway), strict=True):
                stack.enter_context(contextlib.closing(ZmqHub(folder, role, accepts=accepts)))
            link = stack.enter_context(contextlib.closing(ZmqLink(folder, "engine", 0, accepts=ToEngine)))
            journal = stack.enter_context(contextlib.closing(Journal(folder, "orchestrator")))
            journal.write("run", config=settings.model_dump(mode="json"), derived=settings.derived())
            assert link.receive(0.05) is None

    asyncio.run(talk())
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent.name != "keys"}
    assert {path.name for path in files} >= {"config.json", "engine.json", "orchestrator.jsonl"}
    printed = "".join(capfd.readouterr())
    for path in (folder / "keys").iterdir():
        secret = read_keys(folder, path.stem).secret
        assert not [path for path, content in files.items() if secret in content]
        assert secret.decode() not in commands + printed
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (folder / "keys").iterdir()} == {0o600}


@pytest.mark.parametrize("key", ["hf_token", "api_key", "SECRET", "aws_secret", "password"])
def test_a_setting_that_looks_like_a_secret_is_refused_before_it_is_written_anywhere(tmp_path: Path, key: str):
    with pytest.raises(ConfigError, match=rf"engine.options.{key} looks like a secret: .* set it in the environment"):
        config(tmp_path, options={key: "hf_abc"})
    assert list(tmp_path.iterdir()) == []


def test_a_setting_of_many_tokens_is_no_secret(tmp_path: Path):
    assert config(tmp_path, options={"max_num_batched_tokens": 5, "kv_cache_dtype": "auto"}).engine.options["max_num_batched_tokens"] == 5


@pytest.mark.parametrize(
    "section",
    [
        {"reward": [{"function": "a:b", "options": {"api_key": "x"}}]},
        {"prm": {"path": "m", "options": {"hf_token": "x"}}},
        {"prm": {"judge": {"url": "u", "model": "m", "extra": {"password": "x"}}}},
    ],
)
def test_no_secret_reaches_a_scorer_by_the_config(section: dict[str, Any]) -> None:
    tree = {"model": {"path": "m"}, "data": {"source": "d"}, "reward": [{"function": "a:b"}]} | section
    with pytest.raises(ConfigError, match=r"looks like a secret: .* give the file's path under another name"):
        parse(tree, origin="a test")

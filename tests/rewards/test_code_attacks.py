"""Code that means harm, under every isolation, as root and as an ordinary user: what it reaches, and how much it takes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from pipelinerl.rewards.functions import code
from pipelinerl.rewards.functions.code import DISK_BYTES, MAX_PROCESSES, Isolation

pytestmark = pytest.mark.process

NOBODY = 65534
DRIVER = """
import importlib.util, json, sys, dataclasses
spec = importlib.util.spec_from_file_location("runs_code", sys.argv[1])
runs = importlib.util.module_from_spec(spec)
sys.modules["runs_code"] = runs
spec.loader.exec_module(runs)
runs.MEMORY_BYTES = 256 << 20
try:
    ran = runs.run_python(sys.argv[2], timeout_s=60.0, under=runs.Isolation(sys.argv[3]))
    print(json.dumps(dataclasses.asdict(ran)))
except runs.NotIsolated as error:
    print(json.dumps({"refused": str(error)}))
"""
TRESPASS = """
import os, shutil, sys
def told(what, do):
    try:
        do()
        print(what)
    except OSError:
        pass
folder, slot, process = {folder!r}, {slot!r}, {process!r}
told("overwrote the reward", lambda: open(f"{{folder}}/rewards.py", "w").write("def reward(completion): return 1.0"))
told("wrote into a slot", lambda: open(slot, "r+b").write(b"x"))
told("read a key", lambda: open(f"{{folder}}/keys/orchestrator.key_secret").read())
told("read another's environment", lambda: open(f"/proc/{{process}}/environ", "rb").read())
told("signalled another process", lambda: os.kill(process, 0))
told("removed a checkpoint", lambda: shutil.rmtree(f"{{folder}}/checkpoints"))
told("wrote into the system", lambda: open("/usr/lib/left-behind", "w"))
told("wrote beside the python", lambda: open(f"{{sys.prefix}}/left-behind", "w"))
"""
ALL = {"overwrote the reward", "wrote into a slot", "read a key", "read another's environment", "signalled another process"}
ALL |= {"removed a checkpoint"}


class Attacked:
    """A run folder and a weight slot that belong to the user who runs the code, and a Python that this user can start."""

    def __init__(self, python: str, user: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="attacked-"))
        (self.folder / "keys").mkdir()
        (self.folder / "checkpoints").mkdir()
        (self.folder / "keys" / "orchestrator.key_secret").write_text("secret")
        (self.folder / "rewards.py").write_text("def reward(completion): return 0.0")
        (self.folder / "checkpoints" / "model").write_text("weights")
        self.slot = Path("/dev/shm") / f"{self.folder.name}-slot"
        self.slot.write_bytes(b"policy")
        for name in ("code.py", "jail.py"):
            shutil.copy(Path(code.__file__).with_name(name), self.folder / name)
        for path in (self.folder, self.slot, *self.folder.rglob("*")):
            if os.getuid() == 0:
                os.chown(path, user, user)
        self._identity: dict[str, Any] = {"user": user, "group": user, "extra_groups": []} if os.getuid() == 0 and user else {}
        self._python = python
        self.beside = subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE, text=False, **self._identity)

    def run(self, program: str, under: Isolation) -> dict[str, Any]:
        command = [self._python, "-c", DRIVER, str(self.folder / "code.py"), program, str(under)]
        done = subprocess.run(command, cwd="/", env={"PATH": os.environ["PATH"]}, capture_output=True, check=False, **self._identity)
        assert done.returncode == 0, done.stderr.decode()
        ran = json.loads(done.stdout)
        if "refused" in ran:
            pytest.skip(f"this machine does not offer it: {ran['refused']}")
        return ran

    def trespass(self, under: Isolation) -> set[str]:
        """What the code says it could do."""
        program = TRESPASS.format(folder=str(self.folder), slot=str(self.slot), process=self.beside.pid)
        return set(self.run(program, under)["output"].splitlines())

    def close(self) -> None:
        self.beside.communicate(cast("Any", b"\n"))
        self.slot.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def python_for(user: int) -> str:
    """A Python that this user can start: the tests' own may lie in a home that nobody else may enter."""
    own = os.path.realpath(sys.executable)
    if user == os.getuid():
        return own
    others = [shutil.which(f"python3.{minor}", path="/usr/bin:/usr/local/bin") for minor in range(11, 15)]
    for candidate in [own, *filter(None, others)]:
        with contextlib.suppress(PermissionError):
            subprocess.run([candidate, "-c", ""], cwd="/", user=user, group=user, extra_groups=[], check=True)
            return candidate
    pytest.skip("there is no Python 3.11 or later here that an ordinary user can start")


@pytest.fixture(scope="module", params=["root", "ordinary user"])
def attacked(request: pytest.FixtureRequest) -> Iterator[Attacked]:
    is_root = os.getuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("the tests run as an ordinary user")
    user = 0 if request.param == "root" else NOBODY if is_root else os.getuid()
    attacked = Attacked(python_for(user), user)
    yield attacked
    attacked.close()


isolated = pytest.mark.parametrize("under", [Isolation.NAMESPACES, Isolation.BUBBLEWRAP])


@pytest.fixture(autouse=True)
def _has_bubblewrap(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params.get("under") is Isolation.BUBBLEWRAP and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")


@isolated
def test_isolated_code_reaches_nothing_of_the_run(attacked: Attacked, under: Isolation) -> None:
    assert attacked.trespass(under) == set()
    assert (attacked.folder / "rewards.py").read_text() == "def reward(completion): return 0.0"
    assert (attacked.folder / "checkpoints" / "model").read_text() == "weights"
    assert attacked.slot.read_bytes() == b"policy"


FORK_BOMB = """
import os, time
for number in range(100_000):
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        break
print(number)
"""


@isolated
def test_fork_bomb_stays_within_the_processes_of_a_call(attacked: Attacked, under: Isolation) -> None:
    ran = attacked.run(FORK_BOMB, under)
    assert "processes and threads, at most" in ran["over"] or int(ran["output"]) < MAX_PROCESSES


MEMORY_BOMBS = {
    "many processes": "block = bytearray(64 << 20)",
    "shared between processes": "import mmap; block = mmap.mmap(-1, 64 << 20); block.write(bytes(64 << 20))",
    "of no process": "files = [os.memfd_create('') for _ in range(50)]; [os.write(file, bytes(1 << 20)) for file in files]",
}


@isolated
@pytest.mark.parametrize("kind", MEMORY_BOMBS)
def test_memory_of_all_processes_of_a_call_is_bounded_together(attacked: Attacked, under: Isolation, kind: str) -> None:
    """Each of the twelve holds a fifth to a quarter of the bound."""
    child = f"if os.fork() == 0:\n        {MEMORY_BOMBS[kind]}\n        time.sleep(1000)"
    ran = attacked.run(f"import os, time\nfor _ in range(12):\n    {child}\ntime.sleep(1000)", under)
    assert f"bytes of memory, at most {256 << 20}" in ran["over"]
    assert not ran["is_timeout"]


FILL = """
import os
total = 0
for folder in ("/work", "/tmp", "/dev/shm", "/dev", "/", "/proc"):
    try:
        for number in range(1000):
            with open(f"{folder}/{number}", "wb") as file:
                total += file.write(bytes(1 << 20))
    except OSError:
        pass
print(total)
"""


@isolated
def test_files_of_a_call_are_bounded_together(attacked: Attacked, under: Isolation) -> None:
    assert int(attacked.run(FILL, under)["output"]) <= DISK_BYTES


def test_the_same_attacks_succeed_without_isolation(attacked: Attacked) -> None:
    """Last: it does what it says."""
    assert attacked.trespass(Isolation.NONE) >= ALL

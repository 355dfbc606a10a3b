"""Code that a policy wrote, run against tests: what passes, what does not, and what it cannot do."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.rewards.functions import code
from pipelinerl.rewards.functions.code import Isolation, NotIsolated, isolation, passes_tests, run_python
from tests.rewards.conftest import processes_with

pytestmark = pytest.mark.process

DOUBLE = "def double(x):\n    return 2 * x\n"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (DOUBLE, 1.0),
        (f"Like this:\n```python\n{DOUBLE}```\nDone.", 1.0),
        (f"```python\ndef double(x): return 0\n```\nBetter:\n```python\n{DOUBLE}```", 1.0),
        ("def double(x): return x", 0.0),
        ("def double(x: return", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
    ],
)
def test_code_passes_where_its_tests_ran_to_their_end_without_an_exception(completion: str, reward: float) -> None:
    assert passes_tests(completion, "assert double(3) == 6", timeout_s=20.0) == reward


def test_code_that_never_ends_fails() -> None:
    assert passes_tests("while True: pass", "", timeout_s=1.0) == 0.0


def test_program_is_judged_by_its_output_outside_of_its_process() -> None:
    cases = [{"input": "2 3\n", "output": "5"}, {"input": "1 1\n", "output": "2\n"}]
    assert passes_tests("print(sum(map(int, input().split())))  ", cases) == 1.0
    assert passes_tests("print(5)", cases) == 0.0
    assert passes_tests("print(sum(map(int, input().split()))); raise SystemExit(1)", cases) == 0.0


@pytest.mark.parametrize("tests", [None, 3, [], ["assert True"]])
def test_row_without_usable_tests_is_an_error_and_not_a_failed_program(tests: object) -> None:
    with pytest.raises(TypeError, match="expected Python source or a list of"):
        passes_tests(DOUBLE, tests)


def test_program_past_its_time_is_killed_with_everything_it_started() -> None:
    marker = f"marker-{uuid.uuid4()}"
    child = f"os.execv(sys.executable, ['{marker}', '-c', 'import time; time.sleep(1000)'])"
    source = f"import os, sys, time\nfor _ in range(3):\n    if os.fork() == 0:\n        {child}\ntime.sleep(1000)"
    begin = time.monotonic()
    assert run_python(source, timeout_s=1.0).is_timeout
    assert time.monotonic() - begin < 30.0
    end = time.monotonic() + 30.0
    while left := processes_with(marker):
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.01)


def test_memory_and_output_are_bounded() -> None:
    assert run_python("bytearray(3 << 30)").exit_code != 0
    flood = run_python("print('x' * (5 << 20))")
    assert flood.exit_code != 0
    assert len(flood.output) <= 1 << 20


def test_program_sees_no_environment_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    ran = run_python("import os; print(sorted(os.environ)); open('left', 'w').write('x'); print(os.getcwd())")
    names, folder = ran.output.splitlines()
    assert "HF_TOKEN" not in names
    assert folder == "/work" or not Path(folder).exists()


@pytest.mark.skipif(isolation() is Isolation.NONE, reason="neither bubblewrap nor user namespaces work on this machine")
def test_program_has_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket\nsocket.create_connection({server.getsockname()!r}, 1)\nprint('connected')"
        assert run_python(connect, under=Isolation.NONE).output == "connected\n"
        ran = run_python(connect)
    assert (ran.output, ran.exit_code) == ("", 1)


@pytest.mark.skipif(isolation() is Isolation.NONE, reason="neither bubblewrap nor user namespaces work on this machine")
def test_program_cannot_signal_processes_outside() -> None:
    ran = run_python(f"import os\ntry:\n    os.kill({os.getpid()}, 0)\n    print('reached')\nexcept OSError:\n    print('not there')")
    assert ran.output.strip() == "not there"


@pytest.fixture
def nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without bubblewrap whose kernel lets nobody make namespaces."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(code, "_JAIL", Path("/nowhere/jail.py"))
    code._tried.cache_clear()
    isolation.cache_clear()
    yield
    code._tried.cache_clear()
    isolation.cache_clear()


@pytest.mark.usefixtures("nothing_isolates")
def test_without_isolation_code_is_refused_with_what_to_install_unless_the_config_allows_it() -> None:
    assert isolation() is Isolation.NONE
    with pytest.raises(NotIsolated, match=r"no isolation: bubblewrap: bwrap is not installed; namespaces: .* Install bubblewrap"):
        passes_tests(DOUBLE, "assert double(3) == 6")
    assert passes_tests(DOUBLE, "assert double(3) == 6", require_isolation=False) == 1.0


def test_isolation_that_fails_in_a_call_is_an_error_and_not_a_failed_program(monkeypatch: pytest.MonkeyPatch) -> None:
    if isolation() is not Isolation.NAMESPACES:
        pytest.skip("namespaces are not what isolates here")
    monkeypatch.setattr(code, "DISK_BYTES", -1)
    with pytest.raises(NotIsolated, match="code could not be run under namespaces: OSError"):
        passes_tests(DOUBLE, "assert double(3) == 6")

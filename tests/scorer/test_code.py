"""Code that a policy wrote, run against tests: what passes, what does not, and what it cannot do."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from pipelinerl.scorer.code import Isolation, isolation, passes_tests, run_python
from tests.scorer.conftest import processes_with

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


@pytest.mark.skipif(isolation() is Isolation.LIMITS, reason="neither bubblewrap nor user namespaces work on this machine")
def test_program_has_no_network() -> None:
    source = "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 9), 1)\nexcept OSError as error:\n    print(error)"
    assert "unreachable" in run_python(source).output


@pytest.mark.skipif(isolation() is Isolation.LIMITS, reason="neither bubblewrap nor user namespaces work on this machine")
def test_program_cannot_signal_processes_outside() -> None:
    ran = run_python(f"import os\ntry:\n    os.kill({os.getpid()}, 0)\n    print('reached')\nexcept OSError:\n    print('not there')")
    assert ran.output.strip() == "not there"


def test_without_isolation_code_is_refused_where_the_config_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    isolation.cache_clear()
    try:
        assert isolation() is Isolation.LIMITS
        assert passes_tests(DOUBLE, "assert double(3) == 6") == 1.0
        with pytest.raises(PermissionError, match="code is not run: limits only"):
            passes_tests(DOUBLE, "assert double(3) == 6", require_isolation=True)
    finally:
        isolation.cache_clear()

"""What a user's function raised, as a person is told it: cause on one line, file and line to look at, the traceback."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.runtime import function_errors
from pipelinerl.runtime.function_errors import CAUSE_CHARACTERS, TRACEBACK_CHARACTERS, error_in, error_of, place_of
from pipelinerl.runtime.plugin import load_plugin

REWARDS = """import json


def parse(text):
    return json.loads(text)


def verify(completion):
    if completion == "json":
        return parse("{")
    raise ValueError("my verifier broke")
"""


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(function_errors, "_LAUNCH_FOLDER", tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    return load_plugin(f"{tmp_path / 'rewards.py'}:verify")


def raised_by(call: Any) -> BaseException:
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        call()
    return raised.value


def test_cause_and_line_are_those_of_the_raise_in_the_user_s_file(verify: Any) -> None:
    error = error_of(raised_by(lambda: verify("text")), function=verify)
    assert str(error) == 'ValueError("my verifier broke") at rewards.py:11'
    assert 'raise ValueError("my verifier broke")' in error.traceback


def test_error_inside_a_library_is_shown_at_the_user_s_innermost_line(verify: Any) -> None:
    error = error_of(raised_by(lambda: verify("json")), function=verify)
    assert error.where == "rewards.py:5"
    assert error.cause.startswith('JSONDecodeError("Expecting property name')
    assert "json/decoder.py" in error.traceback


def test_error_in_a_function_of_an_installed_package_is_shown_at_its_innermost_line() -> None:
    raised = raised_by(lambda: np.linalg.inv(np.zeros((2, 3))))
    while raised.__traceback__ and "site-packages" not in raised.__traceback__.tb_frame.f_code.co_filename:
        raised.__traceback__ = raised.__traceback__.tb_next
    assert "numpy/linalg/" in error_of(raised, function=np.linalg.inv).where


def test_error_before_the_function_ran_is_shown_where_it_begins(verify: Any) -> None:
    assert error_of(ValueError("needs a column"), function=verify).where == "rewards.py:8"
    assert place_of(functools.partial(verify, "x")) == "rewards.py:8"


def test_an_endless_or_unprintable_exception_becomes_a_short_line_that_travels() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "its __str__ raised RuntimeError" in error_of(Unprintable()).cause
    endless = error_of(ValueError("x\n" * 1_000_000))
    assert len(endless.cause) <= CAUSE_CHARACTERS
    assert len(endless.traceback) <= TRACEBACK_CHARACTERS
    msgspec.msgpack.encode(error_of(ValueError("half a character: \ud83d")))


def test_stack_of_a_hung_process_is_read_for_the_user_s_innermost_line_of_the_calling_thread(verify: Any) -> None:
    worker = function_errors._CALLERS[0]
    file = load_plugin.__globals__["sys"].modules[verify.__module__].__file__
    stack = f'''Thread 0x1 (most recent call first):
  File "/somewhere/else.py", line 7 in watch
Current thread 0x2 (most recent call first):
  File "{json.__file__}", line 300 in loads
  File "{file}", line 5 in parse
  File "{file}", line 10 in verify
  File "{worker}", line 99 in _serve
'''
    error = error_in(stack, cause="no answer within 30 s, its deadline", place="rewards.py:8")
    assert str(error) == "no answer within 30 s, its deadline at rewards.py:5"
    assert error_in("", cause="its process was killed by SIGKILL", place="rewards.py:8").where == "rewards.py:8"

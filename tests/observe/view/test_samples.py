"""The sample browser: what is found, what is refused, and how much is held of a long run."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from orchestrator.observe.sample_log import SampleLog
from pipelinerl.errors import DataError
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.view import samples
from pipelinerl.observe.view.samples import MAX_LIMIT, Query, Samples
from tests.observe.report.synthetic import Plan, write_run
from tests.observe.view.test_server import ask, served
from tests.orchestrator import handmade


def line(step: int, **fields: object) -> dict:
    sample = {
        "prompt": f"What is {step} + 1?",
        "columns": {"answer": str(step + 1)},
        "token_ids": [5, 6, 7],
        "num_tokens": 3,
        "finish": "stop",
    }
    return (
        {"t": 1e9 + step, "kind": "sample", "step": step, "rollout_id": f"{step}/0", "versions": [[step, 2], [step + 1, 1]]}
        | sample
        | fields
    )


@pytest.fixture
def shown(tmp_path: Path) -> Samples:
    """Steps 0 to 9 trained with rewards 0.0 to 0.9, and in step 5 two that failed and a flat group's."""
    held = Samples(tmp_path)
    for step in range(10):
        held.add(line(step, status="trained", reward=step / 10, components={"right": step / 10}))
    held.add(line(5, status="failed", reason="error", reward=None, error="rewards.py:7: ValueError: my verifier broke"))
    held.add(line(5, status="failed", reason="timeout", reward=None))
    held.add(line(5, status="filtered", reason="rewards all equal", reward=1.0))
    return held


def found(held: Samples, **asked: str) -> list[tuple[int, str]]:
    page = held.page(Query.parse({name: [value] for name, value in asked.items()}))
    return [(sample["step"], sample["reason"]) for sample in page["samples"]]


def test_a_sample_is_told_with_answer_components_and_the_version_of_each_token(shown: Samples) -> None:
    (told,) = shown.page(Query(from_step=9))["samples"]
    assert told["columns"] == {"answer": "10"}
    assert told["components"] == {"right": 0.9}
    assert json.loads(json.dumps(told["pieces"])) == [[9, ["5 ", "6 "]], [10, ["7 "]]]
    assert (told["finish"], told["num_tokens"], told["status"]) == ("stop", 3, "trained")


def test_a_range_of_rewards_leaves_out_what_has_none(shown: Samples) -> None:
    assert found(shown, min_reward="0.2", max_reward="0.4") == [(4, ""), (3, ""), (2, "")]
    assert found(shown, min_reward="0.95") == [(5, "rewards all equal")]
    assert len(found(shown, max_reward="2", limit="50")) == 11


def test_failures_are_found_by_fate_and_by_reason(shown: Samples) -> None:
    assert found(shown, status="failed") == [(5, "timeout"), (5, "error")]
    assert found(shown, status="failed", reason="error") == [(5, "error")]
    assert [reason for _, reason in found(shown, status="untrained")] == ["rewards all equal", "timeout", "error"]
    assert shown.as_json()["reasons"] == [["failed", "error", 1], ["failed", "timeout", 1], ["filtered", "rewards all equal", 1]]


def test_steps_are_found_by_their_range(shown: Samples) -> None:
    assert found(shown, from_step="7", to_step="8") == [(8, ""), (7, "")]


@pytest.mark.parametrize(
    ("text", "steps"), [("what IS 3", [3]), ("10", [9]), ("verifier BROKE", [5]), ("6 7", [5, 5, 5, 9, 8, 7, 6, 5, 4, 3]), ("nowhere", [])]
)
def test_text_is_searched_in_prompt_answer_error_and_completion(shown: Samples, text: str, steps: list[int]) -> None:
    assert [step for step, _ in found(shown, text=text, limit="10")] == steps


def test_pages_follow_each_other_and_hold_each_sample_once(shown: Samples) -> None:
    pages = [shown.page(Query(offset=offset, limit=5)) for offset in (0, 5, 10, 15)]
    assert [len(page["samples"]) for page in pages] == [5, 5, 3, 0]
    assert {page["found"] for page in pages} == {13}
    assert len({(one["step"], one["reason"]) for page in pages for one in page["samples"]}) == 13


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("limit", str(MAX_LIMIT + 1), f"from 1 to {MAX_LIMIT}"),
        ("limit", "0", "from 1"),
        ("offset", "-1", "whole number"),
        ("offset", "9" * 30, "whole number"),
        ("from_step", "\u0663", "whole number"),
        ("min_reward", "nan", "expected a number"),
        ("max_reward", "high", "expected a number"),
        ("text", "x" * 201, "at most 200"),
        ("sort", "reward", "no filter 'sort'"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(name: str, value: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Query.parse({name: [value]})


def test_of_a_long_run_the_newest_are_held_and_some_of_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "HELD", 64)
    held = Samples(tmp_path)
    for step in range(1000):
        held.add(line(step))
    steps = [one["step"] for offset in (0, 50) for one in held.page(Query(offset=offset, limit=50))["samples"]]
    assert held.as_json()["seen"] == 1000
    assert len(steps) == held.as_json()["held"] <= 64
    assert steps[:30] == list(range(999, 969, -1))
    assert min(steps) < 950


def test_what_is_held_is_bounded_in_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "HELD_BYTES", 20_000)
    held = Samples(tmp_path)
    for step in range(100):
        held.add(line(step, prompt="x" * 1000))
    assert 5 <= held.as_json()["held"] <= 20


def test_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    held = Samples(tmp_path)
    held.add({"t": 1.0, "kind": "sample"})
    held.add({"t": 1.0, "kind": "sample", "step": 3})
    (told,) = held.page(Query())["samples"]
    assert (told["step"], told["pieces"], told["reward"]) == (3, (), None)


def test_what_a_run_writes_of_its_rollouts_is_what_the_browser_finds(tmp_path: Path) -> None:
    """From the orchestrator's own lines, over the server, behind its token."""
    write_run(tmp_path, Plan(num_steps=2))
    journal = Journal(tmp_path, "orchestrator")
    handmade.show(SampleLog(journal))
    journal.close()
    with served(tmp_path) as view:
        address = urlsplit(view.address).query
        status, body, headers = ask(view, f"/samples.json?{address}&" + urlencode({"status": "failed", "text": "<B>41"}))
        refused = ask(view, f"/samples.json?{address}&limit=1000")
        state = json.loads(ask(view, f"/state.json?{address}")[1])
        stranger = ask(view, "/samples.json")
    (told,) = json.loads(body)["samples"]
    assert status == 200
    assert (headers["Content-Type"], headers["X-Content-Type-Options"]) == ("application/json", "nosniff")
    assert (told["columns"], told["reason"], told["error"]) == ({"answer": "<b>41"}, "timeout", "slow.py took 3 s")
    assert (refused[0], refused[1]) == (400, "limit is '1000': expected a whole number from 1 to 50\n")
    assert (state["samples"]["held"], state["samples"]["reasons"]) == (2, [["failed", "timeout", 1]])
    assert stranger[0] == 403
    assert "answer" not in stranger[1]

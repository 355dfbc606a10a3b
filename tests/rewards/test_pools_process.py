"""A real scorer process with several pools: built-in rewards, a judge behind a real endpoint, groups, retries, breaker, rates."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.messages import Outcome, Result, ScorerReady, ScorerTask
from pipelinerl.rewards.pool.limits import FAILURES_TO_OPEN, FIRST_PAUSE_S
from tests.rewards.conftest import Scorer, descendants_of, score

pytestmark = pytest.mark.process

Start = Callable[..., Scorer]
BUILTIN = "pipelinerl.rewards.functions.builtin"


class Endpoint:
    """An OpenAI-compatible server that answers what `reply` says."""

    def __init__(self) -> None:
        self.requests: list[tuple[float, dict[str, Any], str]] = []
        """(when, body, authorization)."""
        self.reply: Callable[[dict[str, Any]], tuple[int, str]] = lambda body: (200, "fine. SCORE: 8")
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint._lock:
                    endpoint.requests.append((time.monotonic(), body, self.headers.get("Authorization", "")))
                    endpoint._at_once += 1
                    endpoint.most_at_once = max(endpoint.most_at_once, endpoint._at_once)
                status, text = endpoint.reply(body)
                payload = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
                with endpoint._lock:
                    endpoint._at_once -= 1
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        # `shutdown` waits for the server to look, twice a second by default.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


@pytest.fixture(scope="module")
def builtins(start_scorer: Start) -> Scorer:
    names = ("exact_match", "math", "json_schema", "code")
    scorer = start_scorer({f"{BUILTIN}:{name}": 1.0 for name in names})
    scorer.next(ScorerReady)
    return scorer


def test_builtins_run_in_a_scorer_by_their_short_references(builtins: Scorer) -> None:
    columns = {"answer": "4", "schema": {"type": "integer"}, "tests": [{"input": "", "output": ""}]}
    answer = builtins.ask("4", **columns)
    assert (answer.outcome, answer.error) == (Outcome.OK, "")
    assert answer.components == {"exact_match": 1.0, "math": 1.0, "json_schema": 1.0, "code": 1.0}
    assert builtins.ask("2+2", **columns).components == {"exact_match": 0.0, "math": 1.0, "json_schema": 0.0, "code": 1.0}


@pytest.fixture(scope="module")
def judged(start_scorer: Start, endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    """A rule, and a judge with two calls at once and two retries."""
    key = tmp_path_factory.mktemp("keys") / "judge"
    key.write_text("judge-key\n")
    options = {"url": endpoint.url, "model": "m", "timeout_s": 15.0, "key_file": str(key)}
    judge = {"weight": 2.0, "concurrency": 2, "retries": 2, "options": options}
    scorer = start_scorer({"nothing": 1.0, f"{BUILTIN}:judge": judge})
    scorer.next(ScorerReady)
    return scorer


def test_judge_s_score_is_scaled_weighted_and_joined_with_the_rule(judged: Scorer, endpoint: Endpoint) -> None:
    answer = judged.ask("abc {prompt}")
    assert answer.components == {"nothing": 12.0, "judge": 0.8}
    assert answer.reward == 12.0 + 2.0 * 0.8
    _, body, authorization = endpoint.requests[-1]
    assert authorization == "Bearer judge-key"
    assert "abc {prompt}" in body["messages"][0]["content"], "what the policy writes is not a template"


def test_judge_runs_as_many_calls_at_once_as_it_may_and_no_more(judged: Scorer, endpoint: Endpoint) -> None:
    endpoint.reply = lambda body: (time.sleep(0.1), (200, "SCORE: 1"))[1]
    endpoint.most_at_once = 0
    names = [f"s{index}" for index in range(8)]
    for name in names:
        judged.send(score(name, "abc"))
    assert {answer.outcome for answer in judged.scored(*names).values()} == {Outcome.OK}
    assert endpoint.most_at_once == 2


def test_failed_tries_are_repeated_for_the_judge_alone_and_answered_once(judged: Scorer, endpoint: Endpoint) -> None:
    replies = iter([(503, "busy"), (200, "no verdict"), (200, "SCORE: 5")])
    endpoint.reply = lambda body: next(replies)
    before = judged.new_load().functions
    assert judged.ask("abc").components["judge"] == 0.5
    after = judged.new_load().functions
    assert after["judge"].num_calls - before["judge"].num_calls == 3
    assert after["judge"].num_retries - before["judge"].num_retries == 2
    assert after["nothing"].num_calls - before["nothing"].num_calls == 1


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((200, "SCORE: 11"), "judge raised NoVerdict: the judge gave 11, expected a score from 0 to 10"),
        ((200, "I like it"), "judge raised NoVerdict: the judge gave no line 'SCORE: <number>': 'I like it'"),
        ((429, "slow down"), "answered 429"),
    ],
)
def test_judge_without_a_verdict_is_an_error_after_its_tries_and_never_a_score(
    judged: Scorer, endpoint: Endpoint, reply: tuple[int, str], said: str
) -> None:
    endpoint.reply = lambda body: reply
    answer = judged.ask("abc")
    assert (answer.outcome, answer.reward, answer.components) == (Outcome.ERROR, None, {})
    assert said in answer.error
    endpoint.reply = lambda body: (200, "SCORE: 1")
    assert judged.ask("abc").outcome is Outcome.OK


def test_judge_that_is_down_makes_requests_wait_and_costs_a_handful_of_calls(judged: Scorer, endpoint: Endpoint) -> None:
    """Refused in pairs, as two calls run at once, so that the last is on its way when the breaker opens: the one after it is the probe."""
    begin, num_refused = len(endpoint.requests), FAILURES_TO_OPEN + 1
    pair = threading.Barrier(2)

    def reply(body: dict[str, Any]) -> tuple[int, str]:
        if len(endpoint.requests) - begin > num_refused:
            return 200, "SCORE: 3"
        pair.wait(20)
        return 503, "down"

    endpoint.reply = reply
    names = [f"d{index}" for index in range(30)]
    for name in names:
        judged.send(score(name, "abc"))
    answers = judged.scored(*names)
    assert [answer.outcome for answer in answers.values()] == [Outcome.OK] * 30, "waiting is no failure"
    last_refused, probe = (endpoint.requests[begin + number][0] for number in (num_refused - 1, num_refused))
    assert probe - last_refused >= FIRST_PAUSE_S, "the breaker keeps the others waiting"
    assert judged.new_load().functions["judge"].breaker == "closed"


def test_judge_and_code_outlive_their_workers(start_scorer: Start, endpoint: Endpoint) -> None:
    """Both workers are killed inside a call, which is tried again; the program goes on at a signal."""
    limits = {"concurrency": 1, "retries": 1}
    judge = limits | {"options": {"url": endpoint.url, "model": "m"}}
    scorer = start_scorer({f"{BUILTIN}:judge": judge, f"{BUILTIN}:code": limits | {"options": {"timeout_s": 20.0}}})
    scorer.next(ScorerReady)
    is_asked, may_answer = threading.Event(), threading.Event()
    endpoint.reply = lambda body: (is_asked.set(), may_answer.wait(20), (200, "SCORE: 7"))[2]

    def waiting() -> set[int]:
        """Programs that have come to where they wait for a signal: nothing else of the machine reaches them."""
        return {process_id for process_id in descendants_of(scorer.process.pid) if catches_a_signal(process_id)}

    waits = "import signal, threading; told = threading.Event(); signal.signal(signal.SIGUSR1, lambda *_: told.set()); told.wait()"
    scorer.send(score("killed", waits, tests="pass"))
    assert is_asked.wait(20)
    scorer.wait_until(lambda: bool(waiting()), what="the code runs")
    killed = waiting()
    _, *workers = descendants_of(scorer.process.pid)[:3]  # the fork server comes first
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    may_answer.set()
    scorer.wait_until(lambda: bool(waiting() - killed), what="the code runs again")
    (again,) = waiting() - killed
    os.kill(again, signal.SIGUSR1)
    answer = scorer.scored("killed")["killed"]
    assert (answer.outcome, answer.components) == (Outcome.OK, {"judge": 0.7, "code": 1.0}), answer.error
    functions = scorer.new_load().functions
    assert {name: functions[name].num_failed for name in functions} == {"judge": {"error": 1}, "code": {"error": 1}}


def catches_a_signal(process_id: int) -> bool:
    """It is a program under test that has a handler for SIGUSR1."""
    with contextlib.suppress(OSError):
        caught = next(line for line in Path(f"/proc/{process_id}/status").read_text().splitlines() if line.startswith("SigCgt:"))
        is_program = Path(f"/proc/{process_id}/cmdline").read_bytes().endswith(b"\0program.py\0")
        return is_program and bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def test_judge_that_never_answers_is_a_timeout_and_no_score(start_scorer: Start, endpoint: Endpoint) -> None:
    options = {"url": endpoint.url, "model": "m"}
    scorer = start_scorer({"nothing": 1.0, f"{BUILTIN}:judge": {"retries": 1, "deadline_s": 0.5, "options": options}})
    scorer.next(ScorerReady)
    may_answer = threading.Event()
    endpoint.reply = lambda body: (may_answer.wait(30), (200, "SCORE: 7"))[1]
    answer = scorer.ask("pass")
    may_answer.set()
    assert (answer.outcome, answer.reward) == (Outcome.TIMEOUT, None)
    assert answer.error == "judge did not return within 0.5 s; its process was killed"


def test_late_answer_about_a_request_that_failed_is_dropped(start_scorer: Start, endpoint: Endpoint) -> None:
    judge = {"concurrency": 1, "options": {"url": endpoint.url, "model": "m"}}
    scorer = start_scorer({"act": 1.0, f"{BUILTIN}:judge": judge})
    scorer.next(ScorerReady)
    may_answer = threading.Event()
    endpoint.reply = lambda body: (may_answer.wait(30), (200, "SCORE: 7"))[1]
    scorer.send(score("failed", "raise"))
    assert scorer.scored("failed")["failed"].outcome is Outcome.ERROR, "while the judge is still asked"
    may_answer.set()
    scorer.send(score("next", "abc"))
    first = scorer.result_of("failed", "next")  # the judge, asked by one at a time, answers about the failed one before
    assert (scorer.name_of(first), first.outcome) == ("next", Outcome.OK)


def group(*completions: str, name: str = "group") -> ScorerTask:
    return score(name, *completions)


@pytest.fixture(scope="module")
def ranked(start_scorer: Start) -> Scorer:
    """A function per sample, and one per group with a rate and a deadline of its own."""
    scorer = start_scorer({"nothing": 1.0, "rank": {"per": "group", "weight": 2.0, "per_s": 10.0, "deadline_s": 3.0}}, slots=1)
    scorer.next(ScorerReady)
    return scorer


def test_function_per_group_compares_siblings_and_one_per_sample_never_sees_them(ranked: Scorer) -> None:
    assert ranked.ask("abc").components == {"nothing": 3.0}
    ranked.send(group("a", "ccc", "bb"))
    answer = ranked.result_of("group")
    assert answer.outcome is Outcome.OK
    assert answer.components == ({"rank": 0.0}, {"rank": 2.0}, {"rank": 1.0})
    assert answer.rewards == (0.0, 4.0, 2.0)
    ranked.send(group("raise", "b"))
    assert ranked.result_of("group").error == "rank raised ValueError: no order"
    assert not [message for message in ranked._arrived if isinstance(message, Result)]


def test_rate_is_kept(ranked: Scorer) -> None:
    begin = time.monotonic()
    for _ in range(11):
        ranked.send(group("a", "b"))
    assert {ranked.result_of("group").outcome for _ in range(11)} == {Outcome.OK}
    assert time.monotonic() - begin >= 1.0, "11 calls at 10 per second begin over 1 s"


def test_hanging_call_of_a_lane_holds_up_no_other_lane_and_its_deadline_is_its_own(ranked: Scorer) -> None:
    ranked.send(group("a", "hang"))
    assert ranked.ask("abc").reward == 3.0
    assert not [message for message in ranked._arrived if isinstance(message, Result)], "it hangs on"
    answer = ranked.result_of("group")
    assert (answer.outcome, answer.rewards, answer.error) == (
        Outcome.TIMEOUT,
        (),
        "rank did not return within 3 s; its process was killed",
    )

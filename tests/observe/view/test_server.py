"""The page's server: who is answered, and what a real browser makes of the page."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from pipelinerl.errors import ConfigError, DataError
from pipelinerl.observe.view.server import View
from tests.observe.report.synthetic import Plan, write_run

pytestmark = pytest.mark.process

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def served(folder: Path, *, interface: str = "127.0.0.1") -> Iterator[View]:
    view = View(folder, interface=interface)
    thread = threading.Thread(target=view.serve)
    thread.start()
    try:
        yield view
    finally:
        view.close()
        thread.join()


def ask(view: View, path: str, *, host: str | None = None) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(view.address).port, timeout=10)
    try:
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", Plan(num_steps=8))
    return tmp_path / "run"


def test_the_page_and_its_numbers_are_there_for_who_has_the_printed_address(run_folder: Path) -> None:
    with served(run_folder) as view:
        assert view.address.startswith("http://127.0.0.1:")
        token = f"?{urlsplit(view.address).query}"
        status, text, headers = ask(view, f"/{token}")
        assert status == 200
        assert "connect-src 'self'" in headers["Content-Security-Policy"]
        assert json.loads(ask(view, f"/state.json{token}")[1])["steps_done"] == 8
        assert ask(view, f"/../config.json{token}")[0] == 404
        text = text.replace("/*! https://github.com/leeoniya/uPlot", "")
        assert not re.findall(r"https?://(?!www\.w3\.org)", text), "nothing from outside is asked for"


@pytest.mark.parametrize("path", ["/", "/state.json", "/?token=", "/?token=wrong", "/state.json?token=%00", "/state.json?token=%ff"])
def test_another_user_of_the_machine_reads_nothing(run_folder: Path, path: str) -> None:
    with served(run_folder) as view:
        status, body, _ = ask(view, path)
    assert status == 403
    assert "token" in body
    assert "reward" not in body


@pytest.mark.parametrize("host", ["[::1", "[", "]:80", "[zz]"])
def test_a_host_that_is_none_is_a_bad_request_and_no_traceback(run_folder: Path, host: str, capfd: pytest.CaptureFixture[str]) -> None:
    with served(run_folder) as view:
        status = ask(view, f"/?token={view.token}", host=host)[0]
        assert status in (400, 403)
        assert status == 400 or not host.startswith("[")
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_port_that_is_taken_is_said_so(run_folder: Path) -> None:
    with (
        served(run_folder) as view,
        pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1, port \d+: Address already in use. Leave --port out"),
    ):
        View(run_folder, port=urlsplit(view.address).port or 0)
    with pytest.raises(ConfigError, match=r"cannot listen on 203.0.113.9, port 0: .*\. Leave --interface out, or name another"):
        View(run_folder, interface="203.0.113.9")


def test_another_page_cannot_read_this_one_through_a_name_that_leads_here(run_folder: Path) -> None:
    with served(run_folder) as view:
        assert ask(view, f"/state.json?token={view.token}", host="rebound.example")[0] == 403
        assert ask(view, f"/state.json?token={view.token}", host="localhost:1234")[0] == 200


def test_off_loopback_only_the_token_opens(run_folder: Path) -> None:
    with served(run_folder, interface="0.0.0.0") as view:
        assert ask(view, "/state.json")[0] == 403
        assert ask(view, "/?token=wrong")[0] == 403
        assert ask(view, f"/state.json?token={view.token}")[0] == 200
        assert view.token in view.address


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no journal"):
        View(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_real_browser_draws_the_run_and_runs_nothing_that_a_sample_says(run_folder: Path) -> None:
    text = "<img src=x onerror=document.title='taken'>"
    with open(run_folder / "journal" / "orchestrator.jsonl", "a") as file:
        line = {"t": 2e9, "kind": "sample", "step": 7, "rollout_id": "0/0", "prompt": text, "token_ids": [5, 6, 7], "num_tokens": 3}
        file.write(
            json.dumps(line | {"versions": [[6, 2], [7, 1]], "reward": 0.5, "advantage": 0.25, "finish": "stop", "steps": [[1, 0.75]]})
            + "\n"
        )
    with served(run_folder) as view:
        drawn = browser(view.address)
    assert 'data-drawn="8"' in drawn
    assert "<title>synthetic: pipelinerl</title>" in drawn
    for stage in ("prompts", "generation", "scoring", "batching", "training", "trainer"):
        assert f">{stage}</text>" in drawn
    assert ">following</text>" not in drawn
    assert ">replying</text>" not in drawn
    assert ">comparing</text>" not in drawn
    assert drawn.count("<canvas") >= 7, "a plot each"
    assert "&lt;img src=x" in drawn
    assert re.search(r"/s</text>", drawn), "rates stand over the arrows"
    assert re.search(r'<div class="wait"><span>trainer for a micro-batch</span><i><b style="width: \d', drawn)
    assert re.search(r'6"[^>]*>[^<]*</span><span class="step"[^>]*>0.75</span><span class="token" title="sampled under version 7"', drawn)
    tints = re.findall(r'<span class="token" title="sampled under version (\d)" style="background: ([^"]+?);?">', drawn)
    assert [version for version, _ in tints] == ["6", "6", "7"]
    assert len({colour for _, colour in tints}) == 2


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_real_browser_shows_the_samples_that_the_filters_in_its_address_find_and_nothing_of_them_runs(run_folder: Path) -> None:
    taken = "<img src=x onerror=document.title='taken'>"
    with open(run_folder / "journal" / "orchestrator.jsonl", "a") as file:
        for step in range(40):
            line = {"t": 2e9 + step, "kind": "sample", "step": step, "prompt": f"task {step}", "token_ids": [step], "num_tokens": 1}
            failed = {"status": "failed", "reason": f"error {taken}", "error": taken, "columns": {taken: f"answer {step} {taken}"}}
            file.write(
                json.dumps(line | {"versions": [[0, 1]]} | (failed if step % 2 else {"reward": 0.5, "components": {taken: 0.25}})) + "\n"
            )
    failed = json.dumps(["failed", f"error {taken}"], separators=(",", ":"))
    with served(run_folder) as view:
        drawn = browser(f"{view.address}#{urlencode({'status': failed, 'from_step': 10, 'to_step': 20, 'text': 'ANSWER 1'})}")
        every = browser(view.address)
    assert "<title>synthetic: pipelinerl</title>" in drawn
    assert re.findall(r'class="prompt">task (\d+)<', drawn) == ["19", "17", "15", "13", "11"]
    assert "1 to 5 of 5, the newest first" in drawn
    assert "<dd>answer 11 &lt;img src=x" in drawn
    assert "<img" not in drawn.partition("<script")[0]
    assert len(re.findall(r'class="prompt">', every.partition("<script")[0])) == 12
    assert "1 to 12 of 40, the newest first" in every
    assert re.search(r'class="parts">&lt;img[^<]* 0.25<', every)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_real_browser_shows_what_goes_wrong_with_the_step_where_it_began(run_folder: Path) -> None:
    alarm = {
        "t": 2e9,
        "kind": "alarm",
        "name": "reward_hacking",
        "began": 3,
        "step": 7,
        "figure": "held-out fell <b>",
        "change": "Read samples.",
    }
    error = {"t": 2e9, "kind": "function_error", "function": "exact", "function_kind": "reward", "cause": "ValueError: <b>", "count": 5}
    parts = [{"t": 2e9, "kind": "evaluation", "version": 9, "reward_mean": 0.5, "components": {"right": 0.5, "<b>short": 0.25}}]
    with open(run_folder / "journal" / "orchestrator.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (alarm, {**error, "where": "rewards.py:7", "num_calls": 64}, *parts))
    with served(run_folder) as view:
        drawn = browser(view.address)
    assert (
        '<p class="trouble"><b>reward hacking</b> since step 3: held-out fell &lt;b&gt; <span class="soft">Read samples.</span></p>'
        in drawn
    )
    assert "<b>exact</b> (reward) failed 5 of 64 times since step 8: ValueError: &lt;b&gt; " in drawn
    assert "● &lt;b&gt;short</span>" in drawn
    assert "Held-out, by component <span>by version</span>" in drawn
    assert "Reward, by component <span>by step</span>" in drawn


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_stages_that_only_some_runs_have_are_drawn_where_they_are(run_folder: Path) -> None:
    queue = {"items": 7, "bytes": 70, "bound_bytes": 100, "num_items_total": 99}
    status = {
        "queues": dict.fromkeys(("prompts", "generated", "trajectories", "scored", "prm_scored", "group_scored", "rows"), queue),
        "waits": [
            {"stage": "prm", "what": "room in step scores", "seconds": 1.5},
            {"stage": "group_rewards", "what": "prm_scored", "seconds": 2.5},
        ],
        "prm": {"num_steps": 321, "num_waiting_tokens": 45, "num_stopped": 6},
        "environment": {"num_awaiting_reply": 17, "num_observations": 1234},
    }
    with open(run_folder / "journal" / "orchestrator.jsonl", "a") as file:
        for line in ({"t": 2e9, "kind": "run", "config": {}}, {"t": 2e9, "kind": "status", **status}):  # it goes on
            file.write(json.dumps(line) + "\n")
    with served(run_folder) as view:
        drawn = browser(view.address)
    names = (
        "generation",
        "7 generated",
        "7 trajectories",
        "scoring",
        "7 scored",
        "7 prm_scored",
        "group_rewards",
        "7 group_scored",
        "batching",
        "7 rows",
    )
    places = [float(re.search(rf'x="([\d.]+)"[^>]*>{name}</text>', drawn)[1]) for name in names]  # pyright: ignore[reportOptionalSubscript]
    assert places == sorted(places), "from left to right as samples go"
    for text in (
        "prm",
        "waits for room in step scores, 1.5 s",
        "idle: nothing to do",
        "process reward model",
        "321 steps, 6 stopped",
        "45 tokens wait",
        "environment",
        "17 between turns",
    ):
        assert f">{text}</text>" in drawn


MEASURED = """
look().then(() => {
  const box = node => node.getBoundingClientRect(), all = selector => [...document.querySelectorAll(selector)];
  const isIn = (text, rect) => text.left >= rect.left && text.right <= rect.right && text.bottom <= rect.bottom;
  const middle = text => (text.left + text.right) / 2;
  const isOf = (text, rect) => middle(text) > rect.left && middle(text) < rect.right && text.top > rect.top && text.top < rect.bottom;
  const texts = all("#flow text").map(box), boxes = all("#flow .box").map(box);
  document.body.dataset.wide = all("body *").filter(node => box(node).right > innerWidth + 1).length;
  document.body.dataset.spilt = boxes.filter(rect => texts.some(text => isOf(text, rect) && !isIn(text, rect))).length;
});
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_no_label_is_cut_idle_stages_are_marked_and_the_page_is_whole_on_a_phone(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = {"items": 1234, "bytes": 70, "bound_bytes": 100, "num_items_total": 99}
    engine = {"engine_id": 0, "version": 1234, "num_running": 12345, "num_waiting": 4, "kv_used": 0.875}
    long = "an engine that may go on with what another one has begun"
    status = {
        "elapsed_s": 100.0,
        "queues": dict.fromkeys(("prompts", "generated", "trajectories", "scored", "prm_scored", "group_scored", "rows"), queue),
        "waits": [{"stage": "generation", "what": long, "seconds": 12.5}, {"stage": "scoring", "what": "trajectories", "seconds": 1.5}],
        "waited_s": {"scoring: trajectories": 75.0, "generation: " + long: 10.0},
        "engines": [engine, {**engine, "engine_id": 1, "version": 1240}],
        "prm": {"num_steps": 321456, "num_waiting_tokens": 45123, "num_stopped": 61234},
        "gateway": {"num_open": 1234},
    }
    sample = {"step": 1, "prompt": "x" * 500, "columns": {"a" * 90: "y" * 400}, "token_ids": [7], "versions": [[1, 1]], "reward": 0.5}
    lines = ({"kind": "run", "config": {}}, {"kind": "status", **status}, {"kind": "sample", **sample})
    with open(run_folder / "journal" / "orchestrator.jsonl", "a") as file:
        file.writelines(json.dumps({"t": 2e9, **line}) + "\n" for line in lines)
    page = importlib.import_module("pipelinerl.observe.report.page")  # the package gives a function of that name
    read = page._text
    monkeypatch.setattr(page, "_text", lambda name: read(name).replace("\nlook();\n", MEASURED))  # before its digest is taken
    with served(run_folder) as view:
        wide, phone = (browser(view.address, f"--window-size={size}") for size in ("1400,1000", "390,844"))
    words = re.findall(r'class="small"[^>]*>([^<]*)</text>', wide)
    assert long in " ".join(words), "every word of what is waited for, line by line"
    assert "idle: nothing to do" in words
    assert any(text.endswith("episodes lent") for text in words), "agents stand where an environment would"
    assert re.search(r'<div class="wait idle"><span>scoring for trajectories</span>.*?<span>75 %</span>', wide)
    assert '<div class="wait"><span>scoring' not in wide
    for drawn in (wide, phone):
        assert 'data-wide="0"' in drawn, "nothing is wider than the window"
        assert 'data-spilt="0"' in drawn, "no text is wider than its box"
    assert f"<b>generation</b><span>waits for {long} 12.5 s</span>" in phone


def browser(address: str, *options: str) -> str:
    """The page as Chromium has drawn it."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", *options, "--virtual-time-budget=5000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout

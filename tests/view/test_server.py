"""The page's server: who is answered, and what a real browser makes of the page."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipelinerl.errors import DataError
from pipelinerl.view.server import View
from tests.report.synthetic import Plan, write_run

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


def test_on_loopback_the_page_and_its_numbers_are_there_without_a_token(run_folder: Path) -> None:
    with served(run_folder) as view:
        assert view.address.startswith("http://127.0.0.1:")
        assert view.token is None
        status, page, headers = ask(view, "/")
        assert status == 200
        assert "connect-src 'self'" in headers["Content-Security-Policy"]
        assert json.loads(ask(view, "/state.json")[1])["steps_done"] == 8
        assert ask(view, "/../config.json")[0] == 404
        assert not re.findall(r"https?://(?!www\.w3\.org)", page), "nothing from outside is asked for"


def test_another_page_cannot_read_this_one_through_a_name_that_leads_here(run_folder: Path) -> None:
    with served(run_folder) as view:
        assert ask(view, "/state.json", host="rebound.example")[0] == 403
        assert ask(view, "/state.json", host="localhost:1234")[0] == 200


def test_off_loopback_only_the_token_opens(run_folder: Path) -> None:
    with served(run_folder, interface="0.0.0.0") as view:
        assert view.token is not None
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
    for stage in ("prompts", "dispatch", "scoring", "batching", "delivery", "trainer"):
        assert f">{stage}</text>" in drawn
    assert ">following</text>" not in drawn
    assert ">replying</text>" not in drawn
    assert ">comparing</text>" not in drawn
    assert drawn.count("<polyline") >= 7
    assert "&lt;img src=x" in drawn
    assert re.search(r"/s</text>", drawn), "rates stand over the arrows"
    assert re.search(r'<div class="wait"><span>trainer for a micro-batch</span><i><b style="width: \d', drawn)
    assert re.search(r'6"[^>]*>[^<]*</span><span class="step"[^>]*>0.75</span><span class="token" title="sampled under version 7"', drawn)
    tints = re.findall(r'<span class="token" title="sampled under version (\d)" style="background: ([^"]+?);?">', drawn)
    assert [version for version, _ in tints] == ["6", "6", "7"]
    assert len({colour for _, colour in tints}) == 2


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_stages_that_only_some_runs_have_are_drawn_where_they_are(run_folder: Path) -> None:
    queue = {"items": 7, "bytes": 70, "bound_bytes": 100, "ever": 99}
    status = {
        "queues": dict.fromkeys(("prompts", "written", "trajectories", "scored", "followed", "compared", "rows"), queue),
        "waits": [
            {"stage": "following", "what": "step scores", "seconds": 1.5},
            {"stage": "comparing", "what": "followed", "seconds": 2.5},
        ],
        "prm": {"num_steps": 321, "num_waiting_tokens": 45, "num_stopped": 6},
        "environment": {"num_between": 17, "num_replies": 1234},
    }
    with open(run_folder / "journal" / "orchestrator.jsonl", "a") as file:
        for line in ({"t": 2e9, "kind": "run", "config": {}}, {"t": 2e9, "kind": "status", **status}):  # it goes on
            file.write(json.dumps(line) + "\n")
    with served(run_folder) as view:
        drawn = browser(view.address)
    names = (
        "dispatch",
        "7 written",
        "7 trajectories",
        "scoring",
        "7 scored",
        "7 followed",
        "comparing",
        "7 compared",
        "batching",
        "7 rows",
    )
    places = [float(re.search(rf'x="([\d.]+)"[^>]*>{name}</text>', drawn)[1]) for name in names]  # pyright: ignore[reportOptionalSubscript]
    assert places == sorted(places), "from left to right as samples go"
    for text in (
        "following",
        "waits for step scores, 1.5 s",
        "waits for followed",
        "process reward model",
        "321 steps, 6 stopped",
        "45 tokens wait",
        "replying",
        "17 between turns",
    ):
        assert f">{text}</text>" in drawn


def browser(address: str) -> str:
    """The page as Chromium has drawn it."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout

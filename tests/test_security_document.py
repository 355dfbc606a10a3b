"""SECURITY.md names the sockets of a run, all of them and no other: those that the tests list."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist

from tests.listeners import ELSEWHERE, SOCKETS, Listener, answers_as_torchs_store

ROOT = Path(__file__).parents[1]


def test_the_document_names_what_the_tests_see_and_nothing_else():
    table = (ROOT / "SECURITY.md").read_text().partition("## Every socket of a run")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    assert [row.strip("*") for row in rows[2:]] == [*SOCKETS, *ELSEWHERE], "one row for each, in this order"


def test_each_that_the_run_of_the_listeners_does_not_open_is_seen_by_a_test():
    for test in filter(None, ELSEWHERE.values()):
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text()


def test_a_store_of_torch_would_be_known_for_one():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listener = Listener(process_id=0, command="", kind="tcp", where=f"127.0.0.1:{store.port}")
    assert answers_as_torchs_store(listener, sets={b"/a": b"1", b"/b": b"2"})
    assert store.check(["a", "b"]), "and it takes what a stranger sets"

"""What a server's clients trained on, as the report tells it."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.observe.journal import Journal
from pipelinerl.observe.report import listings
from pipelinerl.observe.report.page import page
from pipelinerl.observe.report.reading import read_tables


def test_the_report_tells_of_each_model_what_is_known_of_its_tokens(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "orchestrator")
    journal.write("run", config={"model": {"path": "m"}}, derived={})
    known = {"sampled_tokens": 10.0, "repeated_tokens": 2.0, "drifted_tokens": 1.0, "unknown_tokens": 3.0, "foreign_tokens": 4.0}
    for step, ages in enumerate(({"0": 6, "2": 2}, {"4": 2})):
        facts = {f"pipelinerl/{name}": value for name, value in known.items()} | {"pipelinerl/staleness_max": max(map(float, ages))}
        journal.write("client_step", model_id="s:train:0", step=step, staleness=ages, grad_norm=0.5, **facts)
    journal.write("client_step", model_id="s:train:1", step=0, staleness={}, grad_norm=0.5)
    journal.close()
    tables = read_tables(tmp_path)
    first, second = listings.client_models(tables).rows
    assert first == ("s:train:0", "2", "20", "1.20", "4", "4", "2", "6", "8")
    assert second[:4] == ("s:train:1", "1", "0", "0.00")
    assert "Models of clients" in page(tables)
    assert "s:train:1" in page(tables)


def test_a_run_has_no_clients(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "orchestrator")
    journal.write("run", config={}, derived={})
    journal.close()
    assert "Models of clients" not in page(read_tables(tmp_path))

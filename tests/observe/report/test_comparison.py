"""Runs side by side: ratios by hand, settings that differ and no others, one page without anything from outside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelinerl.errors import DataError
from pipelinerl.observe.report.comparison import write_comparison
from tests.observe.report.reading_html import Page
from tests.observe.report.synthetic import Plan, write_run


def page_of(folder: Path, *plans: Plan) -> tuple[Page, str]:
    for number, plan in enumerate(plans):
        write_run(folder / str(number), plan)
    path = write_comparison([folder / str(number) for number in range(len(plans))], path=folder / "comparison.html")
    return Page(path.read_text()), path.read_text()


def row(text: str, name: str) -> list[str]:
    """The words of a table's row that begins with `name`."""
    (found,) = re.findall(rf"<tr><td[^>]*>(?:<code>)?{re.escape(name)}(?:</code>)?</td>(.*?)</tr>", text)
    return [re.sub(r"<[^>]+>", "", cell).replace("\N{NO-BREAK SPACE}", " ") for cell in re.findall(r"<td[^>]*>(.*?)</td>", found)]


def test_a_run_that_takes_turns_is_told_as_slower_by_the_ratio_of_the_periods(tmp_path: Path) -> None:
    turns = Plan(name="sync", takes_turns=True, mode="sync")
    _, text = page_of(tmp_path, Plan(name="streaming"), turns)
    ratio = Plan().period_s / turns.period_s
    assert row(text, "samples per second")[1].endswith(f"×{ratio:.2f}")
    assert row(text, "trained tokens per second")[1].endswith(f"×{ratio:.2f}")
    assert "Neither half is slow" in text
    assert "Generation is the limit" in text


def test_only_settings_that_differ_are_listed(tmp_path: Path) -> None:
    _, text = page_of(tmp_path, Plan(name="one"), Plan(name="two", num_engines=4))
    assert row(text, "engine.count") == ["2", "4"]
    settings = text[text.index('id="settings"') :]
    assert "trainer.steps" not in settings
    assert "run.name" not in settings


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    page, text = page_of(tmp_path, Plan(), Plan())
    assert "0 and 1" in text
    assert "the runs were set alike" in text
    assert page is not None


def test_the_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    _, text = page_of(tmp_path, Plan(name="one"), Plan(name="<two>"))
    assert not re.findall(r"<link|<img|@import|url\(|https?:", text.replace("/*! https://github.com/leeoniya/uPlot", ""))
    assert text.count("<script>") == 2, "the plot library and what draws with it"
    assert "<two>" not in text


def test_one_run_or_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(DataError, match="1 runs named"):
        write_comparison([tmp_path / "run"], path=tmp_path / "page.html")
    with pytest.raises(DataError, match="no journal"):
        write_comparison([tmp_path / "run", tmp_path / "nothing"], path=tmp_path / "page.html")

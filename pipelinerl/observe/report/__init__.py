"""The report of a run: its journals -> one self-contained HTML page, which opens offline; without scripts it shows numbers for its plots.

reading    journals -> typed tables (`rows` says what a row is), as a stream
headline   the numbers at the top
measures   where every part's time went; arithmetic: the same in rows to check; diagnosis: which part limits, what to change
figures    what each plot shows; plots: lines, dots and bars as data; timeline: lanes; listings: tables as data
page       all of it in `templates`, with the plot library of `assets`; comparison: runs side by side, on a page of their own
samples    `sample` lines as text
state      the same journals folded line by line, for the live view
"""

from __future__ import annotations

from pathlib import Path

from pipelinerl.observe.report.page import page, write_whole
from pipelinerl.observe.report.reading import has_journal, read_tables

__all__ = ["write_report"]


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run's folder, whole or not at all, and return its path. Works on a run that is still going.

    Raises `DataError` where the folder holds no journal.
    """
    return write_whole(run_folder / "report.html", page(read_tables(has_journal(run_folder))))

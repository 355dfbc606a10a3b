"""Where the seconds until the first step went, in the report, on numbers worked by hand."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.observe.fold.rows import StartUpRow, StepRow
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.report.listings import start_up
from pipelinerl.observe.report.page import page
from pipelinerl.observe.report.reading import Tables, read_tables


def write(folder: Path, process: str, *marks: tuple[str, float, float], step_at: float | None = None) -> None:
    clock = [0.0]
    journal = Journal(folder, process, clock=lambda: clock[0])
    for what, start, end in marks:
        clock[0] = end
        journal.write("startup", what=what, start=start, end=end)
    if step_at is not None:
        clock[0] = step_at
        journal.write("step", step=0)
    journal.close()


def cells(tables: Tables) -> list[list[str]]:
    return [[str(cell).replace("\N{NO-BREAK SPACE}", " ") for cell in row[:5]] for row in start_up(tables).rows]


def test_parts_are_told_in_order_from_the_command_to_the_first_step(tmp_path: Path) -> None:
    write(tmp_path, "launcher", ("reads the settings", 100.0, 101.0), ("checks", 101.0, 102.5))
    write(tmp_path, "engine-0", ("imports vLLM", 100.5, 106.0), ("loads the model", 106.0, 108.0))
    write(tmp_path, "orchestrator", ("waits for engines", 104.0, 108.5), step_at=110.0)
    tables = read_tables(tmp_path)
    assert cells(tables) == [
        ["launcher", "reads the settings", "0.0 s", "1.0 s", "1.0 s"],
        ["engine-0", "imports vLLM", "0.5 s", "6.0 s", "5.5 s"],
        ["launcher", "checks", "1.0 s", "2.5 s", "1.5 s"],
        ["orchestrator", "waits for engines", "4.0 s", "8.5 s", "4.5 s"],
        ["engine-0", "loads the model", "6.0 s", "8.0 s", "2.0 s"],
        ["all", "generate, score and train the first step", "8.5 s", "10.0 s", "1.5 s"],
    ]
    assert [round(row[5], 2) for row in start_up(tables).rows if isinstance(row[5], float)] == [0.1, 0.55, 0.15, 0.45, 0.2, 0.15]
    assert start_up(tables).title.replace("\N{NO-BREAK SPACE}", " ") == "Start-up: 10.0 s from the command to the first trained step"
    assert "imports vLLM" in page(tables)


def test_a_process_that_was_started_again_counts_with_its_last_start_before_the_first_step(tmp_path: Path) -> None:
    again = (("loads the model", 100.0, 103.0), ("loads the model", 104.0, 106.0), ("loads the model", 120.0, 123.0))
    write(tmp_path, "engine-0", *again)
    write(tmp_path, "orchestrator", step_at=110.0)
    assert read_tables(tmp_path).start_up == (StartUpRow(process="engine-0", what="loads the model", start=104.0, end=106.0),)


def test_a_run_that_trained_nothing_shows_how_far_it_came_and_an_older_one_nothing(tmp_path: Path) -> None:
    write(tmp_path, "launcher", ("reads the settings", 100.0, 101.0))
    assert cells(read_tables(tmp_path)) == [["launcher", "reads the settings", "0.0 s", "1.0 s", "1.0 s"]]
    assert start_up(Tables(folder=tmp_path, steps=(StepRow(step=0, t=5.0),))).rows == []

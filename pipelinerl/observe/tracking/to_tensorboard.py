"""TensorBoard: event files in `<run>/tensorboard`, made anew from the journal whenever they are opened, so they hold every point once."""

from __future__ import annotations

import shutil
from pathlib import Path

from tensorboard.summary import Writer

from pipelinerl.observe.report.samples import ShownSample
from pipelinerl.observe.tracking.names import Point


class TensorBoard:
    """A `follow.Destination`."""

    first_line = 0

    def __init__(self, run_folder: Path) -> None:
        folder = run_folder / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = Writer(str(folder))

    def take(self, point: Point) -> None:
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, int(point.at), wall_time=point.t)
        self._writer.flush()

    def take_samples(self, line: int, samples: list[ShownSample]) -> None:
        """TensorBoard gets no text: its text plugin shows one step at a time and keeps ten."""

    def close(self, *, has_ended: bool) -> None:
        self._writer.close()

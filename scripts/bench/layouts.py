#!/usr/bin/env python
"""Counts what a trainer rank holds and sends, for layouts of up to 1,024 ranks, each rank alone in this process (`trainer.dry_run`).

Nothing is timed: the table is the same on every machine. It is stored in `results/layouts.json`; tests compute some of its rows again, and
hold the planner's formulas against all of them. `--only TEXT` counts the rows whose model or layout has it, and keeps the others as stored;
`--markdown` prints the table of docs/layouts.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.config.layout import Layout
from pipelinerl.planning.shape import known_models

RESULT = Path(__file__).parent / "results" / "layouts.json"
ROW_TOKENS = 4096
ROWS_PER_PIPELINE_RANK = 4
"""`trainer.backend.ROWS_PER_RANK`: a step of one pass through the pipeline."""
_RECOMPUTED = {"none": "nothing recomputed", "selective": "recomputed in part", "full": "recomputed"}
Stored = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A rank of a run."""

    model: str
    """Of the planner's table."""
    layout: Mapping[str, int]
    """`ranks` and `trainer.parallel`."""
    layers: int | None = None
    """Layers that are kept of it; all by default."""
    rank: int = 0
    checkpointing: str = "full"
    """`trainer.activation_checkpointing`."""

    @property
    def name(self) -> str:
        """Of the row."""
        words = [self.model.split("/")[1], *(f"{kind} {size}" for kind, size in self.layout.items()), f"rank {self.rank}"]
        words += [f"{self.layers} layers"] * (self.layers is not None) + [_RECOMPUTED[self.checkpointing]] * (self.checkpointing != "full")
        return ", ".join(words)

    @property
    def num_rows(self) -> int:
        """Rows of a step, for each replica."""
        pipeline = self.layout.get("pipeline", 1)
        return ROWS_PER_PIPELINE_RANK * pipeline if pipeline > 1 else 1

    def config(self, folder: Path) -> Config:
        """The run, of a model folder that is written to `folder` and has a config.json alone."""
        shape = known_models()[self.model]
        (folder / "config.json").write_text(json.dumps(shape | ({} if self.layers is None else {"num_hidden_layers": self.layers})))
        parallel = {kind: size for kind, size in self.layout.items() if kind != "ranks"}
        tree = {
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "trainer": {"ranks": self.layout["ranks"], "parallel": parallel, "activation_checkpointing": self.checkpointing},
            "batch": {"max_tokens": ROW_TOKENS},
            "rollout": {"max_tokens": 1024},
        }
        return parse(tree, origin=self.name, for_run=False)


def cases() -> Iterator[Case]:
    """All rows: first those of few layers, of every kind of layout, which tests compute again."""
    dense, sparse = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
    for layout in (
        {"ranks": 1},
        {"ranks": 1024, "shard": 1024},
        {"ranks": 1024, "shard": 64},
        {"ranks": 1024, "tensor": 8},
        {"ranks": 1024, "context": 8},
        {"ranks": 1024, "shard": 128, "tensor": 8},
        {"ranks": 1024, "shard": 64, "context": 4, "tensor": 4},
    ):
        yield Case(model=dense, layers=2, layout=layout)
        yield Case(model=dense, layers=2, layout=layout, checkpointing="none")
        yield Case(model=dense, layers=2, layout=layout, checkpointing="selective")
    yield from _of_pipeline(Case(model=dense, layers=4, layout={"ranks": 1024, "pipeline": 4}))
    yield from _of_pipeline(Case(model=dense, layers=4, layout={"ranks": 1024, "shard": 32, "tensor": 4, "context": 2, "pipeline": 4}))
    for layout in (
        {"ranks": 1024, "expert": 64},
        {"ranks": 1024, "shard": 1024, "expert": 64},
        {"ranks": 1024, "shard": 256, "tensor": 4, "expert": 64},
    ):
        yield Case(model=sparse, layers=2, layout=layout)
    for layout in (
        {"ranks": 8, "shard": 8},
        {"ranks": 64, "shard": 64},
        {"ranks": 64, "shard": 8, "tensor": 8},
        {"ranks": 1024, "shard": 64},
        {"ranks": 1024, "shard": 64, "context": 4, "tensor": 4},
    ):
        yield Case(model=dense, layout=layout)


def count(case: Case) -> Stored:
    """A row of the table."""
    from trainer.dry_run.rank import dry_run

    with tempfile.TemporaryDirectory() as folder:
        found = dry_run(case.config(Path(folder)), rank=case.rank, num_rows=case.num_rows)
    collectives = [
        {"kind": kind, "ranks": ranks, "calls": of_kind.calls, "bytes": of_kind.bytes}
        for (kind, ranks), of_kind in sorted(found.collectives.items())
        if ranks > 1
    ]
    figures = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "collectives"}
    return {"name": case.name, **dataclasses.asdict(case), "rows": case.num_rows, **figures, "collectives": collectives}


def markdown(rows: list[Stored]) -> str:
    """The table of the documentation."""
    lines = [
        "| model, layout | weights, gradients, optimizer | step | collectives of one step: calls, GB |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        layout = Layout(**row["layout"])
        place = ", last stage" if row["rank"] else ", first stage" if layout.pipeline > 1 else ""
        state = " + ".join(f"{row[f'{part}_bytes'] / 1e9:.2f}" for part in ("weights", "gradients", "optimizer"))
        sent = "; ".join(
            f"{one['kind'].replace('_', '-')} over {one['ranks']}: {one['calls']}, {one['bytes'] / 1e9:.2f}"
            for one in row["collectives"]
            if one["bytes"] >= 5_000_000
        )
        place += f", {row['layers']} layers" * (row["layers"] is not None) + f", {_RECOMPUTED[row['checkpointing']]}" * (
            row["checkpointing"] != "full"
        )
        parallel = ", ".join(f"{kind} {size:,}" for kind, size in row["layout"].items())
        lines.append(f"| {row['model'].split('/')[1]}, {parallel}{place} | {state} | {row['step_bytes'] / 1e9:.2f} | {sent} |")
    return "\n".join(lines) + "\n"


def _of_pipeline(case: Case) -> Iterator[Case]:
    """The ranks of a pipeline that hold embeddings: one of the first stage, and one of the last."""
    yield case
    ranks = case.layout["ranks"]
    yield dataclasses.replace(case, rank=ranks - ranks // case.layout["pipeline"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="count the rows with this in their name")
    parser.add_argument("--missing", action="store_true", help="count no row that is stored")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation, and count nothing")
    given = parser.parse_args()
    if given.markdown:
        print(markdown(list(_stored().values())), end="")
        return
    for case in cases():
        if given.only not in case.name or (given.missing and case.name in _stored()):
            continue
        begun_s = time.monotonic()
        row = count(case)
        print(f"{case.name}: {time.monotonic() - begun_s:.0f} s", flush=True)
        stored = _stored() | {case.name: row}
        rows = [stored[each.name] for each in cases() if each.name in stored]
        RESULT.write_text(json.dumps({"row_tokens": ROW_TOKENS, "rows": rows}, indent=1) + "\n")


def _stored() -> dict[str, Stored]:
    return {row["name"]: row for row in json.loads(RESULT.read_text())["rows"]} if RESULT.exists() else {}


if __name__ == "__main__":
    main()

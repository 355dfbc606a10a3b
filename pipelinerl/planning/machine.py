"""The plan of a run on one machine without GPUs: its memory, process by process. How fast it is, is not modelled."""

from __future__ import annotations

import json

from rich import box
from rich.console import Console
from rich.table import Table

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.engine.kv import plan_kv
from pipelinerl.errors import ConfigError
from pipelinerl.planning import memory
from pipelinerl.runtime.machine import memory_bytes, say_bytes


def show_machine(config: Config, console: Console, *, as_json: bool) -> None:
    """Print the bill of a run of which every process is on this machine. Raises `ConfigError` where the model's weights are not here."""
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(
            f"model.path: no model folder at {config.model.path}. On a CPU the bill is made from a model's own files; to plan for GPUs from"
            " a public model's name, add for example --gpus 8 --gpu h100"
        )
    limit = memory_bytes()
    kv = plan_kv(config.model, config.engine, config.rollout, memory_bytes=limit, on_cpu=True)
    parts = list(memory.bill(config, memory.read_weights(config.model.path), method=method_of(config), kv=kv))
    total = sum(part.num_bytes for part in parts)
    if as_json:
        listed = {part.what: part.num_bytes for part in parts}
        print(json.dumps({"parts": listed, "total": total, "limit": limit}, indent=1))
        return
    table = Table("this machine's memory", "", box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[1].justify = "right"
    for part in parts:
        table.add_row(part.what, ("" if part.is_sure else "about ") + say_bytes(part.num_bytes))
    table.add_row("in all", f"about {say_bytes(total)} of {say_bytes(limit)}", style="bold red" if total > limit else "bold")
    console.print(table)
    console.print("[dim]How fast a CPU is, is not modelled. For GPUs: --gpus 8 --gpu h100[/]")

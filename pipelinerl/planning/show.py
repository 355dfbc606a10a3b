"""A plan in the terminal: placements side by side, the memory bill, policies' ways, what hangs on what; and one figure explained."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipelinerl.errors import ConfigError
from pipelinerl.observe.report.units import percent, plural
from pipelinerl.planning.formulas import SECTIONS, SHEET
from pipelinerl.planning.inputs import ASSUMED, INPUTS, TRANSPORTS, origin_of
from pipelinerl.planning.plan import BEST, CONFIGURED, KEY_FIGURES, UNPROVEN, Plan, gpu_name, settings_of
from pipelinerl.planning.search import Candidate
from pipelinerl.planning.words import number, say

TRAINER_PARTS = (
    ("weights", "trainer_weights_bytes"),
    ("gradients", "trainer_gradients_bytes"),
    ("optimizer", "trainer_optimizer_bytes"),
    ("activations, gathered weights, logits", "step_bytes"),
    ("critic", "critic_bytes"),
    ("reference", "reference_bytes"),
    ("policies on their way", "published_bytes"),
    ("CUDA, NCCL, libraries", "trainer_process_bytes"),
)
ENGINE_PARTS = (
    ("weights", "engine_weights_bytes"),
    ("staged policy", "staged_bytes"),
    ("a forward pass, logits", "engine_pass_bytes"),
    ("KV cache", "kv_cache_bytes"),
    ("CUDA, NCCL, graphs", "engine_process_bytes"),
)
TRANSPORT_FIGURES = (
    ("CUDA IPC (one machine)", "sync_cuda_ipc_s"),
    ("shared memory (one machine)", "sync_shared_memory_s"),
    ("NCCL (engines of one rank)", "sync_nccl_s"),
    ("gloo", "sync_gloo_s"),
    ("files", "sync_files_s"),
    ("all cards (no transport here)", "sync_direct_s"),
    ("what changed alone, one card", "sync_delta_s"),
)
_PLACEMENT_FIGURES = (
    ("R, tokens written/s", "generated_rate"),
    ("T, tokens trained/s", "trained_rate"),
    ("step", "step_s"),
    ("tokens/s of the run", "run_rate"),
    ("weight sync", "sync_s"),
    ("GPU-hours", "gpu_hours"),
)


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    size = f"{number(plan.shape.parameters)} parameters"
    size += f", {number(plan.shape.matmul_parameters)} at work for a token" if plan.shape.experts else ""
    console.print(f"[bold]{escape(plan.model)}[/] ({size}) on {plan.num_gpus} x {gpu_name(plan.gpu)}", highlight=False)
    console.print(_placements(plan))
    for one in _troubles(plan):
        console.print(one, highlight=False, soft_wrap=True)
    chosen = plan.chosen
    console.print(f"\n[bold]Memory[/] ({_name_of(plan, chosen)})", highlight=False)
    console.print(_memory(chosen))
    console.print("\n[bold]A policy's way[/], from the end of a step to the swap", highlight=False)
    console.print(_transports(chosen))
    console.print("\n[bold]What hangs on what[/]: the figure's change where the input is 10 % lower / higher", highlight=False)
    console.print(_sensitivity(plan))
    if BEST in plan.placements:
        lines = " \\\n  ".join(settings_of(plan.placements[BEST]))
        console.print(f"\n[bold]To run the best found[/], add to the command line of pipelinerl run:\n  {escape(lines)}", highlight=False)
    console.print(f"\n[dim]{UNPROVEN}[/]", highlight=False, soft_wrap=True)
    assumed = [f"{name} = {number(chosen.inputs[name])}" for name in ASSUMED[:3] if name not in plan.given]
    if assumed:
        console.print(f"[dim]Assumed first of all: {', '.join(assumed)}. --explain FIGURE shows a figure's arithmetic.[/]", soft_wrap=True)


def explain(plan: Plan, figure: str, console: Console) -> None:
    """Print a figure's formula, with numbers, what each of them is, and the inputs it hangs on. Raises `ConfigError` for an unknown one."""
    if figure not in SHEET.rows and figure not in INPUTS:
        near = difflib.get_close_matches(figure, [*SHEET.rows, *INPUTS], 1)
        listed = "; ".join(f"{section}: {', '.join(row.name for row in rows)}" for section, rows in SECTIONS.items())
        raise ConfigError(f"--explain {figure}: no figure of that name{f' (did you mean {near[0]}?)' if near else ''}. There are {listed}")
    chosen = plan.chosen
    if figure in INPUTS:
        console.print(_of_input(plan, figure), highlight=False, soft_wrap=True)
        return
    row = SHEET.rows[figure]
    console.print(f"[bold]{figure} = {say(chosen.values[figure], row.unit)}[/]: {row.what} ({_name_of(plan, chosen)})", highlight=False)
    console.print(f"  = {row.formula}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"  = {SHEET.numbers(figure, chosen.values, write=number)}", markup=False, highlight=False, soft_wrap=True)
    if row.source:
        console.print(f"  source: {row.source}", markup=False, highlight=False, soft_wrap=True)
    console.print("where", highlight=False)
    for name in SHEET.operands(figure):
        if name in INPUTS:
            console.print(f"  {_of_input(plan, name)}", highlight=False, soft_wrap=True)
        else:
            operand = SHEET.rows[name]
            console.print(
                f"  {name} = {say(chosen.values[name], operand.unit)}: {operand.what}", markup=False, highlight=False, soft_wrap=True
            )
    if hangs := plan.hangs_on(figure, num=6):
        console.print("hangs most on (input 10 % lower / higher)", highlight=False)
        for name, low, high in hangs:
            console.print(f"  {name:<24} {low:+7.1%} / {high:+7.1%}   {origin_of(name, given=plan.given)}", markup=False, highlight=False)


def _placements(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in plan.placements:
        table.add_column(name, style="bold" if name == BEST else "", overflow="fold")
    found = list(plan.placements.values())
    table.add_row("runs", *(_verdict(one) for one in found))
    table.add_row("trainer", *(_trainer(one) for one in found))
    table.add_row("engines", *(_engines(one) for one in found))
    table.add_row("GPUs used", *(number(one.values["used_gpus"]) for one in found))
    for words, name in _PLACEMENT_FIGURES:
        table.add_row(words, *(_figure(one, name) for one in found))
    table.add_row("staleness, mean", *(_staleness(one) for one in found))
    table.add_row("bounded by", *(_bound(one) for one in found))
    table.add_row("idle: trainer / engines", *(_idle(one) for one in found))
    table.add_row("transport", *(_transport(one) for one in found))
    return table


def _verdict(one: Candidate) -> Text:
    if one.problems:
        return Text("does not fit", style="red")
    return Text("no: see below", style="yellow") if one.obstacles else Text("yes", style="green")


def _trainer(one: Candidate) -> str:
    layout = one.layout
    sizes = [plural(layout.ranks, "rank")]
    names = {"shard": "shard", "context": "CP", "tensor": "TP", "pipeline": "PP", "expert": "EP"}
    sizes += [f"{short} {size}" for kind, short in names.items() if (size := getattr(layout, kind)) > 1]
    sizes += [f"{layout.copies} copies"] if layout.copies > 1 else []
    if one.inputs["is_checkpointed"]:
        sizes.append("recomputing" + ", selective" * bool(one.inputs["keeps_products"]))
    return ", ".join(sizes)


def _engines(one: Candidate) -> str:
    sizes = [f"{one.inputs['engines']:.0f} of {one.values['engine_ranks']:.0f}"]
    sizes += [
        f"{short} {one.inputs[name]:.0f}" for short, name in (("TP", "engine_tensor"), ("PP", "engine_pipeline")) if one.inputs[name] > 1
    ]
    return ", ".join([*sizes, f"{one.values['running']:.0f} at once"])


def _figure(one: Candidate, name: str) -> str:
    return "–" if one.problems else say(one.values[name], SHEET.rows[name].unit.replace("tokens/s", "").replace("GPU-hours", ""))


def _staleness(one: Candidate) -> str:
    values = one.values
    if one.problems:
        return "–"
    is_bound = one.inputs["mode"] < 1 and values["expected_staleness"] >= one.inputs["max_staleness"]
    return f"{values['expected_staleness']:.2f}" + (" (the bound)" if is_bound else "")


def _bound(one: Candidate) -> str:
    """What would have to be faster for a step to be."""
    values = one.values
    if one.problems or one.inputs["mode"] >= 1:
        return "–" if one.problems else "taking turns"
    slower = "generation" if values["generated_rate"] < values["trained_rate"] else "training"
    return (
        slower
        if values["step_s"] * min(values["generated_rate"], values["trained_rate"]) <= values["step_tokens"] * 1.000001
        else "weight sync"
    )


def _idle(one: Candidate) -> str:
    return "–" if one.problems else f"{percent(one.values['trainer_idle'])} / {percent(one.values['engines_idle'])}"


def _transport(one: Candidate) -> str:
    at = int(one.values["chosen_transport"])
    return TRANSPORTS[at] if at < len(TRANSPORTS) else "all cards"


def _troubles(plan: Plan) -> Iterator[str]:
    for name, one in plan.placements.items():
        for problem in dict.fromkeys((*one.problems, *one.obstacles)):
            yield f"[yellow]{name}[/]: {escape(problem)}"
    if BEST not in plan.placements:
        yield (
            f"[red]No placement of {plan.num_gpus} GPUs was found that fits.[/] More GPUs or larger ones (--gpus, --gpu), adapters"
            " (lora.rank), trainer.offload, or a shorter batch.max_tokens may change that"
        )


def _memory(one: Candidate) -> RenderableType:
    numbers, tables = {**one.inputs, **one.values}, []
    for title, parts, total in (
        ("a trainer rank", TRAINER_PARTS, "trainer_rank_bytes"),
        ("an engine rank", ENGINE_PARTS, "engine_rank_bytes"),
    ):
        table = Table(title, "", "", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for words, name in (*parts, ("in all", total)):
            if numbers[name]:
                style = "bold" if name == total else ""
                table.add_row(words, say(numbers[name], "B"), percent(numbers[name] / one.inputs["gpu_bytes"]), style=style)
        tables.append(table)
    side_by_side = Table.grid(padding=(0, 6))
    side_by_side.add_row(*tables)
    prm = numbers["prm_weights_bytes"]
    room = f"process reward model: {say(prm, 'B')} of weights on each of its GPUs; " if prm else ""
    room += f"KV cache for {number(one.values['kv_tokens'])} tokens, {number(one.values['kv_running'])} sequences of the mean length"
    return Group(side_by_side, Text(room, style="dim"))


def _transports(one: Candidate) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    for at, (words, name) in enumerate(TRANSPORT_FIGURES):
        is_chosen = at == int(one.values["chosen_transport"])
        table.add_row(words, say(one.values[name], "s"), "this run's" if is_chosen else "", style="bold" if is_chosen else "")
    return table


def _sensitivity(plan: Plan) -> Table:
    table = Table("figure", "", "hangs most on", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in KEY_FIGURES:
        found = [f"{leaf} {low:+.0%} / {high:+.0%}" for leaf, low, high in plan.hangs_on(name)]
        table.add_row(name, say(plan.chosen.values[name], SHEET.rows[name].unit), ", ".join(found))
    return table


def _of_input(plan: Plan, name: str) -> str:
    one, value = INPUTS[name], plan.chosen.inputs[name]
    return escape(f"{name} = {say(value, one.unit)}: {one.what} [{origin_of(name, given=plan.given)}]")


def _name_of(plan: Plan, candidate: Candidate) -> str:
    return BEST if plan.placements.get(BEST) is candidate else CONFIGURED

"""A run in the terminal: who waits for whom, how far it is, what it has learnt. Reads the journals and nothing else.

`RunState` (report.state) folds journal lines; `render` draws it, purely; `show` follows the files. Where the output is no terminal,
`show` prints a plain line every few steps instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl.report import rows, units
from pipelinerl.report.reading import JournalTail, read_failures
from pipelinerl.report.rows import EXITS, Line
from pipelinerl.report.state import RunState

LOOK_EVERY_S = 0.5
"""Between two looks at the journals; as often as the orchestrator writes its gauges."""
PLAIN_LINES = 50
"""About so many plain lines for a whole run."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclasses.dataclass(slots=True, kw_only=True)
class PlainLines:
    """Says when the next plain line is due, and what it says."""

    next_step: int = 1

    def due(self, state: RunState) -> str | None:
        """A line for the log where enough steps were done since the last one, else None."""
        done = state.num_steps_done
        if done < self.next_step or not state.steps:
            return None
        self.next_step = done + max(1, (state.num_steps or 0) // PLAIN_LINES)
        return plain_line(state)


class LiveView:
    """A run's folder, followed: `look` takes what the journals have gained, and the view renders itself."""

    def __init__(self, run_folder: Path) -> None:
        self.state = RunState()
        self._run_folder = run_folder
        self._tail = JournalTail(run_folder)

    def look(self) -> None:
        """Fold the lines written since the last look, in order of time, and the last words of processes that failed."""
        for line in sorted(self._tail.new_lines(), key=lambda line: line["t"]):
            self.state.fold(line)
        for failure in read_failures(self._run_folder):
            self.state.fail(failure)

    def __rich__(self) -> RenderableType:
        return render(self.state)


async def show(run_folder: Path, *, console: Console, until: asyncio.Event) -> None:
    """Follow a run until it has ended or a process of it failed, or `until` is set; a finished run is shown once."""
    view = LiveView(run_folder)
    plain = PlainLines()
    live = Live(view, console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    with live:
        while True:
            is_last = until.is_set()
            await asyncio.to_thread(view.look)
            if isinstance(live, Live):
                live.refresh()
            elif (line := plain.due(view.state)) is not None:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            if is_last or view.state.end_reason is not None:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), LOOK_EVERY_S)
    if not console.is_terminal and view.state.end_reason is not None:
        console.print(f"ended: {view.state.end_reason}; {identity_words(view.state)}", markup=False, highlight=False, soft_wrap=True)


def renderable(lines: Iterable[Line]) -> RenderableType:
    """What the view shows after these lines."""
    state = RunState()
    for line in lines:
        state.fold(line)
    return render(state)


def render(state: RunState) -> RenderableType:
    """Draw the state: progress, learning, the two halves, accounts, queues."""
    if state.status is None and not state.steps:
        return Text("waiting for the run's journal: engines and trainer load their models", style="dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, cell in (
        ("progress", _progress(state)),
        ("reward", _reward(state)),
        ("tokens", _tokens(state)),
        ("staleness", _staleness(state)),
        ("trainer", _gauge(state.trainer_wait_fraction, "waited for a batch")),
        ("engines", _engines(state)),
        *([("steps", _steps(state.status.prm))] if state.status and state.status.prm else []),
        *([("turns", _turns(state.status.environment))] if state.status and state.status.environment else []),
        ("rollouts", Text(identity_words(state))),
        ("queues", _queues(state)),
    ):
        table.add_row(name, cell)
    ended = Text(f"ended: {state.end_reason}", style="bold") if state.end_reason is not None else Text("")
    title = escape(state.name) or "run"
    return Panel(Group(table, ended) if state.end_reason is not None else table, title=title, title_align="left", expand=False)


def plain_line(state: RunState) -> str:
    """The state on one line, for a log."""
    step = state.steps[-1]
    parts = [
        f"step {state.num_steps_done}/{state.num_steps or '?'}",
        f"reward {_short(step.reward_mean)}",
        f"staleness {_short(step.staleness_mean)}/{_count(step.staleness_max)}",
        f"generated {_short(state.generated_tokens_per_s)} tok/s",
        f"trained {_short(state.trained_tokens_per_s)} tok/s",
        f"trainer waited {_percent(state.trainer_wait_fraction)}",
        f"engines idle {_percent(state.engine_idle_fraction)}",
        f"slots empty {_percent(state.engine_empty_fraction)}",
    ]
    if state.last_evaluation is not None:
        parts.append(f"held-out {_short(state.last_evaluation.reward_mean)}")
    if state.seconds_left:
        parts.append(f"{units.duration(state.seconds_left)} left")
    if off := rows.imbalance(state.identity):
        parts.append(f"ACCOUNTS OFF BY {off}")
    return "  ".join(parts)


def identity_words(state: RunState) -> str:
    """The conservation identity on one line."""
    identity = state.identity
    off = rows.imbalance(identity)
    if off is None:
        return units.NOT_RECORDED
    parts = " + ".join(f"{units.whole(identity.get(name, 0))} {name.replace('_', ' ')}" for name in ("in_flight", *EXITS))
    sign = "=" if off == 0 else "≠"
    return f"{units.whole(identity['admitted'])} admitted {sign} {parts}" + (f"  off by {units.whole(off)}" if off else "")


def sparkline(values: Iterable[float]) -> str:
    """One block per value, from the lowest to the highest."""
    known = list(values)
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in known)


def _progress(state: RunState) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    total = state.num_steps or max(1, state.num_steps_done)
    left = "" if state.end_reason is not None or not state.seconds_left else f", {units.duration(state.seconds_left)} left"
    version = f", version {units.whole(state.status.version)}" if state.status and state.status.version is not None else ""
    elapsed = f", {units.duration(state.status.elapsed_s)}" if state.status and state.status.elapsed_s is not None else ""
    row.add_row(
        ProgressBar(total=total, completed=min(total, state.num_steps_done), width=30),
        Text(f"{state.num_steps_done}/{state.num_steps or '?'} steps{version}{elapsed}{left}"),
    )
    return row


def _reward(state: RunState) -> RenderableType:
    rewards = [step.reward_mean for step in state.steps if step.reward_mean is not None]
    text = Text(sparkline(rewards), style="magenta")
    text.append(f"  {_short(rewards[-1])}" if rewards else units.NOT_RECORDED, style="bold")
    first, last = state.first_evaluation, state.last_evaluation
    if first is not None and last is not None:
        text.append(f"   held-out {_short(first.reward_mean)}", style="green")
        if last is not first:
            text.append(f" → {_short(last.reward_mean)} (version {units.whole(last.version)})", style="green")
    return text


def _tokens(state: RunState) -> RenderableType:
    return Text(f"generated {_short(state.generated_tokens_per_s)}/s   trained {_short(state.trained_tokens_per_s)}/s")


def _staleness(state: RunState) -> RenderableType:
    last = state.steps[-1] if state.steps else None
    mean, oldest = (_short(last.staleness_mean), _count(last.staleness_max)) if last else ("–", "–")
    return Text(f"mean {mean}, oldest {oldest} versions   last swap paused {_milliseconds(state.last_pause_s)}")


def _steps(prm: Mapping[str, float]) -> RenderableType:
    """What the process reward model has done, and what waits for it."""
    taken, computed, asked = (prm.get(name, 0.0) for name in ("num_taken", "num_computed", "num_asked"))
    cost = (
        f"{computed / taken:.2f} of its tokens for each of the policy's, {asked / taken:.2f} without a cache" if taken else "no token yet"
    )
    waiting = units.whole(prm.get("num_waiting_tokens", 0))
    stopped = (
        f"   {units.whole(prm['num_stopped'])} of {units.whole(prm['num_flagged'])} hopeless rollouts stopped, about"
        f" {units.whole(prm['num_saved_tokens'])} tokens saved"
        if "num_stopped" in prm
        else ""
    )
    return Text(
        f"{units.whole(prm.get('num_steps', 0))} scored by the process reward model   {cost}   {waiting} tokens wait for it{stopped}"
    )


def _turns(environment: Mapping[str, float]) -> RenderableType:
    """What the environment has replied to, and who waits for it."""
    replies, between = (units.whole(environment.get(name, 0)) for name in ("num_replies", "num_between"))
    return Text(f"{replies} replied to by the environment   {between} rollouts between two turns")


def _engines(state: RunState) -> RenderableType:
    status = state.status
    gauges = _gauge(state.engine_idle_fraction, "without a request")
    running = sum(engine.num_running or 0 for engine in status.engines) if status else 0
    if status and status.engines:
        slots = f" of {state.sequence_slots * len(status.engines)}" if state.sequence_slots else ""
        gauges.append(f"   {running:.0f}{slots} sequences", style="dim")
    gauges.append(f"   {_percent(state.engine_empty_fraction)} of slots empty, admission closed", style="dim")
    return gauges


def _queues(state: RunState) -> RenderableType:
    queues = state.status.queues if state.status else {}
    text = Text()
    for name, queue in queues.items():
        text.append(f"{name} ", style="dim")
        text.append_text(_bar(queue.fill_fraction or 0.0, width=6))
        text.append(f" {units.whole(queue.items)}   ")
    return text if queues else Text(units.NOT_RECORDED, style="dim")


def _gauge(fraction: float | None, words: str) -> Text:
    text = _bar(fraction or 0.0, width=20)
    text.append(f" {_percent(fraction):>5} {words}")
    return text


def _bar(fraction: float, *, width: int) -> Text:
    filled = round(width * min(1.0, max(0.0, fraction)))
    text = Text("█" * filled, style="cyan")
    text.append("░" * (width - filled), style="dim")
    return text


def _short(value: float | None) -> str:
    return "–" if value is None else units.quantity(value)


def _count(value: float | None) -> str:
    return "–" if value is None else units.whole(value)


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.0f} %"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else units.milliseconds(value)

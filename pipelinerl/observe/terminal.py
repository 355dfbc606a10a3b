"""A run in the terminal: who waits for whom, how far it is, and what it has learnt. It reads the journals and nothing else.

`fold` follows the journals, `render` draws the state that they add up to, and `show` does both until the run ends. Where the output is no
terminal, `show` prints plain lines instead (`plain`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl.observe.fold import rows
from pipelinerl.observe.fold.followed import FollowedRun
from pipelinerl.observe.fold.state import RunState
from pipelinerl.observe.plain import STUCK_S, PlainLines, end_lines, error_words, identity_words, waiting_words
from pipelinerl.observe.report import units

LOOK_EVERY_S = 0.5
"""Pause between two looks at the journals: as often as the orchestrator writes its gauges."""
MEMBERS_SHOWN = 4
"""Engines that join, drain or are lost, which are named."""
ERRORS_SHOWN = 4
_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView(FollowedRun):
    """A followed run that draws itself."""

    def __rich__(self) -> RenderableType:
        return render(self.state)


async def show(run_folder: Path, *, console: Console, until: asyncio.Event, began: float = 0.0) -> None:
    """Follow a run until it has ended or a process of it failed, or `until` is set; a finished run is shown once.

    With `began`, Unix seconds, one start is followed, and ends of earlier starts count for nothing: until `until` alone, as a process that
    failed may be started again.
    """
    view = LiveView(run_folder, began=began)
    plain = PlainLines(began=began)
    live = Live(view, console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()

    def say(lines: list[str]) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with live:
        while True:
            is_last = until.is_set()
            lines = await asyncio.to_thread(view.look)
            if isinstance(live, Live):
                live.refresh()
            else:
                plain.take(line for line, _ in lines)
                say(plain.lines(view.state, now=time.time()))
            if is_last or (not began and view.state.end_reason is not None):
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), LOOK_EVERY_S)
    if not console.is_terminal and view.state.end_reason is not None:
        say(end_lines(view.state))


async def show_all(run_folders: Sequence[Path], *, console: Console) -> None:
    """Follow the policies of a run, one below the other, until all have ended."""
    views = [LiveView(folder) for folder in run_folders]
    live = Live(Group(*views), console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    with live:
        while True:
            for view in views:
                await asyncio.to_thread(view.look)
            if isinstance(live, Live):
                live.refresh()
            if all(view.state.end_reason is not None for view in views):
                break
            await asyncio.sleep(LOOK_EVERY_S)  # a file tells nobody that it has grown
    if not console.is_terminal:
        console.print(Group(*views))


def render(state: RunState) -> RenderableType:
    """Draw the state: progress, learning, the two halves, accounts, queues."""
    if state.status is None and not state.steps:
        return Text("waiting for the run's journal: the orchestrator begins", style="dim")
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
        ("steps", _steps(state.status.prm) if state.status and state.status.prm else None),
        ("turns", _turns(state.status.environment) if state.status and state.status.environment else None),
        ("agents", _agents(state.status.gateway) if state.status and state.status.gateway else None),
        ("rollouts", Text(identity_words(state))),
        ("queues", _queues(state)),
        ("waits", _waits(state)),
        ("errors", _errors(state) if state.errors.now else None),
        ("alarms", Text("\n".join(map(str, state.active_alarms.values())), style="bold red") if state.active_alarms else None),
    ):
        if cell is not None:
            table.add_row(name, cell)
    ended = Text(f"ended: {state.end_reason}", style="bold") if state.end_reason is not None else Text("")
    title = escape(state.name) or "run"
    return Panel(Group(table, ended) if state.end_reason is not None else table, title=title, title_align="left", expand=False)


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
    text.append(f"  {units.dashed(rewards[-1])}" if rewards else units.NOT_RECORDED, style="bold")
    first, last = state.first_evaluation, state.last_evaluation
    if first is not None and last is not None:
        text.append(f"   held-out {units.dashed(first.reward_mean)}", style="green")
        if last is not first:
            text.append(f" → {units.dashed(last.reward_mean)} (version {units.whole(last.version)})", style="green")
        if len(last.components) > 1:
            text.append("   " + ", ".join(f"{name} {units.dashed(value)}" for name, value in last.components.items()), style="dim green")
    return text


def _tokens(state: RunState) -> RenderableType:
    text = Text(f"generated {units.dashed(state.generated_tokens_per_s)}/s   trained {units.dashed(state.trained_tokens_per_s)}/s")
    if (useful := state.useful_tokens_per_s) is not None:
        text.append(f", useful {units.dashed(useful)}/s")
    return text


def _staleness(state: RunState) -> RenderableType:
    last = state.steps[-1] if state.steps else None
    mean, oldest = (units.dashed(last.staleness_mean), units.dashed(last.staleness_max, units.whole)) if last else ("–", "–")
    return Text(f"mean {mean}, oldest {oldest} versions   last swap paused {units.dashed(state.last_pause_s, units.milliseconds)}")


def _steps(prm: Mapping[str, float]) -> RenderableType:
    """The work of the process reward model, done and waiting."""
    taken, computed, asked = (prm.get(name, 0.0) for name in ("num_trace_tokens", "num_computed", "num_uncached_tokens"))
    cost = (
        f"{computed / taken:.2f} of its tokens for each of the policy's, {asked / taken:.2f} without a cache" if taken else "no token yet"
    )
    waiting = units.whole(prm.get("num_waiting_tokens", 0))
    stopped = (
        f"   {units.whole(prm['num_stopped'])} of {units.whole(prm['num_hopeless'])} hopeless rollouts stopped, about"
        f" {units.whole(prm['num_saved_tokens'])} tokens saved"
        if "num_stopped" in prm
        else ""
    )
    return Text(
        f"{units.whole(prm.get('num_steps', 0))} scored by the process reward model   {cost}   {waiting} tokens wait for it{stopped}"
    )


def _turns(environment: Mapping[str, float]) -> RenderableType:
    """The environment's replies, and the rollouts between two turns."""
    replies, between = (units.whole(environment.get(name, 0)) for name in ("num_observations", "num_awaiting_reply"))
    said = f"{replies} replied to by the environment   {between} rollouts between two turns"
    if "num_alive" in environment:
        alive, again, drifts = (units.whole(environment.get(name, 0)) for name in ("num_alive", "num_restarts", "num_drifts"))
        said += f"   {alive} environments alive   {again} episodes begun again   {drifts} ended by drift"
    return Text(said)


def _agents(gateway: Mapping[str, float]) -> RenderableType:
    """The episodes that agents have, and what became of those they had."""
    names = ("num_open", "num_offered", "num_agents_waiting", "num_turns", "num_branches", "num_drifted")
    opened, offered, waiting, turns, branches, drifted = (units.whole(gateway.get(name, 0)) for name in names)
    said = f"{opened} episodes lent, {offered} on offer   {waiting} agents wait   {turns} turns, {branches} branches, {drifted} drifted"
    troubles = (("num_expired", "leases expired"), ("num_given_up", "given up"), ("num_refused", "requests refused"))
    return Text("   ".join([said, *(f"{units.whole(gateway[name])} {words}" for name, words in troubles if gateway.get(name))]))


def _engines(state: RunState) -> RenderableType:
    status = state.status
    gauges = _gauge(state.engine_idle_fraction, "without a request")
    running = sum(engine.num_running or 0 for engine in status.engines) if status else 0
    if status and status.engines:
        slots = f" of {state.sequence_slots * len(status.engines)}" if state.sequence_slots else ""
        gauges.append(f"   {running:.0f}{slots} sequences", style="dim")
    if status and status.members:
        told = ", ".join(f"{one.name} {one.state}" for one in status.members[:MEMBERS_SHOWN])
        more = len(status.members) - MEMBERS_SHOWN
        gauges.append(f"   {told}{f' and {more} more' if more > 0 else ''}", style="yellow")
    if state.trainer_ranks is not None and state.trainer_ranks.phase != "settled":
        gauges.append(f"   {state.trainer_ranks.words}", style="yellow")
    if state.roles is not None and state.roles.is_under_way:
        gauges.append(f"   {state.roles.words}", style="yellow")
    gauges.append(f"   {units.whole_percent(state.engine_empty_fraction)} of slots empty, admission closed", style="dim")
    return gauges


def _queues(state: RunState) -> RenderableType:
    queues = state.status.queues if state.status else {}
    text = Text()
    for name, queue in queues.items():
        text.append(f"{name} ", style="dim")
        text.append_text(_bar(queue.fill_fraction or 0.0, width=6))
        text.append(f" {units.whole(queue.items)}   ")
    return text if queues else Text(units.NOT_RECORDED, style="dim")


def _waits(state: RunState) -> Text | None:
    """The longest wait that tells, and reward calls that do not end; None where the run moves."""
    status = state.status
    if status is None or state.end_reason is not None:
        return None
    told = [(name, seconds) for name, seconds in status.waits if seconds >= STUCK_S and not rows.is_idle(name)]
    is_stuck = state.scored_at is not None and status.t - state.scored_at >= STUCK_S
    return Text(waiting_words(state, now=status.t, began=0.0), style="yellow") if told or is_stuck else None


def _errors(state: RunState) -> Text:
    """Failures of users' functions by cause, the commonest first."""
    worst = state.errors.commonest()
    lines = [f"{units.whole(error.count)} × {error_words(error).removeprefix('ERROR ')}" for error in worst[:ERRORS_SHOWN]]
    more = [f"and {len(worst) - ERRORS_SHOWN} other causes"] if len(worst) > ERRORS_SHOWN else []
    return Text("\n".join([*lines, *more]), style="red")


def _gauge(fraction: float | None, words: str) -> Text:
    text = _bar(fraction or 0.0, width=20)
    text.append(f" {units.whole_percent(fraction):>5} {words}")
    return text


def _bar(fraction: float, *, width: int) -> Text:
    filled = round(width * min(1.0, max(0.0, fraction)))
    text = Text("█" * filled, style="cyan")
    text.append("░" * (width - filled), style="dim")
    return text

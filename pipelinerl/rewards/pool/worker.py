"""A worker process: it loads the functions of its pool, or its reward model, and answers calls until its socket closes or it is killed.

It is forked by `forkserver` with a session, a process group and a temporary folder of its own, and none of the run's secrets. The limits
here and there protect a run from mistakes in reward code that its operator trusts. A worker has its owner's rights, so code that the
policy wrote must run in a sandbox that the reward function calls, for example `pipelinerl.rewards.functions.code`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import faulthandler
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from pipelinerl.data.tokenizer import Codec
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Message
from pipelinerl.rewards.calls import Call, Calling, CallResult, Component, Loaded, Refused, Skipped, ToWorker, Withdraw
from pipelinerl.rewards.functions.jail import lower_limit
from pipelinerl.rewards.pool.plan import MAX_BATCH
from pipelinerl.rewards.reward_model.runner import load_reward_model
from pipelinerl.rewards.runner import Runner, load_functions
from pipelinerl.runtime.function_errors import place_of
from pipelinerl.transport.codec import Decoder
from pipelinerl.transport.stream import Frames, frame

ADDRESS_SPACE_BYTES = 64 << 30
"""Bound on a worker's address space. A smaller one breaks functions that map large models; a larger one lets one runaway call use up the
swap of a big machine."""
OPEN_FILES = 4096
OOM_SCORE = 500
"""Number added to the kernel's score, at most 1000: when memory runs out, a reward worker is killed before an engine or a trainer rank."""
STACK_SIGNAL = signal.SIGRTMAX - 1
"""Signal at which a worker writes down its stack and ends. No library is known to use it."""
STACK_FILE = "stack"
"""Name of the file in the worker's folder that holds its stack when it crashed or got `STACK_SIGNAL`."""
_NO_CHAT: Mapping[str, Any] = MappingProxyType({})


def run_worker(
    channel: socket.socket,
    *,
    components: tuple[Component, ...],
    codec: Codec,
    max_tokens: int,
    folder: Path,
    chat: Mapping[str, Any] = _NO_CHAT,
) -> None:
    """Serve calls until the scorer closes the channel. Raises `ConnectionError` where it closes while an answer is sent.

    Functions are imported in the folder in which the scorer was started, so that relative paths of plug-ins work; calls run in `folder`.
    """
    faulthandler.enable()
    limit_resources(bounds_addresses=components[0].model is None)

    def send(message: Message) -> None:
        channel.sendall(frame(message))

    run: Callable[[Sequence[Call]], Iterable[CallResult]]
    with contextlib.ExitStack() as open_ones:
        try:
            if components[0].model is not None:
                run = load_reward_model(components[0], decode=codec.decode).run
                places = {components[0].name: components[0].function}
            else:
                functions = load_functions(components)
                runner = Runner(functions, codec=codec, max_tokens=max_tokens, entering=lambda name: send(Calling(name=name)), chat=chat)
                open_ones.enter_context(contextlib.closing(runner))
                run, places = runner.run_each, {each.name: place_of(each.function) for each in functions}
        except ConfigError as error:
            send(Refused(error=str(error)))
            return
        os.chdir(folder)
        _tell_stacks(open_ones.enter_context(open(folder / STACK_FILE, "w", buffering=1)))
        send(Loaded(places=places))
        _serve(channel, run, send, batch=MAX_BATCH if components[0].model is not None else 1)


def limit_resources(*, bounds_addresses: bool) -> None:
    """Forbid core files, bound open files and, but for a model, which maps what it never touches, address space; have this process killed
    first when memory runs out.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lower_limit(resource.RLIMIT_CORE, 0)
    if bounds_addresses:
        lower_limit(resource.RLIMIT_AS, min(ADDRESS_SPACE_BYTES, memory_bytes))
    lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def _tell_stacks(stack: TextIO) -> None:
    """Have this process write its stack when it crashes, and at `STACK_SIGNAL`, after which it ends.

    `faulthandler` writes even while native code runs or a lock is held; the tasks of an event loop follow once Python runs again.
    """

    def tell_tasks(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # no event loop runs
            for task in asyncio.all_tasks():
                _write_task(task, stack)
        os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(STACK_SIGNAL, tell_tasks)
    faulthandler.register(STACK_SIGNAL, stack, all_threads=True, chain=True)
    faulthandler.enable(stack)


def _write_task(task: asyncio.Task[object], stack: TextIO) -> None:
    """Write what a task awaits, in the format of `faulthandler`: the stack of an event loop that waits does not show it."""
    lines: list[str] = []
    awaited: object = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        awaited = getattr(awaited, "cr_await", None)
    stack.write("\n".join(["Task (most recent call first):", *reversed(lines), ""]))


def _serve(
    channel: socket.socket, run: Callable[[Sequence[Call]], Iterable[CallResult]], send: Callable[[Message], None], *, batch: int
) -> None:
    """Answer up to `batch` calls at a time, in order, until the scorer closes the channel."""
    frames, decoder = Frames(channel), Decoder[Call | Withdraw](ToWorker)
    calls: collections.deque[Call] = collections.deque()
    withdrawn: set[int] = set()
    process_id = os.getpid()
    while True:
        try:
            bodies = frames.receive(socket.MSG_DONTWAIT if calls else 0)
        except BlockingIOError:
            bodies = []
        if bodies is None:
            return
        for message in map(decoder.decode, bodies):
            if isinstance(message, Call):
                calls.append(message)
            else:
                withdrawn.update(message.call_ids)
        taken = [calls.popleft() for _ in range(min(batch, len(calls)))]
        wanted = [call for call in taken if call.call_id not in withdrawn]
        results = {result.call_id: result for result in run(wanted)} if wanted else {}
        if os.getpid() != process_id:
            os._exit(0)  # a function forked, and returned in the child, too: a second answer would be charged to the next call
        for call in taken:
            withdrawn.discard(call.call_id)
            send(results.get(call.call_id) or Skipped(call_id=call.call_id))

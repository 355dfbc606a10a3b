"""The scorer's fork server: one clean process that has loaded the tokenizer, forks workers, and kills and reaps them.

It is started by `sandbox` as a separate program, so that neither the scorer's keys nor its threads are in the memory that is forked. It
imports no user code, hence forks in milliseconds and from one thread. Only this process reaps workers, so a process group is never
killed after its number was given to another one. Workers and this process adopt orphans (`PR_SET_CHILD_SUBREAPER`): a process that a
worker started in another session becomes a child of this one when the worker is gone, and is killed too.

It ends when the scorer's end of the control socket closes, however the scorer ended, and kills all workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

from pipelinerl.data.tokenizer import Codec
from pipelinerl.engine.tool_parser import parser_of
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Message
from pipelinerl.rewards.calls import PACKET_BYTES, STACK_CHARACTERS, Ended, Kill, Prepared, Refused, Setup, Spawn, ToForkServer
from pipelinerl.rewards.codec import load_codec
from pipelinerl.rewards.pool.worker import STACK_FILE, STACK_SIGNAL, run_worker
from pipelinerl.runtime.devices import show_first
from pipelinerl.runtime.process import die_with_parent, how_it_ended
from pipelinerl.transport.codec import Decoder, encode

REAP_DEADLINE_S = 5.0
"""Maximum wait, at the end, for killed processes to be gone. A process that outlasts it hangs inside the kernel."""
STACK_GRACE_S = 0.5
"""Seconds between asking a worker that hangs for its stack, and killing it. A shorter time loses the stack on a busy machine; a longer one
lets it hang on."""
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serve the control socket whose descriptor is the only argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    server = ForkServer(control)
    try:
        server.run()
    finally:
        server.close()


class ForkServer:
    """Forks workers on demand and reports how they end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._decoder: Decoder[Setup | Spawn | Kill] = Decoder(ToForkServer)
        self._process_ids: dict[int, int] = {}
        """Process ids by worker id."""
        self._kill_at: dict[int, float] = {}
        """Time at which a worker that was asked for its stack is killed, in monotonic seconds, by worker id."""
        self._folder = Path(tempfile.mkdtemp(prefix="pipelinerl-scorer-"))
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        _adopt_orphans()

    def run(self) -> None:
        """Load the tokenizer, then fork, kill and reap until the control socket closes."""
        setup = self._decoder.decode(self._control.recv(PACKET_BYTES))
        assert isinstance(setup, Setup), f"first message is {type(setup).__name__}, expected Setup"
        try:
            codec = load_codec(Path(setup.model_path))
            codec = dataclasses.replace(codec, calls=parser_of(setup.chat.get("tool_call_parser"), codec.tokenizer, ends=codec.ends))
        except ConfigError as error:
            self._send(Refused(error=str(error)))
            return
        gc.freeze()  # a collection in a worker would touch, hence copy, every page it shares with this process
        self._send(Prepared())
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while True:
            wait_s = max(0.0, min(self._kill_at.values()) - time.monotonic()) if self._kill_at else None
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._control:
                    if not self._on_message(setup, codec):
                        return
                else:
                    os.read(self._woken, 4096)
            self._kill_overdue()
            self._reap()

    def close(self) -> None:
        """Kill every worker with everything it started, wait until all are gone, and remove their folders."""
        deadline = time.monotonic() + REAP_DEADLINE_S
        for process_id in self._process_ids.values():
            _kill_group(process_id)
        self._reap()
        while _children() and (left_s := deadline - time.monotonic()) > 0:
            select.select([self._woken], [], [], left_s)
            os.read(self._woken, 4096)
            self._reap()
        signal.set_wakeup_fd(-1)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _on_message(self, setup: Setup, codec: Codec) -> bool:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
        except ConnectionResetError:  # the scorer is gone, and had not read everything that was sent to it
            return False
        if not packet:
            return False
        message = self._decoder.decode(packet)
        if isinstance(message, Kill):
            self._kill(message)
        elif isinstance(message, Spawn):
            with socket.socket(fileno=descriptors[0]) as channel:
                self._process_ids[message.worker_id] = self._fork(message, channel, setup, codec)
        return True

    def _kill(self, message: Kill) -> None:
        process_id = self._process_ids.get(message.worker_id)
        if process_id is None:
            return
        if not message.wants_stack:
            _kill_group(process_id)
            return
        self._kill_at[message.worker_id] = time.monotonic() + STACK_GRACE_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, STACK_SIGNAL)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for worker_id in [worker_id for worker_id, at in self._kill_at.items() if at <= now]:
            del self._kill_at[worker_id]
            if (process_id := self._process_ids.get(worker_id)) is not None:
                _kill_group(process_id)

    def _fork(self, spawn: Spawn, channel: socket.socket, setup: Setup, codec: Codec) -> int:
        folder = self._folder / str(spawn.worker_id)
        folder.mkdir()
        parent = os.getpid()
        process_id = os.fork()
        if process_id:
            return process_id
        code = 1
        try:
            self._become_worker(parent, folder)
            if spawn.gpu:
                show_first(spawn.gpu)
            run_worker(
                channel, components=setup.pools[spawn.pool], codec=codec, max_tokens=setup.max_tokens, folder=folder, chat=setup.chat
            )
            code = 0
        except ConnectionError:
            code = 0  # the scorer closed the channel in the middle of an answer: it has ended
        except BaseException:  # this process must never return into the fork server's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _become_worker(self, parent: int, folder: Path) -> None:
        os.setsid()
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._control.close()
        os.close(self._woken)
        os.close(self._waker)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        _adopt_orphans()

    def _reap(self) -> None:
        """Report the workers that ended; kill and reap what they left behind."""
        while (child := _ended_child()) is not None:
            worker_id = next((key for key, process_id in self._process_ids.items() if process_id == child), None)
            if worker_id is not None:
                _kill_group(child)
            _, status = os.waitpid(child, 0)
            if worker_id is not None:
                del self._process_ids[worker_id]
                self._kill_at.pop(worker_id, None)
                stack = _stack_in(self._folder / str(worker_id))
                shutil.rmtree(self._folder / str(worker_id), ignore_errors=True)
                self._send(Ended(worker_id=worker_id, how=how_it_ended(os.waitstatus_to_exitcode(status)), stack=stack))
            for orphan in _children() - set(self._process_ids.values()):
                _kill(orphan)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the scorer is gone; the loop sees that next
            self._control.send(encode(message))


def _stack_in(folder: Path) -> str:
    """Return the stack that a worker wrote. User code can write to the file's folder, so the file may hold anything, or be gone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / STACK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(STACK_CHARACTERS).decode("ascii", "replace").replace("\x00", "")
    return ""


def _adopt_orphans() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _ended_child() -> int | None:
    """Return a child that ended and still waits to be reaped; None where there is none."""
    try:
        result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return result.si_pid if result is not None else None


def _children() -> set[int]:
    """Return every process whose parent is this one."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def _kill_group(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process_id, signal.SIGKILL)
    _kill(process_id)  # a worker just forked has no group of its own yet


def _kill(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""What NCCL and CUDA's memory handles do, on the host: the transports between devices are tested over it where there is no device.

Like NCCL, the stand-in never says that a peer is gone: what is under way is then simply never done, until it is aborted.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import queue
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights.nccl import Communicator

ID_BYTES = 128
CONNECT_S = 20.0


class StandInNccl:
    """A `nccl.Library` of sockets that have no place in a file system."""

    def unique_id(self) -> bytes:
        return secrets.token_hex(ID_BYTES // 2).encode()

    def connect(self, unique_id: bytes, rank: int) -> Communicator:
        assert len(unique_id) == ID_BYTES
        address = b"\0" + unique_id[:64]
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(CONNECT_S)
        if rank == 0:
            with line:
                line.bind(address)
                line.listen(1)
                taken, _ = line.accept()
            return _Communicator(taken)
        end = time.monotonic() + CONNECT_S
        while True:
            try:
                line.connect(address)
            except ConnectionRefusedError:
                assert time.monotonic() < end
                time.sleep(0.001)
            else:
                return _Communicator(line)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


class _Communicator:
    def __init__(self, line: socket.socket) -> None:
        line.settimeout(None)
        self._line = line
        self._work: queue.Queue[tuple[Any, torch.Tensor, threading.Event] | None] = queue.Queue()
        threading.Thread(target=_serve, args=(line, self._work), daemon=True).start()  # of a function: it must not keep `self` alive

    def bucket(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, part: torch.Tensor) -> threading.Event:
        return self._begin(self._line.sendall, part)

    def receive(self, part: torch.Tensor) -> threading.Event:
        return self._begin(functools.partial(_fill, self._line), part)

    def is_done(self, work: threading.Event) -> bool:
        return work.is_set()

    def abort(self) -> None:
        self._work.put(None)
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self._work.put(None)

    def _begin(self, call: Any, part: torch.Tensor) -> threading.Event:
        done = threading.Event()
        self._work.put((call, part, done))
        return done


def _fill(line: socket.socket, into: memoryview) -> None:
    while into:
        count = line.recv_into(into)
        if not count:
            raise ConnectionError
        into = into[count:]


def _serve(line: socket.socket, queued: queue.Queue[tuple[Any, torch.Tensor, threading.Event] | None]) -> None:
    with line, contextlib.suppress(OSError):
        while (work := queued.get()) is not None:
            call, part, done = work
            call(part.numpy().data)
            done.set()


class StandInMemory:
    """A `cuda_ipc.Memory` of files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, handle: bytes) -> Path:
        return self._folder / handle.decode()

    def make(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        handle = f"device-{secrets.token_hex(8)}".encode()
        with open(self.path_of(handle), "w+b") as file:
            os.ftruncate(file.fileno(), num_bytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8), handle

    def open(self, handle: bytes) -> torch.Tensor:
        try:
            with open(self.path_of(handle), "r+b") as file:
                return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        except OSError as error:
            raise WeightsError(f"cannot open the trainer's device memory: {error}; is it alive, and on this machine?") from error

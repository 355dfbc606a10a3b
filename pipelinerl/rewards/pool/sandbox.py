"""The scorer's control of its workers: it starts the fork server without secrets, spawns and kills workers, and learns how they ended."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping

from pipelinerl.errors import ConfigError, PeerGone, PeerSilent
from pipelinerl.messages import Message
from pipelinerl.rewards.calls import PACKET_BYTES, Ended, FromForkServer, Kill, Prepared, Refused, Setup, Spawn
from pipelinerl.transport.codec import Decoder, encode

PREPARE_DEADLINE_S = 300.0
"""Maximum wait for the tokenizer. Importing transformers from a cold network file system can take minutes."""
END_DEADLINE_S = 10.0
"""Maximum wait for the fork server to kill all workers and end."""

PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "JAVA_HOME", "NLTK_DATA"),
    *("OMP_*", "OPENBLAS_*", "MKL_*", "NUMEXPR_*", "KMP_*", "GOMP_*", "TOKENIZERS_PARALLELISM"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE"),
    *("TORCH_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""Environment variables that functions see (`*` stands for anything): paths, and settings for text and numbers. No list of secrets is ever
complete, so all other variables are left out, except those that the config names."""
_SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASS|CREDENTIAL|AUTH|COOKIE")
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]*@")
_WORKER_SETTINGS = {
    "TOKENIZERS_PARALLELISM": "false",  # the tokenizer's threads would not survive a fork
    "PYTHONUNBUFFERED": "1",  # the output of a function that is killed must be in the log
}
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def clean_environment(environment: Mapping[str, str], *, named: Collection[str] = ()) -> dict[str, str]:
    """Return the environment that a reward function sees: the variables of `PASSED` that are no secrets by their name or by a password
    inside a URL, and the variables `named`.

    Numerical libraries are told to use one thread, unless the environment says otherwise, because the slots already run in parallel.
    """
    kept = {name: value for name, value in environment.items() if name in named or _is_passed(name, value)}
    return dict.fromkeys(_ONE_THREAD, "1") | kept | _WORKER_SETTINGS


def _is_passed(name: str, value: str) -> bool:
    is_secret = _SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value)
    return not is_secret and any(fnmatch.fnmatchcase(name, pattern) for pattern in PASSED)


class Sandbox:
    """The fork server and its control socket. Every worker has a number that is never used again."""

    def __init__(self, setup: Setup, *, variables: Collection[str] = ()) -> None:
        """Start the fork server. `variables` are names of environment variables that functions see beside `PASSED`."""
        self._decoder: Decoder[Prepared | Ended | Refused] = Decoder(FromForkServer)
        self._next_worker_id = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelinerl.rewards.pool.forkserver", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=clean_environment(os.environ, named=variables),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._send(setup)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to return."""
        return self._control.fileno()

    def wait_until_prepared(self) -> None:
        """Wait for the fork server. Raises `ConfigError` where the tokenizer cannot be loaded, `PeerSilent` or `PeerGone` naming the fork
        server.
        """
        self._control.settimeout(PREPARE_DEADLINE_S)
        try:
            message = self._decoder.decode(self._receive())
        except TimeoutError:
            raise PeerSilent(f"waited {PREPARE_DEADLINE_S:g} s for the scorer's fork server to load the tokenizer") from None
        if isinstance(message, Refused):
            raise ConfigError(message.error)
        self._control.setblocking(False)

    def spawn(self, pool: int, *, gpu: str = "") -> tuple[int, socket.socket]:
        """Fork a worker of a pool, on this GPU; return its number and our end of its channel, which does not block."""
        worker_id, self._next_worker_id = self._next_worker_id, self._next_worker_id + 1
        ours, theirs = socket.socketpair()
        with theirs:
            self._send(Spawn(worker_id=worker_id, pool=pool, gpu=gpu), theirs.fileno())
        ours.setblocking(False)
        return worker_id, ours

    def kill(self, worker_id: int, *, wants_stack: bool = False) -> None:
        """Have a worker killed with everything it started; this is harmless where it is gone already.

        With `wants_stack` it is first asked for its stack, which `Ended` then holds.
        """
        self._send(Kill(worker_id=worker_id, wants_stack=wants_stack))

    def receive(self) -> list[Ended]:
        """Return the workers that ended since the last call, without waiting. Raises `PeerGone` where the fork server ended."""
        ended: list[Ended] = []
        while True:
            try:
                message = self._decoder.decode(self._receive())
            except BlockingIOError:
                return ended
            assert isinstance(message, Ended)
            ended.append(message)

    def close(self) -> None:
        """Kill all workers and wait for the fork server to end. Raises `PeerSilent` where it does not."""
        self._control.close()
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise PeerSilent(f"waited {END_DEADLINE_S:g} s for the scorer's fork server (process {self._process.pid}) to end") from None

    def _receive(self) -> bytes:
        packet = b""
        with contextlib.suppress(ConnectionResetError):
            packet = self._control.recv(PACKET_BYTES)
        if not packet:
            raise self._gone()
        return packet

    def _send(self, message: Message, *descriptors: int) -> None:
        try:
            socket.send_fds(self._control, [encode(message)], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            raise self._gone() from None

    def _gone(self) -> PeerGone:
        return PeerGone(f"the scorer's fork server (process {self._process.pid}) ended; its last words are in the scorer's log")

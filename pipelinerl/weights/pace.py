"""Work beside decoding at a bounded share of a core: who works says where it may rest, and whoever set the share has it rest there.

A low priority alone does not hold a share: the scheduler lets short work run almost unhindered (niceness 17 should leave it 2 %, and
staging 44 M parameters took 9 %).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator


@dataclasses.dataclass(slots=True, kw_only=True)
class _Share:
    most: float
    began_s: float
    cpu_began_s: float


class _Here(threading.local):
    share: _Share | None = None


_here = _Here()


@contextlib.contextmanager
def at_most(share: float) -> Iterator[None]:
    """Have this thread, as long as the context lasts, use no more than this part of a core's time, as far as it rests often enough."""
    _here.share = _Share(most=share, began_s=time.monotonic(), cpu_began_s=time.thread_time())
    try:
        yield
    finally:
        _here.share = None


def rest() -> None:
    """Sleep until what this thread has worked is no more than its share; at once where it has none."""
    share = _here.share
    if share is not None:
        due_s = share.began_s + (time.thread_time() - share.cpu_began_s) / share.most
        if (wait_s := due_s - time.monotonic()) > 0:
            time.sleep(wait_s)

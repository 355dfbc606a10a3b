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
    lifted: threading.Event | None
    began_s: float
    cpu_began_s: float


class _Here(threading.local):
    share: _Share | None = None


_here = _Here()


@contextlib.contextmanager
def limit_cpu(share: float, *, lifted: threading.Event | None = None) -> Iterator[None]:
    """Have this thread, as long as the context lasts, use no more than this part of a core's time, as far as it rests often enough.

    While `lifted` is set nobody else wants the core: it need not rest, and what it works meanwhile does not count.
    """
    _here.share = _Share(most=share, lifted=lifted, began_s=time.monotonic(), cpu_began_s=time.thread_time())
    try:
        yield
    finally:
        _here.share = None


def throttle() -> None:
    """Wait until what this thread has worked is no more than its share, or until that is lifted; at once where it has none."""
    share = _here.share
    if share is None:
        return
    wait_s = share.began_s + (time.thread_time() - share.cpu_began_s) / share.most - time.monotonic()
    if share.lifted is None:
        time.sleep(max(0.0, wait_s))
    elif share.lifted.wait(max(0.0, wait_s)):
        share.began_s, share.cpu_began_s = time.monotonic(), time.thread_time()

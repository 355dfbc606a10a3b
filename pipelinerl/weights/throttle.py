"""A bound on the core time of work beside decoding: the work calls `throttle` where it may wait, within a context of `limit_cpu`.

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
    """Limit this thread to a fraction of a core's time, as far as it calls `throttle` often enough, for as long as the context lasts.

    While `lifted` is set nobody else wants the core: the thread need not wait, and its work does not count.
    """
    _here.share = _Share(most=share, lifted=lifted, began_s=time.monotonic(), cpu_began_s=time.thread_time())
    try:
        yield
    finally:
        _here.share = None


def throttle() -> None:
    """Wait until this thread's work is no more than its share, or the limit is lifted; return at once where there is none."""
    share = _here.share
    if share is None:
        return
    wait_s = share.began_s + (time.thread_time() - share.cpu_began_s) / share.most - time.monotonic()
    if share.lifted is None:
        time.sleep(max(0.0, wait_s))
    elif share.lifted.wait(max(0.0, wait_s)):
        share.began_s, share.cpu_began_s = time.monotonic(), time.thread_time()

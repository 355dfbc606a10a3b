"""Imports of large packages. Python's garbage collector walks over all that they make, again and again, and finds nothing: a quarter of
the time that importing vLLM takes, a sixth of that of torch and transformers. What transformers looks for is remembered: `import_cache`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from pipelinerl.runtime.import_cache import remember_transformers


@contextlib.contextmanager
def of_large_packages() -> Iterator[None]:
    """Import inside it, early in a process: nothing is collected meanwhile, and what was made is never looked at again.

    Later collections are shorter for it, and forks go on sharing the memory.
    """
    remember_transformers()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

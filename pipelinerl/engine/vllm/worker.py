"""The module that vLLM imports in every rank of an engine of several, before the model loads: its class there is mixed into the worker."""

from __future__ import annotations

import os
import re

from pipelinerl.engine.vllm.rank import PolicyRank
from pipelinerl.engine.vllm.weights import keep_plain_weights
from pipelinerl.runtime.process import die_with_parent

__all__ = ["PolicyRank"]


def keep_to_own_cores() -> None:
    """Have a forked rank run where vLLM wants it: that says so by OpenMP's environment, which OpenMP has read in the parent."""
    if places := re.fullmatch(r"{([0-9,]+)}", os.environ.get("OMP_PLACES", "")):
        os.sched_setaffinity(0, set(map(int, places[1].split(","))))


die_with_parent()  # at once: a rank that ends by itself when its engine is killed takes seconds, on cores that the next one needs
keep_plain_weights()
keep_to_own_cores()

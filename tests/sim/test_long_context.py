"""One long rollout costs what many short ones of the same length do: bytes on every wire, in ledger and journal grow with its tokens.

Through the whole orchestrator, a process reward model included; `scripts/bench/long_context.py` has real processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.long_context import bytes_of

SHORT, LONG = 2048, 8192
MOST_GROWTH = 1.1
"""Of the bytes of one token. What is quadratic gives 4; what is said once for a rollout makes it less than 1."""


@pytest.mark.slow
def test_bytes_of_a_token_do_not_grow_with_the_rollout(tmp_path: Path) -> None:
    short, long = (bytes_of(size, tmp_path / str(size)) for size in (SHORT, LONG))
    growth = {name: long[name] / short[name] / (LONG / SHORT) for name in short}
    assert {name for name, value in growth.items() if value > MOST_GROWTH} == set(), growth
    assert {"engine-0>hub", "hub>scorer-1", "scorer-1>hub", "hub>trainer-0", "ledger.sqlite"} <= growth.keys()

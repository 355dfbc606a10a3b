"""The server over a backend of a test, as `orchestrator.serving` wires it over a run's engines and trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.config import TinkerSection
from pipelinerl.tinker.dispatch import Dispatch
from pipelinerl.tinker.futures import Futures
from pipelinerl.tinker.ledger import Ledger
from pipelinerl.tinker.provenance import Provenance
from pipelinerl.tinker.sampling import Sampled
from pipelinerl.tinker.server import Tinker
from pipelinerl.tinker.sessions import Sessions
from pipelinerl.tinker.training import Training

KEY = "tml-test"
MODEL = "my-model"


def wired(
    backend: Any,
    folder: Path,
    *,
    ledger: Ledger,
    journal: Callable[..., None] = lambda kind, **fields: None,
    rank: int = 8,
    max_staleness: int | None = None,
    checkpoint_every: int = 10,
    max_held_bytes: int = 1 << 20,
    max_pending: int = 64,
    **section: Any,
) -> Tinker:
    """`section`: as `[tinker]`."""
    sessions = Sessions(folder / "saved", ledger=ledger, now_s=0.0)
    provenance = Provenance(backend.publications, ledger=ledger)
    training = Training(
        backend=backend,
        sessions=sessions,
        provenance=provenance,
        journal=journal,
        rank=rank,
        max_staleness=max_staleness,
        is_base=lambda name: name == MODEL,
    )
    dispatch = Dispatch(
        ledger=ledger,
        training=training,
        backend=backend,
        folder=folder / "checkpoints",
        checkpoint_every=checkpoint_every,
        max_held_bytes=max_held_bytes,
        caught_up=asyncio.Event(),
        clock=time.time,
    )
    return Tinker(
        sessions=sessions,
        futures=Futures(max_pending=max_pending, max_held_bytes=max_held_bytes),
        ledger=ledger,
        training=training,
        dispatch=dispatch,
        sampled=Sampled(backend=backend, provenance=provenance, ends=(2,), vocabulary=100),
        section=TinkerSection(**section),
        api_key=KEY,
        model=MODEL,
        architecture="qwen2",
    )

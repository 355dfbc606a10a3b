"""`python -m trainer.preflight --config FILE --output FILE`: every demonstration that the run would train beside RL.

A process of its own, because the source may be the user's code. Each row becomes tokens as it does in training, without torch: its texts
are there, and it fits. See `orchestrator.preflight`, which looks at the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.progress import track

from pipelinerl.config import Config
from pipelinerl.errors import DataError
from pipelinerl.launch.preflight import answer
from pipelinerl.runtime.findings import NUM_SAID, Finding, bad_rows, ok
from trainer.data.demonstrations import Demonstrations


def look(config: Config) -> Iterator[Finding]:
    """Look at every demonstration. Raises `ConfigError` and `DataError` where there are none to look at."""
    demonstrations = Demonstrations(config, beside_rl=True)
    bad: list[str] = []
    lengths: list[int] = []
    console = Console(stderr=True)
    rows = range(len(demonstrations))
    for number in track(rows, "demonstrations", console=console, transient=True, disable=not console.is_terminal):
        try:
            lengths.append(demonstrations.at(number).num_tokens)
        except DataError as error:
            bad.append(f"sft_stream.source: {error}" if len(bad) < NUM_SAID else "")
    yield from bad_rows(bad, of=f"{len(demonstrations):,} rows")
    if lengths:
        num_epochs = config.trainer.steps * config.sft_stream.batch_size / len(demonstrations)
        yield ok(
            f"sft_stream.source {config.sft_stream.source}",
            f"{len(demonstrations):,} rows of {min(lengths):,} to {max(lengths):,} tokens, median {np.median(lengths):,.0f}; each is"
            f" trained {num_epochs:.2g} times",
        )


if __name__ == "__main__":
    answer(look, module="trainer.preflight", description=__doc__)

"""`python -m trainer.preflight --config FILE --output FILE`: every demonstration that the run would train beside RL.

A process of its own, because the source may be the user's code. Each row becomes tokens as it does in training, without torch: its texts
are there, and it fits. See `orchestrator.preflight`, which looks at the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError, DataError
from trainer.demonstrations import Demonstrations

NUM_SAID = 3
"""Bad rows that are named; the others are counted."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.preflight", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved settings, as JSON")
    parser.add_argument("--output", type=Path, required=True, help="where the findings go, as JSON")
    arguments = parser.parse_args()
    config = Config.model_validate_json(arguments.config.read_bytes())
    sys.path.insert(0, os.getcwd())  # as in the processes of a run, modules of the working directory can be imported
    arguments.output.write_text(json.dumps(look(config)))


def look(config: Config) -> dict[str, list[str]]:
    """Problems and facts, each as sentences."""
    try:
        demonstrations = Demonstrations(config, beside_rl=True)
    except (ConfigError, DataError) as error:
        return {"problems": [str(error)]}
    bad: list[str] = []
    lengths: list[int] = []
    console = Console(stderr=True)
    rows = range(len(demonstrations))
    for number in track(rows, "demonstrations", console=console, transient=True, disable=not console.is_terminal):
        try:
            lengths.append(demonstrations.at(number).num_tokens)
        except DataError as error:
            bad.append(f"sft_stream.source: {error}" if len(bad) < NUM_SAID else "")
    problems = bad[:NUM_SAID]
    if len(bad) > NUM_SAID:
        problems[-1] += f"; and {len(bad) - NUM_SAID:,} more of {len(demonstrations):,} rows are bad"
    facts = [
        f"sft_stream.source {config.sft_stream.source}: {len(demonstrations):,} rows of {min(lengths):,} to {max(lengths):,} tokens, median"
        f" {np.median(lengths):,.0f}; each is trained {config.trainer.steps * config.sft_stream.batch_size / len(demonstrations):.2g} times"
        for _ in lengths[:1]
    ]
    return {"problems": problems, "facts": facts}


if __name__ == "__main__":
    main()

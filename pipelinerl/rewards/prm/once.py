"""Score whole traces once with the process reward model of a config, for `pipelinerl try`.

The model, the judge and the way in which a trace is cut into steps are those of `pipelinerl.rewards.prm.process`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipelinerl.config import Config
from pipelinerl.engine.environment import set_environment
from pipelinerl.errors import ConfigError
from pipelinerl.rewards.codec import load_codec
from pipelinerl.rewards.prm.process import killed_after, load_scorer
from pipelinerl.rewards.prm.steps import splitter_of


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.rewards.prm.once", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved settings, as JSON")
    parser.add_argument("--traces", type=Path, required=True, help="JSON: a list of {prompt, tokens, turn_ends}, in the policy's token ids")
    parser.add_argument("--output", type=Path, required=True, help="file that the scores are written to, as JSON")
    arguments = parser.parse_args()
    config = Config.model_validate_json(arguments.config.read_bytes())
    set_environment()
    try:
        answer: dict[str, Any] = {"traces": score(config, json.loads(arguments.traces.read_text()))}
    except ConfigError as error:
        answer = {"error": str(error)}
    arguments.output.write_text(json.dumps(answer))


def score(config: Config, traces: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """Return for each trace its `steps`, as (position of the last token, text, score or None, error), and the model's `version`."""
    scorer = load_scorer(config.prm)
    decode = load_codec(config.model.path).decode
    begun = []
    for number, trace in enumerate(traces):
        ends = trace.get("turn_ends")
        splitter = splitter_of(decode, turn_ends=ends, max_steps=config.prm.max_steps, separator=config.prm.separator)
        one = scorer.begin(str(number), 0, prompt=decode(trace["prompt"]), splitter=splitter)
        one.feed(trace["tokens"], is_last=True)
        begun.append(one)
    steps: list[list[tuple[int, str, float | None, str]]] = [[] for _ in traces]
    with killed_after(config.prm.deadline_s, "the process reward model"):
        for found in scorer.score(begun):
            steps[int(found.trace.rollout_id)].append((found.step.end, found.step.text, found.score, found.error))
    return [{"steps": each, "version": scorer.version} for each in steps]


if __name__ == "__main__":
    main()

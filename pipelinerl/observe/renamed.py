"""Names in the journals of older runs: old -> today's. Every reader gets its lines through `current`, so it knows today's names alone.

A journal keeps the names that it was written with. A name that changes gets a line here, and report, view, terminal and trackers read
runs of before as they read runs of now.
"""

from __future__ import annotations

import contextlib
from typing import Any

from pipelinerl.config.renamed import translate

Line = dict[str, Any]
"""One journal line, decoded."""

KINDS = {"evaluation_given_up": "evaluation_dropped", "lie": "violation"}
"""Kinds of lines."""
PRM = {"num_taken": "num_trace_tokens", "num_asked": "num_uncached_tokens", "num_flagged": "num_hopeless"}
"""Gauges of the process reward model, in lines of its own and in the field `prm` of a status."""
ENVIRONMENT = {"num_between": "num_awaiting_reply", "num_replies": "num_observations"}
"""Gauges of the environment, in the field `environment` of a status."""
FIELDS = {
    "step": {"set_aside_groups": "filtered_groups", "let_through_groups": "unfiltered_groups", "engines_differ": "engine_mismatch"},
    "sample": {"fate": "status", "steps": "step_scores"},
    "load": PRM,
    "roles": {"prm": "scorers", "prm_then": "scorers_then"},
    **{kind: {"identity": "rollouts"} for kind in ("status", "end")},
    **{kind: {"lineage": "rollback_epoch", "slot": "buffer"} for kind in ("joined", "trainer", "policy", "staged", "swap", "refused")},
}
"""Fields by the kind of line, which is today's."""
TRAINER_METRICS = {
    "ess": "ess_fraction",
    "kl": "mismatch_kl_k3",
    "mismatch_kl_fresh": "mismatch_kl_on_policy",
    "mismatch_kl_kept": "mismatch_kl_stale_kv",
    "tokens_kept": "tokens_stale_kv",
    "publish_beside_s": "publish_async_s",
}
"""Metrics within the field `trainer` of a step."""
STAGES = {
    "dispatch": "generation",
    "following": "prm",
    "comparing": "group_rewards",
    "replying": "environment",
    "delivery": "training",
    "refresh": "weight_sync",
}
"""Stages, which waits name."""
QUEUES = {"written": "generated", "followed": "prm_scored", "compared": "group_scored"}
"""Queues between stages, in the field `queues` of a status and in waits."""
QUEUE_FIELDS = {"ever": "num_items_total"}
ALARMS = {"kv_lag": "stale_kv"}


def current(line: Line) -> Line:
    """Return a line under today's names. Changes the line that it is given; fields of a wrong type stay as they are."""
    kind = str(line["kind"])
    kind = line["kind"] = KINDS.get(kind, kind)
    _rename(line, FIELDS.get(kind, {}))
    match kind:
        case "run" if isinstance(line.get("config"), dict):
            with contextlib.suppress(AttributeError, TypeError):  # damaged settings are shown as they are
                line["config"] = translate(line["config"])
        case "step":
            _rename(line.get("trainer"), TRAINER_METRICS)
        case "alarm":
            line["name"] = ALARMS.get(str(line.get("name")), str(line.get("name")))
        case "status":
            _rename_status(line)
    return line


def wait_name(name: str) -> str:
    """Return `stage: what` under today's names."""
    stage, colon, what = name.partition(": ")
    room = "room in " if what.startswith("room in ") else ""
    what = what.removeprefix(room)
    return f"{STAGES.get(stage, stage)}{colon}{room}{QUEUES.get(what, what)}"


def _rename_status(line: Line) -> None:
    _rename(line.get("prm"), PRM)
    _rename(line.get("environment"), ENVIRONMENT)
    queues, waited, waits = line.get("queues"), line.get("waited_s"), line.get("waits")
    _rename(queues, QUEUES)
    for queue in queues.values() if isinstance(queues, dict) else ():
        _rename(queue, QUEUE_FIELDS)
    if isinstance(waited, dict):
        line["waited_s"] = {wait_name(name): seconds for name, seconds in waited.items()}
    for wait in waits if isinstance(waits, list) else ():
        if isinstance(wait, dict):
            wait["stage"], _, wait["what"] = wait_name(f"{wait.get('stage')}: {wait.get('what')}").partition(": ")


def _rename(fields: object, names: dict[str, str]) -> None:
    """Rename keys in place, and keep their order; where a line has both names, today's counts."""
    if isinstance(fields, dict) and not names.keys().isdisjoint(fields):
        renamed = {names.get(name, name): value for name, value in fields.items() if names.get(name) not in fields}
        fields.clear()
        fields |= renamed

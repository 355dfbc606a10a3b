"""Every row of the table, and the rules no row has, as methods to be run; the rows they are run on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pipelinerl.algorithms.method import RULE_COLUMNS, Method
from pipelinerl.algorithms.methods import METHODS
from pipelinerl.algorithms.rules import COLUMNS, specs_of, with_columns
from tests.algorithms.rows import Seq, changed, method_of, random_seq

STATED: dict[str, dict[str, Any]] = {
    "dppo_kl": {"objective": {"threshold": 0.02}},
    "ipo": {"objective": {"threshold": 0.1}},
    "kimi": {"objective": {"tau": 0.5}},
    "dro": {"objective": {"beta": 0.5}},
    "kl_cov": {"objective": {"fraction": 0.2}},
    "clip_cov": {"objective": {"fraction": 0.2, "low": 0.0, "high": 9.0}},
    "m2po": {"masks": {"name": "m2po", "tau": 0.02}},
    "seq_mask_tis": {"masks": {"name": "geo_rs", "low": 0.9, "high": 1.1}},
    "gspo": {"objective": {"clip_low": 0.05, "clip_high": 0.05}},
}
MIXED: dict[str, dict[str, Any]] = {
    "mean of means, all auxiliary": {
        "aggregation": "seq-mean-token-mean",
        "auxiliary": [{"name": "entropy_bonus", "coef": 0.1}, "squared_log_ratio"],
        "kl": {"name": "k3_plus", "beta": 0.2},
    },
    "segments": {"proximal": "recomputed", "weight": "tis_segment", "aggregation": "seq-mean-token-sum"},
    "positive nll": {"auxiliary": {"name": "positive_nll", "coef": 0.5}},
    "sequence masks": {
        "proximal": "recomputed",
        "weight": "tis_sequence",
        "masks": [{"name": "geo_rs", "low": 0.8, "high": 1.25}, {"name": "veto", "low": 0.3}, {"name": "reject_sequence", "high": 0.1}],
        "aggregation": "seq-mean-token-mean",
    },
    "token masks first": {
        "proximal": "recomputed",
        "weight": "mis_sequence",
        "masks": ["ratio_band", "partial_rollout"],
        "mask_order": "before_weight",
    },
    "normalized weights of tokens": {
        "proximal": "recomputed",
        "weight": {"name": "icepop", "low": 0.7, "high": 1.4, "batch_normalize": True},
        "masks": "ratio_band",
    },
    "normalized weights of sequences": {
        "proximal": "recomputed",
        "weight": {"name": "tis_sequence", "cap": 1.5, "batch_normalize": True},
        "aggregation": "seq-mean-token-sum",
    },
    "overlong": {"masks": "overlong", "aggregation": "seq-mean-token-mean"},
    "loglinear": {"proximal": "loglinear", "kl": {"name": "unbiased", "beta": 0.3}},
}


def filled(method: Method) -> dict[str, Any]:
    """The columns of a method with 0.1 for every option that has no default: a new row or rule needs no entry above to be tested."""
    columns: dict[str, Any] = {}
    for column, rule, _ in specs_of(method):
        options = {"name": rule.name} | {option: 0.1 if value is None else value for option, value in rule.options.items()}
        columns[column] = options if column in RULE_COLUMNS else [*columns.get(column, []), options]
    return columns


EVERY_METHOD = {name: method_of(name, **filled(with_columns(METHODS[name], STATED.get(name, {})))) for name in METHODS} | {
    label: method_of("grpo", **columns) for label, columns in MIXED.items()
}
EVERY_RULE = {
    f"{column} {rule}": method_of("grpo", **filled(with_columns(METHODS["grpo"], {"proximal": "recomputed", column: rule})))
    for column in ("weight", "masks", "kl", "auxiliary")
    for rule in COLUMNS[column]
}
"""Each rule that changes the loss alone, beside what `grpo` has."""


def sample(seed: int, lengths: Sequence[int] = (4, 7, 1, 9, 3, 6)) -> list[Seq]:
    generator = random.Random(seed)
    sequences = [random_seq(generator, length=length, weight=generator.choice([0.0, 1.0, 4.0])) for length in lengths]
    return [changed(seq, truncated=index % 3 == 1) for index, seq in enumerate(sequences)]

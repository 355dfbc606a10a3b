"""The same rows through TRL's loss and ours: value and gradient agree, as far as TRL's options in float32 let them.

The file is made by `golden/make_trl_losses.py`.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.algorithms.loss import denominator
from tests.algorithms.rows import Seq, loss_and_gradient, method_of

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden").joinpath("trl_losses.json").read_text())
SEQUENCES_MEAN: dict[str, Any] = {"aggregation": "seq-mean-token-mean"}
OURS: dict[str, dict[str, Any]] = {
    "dapo": {"objective": {"clip_high": 0.28}},
    "grpo": SEQUENCES_MEAN,
    "grpo_kl": {**SEQUENCES_MEAN, "kl": {"name": "k3", "beta": 0.04}},
    "grpo_unbiased_kl": {**SEQUENCES_MEAN, "kl": {"name": "unbiased", "beta": 0.04}},
    "dr_grpo": {"aggregation": "seq-mean-token-sum-norm"},
    "gspo": {**SEQUENCES_MEAN, "objective": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15}},
    "cispo": {"objective": "cispo"},
    "cispo_tight": {"objective": {"name": "cispo", "clip_high": 0.2}},
    "sapo": {**SEQUENCES_MEAN, "objective": "sapo"},
    "vespo": {"objective": "vespo"},
    "opsm": {"masks": {"name": "opsm", "delta": 0.05}},
    "dual_clip": {"objective": {"dual_clip": 1.3}},
    **{name: {"weight": {"name": name, "cap": 1.2}} for name in ("tis_token", "tis_sequence", "mis_token", "mis_sequence")},
    "icepop": {"weight": {"name": "icepop", "low": 0.8, "high": 1.2}},
}
"""Our columns for each of TRL's cases; its epsilon_high of cispo is the bound itself, ours the width above 1; its delta is a dual clip."""


def sequences() -> list[Seq]:
    found = []
    for row, mask in enumerate(GOLDEN["mask"]):
        length = sum(mask)
        found.append(
            Seq(
                logprobs=GOLDEN["logprobs"][row][:length],
                old=GOLDEN["old"][row][:length],
                behaviour=GOLDEN["behaviour"][row][:length],
                reference=GOLDEN["reference"][row][:length],
                advantages=[GOLDEN["advantages"][row]] * length,
            )
        )
    return found


@pytest.mark.parametrize("case", OURS)
def test_loss_and_gradient_are_those_of_trl(case: str) -> None:
    expected = GOLDEN["cases"][case]
    method = method_of("grpo", **{"proximal": "recomputed", "weight": "none"} | OURS[case])
    loss, gradient, _ = loss_and_gradient(sequences(), method=method)
    num_tokens = sum(map(sum, GOLDEN["mask"]))
    divisor = denominator(method.aggregation, num_tokens=num_tokens, num_sequences=len(GOLDEN["mask"]), max_tokens=9)
    theirs = [slope for row, mask in zip(expected["gradient"], GOLDEN["mask"], strict=True) for slope in row[: sum(mask)]]
    assert any(theirs)
    assert loss / divisor == pytest.approx(expected["loss"], rel=1e-6)
    assert [slope / divisor for slope in gradient] == pytest.approx(theirs, rel=1e-6, abs=1e-9)


def test_every_case_is_compared_and_clips_and_masks_act_in_them() -> None:
    assert set(OURS) == set(GOLDEN["cases"])
    pairs = [("cispo", "cispo_tight"), ("dapo", "opsm"), ("grpo", "gspo"), ("grpo_kl", "grpo_unbiased_kl"), ("dapo", "dual_clip")]
    weights = ["dapo", "tis_token", "tis_sequence", "mis_token", "mis_sequence", "icepop"]
    for case, other in [*pairs, *itertools.pairwise(weights)]:
        assert GOLDEN["cases"][case]["loss"] != pytest.approx(GOLDEN["cases"][other]["loss"], rel=1e-3)

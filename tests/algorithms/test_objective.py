"""Every objective against a scalar form written out here, by value and by finite differences of its gradient.

A reference form gets two copies of the sequence's log-probabilities: `x`, which is differentiated, and `frozen`, which stands wherever the
paper stops the gradient. All run with proximal "engine", so that r = pi / mu.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pipelinerl.algorithms.loss import StepStatistics
from pipelinerl.algorithms.method import Method, Rule
from tests.algorithms.rows import Seq, changed, loss_and_gradient, method_of, random_seq, single

Form = Callable[[list[float], list[float], Seq], float]


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def per_token(form: Callable[[float, float, float, float, float], float]) -> Form:
    """A form of (x, frozen, mu, A, ref) summed over tokens; log-probabilities all."""

    def whole(x: list[float], frozen: list[float], seq: Seq) -> float:
        return sum(form(*token) for token in zip(x, frozen, seq.behaviour, seq.advantages, seq.reference, strict=True))

    return whole


def clip_form(low: float, high: float, dual: float) -> Form:
    def form(x: float, _f: float, mu: float, a: float, _r: float) -> float:
        r = math.exp(x - mu)
        surrogate = min(r * a, clamp(r, 1 - low, 1 + high) * a)
        return -max(surrogate, dual * a) if a < 0 and dual else -surrogate

    return per_token(form)


def gspo_form(x: list[float], frozen: list[float], seq: Seq) -> float:
    mean = sum(f - mu for f, mu in zip(frozen, seq.behaviour, strict=True)) / len(x)
    total = 0.0
    for xt, ft, a in zip(x, frozen, seq.advantages, strict=True):
        s = math.exp(mean) * math.exp(xt) / math.exp(ft)
        total -= min(s * a, clamp(s, 1 - 0.05, 1 + 0.05) * a)
    return total


def gmpo_form(x: list[float], _frozen: list[float], seq: Seq) -> float:
    a = seq.advantages[0]
    logs = [xt - mu for xt, mu in zip(x, seq.behaviour, strict=True)]
    held = [min(v, 0.1) if a > 0 else max(v, -0.1) for v in logs]
    return len(x) * -math.exp(sum(held) / len(held)) * a


def topr_form(x: list[float], frozen: list[float], seq: Seq) -> float:
    product = math.exp(sum(f - mu for f, mu in zip(frozen, seq.behaviour, strict=True)))
    weight = clamp(product, 0, 1) if seq.advantages[0] <= 0 else 1.0
    return sum(-weight * a * xt for xt, a in zip(x, seq.advantages, strict=True))


def sapo_form(x: float, _f: float, mu: float, a: float, _r: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (math.exp(x - mu) - 1))) * a


def tv_kept(f: float, mu: float, a: float) -> float:
    change = math.exp(f) - math.exp(mu)
    return float(change <= 0.05) if a > 0 else float(change >= -0.05)


def dppo_kl_form(x: float, f: float, mu: float, a: float, _r: float) -> float:
    p, m = math.exp(f), math.exp(mu)
    kl = m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p))
    wrong_way = p > m if a > 0 else p < m
    return 0.0 if kl > 0.01 and wrong_way else -min(p / m, 20) * a * x


FORMS: dict[str, tuple[Method, Form]] = {
    "clip": (method_of("grpo", proximal="engine", weight="none"), clip_form(0.2, 0.2, 0)),
    "dual clip": (method_of("grpo_dual_clip", objective={"dual_clip": 1.3}), clip_form(0.2, 0.2, 1.3)),
    "dapo": (method_of("dapo", proximal="engine", weight="none"), clip_form(0.2, 0.28, 0)),
    "gspo": (method_of("gspo", objective={"clip_low": 0.05, "clip_high": 0.05}), gspo_form),
    "cispo": (
        method_of("cispo", objective={"clip_low": 0.3, "clip_high": 0.1}),
        per_token(lambda x, f, mu, a, _r: -clamp(math.exp(f - mu), 0.7, 1.1) * a * x),
    ),
    "sapo": (method_of("sapo"), per_token(sapo_form)),
    "gmpo": (method_of("gmpo", objective={"clip_low": 0.1, "clip_high": 0.1}), gmpo_form),
    "dppo_tv": (
        method_of("dppo_tv", objective={"clip_low": 0.05, "clip_high": 0.05, "cap": 1.2}),
        per_token(lambda x, f, mu, a, _r: -min(math.exp(f - mu), 1.2) * a * x * tv_kept(f, mu, a)),
    ),
    "dppo_kl": (method_of("dppo_kl", objective={"threshold": 0.01}), per_token(dppo_kl_form)),
    "prime_rl": (
        method_of("prime_rl", objective={"clip_low": 0.05, "clip_high": 0.05, "adv_tau": 1.5}, auxiliary=[]),
        per_token(lambda x, f, mu, a, _r: -tv_kept(f, mu, a) * 1.5 * a * math.exp(x - mu)),
    ),
    "ipo": (
        method_of("ipo", objective={"threshold": 0.05}, auxiliary=[]),
        per_token(lambda x, f, mu, a, _r: -float(abs(math.exp(f) - math.exp(mu)) <= 0.05) * a * math.exp(x - mu)),
    ),
    "opd": (
        method_of("opd", objective={"threshold": 0.05}, auxiliary=[]),
        per_token(lambda x, f, mu, _a, ref: -float(math.exp(f) - math.exp(mu) >= -0.05) * (ref - f) * math.exp(x - mu)),
    ),
    "topr": (method_of("topr"), topr_form),
    "topr_token": (
        method_of("topr_token"),
        per_token(lambda x, f, mu, a, _r: -(1.0 if a > 0 else clamp(math.exp(f - mu), 0, 1)) * a * x),
    ),
    "kimi": (method_of("kimi", objective={"tau": 0.7}), per_token(lambda x, _f, mu, a, _r: -a * x + 0.35 * (x - mu) ** 2)),
    "dro": (method_of("dro", objective={"beta": 0.7}), per_token(lambda x, _f, mu, a, _r: -(a * x - 0.35 * (x - mu) ** 2))),
    "gpg": (method_of("gpg", proximal="engine", weight="none"), per_token(lambda x, _f, _mu, a, _r: -a * x)),
    "reinforce_is": (
        method_of("reinforce_is", objective={"cap": 1.1}),
        per_token(lambda x, f, mu, a, _r: -min(math.exp(f - mu), 1.1) * a * x),
    ),
}


def difference_quotient(form: Form, seq: Seq) -> list[float]:
    step = 1e-6
    slopes = []
    for t in range(len(seq.logprobs)):
        up, down = list(seq.logprobs), list(seq.logprobs)
        up[t] += step
        down[t] -= step
        slopes.append((form(up, seq.logprobs, seq) - form(down, seq.logprobs, seq)) / (2 * step))
    return slopes


@pytest.mark.parametrize("name", FORMS)
def test_objective_equals_its_formula_in_value_and_gradient(name: str) -> None:
    method, form = FORMS[name]
    method = method_of(method.name, **columns_of(method), aggregation="token-sum")
    for seed in range(8):
        generator = random.Random(seed)
        sequences = [random_seq(generator, length=length, holes=False) for length in (5, 1, 8)]
        loss, gradient, _ = loss_and_gradient(sequences, method=method)
        assert loss == pytest.approx(sum(form(seq.logprobs, seq.logprobs, seq) for seq in sequences), rel=1e-9, abs=1e-12)
        slopes = [slope for seq in sequences for slope in difference_quotient(form, seq)]
        assert gradient == pytest.approx(slopes, rel=1e-6, abs=1e-8)


def columns_of(method: Method) -> dict[str, Any]:
    columns: dict[str, Any] = {name: plain(getattr(method, name)) for name in ("objective", "proximal", "weight")}
    return columns | {"auxiliary": [plain(rule) for rule in method.auxiliary]}


def plain(rule: Rule) -> dict[str, Any]:
    return {"name": rule.name, **rule.options}


def token_loss(method: Method, *, ratio: float, advantage: float) -> tuple[float, float]:
    mu = -3.0
    loss, gradient, _ = loss_and_gradient([single(mu + math.log(ratio), behaviour=mu, advantage=advantage)], method=method)
    return loss, gradient[0]


@pytest.mark.parametrize(
    ("dual_clip", "ratio", "advantage", "expected"),
    [(3.0, 5.0, -1.0, 3.0), (0.0, 5.0, -1.0, 5.0), (3.0, 0.5, -1.0, 0.8), (3.0, 5.0, 1.0, -1.2), (3.0, 4.0, 2.0, -2.4)],
)
def test_dual_clip_bounds_bad_answers_only(dual_clip: float, ratio: float, advantage: float, expected: float) -> None:
    method = method_of("grpo_dual_clip", objective={"dual_clip": dual_clip})
    assert token_loss(method, ratio=ratio, advantage=advantage)[0] == pytest.approx(expected)


def test_clip_cuts_the_gradient_only_where_the_ratio_left_in_the_direction_of_the_advantage() -> None:
    method = method_of("grpo", proximal="engine", weight="none")
    assert token_loss(method, ratio=1.3, advantage=1.0)[1] == 0
    assert token_loss(method, ratio=0.5, advantage=-1.0)[1] == 0
    assert token_loss(method, ratio=0.5, advantage=1.0)[1] == pytest.approx(-0.5)
    assert token_loss(method, ratio=1.3, advantage=-1.0)[1] == pytest.approx(1.3)


@pytest.mark.parametrize(("ratio", "good", "bad"), [(1.0, 2.0, 1.90476), (1.5, 2.48984, 2.39359)])
def test_sapo_gate_has_the_published_values(ratio: float, good: float, bad: float) -> None:
    assert token_loss(method_of("sapo"), ratio=ratio, advantage=1.0)[0] == pytest.approx(-good, abs=1e-5)
    assert token_loss(method_of("sapo"), ratio=ratio, advantage=-1.0)[0] == pytest.approx(bad, abs=1e-5)


def ratios(logs: Sequence[float], advantage: float) -> Seq:
    return Seq(logprobs=[-2.0 + log for log in logs], behaviour=[-2.0] * len(logs), advantages=[advantage] * len(logs))


def test_gspo_takes_the_geometric_mean_of_the_ratios() -> None:
    wide = method_of("gspo", objective={"clip_low": 0.5, "clip_high": 0.5})
    loss, _, _ = loss_and_gradient([ratios([0.01, -0.02, 0.04], 1.0)], method=wide)
    assert loss == pytest.approx(-1.010050, abs=1e-6)


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    """L = -A s, s = exp(mean log r): dL/dlog pi_t = -A s / T, every token alike."""
    wide = method_of("gspo", objective={"clip_low": 0.5, "clip_high": 0.5})
    _, gradient, _ = loss_and_gradient([ratios([0.01, -0.02, 0.04], 2.0)], method=wide)
    assert gradient == pytest.approx([-2.0 * math.exp(0.01) / 3] * 3)


def test_gspo_clips_the_whole_sequence_or_none_of_it() -> None:
    _, gradient, sums = loss_and_gradient([ratios([0.5, -0.4, 0.01], 1.0), ratios([0.0001, 0.0], 1.0)], method=method_of("gspo"))
    assert gradient[:3] == [0, 0, 0]
    assert all(slope < 0 for slope in gradient[3:])
    assert float(sums.meters["clipped_sum"]) == 3


def test_gmpo_clamps_above_for_good_and_below_for_bad_answers() -> None:
    method = method_of("gmpo", objective={"clip_low": 0.2, "clip_high": 0.2})
    logs = [0.5, -0.5]
    assert loss_and_gradient([ratios(logs, 1.0)], method=method)[0] == pytest.approx(-math.exp((0.2 - 0.5) / 2))
    assert loss_and_gradient([ratios(logs, -1.0)], method=method)[0] == pytest.approx(math.exp((0.5 - 0.2) / 2))


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "topr", "topr_token", "reinforce_is"])
def test_gradient_flows_through_log_pi_alone(name: str) -> None:
    """-c A log pi has gradient -c A; were the coefficient differentiated too, log pi would appear in it."""
    method = method_of(name)
    loss, gradient = token_loss(method, ratio=0.9, advantage=-1.0)
    log_pi = -3.0 + math.log(0.9)
    assert gradient == pytest.approx(loss / log_pi)


def test_cispo_keeps_a_gradient_where_the_ratio_is_clipped() -> None:
    assert token_loss(method_of("cispo"), ratio=8.0, advantage=1.0)[1] == pytest.approx(-5.0)


def test_dppo_kl_does_not_mask_a_move_towards_the_engine() -> None:
    method = method_of("dppo_kl", objective={"threshold": 0.001})
    assert token_loss(method, ratio=3.0, advantage=1.0)[1] == 0, "away from mu"
    assert token_loss(method, ratio=3.0, advantage=-1.0)[1] != 0, "back towards mu"
    assert token_loss(method, ratio=0.3, advantage=1.0)[1] != 0, "back towards mu"


def test_topr_uses_the_ratio_of_the_trajectory_and_its_token_form_does_not() -> None:
    seq = ratios([math.log(0.5), math.log(0.5)], -1.0)
    _, whole, _ = loss_and_gradient([seq], method=method_of("topr"))
    _, tokens, _ = loss_and_gradient([seq], method=method_of("topr_token"))
    assert whole == pytest.approx([0.25, 0.25])
    assert tokens == pytest.approx([0.5, 0.5])


def test_topr_does_not_weigh_good_answers() -> None:
    assert token_loss(method_of("topr"), ratio=0.01, advantage=1.0)[1] == pytest.approx(-1.0)


def test_the_squared_term_of_prime_rl_covers_tokens_its_mask_drops() -> None:
    method = method_of("prime_rl", objective={"clip_high": 0.01})
    _, dropped = token_loss(method, ratio=2.0, advantage=1.0)
    assert dropped == pytest.approx(2 * 1e-3 * math.log(2.0))


def test_opd_pulls_towards_the_teacher_without_reading_advantages() -> None:
    method = method_of("opd", auxiliary=[])
    seq = single(-1.0, behaviour=-1.0, advantage=float("nan"), reference=[-0.4])
    _, gradient, _ = loss_and_gradient([changed(seq, advantages=[123.0])], method=method)
    assert gradient == pytest.approx([-0.6])


def test_kl_cov_penalises_the_tokens_it_is_told_to() -> None:
    method = method_of("kl_cov", weight="none", objective={"beta": 0.5}, aggregation="token-sum")
    seq = Seq(logprobs=[-1.0, -0.5], old=[-1.2, -0.6], behaviour=[-1.2, -0.6], advantages=[-1.0, 1.0])
    known = StepStatistics(mean_advantage=0.0, mean_logprob=-1.0, covariance_threshold=0.3)
    loss, gradient, _ = loss_and_gradient([seq], method=method, statistics=known)
    assert loss == pytest.approx(math.exp(0.2) - math.exp(0.1) + 0.5 * 0.1)
    assert gradient == pytest.approx([math.exp(0.2), -math.exp(0.1) + 0.5])

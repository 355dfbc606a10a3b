"""The loss of a whole step in plain Python, a token at a time, from the formulas in the table: what the product's loss must equal.

Each log-probability comes twice: `x` is differentiated, `f` stands wherever a formula stops the gradient. A difference quotient over `x`
with `f` held still is then the gradient the formula asks for. Nothing here is shared with the product, but the random draws of clip_cov.
A rule without a form here fails `test_every_method`: a new one brings its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from pipelinerl.algorithms.method import Aggregation, Method, Rule
from tests.algorithms.rows import DIVERGES, Seq

LIMIT = 20.0
_F = TypeVar("_F")


class Forms(dict[str, _F]):
    """The rules of one column in plain Python, by name."""

    def __missing__(self, name: str) -> _F:
        raise KeyError(
            f"rule {name} has no form in plain Python: write it in tests/algorithms/reference.py, and add it to its column's table"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One trained token."""

    x: float
    f: float
    mu: float
    prox: float
    ref: float
    entropy: float
    a: float
    second_moment: float
    """(log old - log mu)^2."""
    old: float
    version: int
    run: int
    """Number of the unbroken run of trained tokens it lies in."""
    draw: float

    @property
    def log_ratio(self) -> float:
        return clamp(self.x - self.prox, -LIMIT, LIMIT)

    @property
    def r(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def sg_log_ratio(self) -> float:
        return clamp(self.f - self.prox, -LIMIT, LIMIT)

    @property
    def sg_r(self) -> float:
        return math.exp(self.sg_log_ratio)


Row = list[Token]
"""The trained tokens of one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All sequences of a step under one method."""

    method: Method
    rows: list[Row]
    sequences: Sequence[Seq]
    trained_version: int

    @property
    def tokens(self) -> list[Token]:
        return [token for row in self.rows for token in row]

    def rho(self, token: Token) -> float:
        anchor = token.f if self.method.proximal.name == "engine" else token.prox
        return clamp(anchor - token.mu, -LIMIT, LIMIT)


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def loss(
    method: Method, sequences: Sequence[Seq], *, moved: dict[tuple[int, int], float], draws: list[list[float]], trained_version: int = 5
) -> float:
    """The raw sum of a step; `moved` says by how much `x` of (sequence, position) is off its `f`."""
    rows = [
        list(_tokens(method, seq, {t: by for (n, t), by in moved.items() if n == number}, draws[number], trained_version))
        for number, seq in enumerate(sequences)
    ]
    step = Step(method=method, rows=rows, sequences=sequences, trained_version=trained_version)
    return sum(_sequence_loss(step, number) for number in range(len(rows)))


def _sequence_loss(step: Step, number: int) -> float:
    row, seq, method = step.rows[number], step.sequences[number], step.method
    if not row:
        return 0.0
    keeps = [all(kept) for kept in zip(*(MASKS[rule.name](step, number, **rule.options) for rule in method.masks), strict=True)]
    keeps = keeps or [True] * len(row)
    counted = [token for token, keep in zip(row, keeps, strict=True) if keep or method.mask_order != "before_weight"]
    total, mean_weight = 0.0, _mean_weight(step)
    objective = OBJECTIVES[method.objective.name](step, row, **method.objective.options)
    for index, token in enumerate(row):
        weight = _weight(step, counted, token) / mean_weight
        total += weight * keeps[index] * objective[index]
        if method.kl.name != "none":
            total += faded(method.kl, "beta", step) * KLS[method.kl.name](token, float(method.kl.options.get("clamp") or math.inf))
        total += sum(AUXILIARY[rule.name](step, number, token, rule) for rule in method.auxiliary)
    return total * seq.weight / _unit(method, seq, row)


def _unit(method: Method, seq: Seq, row: Row) -> float:
    match method.aggregation:
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return len(row)
        case _:
            return 1.0


def _tokens(method: Method, seq: Seq, moved: dict[int, float], draws: list[float], trained_version: int) -> Iterator[Token]:
    trained = [t for t, loss_mask in enumerate(seq.trained()) if loss_mask]
    for t in trained:
        f, mu, old, version = seq.logprobs[t], seq.behaviour[t], seq.old[t], seq.versions[t]
        run = next(number for number, run in enumerate(_runs(seq.trained())) if t in run)
        yield Token(
            x=f + moved.get(t, 0.0),
            f=f,
            mu=mu,
            prox=PROXIMAL[method.proximal.name](f, mu, old, trained_version - version, **method.proximal.options),
            ref=seq.reference[t],
            entropy=seq.entropy[t],
            a=seq.advantages[t],
            second_moment=clamp(old - mu, -LIMIT, LIMIT) ** 2,
            old=old,
            version=version,
            run=run,
            draw=draws[t],
        )


def _runs(trained: list[bool]) -> list[list[int]]:
    return [list(run) for loss_mask, run in groupby(range(len(trained)), key=lambda t: trained[t]) if loss_mask]


# --- the proximal policy and the weight -----------------------------------------------------------------------------------------


def _loglinear(f: float, mu: float, _old: float, age: int, *, prox_lag: int) -> float:
    return mu + (clamp((age - prox_lag) / age, 0, 1) if age > 0 else 0.0) * (f - mu)


PROXIMAL: Forms[Callable[..., float]] = Forms(
    {
        "current": lambda f, _mu, _old, _age: f,
        "engine": lambda _f, mu, _old, _age: mu,
        "recomputed": lambda _f, _mu, old, _age: old,
        "loglinear": _loglinear,
    }
)


def _product(step: Step, row: Row) -> float:
    return math.exp(clamp(sum(step.rho(token) for token in row), -LIMIT, LIMIT))


def _geometric(step: Step, row: Row) -> float:
    return math.exp(mean([step.rho(token) for token in row]))


def _up_to(value: float, cap: float) -> float:
    return value if value <= cap else 0.0


def _weight(step: Step, row: Row, token: Token) -> float:
    rule = step.method.weight
    return WEIGHTS[rule.name](step, row, token, **{name: value for name, value in rule.options.items() if name != "batch_normalize"})


def _mean_weight(step: Step) -> float:
    """Over tokens, or over sequences where a weight is a sequence's; 1 where nothing is divided by it, or it is 0."""
    if not step.method.weight.options.get("batch_normalize"):
        return 1.0
    if step.method.weight.name in ("tis_sequence", "tis_geometric", "mis_sequence"):
        return mean([_weight(step, row, row[0]) for row in step.rows if row]) or 1.0
    return mean([_weight(step, row, token) for row in step.rows for token in row]) or 1.0


WEIGHTS: Forms[Callable[..., float]] = Forms(
    {
        "none": lambda _s, _row, _t: 1.0,
        "tis_token": lambda s, _row, t, cap, floor: clamp(math.exp(s.rho(t)), floor, cap),
        "tis_sequence": lambda s, row, _t, cap, floor: clamp(_product(s, row), floor, cap),
        "tis_geometric": lambda s, row, _t, cap, floor: clamp(_geometric(s, row), floor, cap),
        "tis_segment": lambda s, row, t, cap: min(_geometric(s, [other for other in row if other.run == t.run]), cap),
        "mis_token": lambda s, _row, t, cap: _up_to(math.exp(s.rho(t)), cap),
        "mis_sequence": lambda s, row, _t, cap: _up_to(_product(s, row), cap),
        "icepop": lambda s, _row, t, low, high: math.exp(s.rho(t)) if low <= math.exp(s.rho(t)) <= high else 0.0,
    }
)


# --- masks -----------------------------------------------------------------------------------------------------------------------


def _binary_kl(log_p: float, log_q: float) -> float:
    p, q = math.exp(log_p), math.exp(log_q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _metric(step: Step, token: Token, metric: str) -> float:
    log_rho = step.rho(token)
    return {
        "ratio": lambda: math.exp(log_rho),
        "k1": lambda: log_rho,
        "k2": lambda: log_rho**2 / 2,
        "k3": lambda: math.exp(log_rho) - 1 - log_rho,
        "binary_kl": lambda: _binary_kl(token.mu, token.mu + log_rho),
    }[metric]()


def _by_token(keeps: Callable[..., bool]) -> Callable[..., list[bool]]:
    return lambda step, number, **options: [keeps(step, token, **options) for token in step.rows[number]]


def _by_sequence(keeps: Callable[..., bool]) -> Callable[..., list[bool]]:
    return lambda step, number, **options: [keeps(step, step.rows[number], **options)] * len(step.rows[number])


def _reject_sequence(step: Step, row: Row, *, metric: str, over: str, low: float, high: float) -> bool:
    values = [_metric(step, token, metric) for token in row]
    pooled = {"mean": mean, "sum": sum, "max": max}[over](values)
    return low <= (math.exp(pooled) if metric == "k1" else pooled) <= high


def _m2po(step: Step, token: Token, *, tau: float) -> bool:
    squares = sorted(other.second_moment for other in step.tokens)
    kept = max((count for count in range(1, len(squares) + 1) if mean(squares[:count]) < tau), default=0)
    return kept > 0 and token.second_moment <= squares[kept - 1]


def _top_entropy(step: Step, token: Token, *, fraction: float) -> bool:
    entropies = sorted((other.entropy for other in step.tokens), reverse=True)
    return token.entropy >= entropies[max(1, int(fraction * len(entropies))) - 1] - 1e-6


MASKS: Forms[Callable[..., list[bool]]] = Forms(
    {
        "outlier_band": _by_token(lambda s, t, low, high: low <= math.exp(s.rho(t)) <= high),
        "ratio_band": _by_token(lambda s, t, low, high: low <= math.exp(s.rho(t)) <= high),
        "probability_band": _by_token(lambda s, t, high: abs(math.exp(t.mu + s.rho(t)) - math.exp(t.mu)) <= high),
        "kpop": _by_token(lambda s, t, high: max(_binary_kl(t.mu + s.rho(t), t.mu), _binary_kl(t.mu, t.mu + s.rho(t))) <= high),
        "geo_rs": _by_sequence(lambda s, row, low, high: low <= _geometric(s, row) <= high),
        "k3_rs": _by_sequence(lambda s, row, high: mean([_metric(s, t, "k3") for t in row]) <= high),
        "product_band": _by_sequence(lambda s, row, low, high: low <= _product(s, row) <= high),
        "veto": _by_sequence(lambda s, row, low: all(math.exp(s.rho(t)) >= low for t in row)),
        "reject_token": _by_token(
            lambda s, t, metric, low, high: low <= _metric(s, t, "ratio" if metric == "k1" else metric) <= high,
        ),
        "reject_sequence": _by_sequence(_reject_sequence),
        "opsm": _by_sequence(lambda _s, row, delta: not (mean([t.a for t in row]) < 0 and mean([t.prox - t.f for t in row]) > delta)),
        "vaco_tv": lambda s, number, delta: [
            not (mean([abs(math.exp(s.rho(o)) - 1) for o in s.rows[number]]) > delta and s.rho(t) * t.a > 0) for t in s.rows[number]
        ],
        "m2po": _by_token(_m2po),
        "top_entropy": _by_token(_top_entropy),
        "tv_gate": _by_sequence(lambda s, row, high: mean([abs(math.exp(s.rho(t)) - 1) for t in row]) / 2 <= high),
        "overlong": lambda s, number: [not s.sequences[number].truncated] * len(s.rows[number]),
        "version_withhold": _by_token(lambda s, t, bound: s.trained_version - t.version <= bound),
        "partial_rollout": lambda s, number: [t.version == max(o.version for o in s.rows[number]) for t in s.rows[number]],
    }
)


# --- objectives ------------------------------------------------------------------------------------------------------------------


def _clipped(r: float, a: float, low: float, high: float, dual: float = 0.0) -> float:
    surrogate = min(r * a, clamp(r, 1 - low, 1 + high) * a)
    return -max(surrogate, dual * a) if a < 0 and dual else -surrogate


def _each(form: Callable[..., float]) -> Callable[..., list[float]]:
    return lambda _step, row, **options: [form(token, **options) for token in row]


def _gspo(_step: Step, row: Row, *, clip_low: float, clip_high: float) -> list[float]:
    s = math.exp(mean([t.sg_log_ratio for t in row]))
    return [_clipped(s * math.exp(t.x - t.f), t.a, clip_low, clip_high) for t in row]


def _sapo(t: Token, *, tau_positive: float, tau_negative: float) -> float:
    tau = tau_positive if t.a > 0 else tau_negative
    return -4 / tau / (1 + math.exp(-tau * (t.r - 1))) * t.a


def _gmpo(_step: Step, row: Row, *, clip_low: float, clip_high: float) -> list[float]:
    held = [min(t.log_ratio, clip_high) if t.a >= 0 else max(t.log_ratio, -clip_low) for t in row]
    return [-math.exp(mean(held)) * mean([t.a for t in row])] * len(row)


def _tv_keeps(t: Token, low: float, high: float) -> bool:
    change = math.exp(t.f) - math.exp(t.mu)
    return change <= high if t.a > 0 else change >= -low


def _dppo_kl(t: Token, *, threshold: float, cap: float) -> float:
    wrong_way = t.f > t.mu if t.a > 0 else t.f < t.mu
    return 0.0 if wrong_way and t.a and _binary_kl(t.mu, t.f) > threshold else -min(t.sg_r, cap) * t.a * t.x


def _topr(_step: Step, row: Row, *, cap: float) -> list[float]:
    product = math.exp(clamp(sum(t.sg_log_ratio for t in row), -LIMIT, LIMIT))
    return [-(1.0 if t.a > 0 else clamp(product, 0, cap)) * t.a * t.x for t in row]


def _covariances(step: Step) -> dict[int, float]:
    tokens = step.tokens
    advantage, logprob = mean([t.a for t in tokens]), mean([t.old for t in tokens])
    return {id(t): (t.a - advantage) * (t.old - logprob) for t in tokens}


def _clip_cov(step: Step, row: Row, *, clip_low: float, clip_high: float, fraction: float, low: float, high: float) -> list[float]:
    cov = _covariances(step)
    candidates = sum(low < value < high for value in cov.values())
    chance = min(1.0, max(1, int(fraction * len(cov))) / candidates) if candidates else 0.0
    return [0.0 if low < cov[id(t)] < high and t.draw < chance else _clipped(t.r, t.a, clip_low, clip_high) for t in row]


def _kl_cov(step: Step, row: Row, *, fraction: float, beta: float) -> list[float]:
    cov = _covariances(step)
    smallest = sorted(cov.values(), reverse=True)[max(1, int(fraction * len(cov))) - 1]
    return [-t.r * t.a + (beta * abs(t.log_ratio) if cov[id(t)] >= smallest else 0.0) for t in row]


def _vespo(_step: Step, row: Row, *, k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float) -> list[float]:
    log_w = clamp(sum(t.sg_log_ratio for t in row), math.log(1e-8), LIMIT)

    def phi(a: float) -> float:
        k, rate = (k_positive, lambda_positive) if a >= 0 else (k_negative, lambda_negative)
        return math.exp(rate + k * log_w - rate * math.exp(log_w))

    return [-phi(t.a) * t.a * t.x for t in row]


OBJECTIVES: Forms[Callable[..., list[float]]] = Forms(
    {
        "vespo": _vespo,
        "clip": _each(lambda t, clip_low, clip_high, dual_clip: _clipped(t.r, t.a, clip_low, clip_high, dual_clip)),
        "gspo": _gspo,
        "cispo": _each(lambda t, clip_low, clip_high: -clamp(t.sg_r, 1 - clip_low, 1 + clip_high) * t.a * t.x),
        "sapo": _each(_sapo),
        "gmpo": _gmpo,
        "dppo_tv": _each(lambda t, clip_low, clip_high, cap: -min(t.sg_r, cap) * t.a * t.x * _tv_keeps(t, clip_low, clip_high)),
        "dppo_kl": _each(_dppo_kl),
        "prime_rl": _each(lambda t, clip_low, clip_high, adv_tau: -_tv_keeps(t, clip_low, clip_high) * adv_tau * t.a * t.r),
        "ipo": _each(lambda t, threshold, adv_tau: -(abs(math.exp(t.f) - math.exp(t.mu)) <= threshold) * adv_tau * t.a * t.r),
        "opd": _each(
            lambda t, threshold: -(math.exp(t.f) - math.exp(t.mu) >= -threshold) * clamp(t.ref - t.f, -LIMIT, LIMIT) * t.r,
        ),
        "gkd": _each(lambda t, mix: DIVERGES * (t.x - t.ref) ** 2),
        "topr": _topr,
        "topr_token": _each(lambda t, cap: -(1.0 if t.a > 0 else clamp(t.sg_r, 0, cap)) * t.a * t.x),
        "kimi": _each(lambda t, tau: -t.a * t.x + tau / 2 * t.log_ratio**2),
        "dro": _each(lambda t, beta: -(t.a * t.x - beta / 2 * t.log_ratio**2)),
        "gpg": _each(lambda t: -t.a * t.x),
        "reinforce_is": _each(lambda t, cap: -min(t.sg_r, cap) * t.a * t.x),
        "clip_cov": _clip_cov,
        "kl_cov": _kl_cov,
    }
)


# --- what is added ---------------------------------------------------------------------------------------------------------------


def _k3(d: float) -> float:
    return math.exp(d) - d - 1


def _toward(t: Token, x: float) -> float:
    return clamp(t.ref - x, -LIMIT, LIMIT)


KLS: Forms[Callable[[Token, float], float]] = Forms(
    {
        "k1": lambda t, _most: -_toward(t, t.x),
        "k2": lambda t, _most: _toward(t, t.x) ** 2 / 2,
        "k3": lambda t, most: min(_k3(_toward(t, t.x)), most),
        "k3_plus": lambda t, most: min(_k3(_toward(t, t.f)), most) + (_toward(t, t.x) ** 2 - _toward(t, t.f) ** 2) / 2,
        "full": lambda t, _most: DIVERGES * (t.x - t.ref) ** 2,
        "unbiased": lambda t, most: t.r * min(_k3(_toward(t, t.x)), most),
    }
)


def faded(rule: Rule, option: str, step: Step) -> float:
    first, last, steps = (float(rule.options[name] or 0) for name in (option, "final", "fade_steps"))
    return first if not steps else first + min(1.0, step.trained_version / steps) * (last - first)


def _positive_nll(step: Step, number: int, token: Token, rule: Rule) -> float:
    right = [len(row) for row, seq in zip(step.rows, step.sequences, strict=True) if seq.correct]
    return -float(rule.options["coef"] or 0) * len(step.tokens) / sum(right) * token.x if step.sequences[number].correct else 0.0


AUXILIARY: Forms[Callable[[Step, int, Token, Rule], float]] = Forms(
    {
        "entropy_bonus": lambda step, _number, token, rule: -faded(rule, "coef", step) * token.entropy,
        "squared_log_ratio": lambda _step, _number, token, rule: (
            float(rule.options["tau"] or 0) * clamp(token.x - token.mu, -LIMIT, LIMIT) ** 2
        ),
        "positive_nll": _positive_nll,
    }
)

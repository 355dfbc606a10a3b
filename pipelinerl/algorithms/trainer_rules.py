"""The rules that act inside the loss: objectives, proximal policies, weights, masks, KL, auxiliary terms. Names, formulas, defaults, needs.

The functions of the same names are in `objective`, `correction`, `mask`, `kl` and `loss`. Notation: r = pi / prox, rho = prox / mu,
sg[.] stops the gradient, d_l and d_h are `clip_low` and `clip_high`.
"""

from __future__ import annotations

from pipelinerl.algorithms.method import Aggregation, Need, RuleSpec

_TWO_POLICY = frozenset({"engine"})
"""Rules whose ratio is pi / mu by definition."""
_MOVED = frozenset({"engine", "recomputed", "loglinear"})
"""Rules that compare pi with prox: with "current" the two are equal, and the rule would never act."""
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_WHOLE = frozenset({Need.WHOLE_STEP, Need.OLD_LOGPROBS})
"""Rules that compare all tokens of a step before its first backward pass."""

_DIVERGES = "mix KL(ref || m) + (1 - mix) KL(pi || m), m = mix ref + (1 - mix) pi; at mix 0 KL(ref || pi), at 1 KL(pi || ref)"
_WHOLE_DISTRIBUTION = frozenset({Need.REFERENCE_LOGPROBS, Need.DIVERGENCE})

OBJECTIVE: dict[str, RuleSpec] = {
    "clip": RuleSpec(
        formula="-min(r A, clip(r, 1-d_l, 1+d_h) A); where A<0 and dual_clip>0 at most -dual_clip A",
        source="PPO arXiv:1707.06347, widths as verl clip_ratio; dual clip arXiv:1912.09729",
        options={**_CLIP, "dual_clip": 0.0},
        proximal=_MOVED,
    ),
    "gspo": RuleSpec(
        formula="clip on s_t = sg[exp(mean_t log r)] pi_t / sg[pi_t]",
        source="GSPO arXiv:2507.18071",
        options={"clip_low": 3e-4, "clip_high": 4e-4},
        proximal=_MOVED,
    ),
    "cispo": RuleSpec(
        formula="-sg[clip(r, 1-d_l, 1+d_h)] A log pi",
        source="MiniMax-M1 arXiv:2506.13585; upper bound 5 as ScaleRL arXiv:2510.13786, no lower bound",
        options={"clip_low": 1.0, "clip_high": 4.0},
        proximal=_MOVED,
        is_linear=True,
    ),
    "sapo": RuleSpec(
        formula="-(4/tau) sigmoid(tau (r-1)) A, tau by the sign of A",
        source="SAPO arXiv:2511.20347",
        options={"tau_positive": 1.0, "tau_negative": 1.05},
        proximal=_MOVED,
    ),
    "gmpo": RuleSpec(
        formula="-exp(mean_t clamp(log r)) A, the side clamped picked by the sign of A",
        source="GMPO arXiv:2507.20673 section 4, as TRL quotes it",
        options={"clip_low": 0.4, "clip_high": 0.4},
        proximal=_MOVED,
    ),
    "dppo_tv": RuleSpec(
        formula="-sg[min(r, cap)] A log pi while pi - mu <= d_h (A>0), >= -d_l (A<0)",
        source="DPPO; verl dppo_tv",
        options={**_CLIP, "cap": 20.0},
        proximal=_TWO_POLICY,
    ),
    "dppo_kl": RuleSpec(
        formula="as dppo_tv, masked where binary KL(mu, pi) > threshold and the token moves away from mu",
        source="DPPO; verl dppo_kl",
        options={"threshold": None, "cap": 20.0},
        proximal=_TWO_POLICY,
    ),
    "prime_rl": RuleSpec(
        formula="-keep adv_tau A r, keep = the mask of dppo_tv",
        source="prime-rl default loss",
        options={**_CLIP, "adv_tau": 1.0},
        proximal=_TWO_POLICY,
    ),
    "ipo": RuleSpec(
        formula="-keep adv_tau A r, keep = |pi - mu| <= threshold",
        source="prime-rl ipo",
        options={"threshold": None, "adv_tau": 1.0},
        proximal=_TWO_POLICY,
        is_linear=True,
    ),
    "opd": RuleSpec(
        formula="-keep sg[log ref - log pi] r, keep = pi - mu >= -threshold",
        source="prime-rl opd",
        options={"threshold": 0.2},
        needs=frozenset({Need.REFERENCE_LOGPROBS}),
        proximal=_TWO_POLICY,
        reads_advantages=False,
    ),
    "gkd": RuleSpec(
        formula=f"{_DIVERGES}, over all words",
        source="GKD arXiv:2306.13649 equation 1, on the policy's own answers; mix its beta, as TRL generalized_jsd_loss",
        options={"mix": 0.5},
        needs=_WHOLE_DISTRIBUTION,
        reads_advantages=False,
    ),
    "topr": RuleSpec(
        formula="A>0: -A log pi; else -sg[min(prod_t r, cap)] A log pi",
        source="TOPR arXiv:2503.14286, trajectory ratio; good and bad by the sign of A",
        options={"cap": 1.0},
        proximal=_TWO_POLICY,
    ),
    "topr_token": RuleSpec(
        formula="as topr with the ratio of the token",
        source="ROLL, which tells good from bad by the score, here by the sign of A",
        options={"cap": 1.0},
        proximal=_TWO_POLICY,
    ),
    "vespo": RuleSpec(
        formula="-sg[phi(w)] A log pi, phi(w) = e^lambda w^k e^(-lambda w), w = prod_t r; k and lambda by the sign of A",
        source="VESPO arXiv:2602.10693, constants as TRL vespo_k_pos, vespo_lambda_pos, ...",
        options={"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
        proximal=_MOVED,
    ),
    "kimi": RuleSpec(
        formula="-A log pi + tau/2 (log r)^2",
        source="Kimi k1.5 arXiv:2501.12599",
        options={"tau": None},
        proximal=_MOVED,
        is_linear=True,
    ),
    "dro": RuleSpec(formula="-(A log pi - beta/2 (log r)^2)", source="verl dro", options={"beta": None}, proximal=_MOVED, is_linear=True),
    "gpg": RuleSpec(formula="-A log pi: the policy gradient, without a trust region", source="GPG arXiv:2504.02546", is_linear=True),
    "reinforce_is": RuleSpec(
        formula="-sg[min(r, cap)] A log pi",
        source="PipelineRL arXiv:2509.19128, its run's cap; its code suggests 1.02",
        options={"cap": 5.0},
        proximal=_TWO_POLICY,
        is_linear=True,
    ),
    "clip_cov": RuleSpec(
        formula="clip, zeroed for a random part of the tokens with low < cov(A, log pi) < high",
        source="arXiv:2505.22617; constants as verl clip_cov_ratio, _lb, _ub, which passes over tokens the clip took",
        options={**_CLIP, "fraction": 2e-4, "low": 1.0, "high": 5.0},
        needs=_WHOLE,
        proximal=_MOVED,
    ),
    "kl_cov": RuleSpec(
        formula="-r A, + beta |log r| on the tokens of largest cov(A, log pi)",
        source="arXiv:2505.22617; constants as verl kl_cov_ratio, ppo_kl_coef",
        options={"fraction": 2e-4, "beta": 0.1},
        needs=_WHOLE,
        proximal=_MOVED,
    ),
}

PROXIMAL: dict[str, RuleSpec] = {
    "current": RuleSpec(formula="sg[pi]: for objectives that clip nothing; weights and masks see pi / mu", source="this project"),
    "recomputed": RuleSpec(
        formula="the policy at the start of the step; with one pass over a step that is pi itself",
        source="verl; AReaL arXiv:2505.24298",
        needs=frozenset({Need.OLD_LOGPROBS}),
    ),
    "engine": RuleSpec(
        formula="mu itself: the ratio is pi / mu and carries the whole correction (two policies; no importance weight)",
        source="verl bypass mode; TRL AsyncGRPO; prime-rl",
    ),
    "loglinear": RuleSpec(
        formula="log mu + a (log pi - log mu), a = (v_prox - v_behave) / (v_theta - v_behave), v_prox = v_theta - prox_lag",
        source="AReaL prox_approx",
        options={"prox_lag": 1},
        needs=frozenset({Need.TOKEN_VERSIONS}),
    ),
}

_THREE_POLICY = frozenset({"current", "recomputed", "loglinear"})
"""With prox = mu the ratio already carries the whole correction; a weight would count it twice."""

_FLOOR = {"floor": 0.0}
"""Least weight: tokens that the policy has all but given up keep so much of their gradient. 0, the default, bounds nothing."""

_NORMALIZES = {"batch_normalize": False}
"""Divide the weights by their mean over the step, so that it is 1: over all trained tokens, or, for weights of whole sequences, over these;
of all rows and ranks, at the policy that the step begins with, before any mask (verl rollout_is_batch_normalize)."""
_OVER_MEAN = "; with batch_normalize over its mean over the step (verl)"
_WHOLE_STEP_IF = {"batch_normalize": Need.WHOLE_STEP}

WEIGHT: dict[str, RuleSpec] = {
    "none": RuleSpec(formula="1"),
    "tis_token": RuleSpec(
        formula=f"min(rho, cap), at least floor{_OVER_MEAN}",
        source="verl, slime (tis_clip_low), OAT",
        options={"cap": 2.0, **_FLOOR, **_NORMALIZES},
        needs_if=_WHOLE_STEP_IF,
        proximal=_THREE_POLICY,
    ),
    "tis_sequence": RuleSpec(
        formula=f"min(prod_t rho, cap), at least floor{_OVER_MEAN}",
        source="SkyRL, verl",
        options={"cap": 5.0, **_FLOOR, **_NORMALIZES},
        level="sequence",
        needs_if=_WHOLE_STEP_IF,
        proximal=_THREE_POLICY,
    ),
    "tis_geometric": RuleSpec(
        formula=f"min(exp(mean_t log rho), cap), at least floor{_OVER_MEAN}",
        source="ROLL",
        options={"cap": 1.2, **_FLOOR, **_NORMALIZES},
        level="sequence",
        needs_if=_WHOLE_STEP_IF,
        proximal=_THREE_POLICY,
    ),
    "tis_segment": RuleSpec(
        formula="min(exp(mean log rho over an unbroken run of trained tokens), cap)",
        source="ROLL",
        options={"cap": 1.2},
        level="sequence",
        proximal=_THREE_POLICY,
    ),
    "mis_token": RuleSpec(
        formula=f"rho where rho <= cap, else 0{_OVER_MEAN}",
        source="MIS; cap as TRL",
        options={"cap": 3.0, **_NORMALIZES},
        needs_if=_WHOLE_STEP_IF,
        proximal=_THREE_POLICY,
    ),
    "mis_sequence": RuleSpec(
        formula=f"prod_t rho where <= cap, else 0{_OVER_MEAN}",
        source="MIS; cap as TRL",
        options={"cap": 3.0, **_NORMALIZES},
        level="sequence",
        needs_if=_WHOLE_STEP_IF,
        proximal=_THREE_POLICY,
    ),
    "icepop": RuleSpec(
        formula=f"rho where low <= rho <= high, else 0{_OVER_MEAN}",
        source="IcePop",
        options={"low": 0.5, "high": 5.0, **_NORMALIZES},
        needs_if=_WHOLE_STEP_IF,
        proximal=_THREE_POLICY,
    ),
}

_BAND = {"low": 0.0, "high": None}

MASK: dict[str, RuleSpec] = {
    "outlier_band": RuleSpec(formula="keep low <= rho <= high", source="SkyRL", options={"low": 1e-4, "high": 100.0}),
    "ratio_band": RuleSpec(formula="keep low <= rho <= high", source="ROLL", options={"low": 0.8, "high": 1.2}),
    "probability_band": RuleSpec(formula="keep |prox - mu| <= high", source="ROLL", options={"high": 0.2}),
    "kpop": RuleSpec(formula="keep max(binary KL(prox, mu), binary KL(mu, prox)) <= high", source="AReaL", options={"high": 2.0}),
    "geo_rs": RuleSpec(
        formula="keep sequence while low <= exp(mean_t log rho) <= high",
        source="SkyRL; NeMo-RL 0.999, 1.002",
        options={"low": 0.99, "high": 1.01},
        level="sequence",
    ),
    "k3_rs": RuleSpec(
        formula="keep sequence while mean_t(rho - 1 - log rho) <= high",
        source="verl rollout correction, preset bypass_ppo_clip_k3_rs",
        options={"high": 0.01},
        level="sequence",
    ),
    "product_band": RuleSpec(
        formula="keep sequence while low <= prod_t rho <= high", source="SkyRL", options={"low": 0.5, "high": 2.0}, level="sequence"
    ),
    "veto": RuleSpec(
        formula="drop sequence when any rho < low",
        source="verl before 0.9, whose option rollout_token_veto_threshold 0.9.1 has no more",
        options={"low": 1e-4},
        level="sequence",
    ),
    "reject_token": RuleSpec(
        formula="keep low <= metric(rho) <= high; k1 is tested as rho itself",
        source="verl rollout correction",
        options={"metric": "ratio", **_BAND},
        choices={"metric": ("ratio", "k1", "k2", "k3", "binary_kl")},
    ),
    "reject_sequence": RuleSpec(
        formula="keep sequence while low <= metric over its tokens <= high; k1 is tested as the geometric mean of rho",
        source="verl rollout correction",
        options={"metric": "k3", "over": "mean", **_BAND},
        choices={"metric": ("ratio", "k1", "k2", "k3", "binary_kl"), "over": ("mean", "sum", "max")},
        level="sequence",
    ),
    "opsm": RuleSpec(
        formula="drop sequence where A<0 and mean_t(log prox - log pi) > delta",
        source="DeepSeek-V3.2 arXiv:2512.02556; delta as slime and MILES",
        options={"delta": 1e-4},
        level="sequence",
        proximal=_MOVED,
    ),
    "vaco_tv": RuleSpec(
        formula="drop where mean_t|rho - 1| > delta over the sequence and sign(log rho) A > 0",
        source="open-instruct",
        options={"delta": None},
    ),
    "m2po": RuleSpec(
        formula="drop the largest (log rho)^2 of the step until the mean of the rest < tau",
        source="M2PO arXiv:2510.01161; tau as in the paper's runs, by Trinity-RFT's m2_threshold",
        options={"tau": 0.04},
        needs=_WHOLE,
    ),
    "top_entropy": RuleSpec(
        formula="keep the `fraction` of the step's tokens with the largest entropy",
        source="80/20 rule arXiv:2506.01939; TRL top_entropy_quantile",
        options={"fraction": 0.2},
        needs=frozenset({Need.ENTROPY, Need.WHOLE_STEP}),
    ),
    "tv_gate": RuleSpec(
        formula="keep sequence while mean_t |rho - 1| / 2 <= high, an estimate of TV(prox, mu)",
        source="TRPO arXiv:1502.05477 bounds by TV; estimated from samples of mu",
        options={"high": None},
        level="sequence",
    ),
    "overlong": RuleSpec(
        formula="drop sequences cut off at their longest length; the reward still counts in the baseline",
        source="DAPO arXiv:2503.14476 overlong filtering",
        needs=frozenset({Need.TRUNCATED}),
        level="sequence",
    ),
    "version_withhold": RuleSpec(
        formula="drop tokens with staleness > bound, and their group only where none is younger; the reward still counts in the baseline",
        source="prime-rl#2960",
        options={"bound": None},
        needs=frozenset({Need.TOKEN_VERSIONS}),
    ),
    "partial_rollout": RuleSpec(
        formula="drop tokens older than the newest version of their sequence",
        source="slime mask-offpolicy-in-partial-rollout",
        needs=frozenset({Need.TOKEN_VERSIONS}),
    ),
}

_REFERENCE = frozenset({Need.REFERENCE_LOGPROBS})
_CLAMP = {"clamp": 10.0}
"""Largest k3 of a token; above it a token has no gradient. 10 is reached at d = 2.6; without it (0), one token at d = 10 outweighs 10^4."""
_FADES = {"final": 0.0, "fade_steps": 0}
"""The coefficient moves in a straight line to `final`, which it has from step `fade_steps` on; with 0 steps it stays as it is."""

_ADAPTS = {"target": 0.0, "horizon": 10_000}
"""Above 0, `target` has beta follow the KL, its mean over sequences of the mean over their tokens by this very estimator, before beta: see
`controllers`. Horizon and target as verl's kl_ctrl; a smaller horizon follows faster, and is refused where a step could turn beta over."""
_FOLLOWS = "; with a target, beta follows the KL"
_STEPS_TOWARDS = {"target": 0.0, "delta": 0.005, "min_coef": 0.0, "max_coef": 1.0}
"""Above 0, `target` (nats per token) has coef follow the entropy, by TRL's constants. Without it, the others do nothing."""

KL: dict[str, RuleSpec] = {
    "none": RuleSpec(formula="0"),
    "k1": RuleSpec(
        formula=f"beta (log pi - log ref){_FOLLOWS}",
        source="verl; target as arXiv:1909.08593, verl",
        options={"beta": None, **_FADES, **_ADAPTS},
        needs=_REFERENCE,
    ),
    "k2": RuleSpec(
        formula=f"beta (log pi - log ref)^2 / 2{_FOLLOWS}",
        source="verl; target as arXiv:1909.08593, verl",
        options={"beta": None, **_FADES, **_ADAPTS},
        needs=_REFERENCE,
    ),
    "k3": RuleSpec(
        formula=f"beta min(e^d - d - 1, clamp), d = log ref - log pi, within +-20{_FOLLOWS}",
        source="GRPO arXiv:2402.03300, beta as in its section 4.2; clamp as verl, OpenRLHF, SkyRL; fading as PipelineRL"
        " final_kl_coef; target as arXiv:1909.08593, verl",
        options={"beta": 0.04, **_CLAMP, **_FADES, **_ADAPTS},
        needs=_REFERENCE,
    ),
    "k3_plus": RuleSpec(
        formula=f"value of k3, clamped as k3, gradient of k2, which is not{_FOLLOWS}",
        source="verl; target as arXiv:1909.08593, verl",
        options={"beta": None, **_CLAMP, **_FADES, **_ADAPTS},
        needs=_REFERENCE,
    ),
    "full": RuleSpec(
        formula=f"beta ({_DIVERGES}), over all words: no estimate{_FOLLOWS}",
        source="mix as GKD arXiv:2306.13649; target as arXiv:1909.08593, verl",
        options={"beta": None, "mix": 1.0, **_FADES, **_ADAPTS},
        needs=_WHOLE_DISTRIBUTION,
    ),
    "unbiased": RuleSpec(
        formula=f"beta r k3, k3 clamped{_FOLLOWS}",
        source="slime; DeepSeek-V3.2 arXiv:2512.02556; target as arXiv:1909.08593, verl",
        options={"beta": None, **_CLAMP, **_FADES, **_ADAPTS},
        needs=_REFERENCE,
    ),
}

AUXILIARY: dict[str, RuleSpec] = {
    "entropy_bonus": RuleSpec(
        formula="- coef H; with a target, coef follows the entropy, and acts while it is at most the target",
        source="PipelineRL; target as Skywork-OR1 arXiv:2505.22312, TRL use_adaptive_entropy",
        options={"coef": None, **_FADES, **_STEPS_TOWARDS},
        needs=frozenset({Need.ENTROPY}),
    ),
    "squared_log_ratio": RuleSpec(formula="+ tau (log pi - log mu)^2, over all tokens", source="prime-rl", options={"tau": 1e-3}),
    "positive_nll": RuleSpec(
        formula="+ coef mean NLL of the tokens of correct sequences",
        source="VAPO arXiv:2504.05118, coef its mu",
        options={"coef": 0.1},
        needs=frozenset({Need.CORRECT, Need.WHOLE_STEP}),
        aggregations=frozenset({Aggregation.TOKEN_MEAN}),
    ),
}

CRITIC: dict[str, RuleSpec] = {
    "none": RuleSpec(formula="no second model"),
    "clipped": RuleSpec(
        formula="0.5 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2)",
        source="PPO arXiv:1707.06347; verl cliprange_value",
        options={"clip": 0.5},
        needs=frozenset({Need.CRITIC}),
    ),
    "huber": RuleSpec(
        formula="(V - G)^2 / 2 while |V - G| <= delta, else delta (|V - G| - delta / 2): an outlier pulls no harder than delta",
        source="Huber 1964",
        options={"delta": 1.0},
        needs=frozenset({Need.CRITIC}),
    ),
    "implicit_prm": RuleSpec(
        formula="BCE(sigmoid(beta sum_t (log phi - log ref)), correct), mean over sequences",
        source="PRIME arXiv:2502.01456",
        options={"beta": 0.05},
        needs=frozenset({Need.IMPLICIT_PRM, Need.REFERENCE_LOGPROBS, Need.CORRECT}),
    ),
}

"""The rules that act before training: reward shaping, group filters, advantages, batch rules. Names, formulas, defaults, needs.

The functions of the same names are in `shaping`, `selection`, `advantage`, `roulette`, `token_advantage`, `step_credit`, `batch_rule`;
`credit` joins the two. Notation: R reward, n siblings, mean_g and std_g over the scored siblings of one prompt, L trained tokens, s_k the
score after step k.
"""

from __future__ import annotations

from pipelinerl.algorithms.method import Need, RuleSpec

SHAPING: dict[str, RuleSpec] = {
    "overlong_penalty": RuleSpec(
        formula="R += factor * min(0, -(L - (max_tokens - buffer_tokens)) / buffer_tokens), not below -factor",
        source="DAPO arXiv:2503.14476 (20480, 4096)",
        options={"max_tokens": None, "buffer_tokens": None, "factor": 1.0},
    ),
    "minus_token_kl": RuleSpec(
        formula="R -= coef * sum_t (log mu - log ref)", source="PipelineRL", options={"coef": None}, needs=frozenset({Need.TOKEN_KL})
    ),
}

_REFILL = {"refill": 10}
"""Then groups train although the filter would set them aside: the step never starves, and a step without signal does no harm."""

GROUP_FILTER: dict[str, RuleSpec] = {
    "none": RuleSpec(formula="every group trains"),
    "zero_variance": RuleSpec(
        formula="set aside when max R - min R <= tolerance; refilled, up to `refill` batches' worth of groups per step",
        source="DAPO arXiv:2503.14476; refill as verl max_num_gen_batches",
        options={"tolerance": 1e-6, **_REFILL},
        min_group=2,
    ),
    "accuracy_band": RuleSpec(
        formula="set aside unless low <= mean_g(correct) <= high; refilled likewise",
        source="PRIME arXiv:2502.01456",
        options={"low": 0.2, "high": 0.8, **_REFILL},
        needs=frozenset({Need.CORRECT}),
        min_group=2,
    ),
}

BATCH: dict[str, RuleSpec] = {
    "none": RuleSpec(formula="advantages as they are"),
    "whiten_tokens": RuleSpec(
        formula="(A - mean) / sqrt(var + eps) over the trained tokens of the step",
        source="verl",
        options={"eps": 1e-8},
        needs=frozenset({Need.WHOLE_BATCH}),
    ),
    "whiten_sequences": RuleSpec(
        formula="(A - mean) / sqrt(var + eps) over the sequences of the step",
        source="GDPO, NeMo-RL",
        options={"eps": 1e-8},
        needs=frozenset({Need.WHOLE_BATCH}),
        level="sequence",
    ),
    "std_of_rewards": RuleSpec(
        formula="A / (std of the rewards of the step + eps)",
        source="TRL scale_rewards='batch', with advantage dr_grpo",
        options={"eps": 1e-4, "ddof": 1},
        needs=frozenset({Need.WHOLE_BATCH}),
    ),
    "gpg_alpha": RuleSpec(
        formula="A * groups / groups with a nonzero advantage", source="GPG arXiv:2504.02546", needs=frozenset({Need.WHOLE_BATCH})
    ),
}

_STD = {"eps": 1e-6, "ddof": 1}
_PARTS = {"process_coef": 1.0, "outcome_coef": 1.0}
_STEPS = frozenset({Need.STEP_SCORES})

_KL_IN_REWARD = {"kl_coef": 0.0}
"""Taken from the reward of every token: kl_coef (log mu - log ref)."""
_NEEDS_KL = {"kl_coef": Need.TOKEN_KL}

ADVANTAGE: dict[str, RuleSpec] = {
    "none": RuleSpec(formula="A = 0: the objective brings its own signal"),
    "grpo": RuleSpec(formula="(R - mean_g) / (std_g + eps)", source="DeepSeekMath arXiv:2402.03300", options=_STD, min_group=2),
    "dr_grpo": RuleSpec(formula="R - mean_g", source="Dr.GRPO arXiv:2503.20783", min_group=2),
    "rloo": RuleSpec(
        formula="R - mean of the other siblings [/ (std_g + eps)]",
        source="arXiv:2402.14740; PipelineRL divide_advantage_by_std",
        options={"divide_by_std": False, **_STD},
        min_group=2,
    ),
    "rloo_doubly_robust": RuleSpec(
        formula="R - mean of the others' s + w (R - s): leave-one-out under an unbiased early stop",
        source="this project",
        needs=frozenset({Need.PREDICTIONS}),
        min_group=2,
        allows_stopped=True,
    ),
    "remax": RuleSpec(formula="R - R(greedy)", source="ReMax arXiv:2310.10505", needs=frozenset({Need.GREEDY_REWARD})),
    "opo": RuleSpec(formula="R - sum(L R) / sum(L)", source="OPO arXiv:2505.23585", min_group=2),
    "gdpo": RuleSpec(
        formula="sum_k weight_k (R_k - mean_g) / (std_g + eps)",
        source="GDPO, NeMo-RL",
        options=_STD,
        needs=frozenset({Need.COMPONENTS}),
        min_group=2,
    ),
    "passk": RuleSpec(
        formula="best sibling: R_max - R_second; the others 0",
        source="verl grpo_passk, which also divides by the group's std unless norm_adv_by_std_in_grpo is false",
        min_group=2,
    ),
    "maxrl": RuleSpec(
        formula="(R - mean_g) / (mean_g + eps), R >= 0",
        source="prime-rl max_rl; eps as for grpo",
        options={"eps": 1e-6},
        min_group=2,
    ),
    "rae": RuleSpec(
        formula="R - b[role]; b <- decay b + (1 - decay) R",
        source="SPIRAL arXiv:2506.24119, prime-rl rae; the decay as SPIRAL's code, role_baseline_ema_gamma",
        options={"decay": 0.95},
        needs=frozenset({Need.ROLES}),
    ),
    "reinforce_pp": RuleSpec(
        formula="A_t = sum_{k>=t} gamma^(k-t) r_k; r = -kl_coef (log mu - log ref), + R at the last token",
        source="REINFORCE++ arXiv:2501.03262",
        options={"gamma": 1.0, "kl_coef": 0.001},
        needs_if=_NEEDS_KL,
        per_token=True,
    ),
    "step_difference": RuleSpec(
        formula="step k: process_coef (s_k - s_{k-1}) + outcome_coef (R - mean_g)",
        source="potential-based shaping",
        options=_PARTS,
        needs=_STEPS,
        min_group=2,
        per_token=True,
    ),
    "step_min": RuleSpec(
        formula="step k: process_coef (min_{j>=k} s_j - mean over pooled steps) + outcome_coef (R - mean_g)",
        source="PURE arXiv:2504.15275",
        options=_PARTS,
        needs=_STEPS,
        min_group=2,
        per_token=True,
    ),
    "step_grpo": RuleSpec(
        formula="sum over this and the following steps of (s - mean) / (std + eps), statistics pooled over the group",
        source="DeepSeekMath arXiv:2402.03300 section 4.1.3",
        options={"pool": "steps", **_STD},
        choices={"pool": ("steps", "position")},
        needs=_STEPS,
        min_group=2,
        per_token=True,
    ),
    "step_reinforce": RuleSpec(
        formula="step k: sum_{j>=k} gamma^(j-k) s_j",
        source="ROLL",
        options={"gamma": 1.0},
        needs=_STEPS,
        per_token=True,
        allows_stopped=True,
    ),
    "gigpo": RuleSpec(
        formula="(R - mean_g)/(std_g + eps) + weight * the same over R discounted by the turns to come, from equal anchor states",
        source="GiGPO arXiv:2505.10978, constants as its code, whose default mode divides by no std: divide_by_std = false",
        options={"weight": 1.0, "gamma": 0.95, "divide_by_std": True, **_STD},
        needs=frozenset({Need.ANCHORS}),
        min_group=2,
        per_token=True,
    ),
    "gae": RuleSpec(
        formula="A_t = delta_t + gamma lam A_{t+1}, carried through masked tokens",
        source="arXiv:1506.02438",
        options={"gamma": 1.0, "lam": 0.95, **_KL_IN_REWARD},
        needs=frozenset({Need.CRITIC}),
        needs_if=_NEEDS_KL,
        on_trainer=True,
        per_token=True,
    ),
    "vapo_gae": RuleSpec(
        formula="GAE with lam = 1 - 1/(alpha L); returns with lam 1",
        source="VAPO arXiv:2504.05118",
        options={"gamma": 1.0, "alpha": 0.05, **_KL_IN_REWARD},
        needs=frozenset({Need.CRITIC}),
        needs_if=_NEEDS_KL,
        on_trainer=True,
        per_token=True,
    ),
    "turn_gae": RuleSpec(
        formula="GAE over turn boundaries, constant inside a turn, whose value is that of its first token",
        source="AReaL",
        options={"gamma": 1.0, "lam": 0.95, **_KL_IN_REWARD},
        needs=frozenset({Need.CRITIC}),
        needs_if=_NEEDS_KL,
        on_trainer=True,
        per_token=True,
    ),
    "otb": RuleSpec(
        formula="R - sum_i R W / sum_i W per position, W_t = sum_{j<=t} w_j^2 (1 - 2 pi_j + sum_v pi_v^2), w the row's weight",
        source="verl optimal_token_baseline with handle_zero_tail=False; its default True is handle_zero_tail here",
        options={"handle_zero_tail": False},
        needs=frozenset({Need.SQUARE_SUM, Need.OLD_LOGPROBS, Need.WHOLE_STEP}),
        min_group=2,
        on_trainer=True,
        per_token=True,
    ),
    "prime": RuleSpec(
        formula="returns(process_coef RLOO(p) + outcome_coef RLOO(correct)), p = beta (log phi - log ref) / its largest |return|",
        source="PRIME arXiv:2502.01456",
        options={"process_coef": 5.0, "outcome_coef": 5.0},
        needs=frozenset({Need.IMPLICIT_PRM, Need.CORRECT, Need.WHOLE_STEP}),
        min_group=2,
        on_trainer=True,
        per_token=True,
    ),
}

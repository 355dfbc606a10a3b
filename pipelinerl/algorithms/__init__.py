"""The mathematics of reinforcement learning here: advantages, objectives, corrections, staleness. Pure functions and one table.

A rule is a function under a decorator (`declare`), a method a choice of rules (`methods`).

Orchestrator side, numpy only, importable without torch:
    methods          METHODS, the table; `resolve(name, overrides)` gives the one `Method` a run uses
    declare, rules   the rules a row is made of, each declared at its function; validation says what does not combine
    advantage/       the two calls of the orchestrator: `group_advantages` when a group closes, `step_advantages` when a batch is cut;
                     in it, a file for each kind of advantage
    staleness        how old tokens are, and which of them may still train

Trainer side, torch:
    loss/            the call of the trainer: `policy_loss(columns, method=...)`, raw sums; `denominator(...)`, applied once per step;
                     in it, a file for each term: objective, correction, mask, kl, critic, ...

Notation, everywhere: pi the policy being trained (with gradient), mu the engine's probability of the token it sampled, prox the
proximal policy the trust region is drawn around, ratio = pi / prox, rho = prox / mu, A the advantage.
"""

"""A training method: a choice of one rule per column, and the needs that those rules have of the run.

A `Method` is plain data. It names its rules; the functions behind the names live in `credit` (numpy) and `loss` (torch), so the
orchestrator can read, check and print a method without importing torch. It travels in the resolved config as a dictionary.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Option = float | int | bool | str | None
"""Value of a rule's option. `None` has no published default and must be stated."""


class Need(enum.StrEnum):
    """Something a rule reads beyond token ids, masks, engine log-probabilities, versions, rewards and lengths, which every run has."""

    COMPONENTS = "components"
    """The reward of each component apart, [N, K]."""
    GREEDY_REWARD = "greedy_reward"
    """Reward of one greedy rollout of the same prompt, by the same engine: the orchestrator adds it to every group."""
    STEP_SCORES = "step_scores"
    """Scores of a process reward model at the ends of steps or turns."""
    ANCHORS = "anchors"
    """The turns of an episode, and an identity of the state that each answered, equal for equal states of sibling rollouts."""
    ROLES = "roles"
    """The agent role that wrote each rollout: the column `role` of its prompt's row, which is looked for when the group closes."""
    PREDICTIONS = "predictions"
    """Predicted reward and sample weight of rows under an unbiased early stop."""
    CORRECT = "correct"
    """Correctness, 0 or 1 per sequence."""
    TRUNCATED = "truncated"
    """Whether a sequence was cut off at its longest allowed length."""
    TOKEN_KL = "token_kl"
    """Per token log mu - log ref, for advantages with a KL in the reward; these are then made in the trainer, which has a reference."""
    REFERENCE_LOGPROBS = "reference_logprobs"
    """Reference or teacher log-probability per token, on the trainer's side."""
    DIVERGENCE = "divergence"
    """How far the policy's whole distribution is from a reference's or teacher's, per token, with gradient."""
    OLD_LOGPROBS = "old_logprobs"
    """Log-probabilities of the policy at the start of the step: one more forward pass of the trainer where it trains a step twice."""
    TOKEN_VERSIONS = "token_versions"
    """The version that sampled each token."""
    ENTROPY = "entropy"
    """Exact entropy of the next-token distribution per token."""
    SQUARE_SUM = "square_sum"
    """Sum over the vocabulary of squared probabilities per token."""
    CRITIC = "critic"
    """A value per token, of a critic the trainer trains too."""
    IMPLICIT_PRM = "implicit_prm"
    """Log-probabilities of an implicit process reward model that the trainer trains too."""
    WHOLE_BATCH = "whole_batch"
    """All groups of a step before its first row is delivered: the orchestrator's batch rules read all advantages."""
    WHOLE_STEP = "whole_step"
    """All rows of a step in the trainer before its first backward pass, for `step_statistics.measure_step`."""


ALWAYS_OFFERED = frozenset(
    {Need.TOKEN_VERSIONS, Need.COMPONENTS, Need.CORRECT, Need.TRUNCATED, Need.ROLES, Need.WHOLE_BATCH, Need.GREEDY_REWARD}
)
"""Needs that the messages and the orchestrator supply in every run."""
CRITICS = frozenset({Need.CRITIC, Need.IMPLICIT_PRM})
"""Kinds of a second model that is trained beside the policy; see the column `critic`."""
TRAINER_OFFERS = frozenset({Need.ENTROPY, Need.OLD_LOGPROBS, Need.WHOLE_STEP, Need.SQUARE_SUM}) | CRITICS
"""Needs that the trainer computes where a method asks for them."""
REFERENCE_OFFERS = frozenset({Need.REFERENCE_LOGPROBS, Need.TOKEN_KL, Need.DIVERGENCE})
"""Needs that it computes where it is given a reference or teacher model, too."""
ORCHESTRATOR_KNOWS = frozenset({Need.COMPONENTS, Need.GREEDY_REWARD, Need.STEP_SCORES, Need.ANCHORS, Need.ROLES, Need.PREDICTIONS})
"""Needs that an advantage made in the trainer cannot read."""

COSTS: dict[Need, str] = {
    Need.GREEDY_REWARD: "one rollout more in every group, sampled at temperature 0, scored, and never trained",
    Need.ENTROPY: "the entropy's gradient keeps one more table of logits",
    Need.WHOLE_BATCH: "rows leave only when all groups of their step are in: training hides only inside the generation of later steps",
    Need.WHOLE_STEP: "the trainer holds a step's rows until the seal, and computes forward and backward only then",
    Need.OLD_LOGPROBS: "with whole_step or trainer.epochs above 1, one more forward pass of every row, as it arrives; else nothing",
    Need.CRITIC: "a second model of the policy's size, with gradients and optimizer state, and two more passes of every row",
    Need.IMPLICIT_PRM: "likewise",
    Need.REFERENCE_LOGPROBS: "a third model, frozen (reference.path), and one more forward pass of every row",
    Need.DIVERGENCE: "the same model's hidden state of every trained token, and four more passes through output embeddings",
    Need.TOKEN_KL: "the same model; advantages are then made in the trainer",
}
"""The cost of each supplied need."""


class Aggregation(enum.StrEnum):
    """How per-token losses become one number: the unit of the raw sum, and what divides it once per step."""

    TOKEN_MEAN = "token-mean"
    """Sum over tokens / tokens of the global batch. Long answers weigh more."""
    TOKEN_SUM = "token-sum"
    """Sum over tokens, no division: the learning rate then depends on the batch."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """Mean over sequences of the sum over their tokens."""
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """Mean over sequences of the sum over their tokens / a constant length (Dr.GRPO, arXiv:2503.20783)."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """Mean over sequences of the mean over their tokens. Tokens of short answers weigh more (GRPO, GSPO, SAPO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule, chosen by name, with its options filled in."""

    name: str
    options: Mapping[str, Option] = field(default_factory=dict)

    def __str__(self) -> str:
        inner = ", ".join(f"{key}={_plain_text(value)}" for key, value in self.options.items())
        return f"{self.name}({inner})" if inner else self.name


NONE = Rule(name="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One training method: a rule for every column, resolved, nothing left to default."""

    name: str
    formula: str
    """One line."""
    source: str
    """arXiv id or library the row is taken from."""
    shaping: tuple[Rule, ...] = ()
    """Changes rewards before the advantage, in order."""
    group_filter: Rule = NONE
    """A filter of whole groups. This changes the batch and its denominators; a mask does not."""
    advantage: Rule = NONE
    """Turns a scored group into one advantage per sequence or per token."""
    batch: Rule = NONE
    """Applied to the advantages of a whole step."""
    objective: Rule = NONE
    """Per-token policy loss."""
    proximal: Rule = Rule(name="current")
    """The policy `prox` that ratio = pi / prox is measured against."""
    weight: Rule = NONE
    """Importance weight from rho = prox / mu; detached."""
    masks: tuple[Rule, ...] = ()
    """Rejections; a token trains where all of them keep it. They change numerators only."""
    mask_order: str = "unstated"
    """Whether token masks act before or after a sequence-level weight is formed: "before_weight", "after_weight"."""
    kl: Rule = NONE
    """Penalty towards the reference policy, over all trained tokens."""
    auxiliary: tuple[Rule, ...] = ()
    """Further terms of the loss, over all trained tokens."""
    critic: Rule = NONE
    """Loss of the model that is trained beside the policy."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    needs: frozenset[Need] = frozenset()
    """Derived from the rules, see `rules.needs_of`."""

    @property
    def withhold_bound(self) -> int | None:
        """Age in versions beyond which a token is withheld while its sequence's reward counts; None where the method withholds none."""
        bounds = [rule.options["bound"] for rule in self.masks if rule.name == "version_withhold"]
        return min((int(bound) for bound in bounds if bound is not None), default=None)

    @property
    def adds_greedy(self) -> bool:
        """True where every group has one more sibling, sampled greedily, for its reward alone."""
        return Need.GREEDY_REWARD in self.needs

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: strings, numbers, booleans, lists, dictionaries."""
        tree = dataclasses.asdict(self)
        tree["aggregation"] = self.aggregation.value
        tree["needs"] = sorted(need.value for need in self.needs)
        for column in TUPLE_COLUMNS:
            tree[column] = list(tree[column])
        return tree

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Method:
        """The inverse of `to_dict`; trusts its input, which has been resolved before."""
        values = dict(tree)
        for column in RULE_COLUMNS:
            values[column] = Rule(**values[column])
        for column in TUPLE_COLUMNS:
            values[column] = tuple(Rule(**rule) for rule in values[column])
        values["aggregation"] = Aggregation(values["aggregation"])
        values["needs"] = frozenset(Need(need) for need in values["needs"])
        return cls(**values)

    def describe(self, *, notes: Sequence[str] = ()) -> str:
        """Every column on a line of its own, for the log of a run: what is in force is never left to be guessed.

        `notes` follow: coefficients that are controlled, and parts that cannot act in the run at hand (`unused.unused_parts`).
        """
        lines = [f"method       {self.name}: {self.formula}  [{self.source}]"]
        for column in (*RULE_COLUMNS, *TUPLE_COLUMNS):
            value = getattr(self, column)
            lines.append(f"{column:<12} {' -> '.join(map(str, value)) or 'none' if isinstance(value, tuple) else value}")
        lines.append(f"{'aggregation':<12} {self.aggregation.value}")
        lines.append(f"{'needs':<12} {', '.join(sorted(self.needs)) or 'nothing beyond every run'}")
        return "\n".join([*lines, *notes])


RULE_COLUMNS = ("group_filter", "advantage", "batch", "objective", "proximal", "weight", "kl", "critic")
"""Columns that hold one rule."""
TUPLE_COLUMNS = ("shaping", "masks", "auxiliary")
"""Columns that hold any number of rules, in order."""
MASK_ORDERS = ("unstated", "before_weight", "after_weight")


def _plain_text(value: Option) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""A training method: a choice of one rule per column, and the needs that those rules have of the run.

A `Method` is plain data. It names its rules; the functions behind the names live in `advantage` (numpy) and `loss` (torch), so the
orchestrator can read, check and print a method without importing torch.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Option = float | int | bool | str | None
"""Value of a rule's option. `None` has no published default and must be stated."""


class Supplier(enum.Enum):
    """The part of a run that gives a rule what it needs."""

    ROW = "every row of every run carries it"
    GROUP = "the orchestrator knows it of every group, and an advantage that the trainer makes cannot read it"
    SETTING = "likewise, where a setting asks for it"
    TRAINER = "the trainer computes it where a method asks for it"
    REFERENCE = "the trainer computes it where it is given a reference or teacher model, too"


class Need(enum.StrEnum):
    """Something a rule reads beyond token ids, masks, engine log-probabilities, versions, rewards and lengths, which every run has.

    A member is its name, who supplies it, what that costs, and the setting that supplies it to a run without it.
    """

    supplier: Supplier
    cost: str
    remedy: str

    def __new__(cls, value: str, supplier: Supplier, cost: str = "", remedy: str = "") -> Need:
        need = str.__new__(cls, value)
        need._value_, need.supplier, need.cost, need.remedy = value, supplier, cost, remedy
        return need

    COMPONENTS = "components", Supplier.GROUP
    """The reward of each component apart, [N, K]."""
    GREEDY_REWARD = (
        "greedy_reward",
        Supplier.GROUP,
        "one rollout more in every group, sampled at temperature 0, scored, and never trained",
    )
    """Reward of one greedy rollout of the same prompt, by the same engine: the orchestrator adds it to every group."""
    STEP_SCORES = "step_scores", Supplier.SETTING, "", "name a process reward model (prm.path, or prm.judge)"
    """Scores of a process reward model at the ends of steps or turns."""
    ANCHORS = (
        "anchors",
        Supplier.SETTING,
        "",
        "it compares turns that answer equal states, which an environment names; without one a rollout is one turn, whose only state is"
        " the prompt, among whose siblings it would be grpo, or is played by an agent, who names none; set environment.function, or choose"
        " grpo, with agents tree_grpo or mt_grpo, or with a process reward model step_grpo",
    )
    """The turns of an episode, and an identity of the state that each answered, equal for equal states of sibling rollouts."""
    TURNS = (
        "turns",
        Supplier.SETTING,
        "",
        "it compares turns of episodes, and a rollout here is one turn; set environment.function, or have agents play (a [gateway]"
        " section), or choose grpo",
    )
    """The turns of an episode, each with the one that it continues and the reward that it earned."""
    ROLES = "roles", Supplier.GROUP
    """The agent role that wrote each rollout: the column `role` of its prompt's row, which is looked for when the group closes."""
    PREDICTIONS = (
        "predictions",
        Supplier.SETTING,
        "",
        "switch unbiased early stopping on (prm.early_stop.threshold or rollout.cut_after), or choose rloo",
    )
    """Predicted reward and sample weight of rows under an unbiased early stop."""
    CORRECT = "correct", Supplier.ROW
    """Correctness, 0 or 1 per sequence."""
    TRUNCATED = "truncated", Supplier.ROW
    """True for a sequence that was cut off at its longest allowed length."""
    TOKEN_VERSIONS = "token_versions", Supplier.ROW
    """The version that sampled each token."""
    ENTROPY = "entropy", Supplier.TRAINER, "the entropy's gradient keeps one more table of logits"
    """Exact entropy of the next-token distribution per token."""
    SQUARE_SUM = "square_sum", Supplier.TRAINER
    """Sum over the vocabulary of squared probabilities per token."""
    WHOLE_BATCH = (
        "whole_batch",
        Supplier.ROW,
        "rows leave only when all groups of their step are in: training hides only inside the generation of later steps",
    )
    """All groups of a step before its first row is delivered: the orchestrator's batch rules read all advantages."""
    WHOLE_STEP = (
        "whole_step",
        Supplier.TRAINER,
        "the trainer holds a step's rows until the seal, and computes forward and backward only then",
    )
    """All rows of a step in the trainer before its first backward pass, for `step_statistics.measure_step`."""
    OLD_LOGPROBS = (
        "old_logprobs",
        Supplier.TRAINER,
        "with whole_step or trainer.epochs above 1, one more forward pass of every row, as it arrives; else nothing",
    )
    """Log-probabilities of the policy at the start of the step: one more forward pass of the trainer where it trains a step twice."""
    CRITIC = (
        "critic",
        Supplier.TRAINER,
        "a second model of the policy's size, with gradients and optimizer state, and two more passes of every row",
    )
    """A value per token, of a critic the trainer trains too."""
    IMPLICIT_PRM = "implicit_prm", Supplier.TRAINER, "likewise"
    """Log-probabilities of an implicit process reward model that the trainer trains too."""
    REFERENCE_LOGPROBS = (
        "reference_logprobs",
        Supplier.REFERENCE,
        "a third model, frozen (reference.path), and one more forward pass of every row",
        "set reference.path, to model.path for the policy the run starts from or to a teacher's folder, or kl to none",
    )
    """Reference or teacher log-probability per token, on the trainer's side."""
    DIVERGENCE = (
        "divergence",
        Supplier.REFERENCE,
        "the same model's hidden state of every trained token, and four more passes through output embeddings",
        "set reference.path to a teacher's folder, and trainer.parallel.pipeline to 1, where a rank has both output embeddings; or choose"
        " opd, or kl k3, which read the sampled tokens alone",
    )
    """The distance of the policy's whole distribution from a reference's or teacher's, per token, with gradient."""
    TOKEN_KL = (
        "token_kl",
        Supplier.REFERENCE,
        "the same model; advantages are then made in the trainer",
        "set reference.path, usually to model.path, or kl_coef to 0",
    )
    """Per token log mu - log ref, for advantages with a KL in the reward; these are then made in the trainer, which has a reference."""


def supplied_by(*suppliers: Supplier) -> frozenset[Need]:
    """Every need that one of these supplies."""
    return frozenset(need for need in Need if need.supplier in suppliers)


ALWAYS_OFFERED = supplied_by(Supplier.ROW, Supplier.GROUP)
"""Needs that are met in every run."""
ORCHESTRATOR_KNOWS = supplied_by(Supplier.GROUP, Supplier.SETTING)
TRAINER_OFFERS = supplied_by(Supplier.TRAINER)
REFERENCE_OFFERS = supplied_by(Supplier.REFERENCE)
CRITICS = frozenset({Need.CRITIC, Need.IMPLICIT_PRM})
"""Kinds of a second model that is trained beside the policy; see the column `critic`."""


class Aggregation(enum.StrEnum):
    """The rule by which per-token losses become one number: the unit of the raw sum, and what divides it once per step."""

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
    """Token masks act "before_weight" or "after_weight", that is before or after a sequence-level weight is formed."""
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


RULE_COLUMNS = tuple(column.name for column in dataclasses.fields(Method) if isinstance(column.default, Rule))
"""Columns that hold one rule."""
TUPLE_COLUMNS = tuple(column.name for column in dataclasses.fields(Method) if isinstance(column.default, tuple))
"""Columns that hold any number of rules, in order."""
MASK_ORDERS = ("unstated", "before_weight", "after_weight")


def _plain_text(value: Option) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

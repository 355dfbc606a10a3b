"""The table of methods: what it holds, what it refuses, how it travels."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.algorithms import declare
from pipelinerl.algorithms.declare import load_rule
from pipelinerl.algorithms.listing import render_rules, render_table, table_rows
from pipelinerl.algorithms.method import Aggregation, Method, Need, Rule
from pipelinerl.algorithms.methods import METHODS, resolve
from pipelinerl.algorithms.methods import method_of as supplied_method_of
from pipelinerl.algorithms.rules import COLUMNS, makes_advantages_in_trainer, specs_of
from pipelinerl.config import Config, GatewaySection
from pipelinerl.errors import ConfigError
from tests.algorithms.every_method import filled
from tests.algorithms.rows import EVERYTHING, method_of


def stated_options(method: Method) -> list[Any]:
    return [value for _, rule, _ in specs_of(method) for value in rule.options.values()]


def run_with(name: str, *, reference: str | None = None, epochs: int = 1, overrides: dict[str, Any] | None = None) -> Config:
    sections = {"model": {"path": "m"}, "data": {"source": "s"}, "reward": [{"function": "a:b"}], "trainer": {"epochs": epochs}}
    algorithm = {"name": name, "overrides": overrides or {}}
    return Config.model_validate(sections | {"algorithm": algorithm, "reference": {"path": reference}})


def refused(name: str, match: str, /, *, group_size: int = 8, overrides: dict[str, Any] | None = None, **run: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(name, overrides, group_size=group_size, **{"offers": EVERYTHING, **run})


def test_the_default_row_is_grpo_clipped_around_the_engines_policy() -> None:
    method = resolve("grpo", group_size=8)
    assert method.advantage == Rule(name="grpo", options={"eps": 1e-6, "ddof": 1})
    assert method.objective == Rule(name="clip", options={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0})
    assert (method.proximal.name, method.weight.name) == ("engine", "none")
    assert method.aggregation is Aggregation.TOKEN_MEAN
    assert method.needs == frozenset()


@pytest.mark.parametrize(
    ("name", "column", "expected"),
    [
        ("dapo", "objective", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}),
        ("grpo_dual_clip", "objective", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ("gspo", "objective", {"clip_low": 3e-4, "clip_high": 4e-4}),
        ("sapo", "objective", {"tau_positive": 1.0, "tau_negative": 1.05}),
        ("dppo_tv", "objective", {"clip_low": 0.2, "clip_high": 0.2, "cap": 20.0}),
        ("reinforce_is", "objective", {"cap": 5.0}),
        ("icepop", "weight", {"low": 0.5, "high": 5.0, "batch_normalize": False}),
        ("decoupled_ppo", "weight", {"cap": 5.0, "floor": 0.0, "batch_normalize": False}),
        ("loglinear_ppo", "proximal", {"prox_lag": 1}),
        ("grpo_deepseekmath", "kl", {"beta": 0.04, "clamp": 10.0, "final": 0.0, "fade_steps": 0, "target": 0.0, "horizon": 10_000}),
        ("prime", "advantage", {"process_coef": 5.0, "outcome_coef": 5.0}),
        ("prime", "critic", {"beta": 0.05}),
        ("prime", "group_filter", {"low": 0.2, "high": 0.8, "refill": 10}),
        ("mis", "weight", {"cap": 3.0, "batch_normalize": False}),
        ("grpo_tis", "weight", {"cap": 2.0, "floor": 0.0, "batch_normalize": False}),
        ("cispo", "objective", {"clip_low": 1.0, "clip_high": 4.0}),
        ("gmpo", "objective", {"clip_low": 0.4, "clip_high": 0.4}),
        ("prime_rl", "objective", {"clip_low": 0.2, "clip_high": 0.2, "adv_tau": 1.0}),
        ("opd", "objective", {"threshold": 0.2}),
        ("clip_cov", "objective", {"clip_low": 0.2, "clip_high": 0.2, "fraction": 2e-4, "low": 1.0, "high": 5.0}),
        ("kl_cov", "objective", {"fraction": 2e-4, "beta": 0.1}),
        ("ppo", "critic", {"clip": 0.5}),
        ("ppo", "advantage", {"gamma": 1.0, "lam": 0.95, "kl_coef": 0.0}),
        ("gigpo", "advantage", {"weight": 1.0, "gamma": 0.95, "divide_by_std": True, "eps": 1e-6, "ddof": 1}),
    ],
)
def test_published_constants(name: str, column: str, expected: dict[str, float]) -> None:
    assert getattr(METHODS[name], column).options == expected


@pytest.mark.parametrize(
    ("column", "rule", "expected"),
    [
        ("weight", "tis_sequence", {"cap": 5.0, "floor": 0.0, "batch_normalize": False}),
        ("weight", "tis_geometric", {"cap": 1.2, "floor": 0.0, "batch_normalize": False}),
        ("weight", "tis_segment", {"cap": 1.2}),
        ("weight", "mis_sequence", {"cap": 3.0, "batch_normalize": False}),
        ("masks", "ratio_band", {"low": 0.8, "high": 1.2}),
        ("masks", "probability_band", {"high": 0.2}),
        ("masks", "outlier_band", {"low": 1e-4, "high": 100.0}),
        ("masks", "product_band", {"low": 0.5, "high": 2.0}),
        ("masks", "geo_rs", {"low": 0.99, "high": 1.01}),
        ("masks", "k3_rs", {"high": 0.01}),
        ("masks", "veto", {"low": 1e-4}),
        ("masks", "kpop", {"high": 2.0}),
        ("masks", "opsm", {"delta": 1e-4}),
        ("masks", "m2po", {"tau": 0.04}),
        ("auxiliary", "squared_log_ratio", {"tau": 1e-3}),
    ],
)
def test_published_constants_of_rules_that_rows_combine(column: str, rule: str, expected: dict[str, float]) -> None:
    assert COLUMNS[column][rule].options == expected


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [("dr_grpo", "seq-mean-token-sum-norm"), ("gspo", "seq-mean-token-mean"), ("topr", "seq-mean-token-sum"), ("dapo", "token-mean")],
)
def test_published_aggregations(name: str, aggregation: str) -> None:
    assert METHODS[name].aggregation == aggregation


def test_every_row_has_a_formula_and_a_source_and_is_printed() -> None:
    text = render_table()
    for name, formula, cost, source in table_rows():
        assert all((formula, source)), name
        assert all(part in text for part in (f"{name} ", formula, cost, source))
    assert len(table_rows()) == len(METHODS)


def test_every_rule_is_printed_with_its_formula_its_defaults_and_its_source() -> None:
    lines = render_rules().splitlines()
    for column, table in COLUMNS.items():
        at = lines.index(f"{column}:")
        for line, (name, spec) in zip(lines[at + 1 :], table.items(), strict=False):
            assert line.split()[0] == name
            assert all(part in line for part in (spec.formula, spec.source, *spec.options)), name
            assert name in ("none", "current") or spec.source, f"{column} {name} has no source"
    assert "tau=to be stated" in render_rules()


def test_the_table_says_what_a_method_costs_and_what_it_waits_for() -> None:
    costs = {name: cost for name, _, cost, _ in table_rows()}
    assert costs["grpo"] == ""
    assert costs["gdpo"] == "whole_batch"
    assert costs["m2po"] == "old_logprobs; whole_step"
    assert costs["ppo"] == "critic; whole_step"
    assert costs["prime"] == "implicit_prm; reference_logprobs; whole_step"
    assert costs["gigpo"] == "needs anchors"
    assert "whole_batch: rows leave only when all groups of their step are in" in render_table()


RUNS_AS_IT_STANDS = [name for name, _, cost, _ in table_rows() if "needs" not in cost and None not in stated_options(METHODS[name])]


@pytest.mark.parametrize("name", RUNS_AS_IT_STANDS)
def test_what_the_table_does_not_refuse_a_run_accepts(name: str) -> None:
    assert supplied_method_of(run_with(name, reference="models/base")).name == name


def test_a_method_that_reads_a_reference_is_refused_until_one_is_named() -> None:
    for name, way_out in {"opd": "set reference.path, to model.path", "reinforce_pp": "set reference.path, usually to model.path"}.items():
        with pytest.raises(ConfigError, match=way_out):
            supplied_method_of(run_with(name))
    assert supplied_method_of(run_with("reinforce_pp", overrides={"advantage": {"kl_coef": 0.0}})).name == "reinforce_pp"


def test_a_method_whose_inputs_nothing_here_supplies_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError, match=r"needs anchors, which this run does not offer: it compares turns that answer equal states"):
        supplied_method_of(run_with("gigpo", reference="models/base"))


@pytest.mark.parametrize("name", ["gigpo", "hgpo", "tree_grpo", "tree_rpo", "mt_grpo"])
def test_an_environment_supplies_what_methods_of_turns_compare(name: str) -> None:
    settings = run_with(name)
    environment = settings.environment.model_copy(update={"function": "game.py:reply"})
    assert supplied_method_of(settings.model_copy(update={"environment": environment})).name == name


@pytest.mark.parametrize("name", ["tree_grpo", "tree_rpo", "mt_grpo"])
def test_agents_supply_turns(name: str) -> None:
    assert supplied_method_of(run_with(name).model_copy(update={"gateway": GatewaySection.model_validate({})})).name == name


@pytest.mark.parametrize("name", ["gigpo", "hgpo"])
def test_agents_name_no_states(name: str) -> None:
    with pytest.raises(ConfigError, match=r"needs anchors, which this run does not offer: .* by an agent, who names none"):
        supplied_method_of(run_with(name).model_copy(update={"gateway": GatewaySection.model_validate({})}))


def test_a_greedy_baseline_beside_rewards_that_compare_siblings_is_refused() -> None:
    assert supplied_method_of(run_with("remax")).adds_greedy
    refused("remax", "makes that depend on what its siblings sampled", compares_siblings=True)
    assert not resolve("rloo", group_size=8, compares_siblings=True).adds_greedy


@pytest.mark.parametrize("method", ["ppo", "turn_ppo", "vapo"])
def test_credit_that_runs_along_the_tokens_is_refused_for_episodes_that_may_branch(method: str) -> None:
    with pytest.raises(ConfigError, match="it would pass from one context to another"):
        resolve(method, group_size=8, has_critic=True, may_branch=True)
    resolve("grpo", group_size=8, may_branch=True)


def test_several_passes_over_a_step_want_a_policy_that_stays() -> None:
    assert supplied_method_of(run_with("grpo", epochs=2)).proximal.name == "engine"
    assert supplied_method_of(run_with("decoupled_ppo", epochs=2)).proximal.name == "recomputed"
    with pytest.raises(ConfigError, match=r"single epoch of a step the two are one: it would never act\. Set trainer\.epochs to 2"):
        supplied_method_of(run_with("decoupled_ppo"))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_several_passes_over_a_step(name: str) -> None:
    method_of(name, **filled(METHODS[name]))


def test_an_advantage_made_in_the_trainer_leaves_no_rule_over_the_step_to_the_orchestrator() -> None:
    with_kl = method_of("reinforce_pp")
    assert makes_advantages_in_trainer(with_kl)
    assert Need.WHOLE_STEP in with_kl.needs
    assert Need.WHOLE_BATCH not in with_kl.needs
    without = method_of("reinforce_pp", advantage={"kl_coef": 0.0})
    assert not makes_advantages_in_trainer(without)
    assert without.needs == {Need.WHOLE_BATCH}
    assert makes_advantages_in_trainer(method_of("rloo", shaping={"name": "minus_token_kl", "coef": 0.1}))


def test_refuses_what_the_orchestrator_alone_knows_where_the_trainer_makes_the_advantages() -> None:
    refused("gdpo", "advantage gdpo needs components, which only", overrides={"shaping": {"name": "minus_token_kl", "coef": 0.1}})


def test_refuses_to_withhold_only_tokens_older_than_the_run_lets_train() -> None:
    withhold = {"masks": {"name": "version_withhold", "bound": 3}}
    assert resolve("grpo", withhold, group_size=8, max_staleness=3).withhold_bound == 3
    refused("grpo", "got bound 3, expected at most 2", overrides=withhold, max_staleness=2)
    assert METHODS["grpo"].withhold_bound is None


@pytest.mark.parametrize("column", COLUMNS)
def test_what_is_read_of_a_rules_source_is_what_its_function_takes(column: str) -> None:
    """The defaults, too: a run's config holds what was read, and the function is called with it."""
    for spec in COLUMNS[column].values():
        if not spec.reference:
            assert spec.name == "none"
            continue
        parameters = inspect.signature(load_rule(spec.reference)).parameters
        assert parameters.keys() == {*spec.parameters} | spec.options.keys() - spec.caller_options.keys(), f"{column} {spec.name}"
        for option in spec.options.keys() - spec.caller_options.keys():
            default = parameters[option].default
            assert spec.options[option] == (None if default is inspect.Parameter.empty else default), f"{column} {spec.name} {option}"


def test_every_decorated_function_is_found() -> None:
    """A file that declares rules and is not read would hide them."""
    files = Path(declare.__file__).parent.glob("*/*.py")
    found = sum(len(re.findall(rf"(?m)^@({'|'.join(declare.DECORATORS)})\(", file.read_text())) for file in files)
    assert found == sum(bool(spec.reference) for table in COLUMNS.values() for spec in table.values())


def test_an_override_changes_options_a_rule_or_both_and_nothing_else() -> None:
    base = method_of("grpo")
    options = method_of("grpo", objective={"clip_high": 0.28})
    assert options.objective.options == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}
    assert options.weight == base.weight
    assert method_of("grpo_tis", weight="icepop").weight.options == {"low": 0.5, "high": 5.0, "batch_normalize": False}
    both = method_of("grpo_tis", weight={"name": "icepop", "high": 4})
    assert both.weight.options == {"low": 0.5, "high": 4.0, "batch_normalize": False}
    assert method_of("dapo", objective={"clip_low": 0.1}).objective.options["clip_high"] == 0.28, "what the row had stated stays"
    assert METHODS["grpo_tis"].weight.name == "tis_token", "the table itself is never edited"


def test_needs_follow_from_the_rules_in_force() -> None:
    assert method_of("decoupled_ppo").needs == {Need.OLD_LOGPROBS}
    assert method_of("loglinear_ppo").needs == {Need.TOKEN_VERSIONS}
    assert method_of("grpo", kl="k3").needs == {Need.REFERENCE_LOGPROBS}
    assert Need.TOKEN_KL in method_of("reinforce_pp").needs
    assert Need.TOKEN_KL not in method_of("reinforce_pp", advantage={"kl_coef": 0.0}).needs


@pytest.mark.parametrize(
    ("name", "overrides", "match"),
    [
        ("grpoo", {}, r"no method named 'grpoo' \(did you mean 'grpo'\?\)"),
        ("grpo", {"objctive": "gspo"}, r"'objctive' is no column of a method \(did you mean 'objective'\?\)"),
        ("grpo", {"objective": "gpso"}, r"algorithm.objective: no rule named 'gpso' \(did you mean 'gspo'\?\)"),
        ("grpo", {"objective": {"clip_hi": 0.3}}, r"clip has no option 'clip_hi' \(did you mean 'clip_high'\?\)"),
        ("grpo", {"objective": {"clip_low": 1.5}}, r"clip_low: got 1.5, expected a finite number from 0 to 1"),
        ("grpo", {"objective": {"clip_low": "0.2"}}, "got '0.2', expected a number"),
        ("grpo_tis", {"weight": {"cap": float("nan")}}, "got nan, expected a finite number"),
        ("grpo_tis", {"weight": {"cap": 0.5}}, "cap: got 0.5"),
        ("grpo_tis", {"weight": {"cap": True}}, "got True, expected a number"),
        ("grpo", {"advantage": {"ddof": 0.5}}, "ddof: got 0.5, expected a whole number"),
        ("rloo", {"advantage": {"divide_by_std": 1}}, "got 1, expected true or false"),
        ("process_grpo", {"advantage": {"pool": "tokens"}}, "expected one of steps, position"),
        ("grpo", {"aggregation": "token_mean"}, r"got 'token_mean' \(did you mean 'token-mean'\?\)"),
        ("grpo", {"mask_order": "after"}, "Expected one of unstated, before_weight, after_weight"),
        ("grpo", {"objective": 3}, "expected a rule's name or a table of options"),
        ("grpo", {"auxiliary": ["squared_log_ratio", "squared_log_ratio"]}, "each rule at most once"),
    ],
)
def test_a_wrong_word_or_number_names_what_was_expected(name: str, overrides: dict[str, Any], match: str) -> None:
    refused(name, match, overrides=overrides)


@pytest.mark.parametrize("weight", [name for name in COLUMNS["weight"] if name != "none"])
def test_refuses_a_weight_beside_the_bypass(weight: str) -> None:
    refused("gspo", "would count pi/mu twice", overrides={"weight": weight})


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "prime_rl", "ipo", "opd", "topr", "topr_token", "reinforce_is"])
def test_refuses_a_two_policy_objective_around_another_policy(name: str) -> None:
    refused(name, "expected engine", overrides={"proximal": "recomputed"})


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "maxrl", "opo", "grpo_passk", "dapo"])
def test_refuses_a_group_rule_with_groups_of_one(name: str) -> None:
    refused(name, "compares siblings: got group size 1, expected at least 2", group_size=1)


def test_a_group_of_one_may_train_with_a_rule_that_compares_no_siblings() -> None:
    assert resolve("remax", group_size=1, offers=EVERYTHING).advantage.name == "remax"


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("otb", "needs square_sum"),
        ("ppo", "needs critic"),
        ("vapo", "needs critic"),
        ("decoupled_ppo", "needs old_logprobs"),
        ("grpo_deepseekmath", "needs reference_logprobs"),
        ("gigpo", "needs anchors"),
        ("hgpo", "needs anchors"),
        ("tree_grpo", "needs turns"),
        ("mt_grpo", "needs turns"),
        ("process_grpo", "needs step_scores"),
        ("m2po", "needs whole_step"),
        ("clip_cov", "needs whole_step"),
    ],
)
def test_refuses_a_method_whose_inputs_the_run_does_not_have(name: str, need: str) -> None:
    refused(name, need, offers=frozenset())


@pytest.mark.parametrize("name", ["otb", "grpo_top_entropy", "ppo", "m2po"])
def test_what_the_trainer_computes_by_itself_takes_no_reference(name: str) -> None:
    assert supplied_method_of(run_with(name)).name == name


def test_refuses_the_loglinear_proxy_without_versions_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of this system has them; the check is for one that would not."""
    monkeypatch.setattr("pipelinerl.algorithms.methods.ALWAYS_OFFERED", frozenset())
    refused("loglinear_ppo", "needs token_versions", offers=frozenset())


def test_a_critic_makes_ppo_possible() -> None:
    offers = frozenset({Need.WHOLE_STEP, Need.WHOLE_BATCH})
    assert resolve("ppo", group_size=1, offers=offers, has_critic=True).critic.name == "clipped"


@pytest.mark.parametrize("objective", [name for name, spec in COLUMNS["objective"].items() if spec.compares_proximal])
def test_refuses_a_trust_region_around_the_policy_itself(objective: str) -> None:
    columns = {"objective": {"name": objective} | ({"tau": 0.1} if objective == "kimi" else {"beta": 0.1} if objective == "dro" else {})}
    refused("grpo", "'current' makes them equal: it would never act", overrides={**columns, "proximal": "current"}, epochs=2)
    refused("grpo", "in a single epoch of a step the two are one", overrides={**columns, "proximal": "recomputed"})
    assert resolve("grpo", {**columns, "proximal": "recomputed"}, group_size=8, offers=EVERYTHING, epochs=2)


def test_refuses_a_mask_that_would_never_act() -> None:
    refused("grpo_tis", "masks opsm compares pi with the proximal policy, and 'current'", overrides={"masks": "opsm"})
    refused("grpo", "masks opsm compares pi with the policy at the start", overrides={"masks": "opsm", "proximal": "recomputed"})


def test_refuses_a_token_mask_under_a_sequence_weight_until_the_order_is_stated() -> None:
    columns = {"weight": "tis_sequence", "masks": "outlier_band"}
    refused("grpo_tis", "got no order", overrides=columns)
    assert resolve("grpo_tis", {**columns, "mask_order": "after_weight"}, group_size=8).mask_order == "after_weight"
    assert resolve("grpo_tis", {**columns, "masks": "veto"}, group_size=8).masks[0].name == "veto"


@pytest.mark.parametrize(
    ("name", "overrides", "match"),
    [
        ("grpo", {"advantage": "none"}, "nothing would train"),
        ("grpo", {"objective": "opd", "proximal": "engine", "weight": "none"}, "brings its own signal: got advantage 'grpo'"),
        ("ppo", {"critic": "none"}, "reads values: got critic 'none', which trains none, expected clipped"),
        ("grpo", {"critic": "clipped"}, "trains values that advantage grpo does not read"),
        ("prime", {"critic": "clipped"}, "reads process rewards: got critic 'clipped', which trains none, expected implicit_prm"),
        ("rae", {"batch": "whiten_tokens"}, "rae's baselines have moved by then"),
        ("step_reinforce", {"batch": "whiten_sequences"}, "step_reinforce gives one per token. Choose whiten_tokens"),
        ("maxrl", {"shaping": {"name": "minus_token_kl", "coef": 0.1}}, "divides by the mean reward"),
        ("dapo", {"group_filter": {"refill": 0}}, "refill: got 0"),
    ],
)
def test_refuses_rules_of_which_one_makes_what_the_other_cannot_read(name: str, overrides: dict[str, Any], match: str) -> None:
    refused(name, match, overrides=overrides)


def test_rewards_may_be_left_unread_where_another_term_trains() -> None:
    assert method_of("grpo", advantage="none", auxiliary="positive_nll").advantage.name == "none"


def test_refuses_options_that_have_no_default_until_they_are_stated() -> None:
    refused("ipo", r"ipo has no default for threshold.*Set algorithm\.objective\.threshold")
    assert resolve("ipo", {"objective": {"threshold": 0.1}}, group_size=8)


def test_refuses_a_band_that_keeps_nothing_and_a_dual_clip_inside_the_clip() -> None:
    refused("icepop", "low 0.5 and high 0.4", overrides={"weight": {"high": 0.4}})
    refused("grpo", "expected 0 .off. or more than 1", overrides={"objective": {"dual_clip": 0.9}})


def test_refuses_the_nll_of_correct_answers_under_another_unit_than_tokens() -> None:
    refused("vapo", "expected token-mean", overrides={"aggregation": "seq-mean-token-mean"})


def test_all_problems_are_shown_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("decoupled_ppo", {"kl": "k3"}, group_size=1)
    for part in ("old_logprobs", "reference_logprobs", "group size 1", "single epoch"):
        assert part in str(caught.value)


@pytest.mark.slow
def test_the_orchestrators_side_imports_without_torch() -> None:
    """The head node has none."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pipelinerl.algorithms import advantage, methods, staleness\n"
        "from pipelinerl.algorithms.advantage import optimal_baseline, prime\n"
        "print(len(methods.METHODS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(METHODS)


@pytest.mark.parametrize(
    ("name", "overrides", "match"),
    [
        ("dr_grpo", {}, "advantage dr_grpo would compare the others only"),
        ("rloo_early_stop", {"aggregation": "token-mean"}, "divides by rollouts started"),
        ("rloo_early_stop", {"group_filter": "zero_variance"}, "group_filter zero_variance would judge by the others only"),
        ("rloo_early_stop", {"batch": "whiten_tokens"}, "batch whiten_tokens would judge"),
        ("rloo_early_stop", {"masks": "m2po", "proximal": "engine", "weight": "none"}, "measures whole steps"),
        ("rloo_early_stop", {"objective": "clip", "proximal": "engine", "weight": "none"}, "objective clip is not linear in it"),
        ("step_reinforce", {}, "divides by rollouts started"),
    ],
)
def test_whatever_would_make_an_early_stop_biased_is_refused(name: str, overrides: dict[str, Any], match: str) -> None:
    resolve(name, overrides, group_size=8, offers=EVERYTHING)
    refused(name, match, overrides=overrides, stops_early=True)


@pytest.mark.parametrize("name", ["rloo_early_stop", "step_reinforce"])
def test_methods_that_stay_unbiased_take_an_early_stop(name: str) -> None:
    resolve(name, {"aggregation": "seq-mean-token-sum-norm"}, group_size=8, offers=EVERYTHING, stops_early=True)

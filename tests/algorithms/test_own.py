"""Rules of the user's own: the file that the docs print, what the contract carries, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.preflight import look
from pipelinerl.algorithms.advantage import group_advantages
from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from pipelinerl.algorithms.declare import load_rule
from pipelinerl.algorithms.listing import render_rules
from pipelinerl.algorithms.loss import policy_loss
from pipelinerl.algorithms.method import Method, Need
from pipelinerl.algorithms.methods import resolve
from pipelinerl.algorithms.own import CARRIED
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.findings import Level, sentences
from tests.algorithms.every_method import sample
from tests.algorithms.rows import Seq, loss_and_gradient, method_of, pack
from tests.algorithms.test_page import block
from tests.trainer.tiny import make_batch, make_folder, make_model, make_sample, make_step, packed_logprobs

CARRIES_ALL = {column: ", ".join(carried) for column, carried in CARRIED.items()}


@pytest.fixture
def rules(tmp_path: Path) -> Any:
    """Write a file of functions; gives a way to name one of them."""

    def write(source: str, name: str = "f") -> str:
        path = tmp_path / f"rules_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        return f"{path}:{name}"

    return write


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama"), family="llama")


def with_rule(column: str, rule: Any) -> Method:
    base = "grpo_tis" if column == "weight" else "grpo"
    return method_of(base, **{column: [rule] if column in ("masks", "auxiliary") else rule})


def test_the_printed_file_trains_by_its_lines_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = block("python", holding="half_life")
    assert len(source.splitlines()) < 15
    (tmp_path / "rules.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    overrides = tomllib.loads(block("toml", holding="rules.py:loss"))["algorithm"]["overrides"]
    method = resolve("grpo", overrides, group_size=8)
    assert method.objective.options == {"width": 0.3}
    sequences = sample(5)
    loss, gradient, sums = loss_and_gradient(sequences, method=method)
    columns = pack(sequences)
    pi, mu, a, loss_mask = columns.logprobs, columns.behaviour_logprobs, columns.advantages, columns.loss_mask
    ratio = (pi - mu).exp()
    weight = 0.5 ** ((5 - columns.versions) / 4.0) * (ratio.detach() <= 5.0)
    assert columns.weights is not None
    by_hand = -weight * torch.minimum(ratio * a, ratio.clamp(0.7, 1.3) * a) * columns.weights[columns.sequence_ids]
    expected = torch.where(loss_mask, by_hand, 0).sum()
    expected.backward()
    assert pi.grad is not None
    assert loss == pytest.approx(float(expected.detach()))
    assert gradient == pytest.approx(pi.grad.tolist())
    assert "rules.py:mask_dropped_fraction_sum" in sums.meters
    group = ScoredGroup(rewards=np.array([1.0, 0.0, 0.5]), lengths=np.array([2, 3, 4]))
    assert group_advantages(group, method=method) == pytest.approx([0.5, -0.5, 0.0])


def test_a_step_of_the_trainer_has_the_gradient_of_a_loss_of_the_users(llama: Path, rules: Any) -> None:
    reference = rules("def f(ratio, advantages, *, power: float = 2.0):\n    return -advantages * ratio ** power\n")
    samples = [make_sample(np.random.default_rng(seed), prompt=3, completion=5) for seed in range(4)]
    step, optimizer = make_step(make_model(llama), overrides={"objective": {"name": reference, "power": 0.5}})
    step.add(make_batch(samples))
    by_hand = make_model(llama)
    batch = make_batch(samples)
    mu, a = (torch.from_numpy(getattr(batch, column)[batch.loss_mask].copy()) for column in ("logprobs", "advantages"))
    (-a * (packed_logprobs(by_hand, samples) - mu).exp().sqrt()).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in by_hand.parameters() if parameter.grad is not None])
    assert torch.allclose(optimizer.gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("column", ["objective", "weight", "masks", "auxiliary"])
def test_whatever_the_contract_carries_arrives_in_the_shape_it_says(column: str, rules: Any) -> None:
    names = CARRIES_ALL[column]
    result = "logprobs > -100" if column == "masks" else "logprobs * 2"
    reference = rules(f"SEEN = {{}}\ndef f({names}):\n    SEEN.update(locals())\n    return {result}\n")
    method = with_rule(column, reference)
    policy_loss(pack(sample(2)), method=method).loss.backward()
    seen = load_rule(reference).__globals__["SEEN"]
    columns = pack(sample(2))
    for name in CARRIED[column]:
        if name == "sequences":
            assert seen[name].mean(columns.advantages).shape == (6,)
            continue
        value = seen[name]
        assert value.shape == columns.logprobs.shape, name
        assert (value.dtype == torch.bool) == ("bool" in CARRIED[column][name].meaning), name
        assert (value.dtype.is_floating_point) == ("float" in CARRIED[column][name].meaning), name
        has_gradient = column in ("objective", "auxiliary") and name in ("logprobs", "ratio")
        assert value.requires_grad == has_gradient, name


def test_whatever_the_contract_carries_to_an_advantage_arrives(rules: Any) -> None:
    reference = rules(f"def f({CARRIES_ALL['advantage']}):\n    return [0.5 * t + greedy_reward + components[0, 1] for t in loss_mask]\n")
    method = with_rule("advantage", reference)
    assert {Need.GREEDY_REWARD, Need.STEP_SCORES, Need.COMPONENTS} <= method.needs
    group = ScoredGroup(
        rewards=np.array([1.0, 0.0]),
        lengths=np.array([2, 1]),
        loss_mask=(np.array([True, True]), np.array([False, True])),
        components=np.array([[1.0, 0.25], [0.0, 0.5]]),
        component_weights=np.ones(2),
        correct=np.array([True, False]),
        greedy_reward=0.1,
    )
    with pytest.raises(ValueError, match="reads steps"):
        group_advantages(group, method=method)
    without = with_rule(
        "advantage", rules("def f(loss_mask, greedy_reward, components):\n    return [t + greedy_reward for t in loss_mask]\n")
    )
    credit = group_advantages(group, method=without)
    assert [row.tolist() for row in credit] == [pytest.approx([1.1, 1.1]), pytest.approx([0.1, 1.1])]


@pytest.mark.parametrize(
    ("column", "source", "match"),
    [
        ("advantage", "def f(rewards, trains): ...", r"asks for trains, which is now called loss_mask"),
        ("objective", "def f(advantage, ratio): ...", r"asks for advantage \(did you mean 'advantages'\?\), which nothing carries"),
        ("objective", "def f(ratio, advantages, tau=1.0): ...", "asks for tau, which nothing carries .* after a bare"),
        ("objective", "def f(hidden_states): ...", "asks for hidden_states .*which nothing carries to a function of this column"),
        ("advantage", "def f(logprobs): ...", "asks for logprobs, which nothing carries .* may ask for rewards, lengths"),
        ("masks", "def f(*columns): ...", r"takes anything by \*columns: name what it reads"),
        ("weight", "def f(rho, *, caps=[1, 2]): ...", r"option caps has the default \[1, 2\], expected a number, text"),
        ("weight", "def g(rho): ...", r"defines no function 'f' \(did you mean|defines no function 'f'; it has g"),
        ("weight", "def f(rho) ...", "cannot be read: "),
        ("kl", "def f(logprobs): ...", "is a function, and only advantage, objective, weight, masks, auxiliary take one"),
        ("weight", "def f(rho, *, cap): ...", "has no default for cap"),
    ],
)
def test_what_cannot_be_called_is_refused_by_name_before_anything_starts(column: str, source: str, match: str, rules: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        with_rule(column, rules(source + "\n"))


def test_an_unknown_option_names_the_nearest_and_a_wrong_kind_what_was_expected(rules: Any) -> None:
    reference = rules("def f(ratio, advantages, *, width: float = 0.2, how: str = 'sum', slope: float = -1.0): ...\n")
    with pytest.raises(ConfigError, match=r"has no option 'widht' \(did you mean 'width'\?\)"):
        with_rule("objective", {"name": reference, "widht": 0.3})
    with pytest.raises(ConfigError, match="got 'wide', expected a number"):
        with_rule("objective", {"name": reference, "width": "wide"})
    words = rules("def f(ratio, advantages, *, how: Literal['sum', 'mean'] = 'sum'): ...\n")
    with pytest.raises(ConfigError, match="how: got 'max', expected one of sum, mean"):
        with_rule("objective", {"name": words, "how": "max"})
    method = with_rule("objective", {"name": reference, "how": "mean", "slope": -3.0})
    assert method.objective.options == {"width": 0.2, "how": "mean", "slope": -3.0}


def test_its_needs_and_its_place_are_judged_as_those_of_any_rule(rules: Any) -> None:
    reads_reference = rules("def f(logprobs, reference_logprobs): ...\n")
    with pytest.raises(ConfigError, match="needs reference_logprobs, which this run does not offer"):
        resolve("grpo", {"auxiliary": reads_reference}, group_size=8)
    with pytest.raises(ConfigError, match="would count pi/mu twice"):
        method_of("grpo", weight=rules("def f(rho): ...\n"))
    with pytest.raises(ConfigError, match="'current' makes them equal: it would never act"):
        method_of("grpo_tis", objective=rules("def f(ratio, advantages): ...\n"))
    with pytest.raises(ConfigError, match="brings its own signal: got advantage 'grpo'"):
        method_of("grpo", objective=rules("def f(ratio): ...\n"))


@pytest.mark.parametrize(
    ("column", "body", "match"),
    [
        ("objective", "return logprobs.sum()", r"returned float64 of shape \(\), expected a float tensor of shape \(30,\), one number per"),
        ("masks", "return logprobs", "returned float64 of shape .*, expected a bool tensor"),
        ("weight", "return 1.0", "returned float, expected a float tensor"),
        ("auxiliary", "return logprobs / nothing", "raised NameError: name 'nothing' is not defined"),
    ],
)
def test_what_comes_back_wrong_or_not_at_all_is_named_with_its_function(column: str, body: str, match: str, rules: Any) -> None:
    advantages = ", advantages" if column == "objective" else ""
    method = with_rule(column, rules(f"def f(logprobs{advantages}):\n    {body}\n"))
    policy_loss(pack([Seq(logprobs=[], behaviour=[], advantages=[])]), method=method)
    with pytest.raises(ConfigError, match=match):
        policy_loss(pack(sample(2)), method=method)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("return rewards.mean()", r"returned an array of shape \(\), expected one number for each of 2 siblings"),
        ("return [rewards, rewards, rewards]", r"arrays of shapes \[\(2,\), \(2,\), \(2,\)\]"),
        ("return rewards * float('nan')", "not finite for rewards"),
        ("raise KeyError('x')", "raised KeyError: 'x'"),
    ],
)
def test_an_advantage_that_comes_back_wrong_is_named(body: str, match: str, rules: Any) -> None:
    method = with_rule("advantage", rules(f"def f(rewards):\n    {body}\n"))
    with pytest.raises(ConfigError, match=match):
        group_advantages(ScoredGroup(rewards=np.array([1.0, 0.0]), lengths=np.array([3, 4])), method=method)


def test_neither_weight_nor_mask_carries_a_gradient(rules: Any) -> None:
    method = with_rule("weight", rules("def f(logprobs):\n    return logprobs.exp()\n"))
    sequences = [Seq(logprobs=[-1.0], behaviour=[-1.0], advantages=[2.0])]
    _, gradient, _ = loss_and_gradient(sequences, method=method)
    assert gradient == pytest.approx([-2.0 * float(np.exp(-1.0))])


def test_the_orchestrator_reads_a_loss_that_imports_torch_without_running_it(rules: Any) -> None:
    """The head node has no torch."""
    reference = rules("import torch\ndef f(ratio, advantages, *, width: float = 0.2):\n    return -ratio * advantages\n")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pipelinerl.algorithms import advantage\n"
        "from pipelinerl.algorithms.methods import resolve\n"
        f"print(resolve('grpo', {{'objective': {reference!r}}}, group_size=8).objective.options)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "{'width': 0.2}", done.stderr


def test_the_preflight_loads_an_advantage_and_names_what_it_cannot(rules: Any, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def one(completion):\n    return 1.0\n")
    reference = rules("import no_such\ndef f(rewards):\n    return rewards\n")
    tree = {"model": {"path": str(tmp_path)}, "data": {"source": "none.jsonl"}, "reward": [{"function": f"{tmp_path}/rewards.py:one"}]}
    problems = sentences(look(Config.model_validate(tree | {"algorithm": {"overrides": {"advantage": reference}}})), Level.FAIL)
    assert any("cannot be imported: ModuleNotFoundError: No module named 'no_such'" in problem for problem in problems)


def test_the_contract_is_printed_whole() -> None:
    text = render_rules()
    for carried in CARRIED.values():
        for name, what in carried.items():
            assert f"{name} " in text
            assert what.meaning in text

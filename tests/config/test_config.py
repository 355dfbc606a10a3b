"""Settings: every mistake is named with its path, all at once, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config, Mode, renamed
from pipelinerl.config.file import described_keys, known_keys, load, parse
from pipelinerl.errors import ConfigError
from pipelinerl.launch.unused_keys import unused_keys

MINIMAL = """\
[model]
path = "models/small"
[data]
source = "prompts.jsonl"
[[reward]]
function = "rewards.py:right"
"""


def tree(**sections: Any) -> dict[str, Any]:
    """The smallest config, with sections added or exchanged."""
    smallest: dict[str, Any] = {
        "model": {"path": "models/small"},
        "data": {"source": "prompts.jsonl"},
        "reward": [{"function": "rewards.py:right"}],
    }
    return smallest | sections


def problems_of(settings: dict[str, Any]) -> list[str]:
    """The problems a config is refused with, without the line that counts them."""
    with pytest.raises(ConfigError) as refused:
        parse(settings, origin="my.toml")
    first, *lines = str(refused.value).splitlines()
    assert first == f"my.toml: {len(lines)} problem" + ("s" if len(lines) > 1 else "")
    return [line.removeprefix("  - ") for line in lines]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(MINIMAL)
    return path


def test_five_lines_are_enough(file: Path):
    config = load(file)
    assert config.model.path == Path("models/small")
    assert config.reward[0].weight == 1.0
    assert config.pipeline.mode is Mode.STREAMING
    assert config.trainer.steps == 100


def test_a_config_never_changes(file: Path):
    config = load(file)
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"trainer": {"setps": 3}}, "trainer.setps is not a known key; did you mean trainer.steps?"),
        ({"rollout": {"groupsize": 3}}, "rollout.groupsize is not a known key; did you mean rollout.group_size?"),
        ({"pipline": {"mode": "sync"}}, "pipline is not a known key; did you mean pipeline?"),
        ({"trainer": {"zzz": 1}}, "trainer.zzz is not a known key"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_known_one(settings: dict[str, Any], problem: str):
    assert problems_of(tree(**settings)) == [problem]


def test_contradictions_are_told_beside_wrong_keys_as_far_as_their_sections_are_right():
    settings = tree(batch={"max_tokens": 10, "min_group_size": 9}, trainer={"setps": 3, "ranks": 2, "cores": [0]})
    assert problems_of(settings) == [
        "trainer.setps is not a known key; did you mean trainer.steps?",
        "batch.max_tokens is 10 but rollout.max_tokens is 1024: a trajectory could never be packed. Raise batch.max_tokens.",
        "batch.min_group_size is 9 but rollout.group_size is 8: every group would fail. Lower batch.min_group_size.",
    ]


def test_an_unknown_key_of_a_reward_is_named_with_its_place():
    (problem,) = problems_of(tree(reward=[{"function": "a:b"}, {"function": "a:b", "wieght": 2.0}]))
    assert problem == "reward.1.wieght is not a known key; did you mean reward.weight?"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"trainer": {"steps": 0}}, "trainer.steps is 0: input should be greater than 0"),
        ({"trainer": {"steps": "many"}}, "trainer.steps is 'many': input should be a valid integer"),
        ({"pipeline": {"mode": "fast"}}, "pipeline.mode is 'fast': input should be 'streaming', 'one_step_off' or 'sync'"),
        ({"pipeline": {"max_staleness": -1}}, "pipeline.max_staleness is -1: input should be greater than or equal to 0"),
        ({"model": {"path": "m", "dtype": "float64"}}, "model.dtype is 'float64': input should be 'float32', 'bfloat16' or 'float16'"),
        ({"run": {"name": "../elsewhere"}}, "run.name is '../elsewhere': string should match pattern '^[^/]+$'"),
        ({"run": {"name": ""}}, "run.name is '': string should have at least 1 character"),
        ({"reward": []}, "reward is missing: name a function"),
    ],
)
def test_a_wrong_value_is_named_with_its_path_and_what_was_expected(settings: dict[str, Any], problem: str):
    (found,) = problems_of(tree(**settings))
    assert found.startswith(problem)


def test_a_missing_key_says_what_it_is_for():
    settings = tree(model={})
    (found,) = problems_of(settings)
    assert found.startswith("model.path is missing: Hugging Face folder: config.json, *.safetensors, tokenizer files; or a Hub name")
    del settings["model"]
    (found,) = problems_of(settings)
    assert found.startswith("model is missing")
    (found,) = problems_of(tree(reward=[{"weight": 2.0}]))
    assert found == "reward.0 names neither function nor model, expected one of them: what scores a completion."


def test_fp8_is_refused_by_the_kernel_that_would_compute_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelinerl.config.validation.has_amx", lambda: False)
    (found,) = problems_of(tree(engine={"quantization": "fp8"}))
    assert found.startswith('engine.quantization is "fp8": vLLM repacks such weights once it has loaded them')
    assert "CPUFp8PerTensorScaledMMLinearKernel, also want AMX tiles, which this machine's processor lacks" in found
    monkeypatch.setattr("pipelinerl.config.validation.has_amx", lambda: True)
    assert "lacks" not in problems_of(tree(engine={"quantization": "fp8"}))[0]


@pytest.mark.parametrize(
    ("section", "settings", "words"),
    [
        ("engine", {"options": {"tensor_parallel_size": 2}}, "spread an engine over 2 ranks, which quantise nothing"),
        ("weights", {"swap_mode": "copy"}, 'weights.swap_mode is "copy". Set it to "auto"'),
        ("weights", {"adapters": "separate"}, 'weights.adapters is "separate". Set it to "merged"'),
    ],
)
def test_int8_is_for_whole_policies_of_one_rank(section: str, settings: dict, words: str):
    sections = {"engine": {"quantization": "int8"}, "lora": {"rank": 8}}
    sections[section] = sections.get(section, {}) | settings
    assert any(words in problem for problem in problems_of(tree(**sections)))


def test_a_reward_is_a_function_or_a_model_and_takes_no_keys_of_the_other():
    both, keys, group = {"function": "a:b", "model": "m"}, {"function": "a:b", "format": "text"}, {"model": "m", "per": "group"}
    found = problems_of(tree(reward=[both, keys, group, {"model": "n", "format": "text"}]))
    assert [line.split(" ")[0] for line in found] == ["reward.0", "reward.1.format", "reward.2.per"]
    (found,) = problems_of(tree(reward=[{"model": "m"}], environment={"function": "a:b"}))
    assert 'Set reward.0.format to "text"' in found


def test_all_problems_are_shown_at_once():
    found = problems_of(
        {
            "model": {"dtype": "int4"},
            "data": {"source": "a.jsonl", "shufle": True},
            "reward": [{"weigth": 1.0}],
            "trainer": {"steps": -5},
            "colour": "blue",
        }
    )
    assert [line.split(" is ")[0] for line in found] == [
        "model.path",
        "model.dtype",
        "data.shufle",
        "reward.0.weigth",
        "trainer.steps",
        "colour",
    ]


def test_settings_that_contradict_each_other_are_shown_at_once_with_what_to_do():
    found = problems_of(
        tree(
            rollout={"max_tokens": 8192, "group_size": 4},
            batch={"max_tokens": 4096, "min_group_size": 5},
            engine={"count": 2, "cores": [0, 1, 2]},
            trainer={"ranks": 2, "cores": [0], "parallel": {"tensor": 4}},
            prm={"path": "prm", "cores": [0, 1]},
            weights={"adapters": "separate", "swap_mode": "copy"},
        )
    )
    assert found == [
        "batch.max_tokens is 4096 but rollout.max_tokens is 8192: a trajectory could never be packed. Raise batch.max_tokens.",
        "batch.min_group_size is 5 but rollout.group_size is 4: every group would fail. Lower batch.min_group_size.",
        "engine.cores names 3 cores for 2 processes. Name one core for each, or none.",
        "trainer.cores names 1 cores for 2 processes. Name one core for each, or none.",
        "prm.cores names 2 cores for 1 processes. Name one core for each, or none.",
        "trainer.ranks = 2, parallel.tensor = 4: one replica takes 4 ranks (context x tensor x pipeline), which do not divide 2."
        " The nearest that works: ranks = 2, parallel.tensor = 2",
        'weights.adapters is "separate", but lora.rank is 0: all weights are trained. Set lora.rank, or leave weights.adapters out.',
        'weights.swap_mode is "copy", which is how whole policies take effect, and weights.adapters is "separate".'
        ' Set one of them to "auto".',
    ]


def test_steps_are_scored_by_one_model_that_is_named():
    found = problems_of(tree(prm={"path": "m", "judge": {"url": "u"}}))
    assert [line.partition(": ")[0] for line in found] == [
        "prm.path is m and prm.judge.url is u",
        "prm.judge.url is u, and prm.judge.model does not say whom to ask there.",
    ]


def test_an_early_stop_needs_a_model_and_no_comparison():
    found = problems_of(tree(prm={"early_stop": {"threshold": 0.2}}, reward=[{"function": "a:b", "per": "group"}]))
    assert [line.split(": ")[0].split(" and ")[0] for line in found] == [
        "prm.early_stop.threshold is 0.2",
        "prm.early_stop.threshold is set",
    ]


def test_a_group_is_cut_only_where_siblings_are_left_and_nobody_is_compared():
    keys = {"rollout": {"group_size": 4, "cut_after": 4}}
    algorithm = {"name": "rloo_early_stop", "overrides": {"aggregation": "seq-mean-token-sum-norm"}}
    (none_left,) = problems_of(tree(**keys, algorithm=algorithm))
    assert none_left.startswith("rollout.cut_after is 4, and no sibling of 4 (rollout.group_size) is left then")
    (compared,) = problems_of(tree(rollout={"group_size": 8, "cut_after": 4}, reward=[{"function": "a:b", "per": "group"}]))
    assert 'a reward with per = "group" would compare those only' in compared


def test_rollouts_are_sent_one_by_one_only_where_they_are_completions():
    keys = {"dispatch": "longest_first", "routing": "least_loaded", "kv_admission": True}
    found = problems_of(tree(pipeline=keys, environment={"function": "game.py:reply"}))
    assert [line.split(", and")[0] for line in found] == [
        "pipeline.dispatch is longest_first",
        "pipeline.routing is least_loaded",
        "pipeline.kv_admission is True",
    ]


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({}, "engine.count is 1, so there is no other engine"),
        ({"prm": {"path": "prm"}}, "a process reward model (prm) follows"),
        ({"rollout": {"group_size": 8, "cut_after": 4}}, "rollout.cut_after decides"),
        ({"environment": {"function": "game.py:reply"}}, "environment.function makes rollouts of several turns"),
        ({"gateway": {}, "reward": []}, "agents ([gateway]) speak in turns"),
        ({"model": {"path": "model", "replay_routing": True}}, "model.replay_routing records"),
        ({"rollout": {"structured_outputs": [{"choice": ["a"]}]}}, "rollout.structured_outputs holds"),
        ({"tinker": {}}, "[tinker] has clients say"),
    ],
)
def test_a_key_that_has_sequences_move_is_refused_where_none_would(sections: dict[str, Any], why: str) -> None:
    engine = {"count": 2 if sections else 1}
    found = problems_of(tree(**{"pipeline": {"migration": "waiting"}, "engine": engine} | sections))
    (said,) = [line for line in found if line.startswith("pipeline.migration is ")]
    assert said.startswith(f'pipeline.migration is "waiting", and {why}')
    assert said.endswith(": no sequence would move. Leave one of them out.")


def test_a_class_of_environments_needs_no_reward_function_and_stands_alone() -> None:
    game = {"cls": "game.py:Game"}
    assert parse(tree(reward=[], environment=game), origin="my.toml").environment.max_alive == 32
    (both,) = problems_of(tree(environment=game | {"function": "game.py:reply"}))
    assert both.startswith("environment.function is game.py:reply, environment.cls game.py:Game: one of them replies")
    (python,) = problems_of(tree(environment={"function": "game.py:reply", "python": "bin/python"}))
    assert python.startswith("environment.python runs a class, and environment.cls names none")


def test_what_does_not_go_with_episodes_is_told_before_anything_runs():
    prm = {"path": "models/prm", "separator": ";", "early_stop": {"threshold": 0.1}}
    settings = tree(environment={"function": "game.py:reply"}, prm=prm, model={"path": "m", "replay_routing": True})
    stop, separator, routes = problems_of(settings)
    assert stop.startswith("prm.early_stop.threshold is 0.1, and environment.function makes episodes of several turns")
    assert separator.startswith("prm.separator is ';', and environment.function makes episodes, whose steps are their turns")
    assert routes.startswith("environment.function makes episodes of several turns, and model.replay_routing = true needs the experts")


def test_agents_bring_their_own_world_and_what_does_not_go_with_that_is_told():
    sections = tree(
        gateway={},
        environment={"function": "game.py:reply"},
        prm={"path": "m"},
        model={"path": "m", "replay_routing": True},
        evaluation={"source": "held_out.jsonl"},
        reward=[],
    )
    found = [line for line in problems_of(sections) if "gateway lends" in line or "evaluation.source" in line]
    assert len(found) == 4
    assert parse(tree(gateway={}, reward=[]), origin="my.toml").gateway is not None, "agents may post every reward"
    assert parse(tree(), origin="my.toml").gateway is None


def test_episodes_larger_than_a_row_go_with_copies_of_the_trainer_alone():
    large = {"gateway": {"max_episode_tokens": 8192}, "batch": {"max_tokens": 4096}}
    assert parse(tree(**large, trainer={"ranks": 2}), origin="my.toml").gateway is not None
    (layout,) = problems_of(tree(**large, trainer={"ranks": 2, "parallel": {"shard": 2}}))
    assert layout.startswith("gateway.max_episode_tokens is 8192: the trainer computes such an episode in parts")
    assert "trainer.parallel.shard" in layout
    (less,) = problems_of(tree(**large | {"gateway": {"max_episode_tokens": 2048}}))
    assert less.startswith("gateway.max_episode_tokens is 2048, and batch.max_tokens 4096")


def test_what_an_engine_of_several_ranks_cannot_take_is_told_before_it_loads():
    engine = {"options": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}}
    weights = {"transport": "nccl", "delta": True, "kv_max_staleness": 2, "adapters": "separate"}
    model = {"path": "models/small", "replay_routing": True}
    found = problems_of(tree(engine=engine, weights=weights, model=model, lora={"rank": 4}))
    assert [line.partition(":")[0] for line in found] == [
        "engine.options.data_parallel_size is 2",
        'engine.options spread an engine over 4 ranks, and weights.transport is "nccl"',
        "engine.options spread an engine over 4 ranks, which record no routes, and model.replay_routing is true. Leave one of them out.",
        'engine.options.pipeline_parallel_size is 2, and weights.adapters is "separate"',
        "engine.options.pipeline_parallel_size is 2, and weights.kv_max_staleness or weights.kv_max_kl is set",
    ]
    assert parse(tree(engine={"options": {"tensor_parallel_size": 2}}), origin="my.toml").engine.num_ranks == 2


def test_what_does_not_go_with_a_model_that_takes_images_is_told_before_anything_runs(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "idefics3"}')
    model, copies = {"path": str(tmp_path)}, {"ranks": 2}
    assert parse(tree(model=model, trainer=copies), origin="my.toml").trainer.ranks == 2, "copies of the whole model train it"
    asked = {
        "trainer.parallel.shard": {"trainer": {"ranks": 2, "parallel": {"shard": 2}}},
        "trainer.parallel.context": {"trainer": {"ranks": 2, "parallel": {"context": 2}}},
        "trainer.parallel.tensor": {"trainer": {"ranks": 2, "parallel": {"tensor": 2}}},
        "trainer.parallel.pipeline": {"trainer": {"ranks": 2, "parallel": {"pipeline": 2}}},
        'trainer.backend = "torchtitan"': {"trainer": {"backend": "torchtitan"}},
        'trainer.offload = "weights"': {"trainer": {"offload": "weights"}},
        "trainer.activation_checkpointing": {"trainer": {"activation_checkpointing": "full"}},
        "trainer.compile": {"trainer": {"compile": True}},
        "engine.options.tensor_parallel_size or pipeline_parallel_size": {"engine": {"options": {"tensor_parallel_size": 2}}},
        'engine.quantization = "int8"': {"engine": {"quantization": "int8"}},
        "lora.rank": {"lora": {"rank": 4}},
        "environment.function": {"environment": {"function": "game.py:reply"}},
        "prm": {"prm": {"path": "m"}},
        "gateway": {"gateway": {}},
        "pipelinerl serve": {"tinker": {}},
        'pipeline.placement = "colocated"': {"pipeline": {"placement": "colocated"}},
    }
    for key, sections in asked.items():
        found = [line for line in problems_of(tree(model=model, **sections)) if "takes images" in line]
        assert found == [f"model.path {tmp_path} takes images, and {key} is not written for such models. Leave it out."]
    assert parse(tree(lora={"rank": 4}), origin="my.toml").lora.rank == 4, "other models go with it"


def test_what_cannot_travel_from_shard_to_shard_is_told_by_name():
    weights, cut = {"transport": "sharded", "delta": True}, {"ranks": 2, "parallel": {"shard": 2}}
    found = problems_of(tree(weights=weights, engine={"quantization": "int8"}))
    assert [line.partition(", and ")[2].partition(" (")[0].partition(". ")[0].partition(":")[0] for line in found] == [
        "every rank of the trainer holds the whole model",
        'engine.quantization is "int8", which is made of whole policies',
    ]
    assert parse(tree(weights={"transport": "sharded"}, lora={"rank": 4}, trainer=cut), origin="my.toml").weights.transport == "sharded"


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no config file at .*nothing.toml"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be read: Is a directory. Name a TOML file"):
        load(tmp_path)
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad.toml is not valid TOML: .*line 1"):
        load(tmp_path / "bad.toml")


def test_overrides_are_values_in_toml_syntax_and_a_bare_word_is_a_string(file: Path):
    config = load(
        file,
        overrides=[
            "trainer.steps=7",
            "trainer.betas=[0.8, 0.9]",
            "trainer.learning_rate=1e-3",
            "data.shuffle=false",
            "pipeline.mode=sync",
            'run.name="my run"',
            "model.path=some/where",
            "engine.cores=[3]",
            "algorithm.overrides={objective = {clip_high = 0.3}}",
        ],
    )
    assert config.trainer.steps == 7
    assert config.trainer.betas == (0.8, 0.9)
    assert config.trainer.learning_rate == 1e-3
    assert config.data.shuffle is False
    assert config.pipeline.mode is Mode.SYNC
    assert config.run.name == "my run"
    assert config.model.path == Path("some/where")
    assert config.engine.cores == (3,)
    assert config.algorithm.overrides == {"objective": {"clip_high": 0.3}}
    assert config.data.source == "prompts.jsonl", "what is not overridden stays"


def test_a_later_override_wins_and_a_wrong_one_is_refused_like_a_key_of_the_file(file: Path):
    assert load(file, overrides=["trainer.steps=7", "trainer.steps=8"]).trainer.steps == 8
    with pytest.raises(ConfigError, match=r"trainer.setps is not a known key; did you mean trainer.steps\?"):
        load(file, overrides=["trainer.setps=7"])


@pytest.mark.parametrize("override", ["trainer.steps", "=3", "trainer.=3", ".steps=3", ["trainer.steps=3"], {"trainer.steps": 3}])
def test_what_is_no_override_says_how_one_looks(file: Path, override: Any):
    with pytest.raises(ConfigError, match=r"is not `section.key=value`, for example `trainer.steps=10`"):
        load(file, overrides=[override])


def test_an_override_names_an_entry_of_a_list_by_its_number(file: Path):
    two = 'reward=[{function="a:b"}, {function="c:d"}]'
    config = load(file, overrides=[two, "reward.1.weight=2", "trainer.betas=[0.9, 0.95]", "trainer.betas.1=0.99"])
    assert [one.weight for one in config.reward] == [1.0, 2.0]
    assert config.trainer.betas == (0.9, 0.99)
    for wrong in ("reward.2.weight=3", "reward.-1.weight=3", "reward.first.weight=3"):
        with pytest.raises(ConfigError, match=r"reward is a list of 2, whose entries are named from reward\.0 on"):
            load(file, overrides=[two, wrong])


def test_an_override_into_a_value_is_refused(file: Path):
    with pytest.raises(ConfigError, match="path is a value, not a section"):
        load(file, overrides=["model.path.name=3"])


def test_engines_are_kept_a_quarter_more_than_full():
    """2 engines of 16 sequences, groups of 5: 32 * 1.25 = 40 sequences = 8 groups."""
    config = parse(tree(engine={"count": 2, "max_running": 16}, rollout={"group_size": 5}), origin="")
    assert config.max_running_rollouts == 40
    assert parse(tree(engine={"max_running": 1}, rollout={"group_size": 64}), origin="").max_running_rollouts == 1
    assert parse(tree(pipeline={"max_running": 3}), origin="").max_running_rollouts == 3


def test_derived_values_are_worked_out_from_the_settings():
    config = parse(
        tree(batch={"groups_per_step": 3}, rollout={"group_size": 5}, trainer={"steps": 7}, pipeline={"max_staleness": 2}), origin=""
    )
    derived = config.derived()
    assert derived["samples per step"] == 15
    assert derived["samples of the whole run"] == 105
    assert derived["groups admitted before the first step, at most"] == 9


def test_the_learning_rate_fits_what_is_trained_unless_it_is_set():
    whole, adapters = parse(tree(), origin=""), parse(tree(lora={"rank": 8}), origin="")
    assert (whole.learning_rate, whole.sft_learning_rate) == (1e-6, 2e-5)
    assert (adapters.learning_rate, adapters.sft_learning_rate) == (1e-5, 2e-4)
    both = parse(tree(lora={"rank": 8}, trainer={"learning_rate": 3e-5}, sft={"learning_rate": 4e-5}), origin="")
    assert (both.learning_rate, both.sft_learning_rate) == (3e-5, 4e-5)


def test_fine_tuning_never_replaces_its_base():
    assert parse(tree(model={"path": "models/my-model"}), origin="").sft_output == Path("runs/my-model-sft")
    (problem,) = problems_of(tree(model={"path": "models/my-model"}, sft={"output": "models/my-model"}))
    assert problem.startswith("sft.output is models/my-model, and so is model.path: fine-tuning would replace the model it began with.")


def test_demonstrations_beside_rl_have_rows_and_a_weight():
    (problem,) = problems_of(tree(sft_stream={"source": "a.jsonl"}))
    assert problem.startswith("sft_stream.source is a.jsonl, and sft_stream.coef does not say how much its rows weigh beside RL.")
    (problem,) = problems_of(tree(sft_stream={"coef": 0.1}))
    assert problem.startswith("sft_stream.coef is 0.1, and sft_stream.source names no rows.")
    (problem,) = problems_of(tree(sft_stream={"source": "a.jsonl", "coef": -0.1}))
    assert problem.startswith("sft_stream.coef is -0.1: input should be greater than or equal to 0")
    off = parse(tree(sft_stream={"source": "a.jsonl", "coef": 0}), origin="")
    assert list(unused_keys(off, method=method_of(off))) == ["sft_stream.source: no effect here, because sft_stream.coef is 0"]
    unnamed = parse(tree(sft_stream={"batch_size": 7}), origin="")
    assert list(unused_keys(unnamed, method=method_of(unnamed))) == [
        "sft_stream.batch_size: no effect here, because sft_stream.source names no rows"
    ]


def test_arguments_of_the_chat_template_that_are_passed_anyway_are_refused():
    (problem,) = problems_of(tree(data={"source": "a.jsonl", "chat_template_kwargs": {"tools": [], "enable_thinking": False}}))
    assert problem.startswith("data.chat_template_kwargs.tools is passed by this project itself.")


def test_stop_strings_and_the_experts_of_every_token_do_not_go_together():
    (problem,) = problems_of(tree(model={"path": "m", "replay_routing": True}, rollout={"stop": ["x"]}))
    assert problem.startswith("rollout.stop ends completions in the middle of vLLM's own account of them")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"engine": {"kind": "fake"}}, 'engine.kind is "fake"'),
        ({"engine": {"async_scheduling": True}}, "engine.async_scheduling is true"),
        ({"engine": {"options": {"pipeline_parallel_size": 2}}}, "engine.options.pipeline_parallel_size is 2"),
        ({"model": {"path": "m", "replay_routing": True}}, "model.replay_routing records experts"),
        ({"rollout": {"group_size": 1}, "batch": {"min_group_size": 1}}, "rollout.group_size is 1"),
    ],
)
def test_what_speculation_does_not_go_with_is_told_by_name(sections: dict[str, Any], words: str):
    sections["engine"] = {"speculation": "siblings", **sections.get("engine", {})}
    assert any(words in problem for problem in problems_of(tree(**sections)))


def test_keys_of_speculation_that_would_change_nothing_are_refused():
    (problem,) = problems_of(tree(engine={"speculate_below": 8}))
    assert problem.startswith('engine.speculate_below is 8, and engine.speculation is "off"')
    engine = parse(tree(engine={"speculation": "ngram", "speculate_below": 8, "speculative_tokens": 2}), origin="my.toml").engine
    assert engine.drafts == (8, 2)
    assert parse(tree(), origin="my.toml").engine.drafts == (0, 0)


def test_constraints_on_turns_are_checked_and_so_is_what_they_need():
    regex, bounds = {"regex": "a+"}, {"max_logprob_gap": 100.0, "max_mismatch_kl": 100.0}
    parse(tree(rollout={"structured_outputs": [regex, {}, {"choice": ["a"]}]}, trainer=bounds), origin="my.toml")
    (problem,) = problems_of(tree(rollout={"structured_outputs": [regex]}, trainer={"max_logprob_gap": 100.0}))
    assert problem.endswith("Set trainer.max_mismatch_kl to what you accept (in nats; 100 accepts all).")
    (problem,) = problems_of(tree(rollout={"structured_outputs": [regex]}, trainer=bounds, engine={"async_scheduling": True}))
    assert problem.startswith("engine.async_scheduling lets passes overlap")
    for wrong, words in (
        ({"regexp": "a"}, "expected one of regex, choice, grammar, json, structural_tag"),
        (regex | {"choice": ["a"]}, "has the keys regex, choice"),
        ({"choice": "a"}, 'choice is "a", expected a list of texts'),
        ({"json": 3}, "json is 3, expected a JSON schema"),
        ({"regex": ""}, 'regex is "", expected a text'),
    ):
        (problem,) = problems_of(tree(rollout={"structured_outputs": [wrong]}, trainer=bounds))
        assert words in problem, problem


def test_every_key_is_printed_with_its_type_and_default():
    keys = {key: (kind, default) for key, kind, default, _ in described_keys()}
    assert keys.keys() == known_keys().keys()
    assert keys["model.path"] == ("path", "required")
    assert keys["rollout.temperature"] == ("number > 0 <= 2", "1.0")
    assert keys["pipeline.mode"] == ('"streaming"|"one_step_off"|"sync"', '"streaming"')
    assert keys["lora.targets"][0] == "list of text"
    assert keys["trainer.learning_rate"] == ("number > 0", "none")
    assert keys["data.tools"] == ("text or list of table", "none")
    assert not [kind for kind, _ in keys.values() if "typing." in kind or "<class" in kind]


def test_a_resolved_config_survives_the_journey_to_another_process():
    config = parse(tree(algorithm={"overrides": {"objective": {"clip_high": 0.3}}}, rollout={"stop_token_ids": [7, 8]}), origin="")
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_every_key_says_what_it_is_for():
    """Those whose name says it all are listed here."""
    obvious = {
        "trainer.epochs",
        "trainer.learning_rate",
        "trainer.weight_decay",
        "trainer.max_grad_norm",
        "sft.completion_column",
        "sft.steps",
        "sft.batch_size",
        "sft.learning_rate",
        "sft.warmup_steps",
        "sft.final_learning_rate_fraction",
    }
    assert {key for key, meaning in known_keys().items() if not meaning} <= obvious


def test_the_keys_are_these():
    """A new key is a knob that somebody has to understand: it is argued for, and then added here."""
    assert list(known_keys()) == KEYS


KEYS = [
    "run.name",
    "run.folder",
    "run.seed",
    "run.restarts",
    "run.restart_wait_s",
    "run.record_groups",
    "run.fatal_alarms",
    "run.interface",
    "run.cores",
    "model.path",
    "model.dtype",
    "model.max_tokens",
    "model.replay_routing",
    "data.source",
    "data.prompt_column",
    "data.chat",
    "data.system_prompt",
    "data.tools",
    "data.chat_template_kwargs",
    "data.tool_call_parser",
    "data.shuffle",
    "data.limit",
    "data.difficulty",
    "rollout.group_size",
    "rollout.max_tokens",
    "rollout.cut_after",
    "rollout.cut_keep_probability",
    "rollout.temperature",
    "rollout.stop_token_ids",
    "rollout.stop",
    "rollout.structured_outputs",
    "engine.kind",
    "engine.count",
    "engine.elsewhere",
    "engine.apart",
    "engine.max_count",
    "engine.max_running",
    "engine.kv_cache_bytes",
    "engine.async_scheduling",
    "engine.speculation",
    "engine.speculate_below",
    "engine.speculative_tokens",
    "engine.cores",
    "engine.gpus",
    "engine.shares_gpus",
    "engine.sleep_kv",
    "engine.quantization",
    "engine.options",
    "engine.ready_deadline_s",
    "engine.silent_after_s",
    "scorer.slots",
    "scorer.deadline_s",
    "scorer.silent_after_s",
    "scorer.variables",
    "reward.function",
    "reward.model",
    "reward.weight",
    "reward.per",
    "reward.options",
    "reward.concurrency",
    "reward.per_s",
    "reward.retries",
    "reward.deadline_s",
    "reward.format",
    "reward.dtype",
    "reward.max_tokens",
    "environment.function",
    "environment.cls",
    "environment.max_turns",
    "environment.options",
    "environment.concurrency",
    "environment.deadline_s",
    "environment.python",
    "gateway.interface",
    "gateway.port",
    "gateway.deadline_s",
    "gateway.max_attempts",
    "gateway.agents_deadline_s",
    "gateway.max_episodes",
    "gateway.max_episode_tokens",
    "gateway.max_requests",
    "gateway.max_parallel",
    "gateway.max_messages",
    "gateway.max_body_bytes",
    "gateway.silent_after_s",
    "tinker.interface",
    "tinker.port",
    "tinker.max_pending",
    "tinker.max_held_bytes",
    "tinker.checkpoint_every",
    "tinker.max_body_bytes",
    "tinker.session_timeout_s",
    "tinker.max_staleness",
    "prm.path",
    "prm.convention",
    "prm.tag",
    "prm.separator",
    "prm.judge.url",
    "prm.judge.model",
    "prm.judge.concurrency",
    "prm.judge.max_tokens",
    "prm.judge.key_file",
    "prm.judge.extra",
    "prm.early_stop.threshold",
    "prm.early_stop.keep_probability",
    "prm.early_stop.min_steps",
    "prm.early_stop.max_false_stop_fraction",
    "prm.count",
    "prm.max_steps",
    "prm.chunk_tokens",
    "prm.max_waiting_tokens",
    "prm.deadline_s",
    "prm.dtype",
    "prm.max_tokens",
    "prm.cores",
    "prm.gpus",
    "prm.options",
    "algorithm.name",
    "algorithm.overrides",
    "algorithm.correct_reward",
    "batch.groups_per_step",
    "batch.max_tokens",
    "batch.min_group_size",
    "pipeline.mode",
    "pipeline.placement",
    "pipeline.max_staleness",
    "pipeline.max_running",
    "pipeline.adaptive_concurrency",
    "pipeline.elastic",
    "pipeline.elastic_tensor_parallel_sizes",
    "pipeline.dispatch",
    "pipeline.routing",
    "pipeline.kv_admission",
    "pipeline.migration",
    "pipeline.queue_bytes",
    "pipeline.stall_limit_s",
    "trainer.steps",
    "trainer.backend",
    "trainer.ranks",
    "trainer.max_ranks",
    "trainer.min_ranks",
    "trainer.parallel.shard",
    "trainer.parallel.context",
    "trainer.parallel.tensor",
    "trainer.parallel.pipeline",
    "trainer.parallel.schedule",
    "trainer.parallel.expert",
    "trainer.epochs",
    "trainer.learning_rate",
    "trainer.warmup_steps",
    "trainer.final_learning_rate_fraction",
    "trainer.betas",
    "trainer.weight_decay",
    "trainer.max_grad_norm",
    "trainer.max_logprob_gap",
    "trainer.max_mismatch_kl",
    "trainer.activation_checkpointing",
    "trainer.compile",
    "trainer.prefetch_layers",
    "trainer.offload",
    "trainer.float32_head",
    "trainer.cores",
    "trainer.gpus",
    "trainer.ready_deadline_s",
    "trainer.silent_after_s",
    "reference.path",
    "reference.teachers",
    "reference.offload",
    "critic.path",
    "critic.learning_rate",
    "critic.warmup_steps",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "evaluation.source",
    "evaluation.every",
    "evaluation.limit",
    "evaluation.temperature",
    "evaluation.samples",
    "evaluation.deadline_s",
    "weights.transport",
    "weights.address",
    "weights.delta",
    "weights.kv_max_staleness",
    "weights.kv_max_kl",
    "weights.swap_mode",
    "weights.adapters",
    "weights.adapter_versions",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.to",
    "tracking.to",
    "tracking.project",
    "tracking.prometheus_interface",
    "tracking.prometheus_port",
    "slurm.save_s",
    "slurm.trainer_nodes",
    "slurm.engine_nodes",
    "slurm.scorer_nodes",
    "slurm.gpus_per_node",
    "slurm.engine_gpus_per_node",
    "slurm.cpus_per_node",
    "slurm.time",
    "slurm.at_limit",
    "slurm.memory_per_node",
    "slurm.partition",
    "slurm.account",
    "slurm.options",
    "slurm.engine_options",
    "slurm.setup",
    "kubernetes.save_s",
    "kubernetes.trainer_nodes",
    "kubernetes.engine_nodes",
    "kubernetes.scorer_nodes",
    "kubernetes.gpus_per_node",
    "kubernetes.engine_gpus_per_node",
    "kubernetes.cpus_per_node",
    "kubernetes.image",
    "kubernetes.claim",
    "kubernetes.namespace",
    "kubernetes.memory_per_node",
    "kubernetes.gpu_resource",
    "kubernetes.restarts",
    "kubernetes.pod",
    "kubernetes.engine_pod",
    "ray.save_s",
    "ray.trainer_nodes",
    "ray.engine_nodes",
    "ray.scorer_nodes",
    "ray.gpus_per_node",
    "ray.engine_gpus_per_node",
    "ray.cpus_per_node",
    "ray.address",
    "ray.strategy",
    "ray.wait_s",
    "ray.trainer_labels",
    "ray.engine_labels",
    "ray.scorer_labels",
    "sft.source",
    "sft.completion_column",
    "sft.steps",
    "sft.batch_size",
    "sft.learning_rate",
    "sft.warmup_steps",
    "sft.final_learning_rate_fraction",
    "sft.output",
    "sft_stream.source",
    "sft_stream.batch_size",
    "sft_stream.coef",
    "policies",
]


def test_an_old_name_is_refused_with_the_new_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(renamed.KEYS, "weights.old_name", "weights.delta")
    monkeypatch.setitem(renamed.KEYS, "prm.before.keep", "prm.max_steps")
    with pytest.raises(ConfigError) as error:
        parse({"weights": {"old_name": True}, "prm": {"before": {"keep": 3}}}, origin="run.toml")
    assert "weights.old_name is now called weights.delta" in str(error.value)
    assert "prm.before.keep is now called prm.max_steps" in str(error.value)


def test_compiled_parts_are_refused_with_what_is_inside_them():
    trainer = {"compile": True, "ranks": 2, "parallel": {"tensor": 2}, "activation_checkpointing": "selective"}
    (found,) = [line for line in problems_of(tree(trainer=trainer)) if "compile" in line]
    assert found == (
        "trainer.compile does not go with trainer.parallel.tensor = 2, whose collectives are inside those parts; nor with"
        ' trainer.activation_checkpointing = "selective", which does not see the products in them. Leave one of them out.'
    )
    assert parse(tree(trainer={"compile": True}), origin="my.toml").trainer.compile


def test_products_that_are_summed_in_place_cannot_be_kept():
    """The refused case was run: its gradient's norm came out as 0.074 for 0.110."""
    trainer = {"backend": "megatron", "ranks": 2, "parallel": {"tensor": 2}, "activation_checkpointing": "selective"}
    assert any("tensor parallelism adds those of all ranks up in place" in line for line in problems_of(tree(trainer=trainer)))
    parse(tree(trainer=trainer | {"parallel": {"pipeline": 2}}), origin="my.toml")
    parse(tree(trainer=trainer | {"activation_checkpointing": "full"}), origin="my.toml")


def test_an_old_value_is_refused_with_the_new_one():
    again = {"trainer": {"activation_checkpointing": True}}
    with pytest.raises(ConfigError) as error:
        parse({"model": {"path": "m"}, "weights": {"swap_mode": "flip", "adapters": "nonsense"}, **again}, origin="run.toml")
    assert 'trainer.activation_checkpointing = true is now called "full"' in str(error.value)
    assert 'weights.swap_mode = "flip" is now called "pointer"' in str(error.value)
    assert "weights.adapters is 'nonsense'" in str(error.value)


def test_values_of_an_older_run_get_the_new_names_under_their_new_keys():
    before = {"weights": {"commit": "scatter", "adapters": "apart", "road": "gloo"}}
    assert renamed.translate(before) == {"weights": {"swap_mode": "sparse", "adapters": "separate", "transport": "gloo"}}
    assert renamed.translate({"weights": {"commit": "auto"}}) == {"weights": {"swap_mode": "auto"}}
    assert renamed.translate({"trainer": {"recompute": False}}) == {"trainer": {"activation_checkpointing": "none"}}
    assert renamed.translate({}) == {}


def test_settings_of_an_older_run_get_the_new_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(renamed.KEYS, "weights.old_name", "weights.delta")
    monkeypatch.setitem(renamed.KEYS, "prm.before.keep", "prm.after.share")
    monkeypatch.setitem(renamed.KEYS, "reward.times", "reward.retries")
    before = {
        "weights": {"old_name": True, "kept": 1},
        "prm": {"before": {"keep": 0.5}},
        "reward": [{"function": "pipelinerl.scorer.builtin:exact_match", "times": 2}, {"function": "mine.py:reward"}],
        "data": {"chat_template_kwargs": {}},
    }
    assert renamed.translate(before) == {
        "weights": {"delta": True, "kept": 1},
        "prm": {"after": {"share": 0.5}},
        "reward": [{"function": "pipelinerl.rewards.functions.builtin:exact_match", "retries": 2}, {"function": "mine.py:reward"}],
        "data": {"chat_template_kwargs": {}},
    }

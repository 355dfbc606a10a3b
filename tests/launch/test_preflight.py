"""The preflight: everything that can be known to be wrong before a model is loaded is told, all at once, also by `--dry-run`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from orchestrator.preflight import look
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError
from pipelinerl.launch import preflight
from pipelinerl.launch.preflight import check
from pipelinerl.launch.unused_keys import refused, unused_keys
from pipelinerl.planning import memory
from pipelinerl.runtime.findings import Finding, Level, collect, sentences
from tests import processes
from tests.tiny_models import make_classifier, make_qwen2

pytestmark = pytest.mark.process

REWARDS = """
def right(prompt, completion, answer):
    return float(completion == answer)

def misspelt(completion, answr):
    return 0.0

def options(completion, answer, factor):
    return factor

def many(prompts, completions, answer):
    return [0.0 for _ in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0

def reply(turns, secret):
    return None

class Game:
    def reset(self, secret):
        return "?"

    def step(self, message):
        return None, 1.0, True

class Half:
    def reset(self):
        return "?"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_qwen2(folder)
    return folder


@pytest.fixture
def settings(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Settings of a run whose files are in the working directory; `rows` are those of `rows.jsonl`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(*, rows: list[Any] | None = None, **sections: Any) -> Config:
        lines = [json.dumps(row) for row in rows or [{"prompt": "2+2=", "answer": "4"}]]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        smallest = {"model": {"path": str(model)}, "data": {"source": "rows.jsonl"}, "reward": [{"function": "rewards.py:right"}]}
        return parse(smallest | {"rollout": {"max_tokens": 64}} | sections, origin="my.toml")

    return make


def checked(config: Config, *, is_dry: bool = False) -> list[Finding]:
    """What a check finds, all of it in this process; which look has one of its own is shown by demonstrations and the dry runs, below."""

    def look_here(config: Config, *, module: str, imports: str) -> Iterator[Finding]:
        yield from importlib.import_module(module).look(config)

    with mock.patch.object(preflight, "look_apart", look_here):
        return check(config, is_dry=is_dry)


def failures(found: Iterable[Finding]) -> list[str]:
    return sentences(found, Level.FAIL)


def notes(found: Iterable[Finding]) -> list[str]:
    return sentences(found, Level.NOTE)


def facts(found: Iterable[Finding]) -> list[str]:
    return sentences(found, Level.OK)


def test_rows_that_are_right_are_counted(settings: Callable[..., Config]):
    found = collect(look(settings(rows=[{"prompt": "1" * size, "answer": "1"} for size in (3, 7, 5)])))
    assert failures(found) == notes(found) == []
    assert facts(found) == [
        "data.source rows.jsonl: 3 rows; prompts of 3 to 7 tokens, median 5 (all); at most 960 fit",
        "stop tokens: 2 '<eos>' (tokenizer, config.json, generation_config.json)",
    ]


def test_stop_tokens_that_disagree_are_told(settings: Callable[..., Config], model: Path, tmp_path: Path):
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {"eos_token_id": 0}))
    found = collect(look(settings(model={"path": str(folder)})))
    assert facts(found)[-1] == "stop tokens: 0 '<pad>' (config.json, generation_config.json); 2 '<eos>' (tokenizer)"
    assert notes(found)[0].startswith("stop tokens disagree: 2 '<eos>' (tokenizer) is not named by config.json")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"eos_token_id": 10}))
    assert "config.json names 10 as the end of sequence" in failures(look(settings(model={"path": str(folder)})))[0]


def test_demonstrations_beside_rl_are_looked_at_too(settings: Callable[..., Config], tmp_path: Path):
    (tmp_path / "shown.jsonl").write_text(json.dumps({"prompt": "2+2=", "completion": "4"}) + "\n" + json.dumps({"prompt": "2+2="}))
    stream = {"source": "shown.jsonl", "coef": 0.1}
    (problem,) = [one for one in failures(check(settings(sft_stream=stream))) if "sft_stream" in one]
    assert problem == "sft_stream.source: shown.jsonl, row 1: column 'completion' is None, expected text; it has prompt"
    assert not [one for one in failures(checked(settings(sft_stream=stream | {"coef": 0}))) if "sft_stream" in one], (
        "off: nobody reads them"
    )


def test_every_row_is_looked_at_not_only_the_first(settings: Callable[..., Config]):
    rows: list[Any] = [{"prompt": "2+2=", "answer": "4"} for _ in range(2000)]
    rows[1990] = {"question": "2+2=", "answer": "4"}
    rows[1991] = {"prompt": 3, "answer": "4"}
    rows[1993] = {"prompt": "", "answer": "4"}
    rows[1994] = {"prompt": [{"role": "user", "content": "no template"}], "answer": "4"}
    problems = failures(look(settings(rows=rows)))
    assert len(problems) == 3
    assert problems[0] == "rows.jsonl:1991: no column 'prompt'; there are 'question', 'answer'. Set data.prompt_column."
    assert problems[1].startswith("rows.jsonl:1992: column 'prompt' is a int, expected text or a list of chat messages")
    assert problems[2].startswith("rows.jsonl:1994: column 'prompt' is empty")
    assert problems[2].endswith("; and 1 more of 2,000 rows of rows.jsonl alike")


def test_prompts_that_leave_no_room_are_counted_and_the_first_is_named(settings: Callable[..., Config]):
    rows = [{"prompt": "1" * size, "answer": ""} for size in (5, 961, 960, 1000)]
    (told,) = notes(look(settings(rows=rows)))
    assert told.startswith("data.source rows.jsonl: 2 of 4 prompts have more than the 960 tokens that rollout.max_tokens leaves")
    assert "first rows.jsonl:2 (961), longest 1,000: they will be passed over; raise model.max_tokens" in told
    found = collect(look(settings(rows=rows[1:2])))
    assert "no prompt is left" in failures(found)[0]
    held_out = failures(look(settings(rows=rows, evaluation={"source": "rows.jsonl"})))
    assert held_out[0].startswith("evaluation.source rows.jsonl: 2 of 4 prompts")


def test_a_completion_longer_than_the_context_leaves_no_tokens_and_not_fewer_than_none(settings: Callable[..., Config]):
    config = settings(rows=[{"prompt": "1", "answer": ""}], rollout={"max_tokens": 4000}, batch={"max_tokens": 4000})
    assert any("1 of 1 prompts have more than the 0 tokens that rollout.max_tokens leaves" in told for told in failures(look(config)))


def test_a_core_that_is_not_there_is_named(settings: Callable[..., Config]):
    here = sorted(os.sched_getaffinity(0))
    missing = here[-1] + 1
    config = settings(
        engine={"cores": [missing]}, trainer={"cores": here[:1]}, prm={"path": "prm", "cores": [missing]}, run={"cores": [*here, missing]}
    )
    said = f"names {missing}, and processes here may use {', '.join(map(str, here))}"
    assert [one for one in failures(checked(config)) if ".cores" in one] == [f"{part}.cores: {said}" for part in ("run", "engine", "prm")]


def test_a_parameter_that_nothing_supplies_is_named_with_the_nearest_column(settings: Callable[..., Config]):
    functions = ("misspelt", "options", "many", "compute_score", "right")
    config = settings(reward=[{"function": f"rewards.py:{name}"} for name in functions])
    problems = failures(look(config))
    assert problems == [
        "reward rewards.py:misspelt needs answr (did you mean answer?), but the row has only the columns answer (rows.jsonl:1)",
        "reward rewards.py:options needs factor, but the row has only the columns answer (rows.jsonl:1)",
        "reward rewards.py:compute_score needs ground_truth, but the row has only the columns answer (rows.jsonl:1)",
    ]
    fitting = settings(reward=[{"function": "rewards.py:options", "options": {"factor": 2.0}}])
    assert not failures(look(fitting))


def test_a_column_that_one_row_lacks_is_found_there(settings: Callable[..., Config]):
    rows: list[Any] = [{"prompt": "2+2=", "answer": "4"} for _ in range(500)] + [{"prompt": "2+2=", "other": "4"}]
    (problem,) = failures(look(settings(rows=rows)))
    assert problem == "reward rewards.py:right needs answer, but the row has only the columns other (rows.jsonl:501)"


def test_an_environment_is_asked_as_rewards_are(settings: Callable[..., Config]):
    (problem,) = failures(look(settings(environment={"function": "rewards.py:reply"})))
    assert problem.startswith("environment rewards.py:reply needs secret, but the row has only the columns answer")
    (missing,) = failures(look(settings(environment={"function": "rewards.py:answer"})))
    assert missing.startswith("environment.function: rewards.py has no 'answer'")


def test_a_class_of_environments_is_looked_at_and_its_reset_asked_for_its_columns(settings: Callable[..., Config]):
    (problem,) = failures(look(settings(environment={"cls": "rewards.py:Game"})))
    assert problem.startswith("environment rewards.py:Game: reset needs secret, but the row has only the columns answer")
    (wrong,) = failures(look(settings(environment={"cls": "rewards.py:Half"})))
    assert wrong.startswith("environment.cls: environment rewards.py:Half has no step, expected a class with reset(self, **columns)")
    (none,) = failures(look(settings(environment={"cls": "rewards.py:Game", "python": "nowhere/python"})))
    assert none.startswith("environment.cls: environment.python: nowhere/python cannot be started")


def test_a_source_without_an_end_is_looked_at_in_part(settings: Callable[..., Config], tmp_path: Path):
    (tmp_path / "endless.py").write_text(
        "import itertools\ndef rows():\n    for number in itertools.count():\n"
        "        yield {'prompt': str(number), 'answer': ''} | ({} if number < 40 else {'when': object()})\n"
    )
    found = collect(look(settings(data={"source": "endless.py:rows"})))
    assert "column 'when' holds" in failures(found)[0]
    assert "; and 957 more of 1,000 rows" in failures(found)[-1]
    assert "1,000 rows looked at, of a source without an end" in facts(found)[0]


def test_roles_are_looked_for_where_the_method_needs_them(settings: Callable[..., Config]):
    found = collect(look(settings(algorithm={"name": "rae"})))
    assert failures(found) == ["rows.jsonl:1: column role is None, expected a text: the method has a baseline for each role"]


def test_every_row_names_one_of_several_teachers(settings: Callable[..., Config]):
    found = collect(look(settings(algorithm={"name": "gkd"}, reference={"teachers": {"math": "model", "code": "model"}})))
    assert failures(found) == ["rows.jsonl:1: column teacher is None, expected one of math, code (reference.teachers)"]


def test_several_teachers_are_each_looked_for(settings: Callable[..., Config]):
    problems = failures(checked(settings(reference={"teachers": {"math": "nope", "code": "model"}})))
    assert problems[0].startswith("reference.teachers.math: no folder at nope")
    assert any(
        problem.startswith("reference.teachers.code is model, and algorithm grpo reads no reference or teacher") for problem in problems
    )
    with pytest.raises(ConfigError, match=r"reference\.path is model, and reference\.teachers names math: a row has one"):
        settings(reference={"path": "model", "teachers": {"math": "model"}})


def test_models_beside_the_policy_are_looked_for_and_one_that_nobody_reads_is_told(settings: Callable[..., Config]):
    config = settings(reference={"path": "nope"}, critic={"path": "none"})
    problems = failures(checked(config))
    assert [problem.partition(" (looked")[0] for problem in problems[:2]] == [
        "reference.path: no folder at nope",
        "critic.path: no folder at none",
    ]
    assert problems[2].startswith("reference.path is nope, and algorithm grpo reads no reference or teacher: nothing would change.")
    assert problems[3].startswith("critic.path is none, and algorithm grpo trains no critic.")


def test_a_reward_model_is_looked_at_without_loading_it(settings: Callable[..., Config], model: Path, tmp_path: Path):
    for name, facts in {"good": {}, "two": {"labels": 2}, "mute": {"template": False}}.items():
        make_classifier(tmp_path / name, "Qwen2", **facts)
    rewards = [{"model": name} for name in ("good", "two", "mute", str(model), "nowhere")]
    rewards += [{"model": "good", "max_tokens": 600, "options": {"dtype": "float32"}}]
    config = settings(reward=rewards, rollout={"max_tokens": 600})
    found = failures(look(config))
    assert len(found) == 3
    assert "two has 2 labels, expected 1" in found[0]
    assert "mute has no chat template" in found[1]
    assert "has the architecture Qwen2ForCausalLM, expected a sequence classifier" in found[2]
    found = checked(config, is_dry=True)
    assert any("reward.4.model: no folder at nowhere" in line for line in failures(found)), failures(found)
    assert any("reward.5.max_tokens: 600, but good was made for 512 positions" in line for line in failures(found))
    assert any("reward.5.options.dtype is reward.5.dtype, which the rest of the run reads" in line for line in failures(found))
    assert any("reward.0.model: takes 512 tokens, prompt included, and rollout.max_tokens is 600" in line for line in notes(found))


def test_settings_without_a_part_to_act_on_are_said(settings: Callable[..., Config]):
    config = settings(
        lora={"alpha": 8.0},
        evaluation={"every": 5},
        prm={"early_stop": {"keep_probability": 0.5}},
        pipeline={"mode": "sync", "max_staleness": 9},
        critic={"learning_rate": 1e-4},
        trainer={"prefetch_layers": 3},
    )
    said = list(unused_keys(config, method=method_of(config)))
    assert [sentence.partition(":")[0] for sentence in said] == [
        "lora.alpha",
        "evaluation.every",
        "prm.early_stop.keep_probability",
        "trainer.prefetch_layers",
        "critic.learning_rate",
        "pipeline.max_staleness",
    ]
    assert not list(unused_keys(settings(), method=method_of(settings())))
    sharded = settings(trainer={"prefetch_layers": 3, "ranks": 2, "parallel": {"shard": 2}})
    assert not list(unused_keys(sharded, method=method_of(sharded)))
    quantised = settings(engine={"options": {"quantization": "awq"}})
    assert next(refused(quantised, method=method_of(quantised))).startswith('engine.options.quantization is "awq": vLLM repacks')
    beside = settings(engine={"options": {"quantization": "awq"}}, lora={"rank": 8})
    assert not list(refused(beside, method=method_of(beside))), "served with adapters beside them, they stay as they are"
    reads = settings(reference={"path": "model"}, algorithm={"overrides": {"kl": "k3"}})
    assert not list(refused(reads, method=method_of(reads)))


def test_devices_that_change_while_nothing_moves_are_warned_of(settings: Callable[..., Config]):
    """Simulated at 1,024 GPUs, a run with the one and without the other had an idle trainer for 82 % of its time."""

    def said(**sections: Any) -> list[str]:
        return [line for line in sentences(checked(settings(**sections)), Level.WARN) if line.startswith("pipeline.migration")]

    engine = {"kind": "fake", "count": 3}
    (line,) = said(engine=engine, pipeline={"elastic": True})
    assert "an engine that joins gets nothing of what waits in the others" in line
    assert 'set pipeline.migration to "waiting"' in line
    assert not said(engine=engine, pipeline={"elastic": True, "migration": "waiting"})
    assert not said(engine=engine, pipeline={"elastic": False})
    cut = {"rollout": {"max_tokens": 64, "cut_after": 2}, "algorithm": {"name": "rloo_early_stop"}}
    assert not said(engine=engine, pipeline={"elastic": True}, **cut), "there nothing may move"


def test_sizes_that_no_engine_could_have_are_refused_before_the_run(settings: Callable[..., Config]):
    def said(*sizes: int, **sections: Any) -> list[str]:
        engine, pipeline = {"count": 12}, {"elastic": True, "elastic_tensor_parallel_sizes": sizes}
        return [line for line in failures(checked(settings(engine=engine, pipeline=pipeline, **sections))) if "elastic" in line]

    assert said(2) == []
    (line,) = said(2, 3)
    assert "pipeline.elastic_tensor_parallel_sizes names 3: the 4 attention heads of" in line
    (line,) = said(2, weights={"transport": "nccl"})
    assert 'weights.transport is "nccl"' in line
    unused = notes(checked(settings(pipeline={"elastic_tensor_parallel_sizes": [2]})))
    assert any("elastic_tensor_parallel_sizes: no effect here, because pipeline.elastic is false" in line for line in unused)


def test_a_damaged_weights_file_is_told_from_its_header(settings: Callable[..., Config], model: Path, tmp_path: Path):
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in model.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[:-1000])
    problems = failures(checked(settings(model={"path": str(copied)})))
    assert any("it was not copied whole" in problem for problem in problems)


def test_a_family_that_no_engine_takes_is_refused_and_one_never_tried_is_warned_of(
    settings: Callable[..., Config], model: Path, tmp_path: Path
):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tree = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(tree | {"model_type": "gpt_oss"}))
    problems = failures(checked(settings(model={"path": str(other)})))
    assert any("a gpt_oss cannot be served to train it: vLLM transposes its experts" in problem for problem in problems)
    (other / "config.json").write_text(json.dumps(tree | {"model_type": "telechat"}))
    found = checked(settings(model={"path": str(other)}))
    assert not failures(found)
    (warning,) = sentences(found, Level.WARN)
    assert "of the family 'telechat', which was never run here" in warning


def test_the_memory_bill_by_hand(settings: Callable[..., Config], model: Path):
    """0.1 M parameters P in float32: engine 4 P, trainer 4 P + 4 P of gradients + 8 P of moments; in bfloat16 2 P and 2 + 4 + 8 + 4."""
    weights = memory.read_weights(model)
    tensors = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in weights.shapes.values())
    num = weights.num_parameters
    assert num == tensors
    for dtype, engine, trainer in (("float32", 4, 16), ("bfloat16", 2, 18)):
        config = settings(model={"path": str(model), "dtype": dtype}, engine={"count": 2})
        parts = {part.what: part.num_bytes for part in memory.bill(config, weights, method=method_of(config), kv=None)}
        assert parts["weights of 2 engines"] == 2 * engine * num
        assert parts["3 policies in shared memory"] == 3 * engine * num
        assert parts["trainer: weights, gradients, optimizer"] == trainer * num
        assert memory.rank_bytes(config, weights, method=method_of(config)) == trainer * num + parts["trainer: activations of a row"]
        sharded = settings(model={"path": str(model), "dtype": dtype}, trainer={"ranks": 2, "parallel": {"shard": 2}})
        parts = {part.what: part.num_bytes for part in memory.bill(sharded, weights, method=method_of(sharded), kv=None)}
        assert parts["trainer: weights, gradients, optimizer"] == 16 * num, "pieces are float32, and no rounded copy is kept"
        of_rank = 16 * num // 2 + parts["trainer: activations of a row"] // 2
        assert memory.rank_bytes(sharded, weights, method=method_of(sharded)) == of_rank
    adapted = settings(lora={"rank": 4, "targets": ["q_proj"]})
    assert memory.adapter_parameters(adapted, weights) == 2 * 4 * (128 + 128), "two layers, 128 in and 128 out"
    assert memory.checkpoint_bytes(adapted, weights, method=method_of(adapted)) == 12 * 2 * 4 * 256


def test_adapters_that_travel_as_a_whole_model_are_told(settings: Callable[..., Config]):
    (told,) = notes(checked(settings(lora={"rank": 4})))
    assert told.startswith("lora.rank: 4, and each step publishes all ")
    assert 'weights.adapters = "separate" sends adapters alone' in told
    assert notes(checked(settings(lora={"rank": 4}, weights={"adapters": "separate"}))) == []


def test_an_adapter_of_a_matrix_that_the_model_has_not_is_refused_with_the_nearest_name(settings: Callable[..., Config], model: Path):
    (problem,) = failures(checked(settings(lora={"rank": 4, "targets": ["q_proj", "q_porj", "w1", "embed_tokens"]})))
    assert problem.startswith(f"lora.targets: no matrix of {model} is named 'q_porj' (did you mean 'q_proj'?), 'w1', 'embed_tokens'")
    assert "take of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in problem
    assert failures(checked(settings(lora={"rank": 4, "targets": ["up_proj", "v_proj"]}))) == []
    assert failures(checked(settings(lora={"rank": 0, "targets": ["w1"]}))) == [], "no adapter is made"


def test_a_run_that_this_machine_cannot_hold_is_refused_with_the_figures(settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelinerl.launch.preflight.memory_bytes", lambda: 4 << 20)
    problems = failures(checked(settings(engine={"kv_cache_bytes": 1 << 20})))
    assert problems[0].startswith("memory: the run takes ")
    assert "and this machine has 4.0 MiB" in problems[0]


def test_the_estimate_is_told(settings: Callable[..., Config]):
    told = facts(checked(settings()))
    assert told[0] == ("KV cache: 512 bytes a token; 64.0 KiB for a sequence of 128 tokens, 512.0 KiB for the whole context of 1,024")
    assert told[1].startswith("KV cache: of each engine: 64.0 MiB (the least); 1023 such sequences fit, 127 of the whole context")
    assert any(fact.startswith("disk: ") for fact in told)


@pytest.mark.parametrize(
    ("key", "value"), [("trainer.learning_rate", "inf"), ("pipeline.stall_limit_s", "nan"), ("reward.0.weight", "-inf")]
)
def test_a_number_that_is_not_finite_is_refused(settings: Callable[..., Config], key: str, value: str):
    section, _, name = key.rpartition(".")
    sections = {"reward": [{"function": "a:b", name: float(value)}]} if "reward" in key else {section: {name: float(value)}}
    with pytest.raises(ConfigError, match=f"{key} is {value}: input should be a finite number"):
        settings(**sections)


def test_options_are_finite_too(settings: Callable[..., Config]):
    with pytest.raises(ConfigError, match=r"algorithm.overrides.objective.clip_high is inf, expected a finite number"):
        settings(algorithm={"overrides": {"objective": {"clip_high": float("inf")}}})


def test_float16_cannot_be_trained(settings: Callable[..., Config], model: Path):
    with pytest.raises(ConfigError, match=r'model.dtype is "float16": engines could serve it, and the trainer cannot train in it'):
        settings(model={"path": str(model), "dtype": "float16"})


def pipelinerl(*arguments: str, cwd: Path, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in without)
    program = f"import sys\n{blocked}from pipelinerl.__main__ import main\nmain()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, cwd=cwd)


def written(settings: Callable[..., Config], tmp_path: Path, **sections: Any) -> str:
    config = settings(**sections)
    text = f'[model]\npath = "{config.model.path}"\n[data]\nsource = "rows.jsonl"\n[rollout]\nmax_tokens = 64\n'
    (tmp_path / "my.toml").write_text(text + '[[reward]]\nfunction = "rewards.py:right"\n')
    return "my.toml"


def test_a_dry_run_is_the_whole_preflight_and_starts_nothing(settings: Callable[..., Config], tmp_path: Path):
    rows: list[Any] = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "2+2="}]
    file = written(settings, tmp_path, rows=rows)
    wrong = ("engine.options={ blocksize = 4 }", "algorithm.name=grpoo", 'reference.path="nope"')
    shown = pipelinerl("run", file, "--dry-run", *wrong, cwd=tmp_path)
    assert shown.returncode == 1
    for words in (
        "4 problems",
        "engine.options.blocksize is no engine argument of vLLM 0.32.0 (did you mean 'block_size'?)",
        "did you mean 'grpo'",
        "reference.path: no folder at nope",
        "needs answer, but the row has only the columns (none) (rows.jsonl:2)",
    ):
        assert words in shown.stderr
    assert "Traceback" not in shown.stderr
    assert not (tmp_path / "runs").exists()


def test_who_interrupts_the_look_at_the_rows_sees_no_traceback_and_leaves_nobody(settings: Callable[..., Config], tmp_path: Path):
    settings()
    said_id = "pathlib.Path('looking').write_text(f'{os.getpid()}\\n')"
    (tmp_path / "slow.py").write_text(f"import os, pathlib, time\ndef rows():\n    {said_id}\n    time.sleep(100)\n    yield {{}}\n")
    config = settings(data={"source": "slow.py:rows"})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    program = (
        "import pathlib; from pipelinerl.config import Config; from pipelinerl.launch.preflight import look_apart\n"
        "config = Config.model_validate_json(pathlib.Path('config.json').read_bytes())\n"
        "try: list(look_apart(config, module='orchestrator.preflight', imports='rows'))\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    command = [sys.executable, "-c", program]
    looking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    process_id = int(processes.read_when_written(tmp_path / "looking"))
    os.killpg(looking.pid, signal.SIGINT)
    said, errors = looking.communicate(timeout=processes.PATIENCE_S)
    assert (said, "Traceback" in errors) == ("interrupted\n", False), errors
    processes.wait_until(lambda: not processes.is_alive(process_id), what="the look outlives who asked for it")


def test_a_dry_run_of_ten_thousand_rows_takes_seconds_and_no_torch(settings: Callable[..., Config], tmp_path: Path):
    """Neither is imported, nor a process that imports them: time is that of the processor, in this and the process that reads the rows."""
    file = written(settings, tmp_path, rows=[{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(10_000)])
    before = time.process_time(), _children_s()
    shown = pipelinerl("run", file, "--dry-run", cwd=tmp_path, without=("torch", "vllm"))
    assert shown.returncode == 0, shown.stderr
    assert "10,000 rows; prompts of 4 to 6 tokens" in shown.stdout
    assert "nothing is wrong that can be known without loading a model" in shown.stdout
    assert "ok    KV cache    512 bytes a token" in shown.stdout
    assert _children_s() - before[1] < 6.0


def _children_s() -> float:
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

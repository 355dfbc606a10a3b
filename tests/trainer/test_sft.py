"""Supervised fine-tuning, and the demo's task that it warm-starts."""

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl.config import Config
from pipelinerl.config.file import load, write_run
from pipelinerl.demo.settings import demo_config
from pipelinerl.demo.sort_digits import BEHAVIOURS, demonstrations, held_out_prompts, make_model, reward, train_prompts
from pipelinerl.errors import ConfigError, DataError
from tests.trainer.ranks import Ranks
from trainer.checkpoint.model_folder import refuse_to_replace, save_model
from trainer.data.demonstrations import Demonstrations
from trainer.model.model import Model
from trainer.sft import main
from trainer.supervised import SftProgress, train_sft


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo-model")
    make_model(folder, seed=0)
    return folder


def _config(model: Path, output: Path, *, seed: int = 0, **sft: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"seed": seed},
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"source": "none.jsonl"},
            "reward": [{"function": "none.py:none"}],
            "rollout": {"max_tokens": 8},
            "batch": {"max_tokens": 200},
            "sft": {
                "source": "pipelinerl.demo.sort_digits:demonstrations",
                "steps": 12,
                "batch_size": 32,
                "learning_rate": 2e-3,
                "warmup_steps": 3,
                "output": str(output),
                **sft,
            },
        }
    )


def _weights(folder: Path) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(folder).state_dict().values())


def test_loss_falls_progress_is_told_and_the_source_stays(demo_model: Path, tmp_path: Path) -> None:
    before = _weights(demo_model)
    seen: list[SftProgress] = []
    report = train_sft(_config(demo_model, tmp_path / "out"), on_progress=seen.append)
    assert report.losses[0] == pytest.approx(4.16, abs=0.1)  # ln 64: nothing known
    assert report.losses[-1] < 2.9
    assert [progress.step for progress in seen] == list(range(1, 13))
    assert seen[-1].loss == report.losses[-1]
    assert report.num_tokens == 12 * 32 * 14
    assert all(torch.equal(old, new) for old, new in zip(before, _weights(demo_model), strict=True))
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out")("12=")["input_ids"] == AutoTokenizer.from_pretrained(demo_model)("12=")["input_ids"]
    )


def test_the_same_seed_gives_the_same_weights_and_another_does_not(demo_model: Path, tmp_path: Path) -> None:
    folders = [train_sft(_config(demo_model, tmp_path / str(n), seed=seed, steps=3)).folder for n, seed in enumerate((5, 5, 6))]
    first, again, other = (_weights(folder) for folder in folders)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_gradient_is_that_of_the_mean_over_completion_tokens(demo_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "10=", "completion": "01"}\n{"prompt": "2=", "completion": "2222"}\n')
    seen: list[SftProgress] = []
    train_sft(_config(demo_model, tmp_path / "out", source=str(source), batch_size=2, steps=1), on_progress=seen.append)
    module = AutoModelForCausalLM.from_pretrained(demo_model)
    losses: list[torch.Tensor] = []
    for ids, num_prompt in (([3, 2, 12, 2, 3, 1], 3), ([4, 12, 4, 4, 4, 4, 1], 2)):
        logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, num_prompt - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[num_prompt:]), reduction="sum"))
    (torch.stack(losses).sum() / 8).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None]).double().norm()
    assert seen[0].grad_norm == pytest.approx(expected.item(), rel=1e-4)


def test_the_split_into_rows_does_not_change_the_loss(demo_model: Path, tmp_path: Path) -> None:
    config = _config(demo_model, tmp_path / "out", steps=2)
    wide = config.model_copy(update={"batch": config.batch.model_copy(update={"max_tokens": 100_000})})
    assert train_sft(config).losses == pytest.approx(train_sft(wide).losses, rel=1e-5)


class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_fine_tuning_goes_on_where_it_was_bit_by_bit(demo_model: Path, tmp_path: Path) -> None:
    def config(name: str, **sft: Any) -> Config:
        config = _config(demo_model, tmp_path / name, steps=6, **sft)
        return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 2})})

    def interrupt(progress: SftProgress) -> None:
        if progress.step == 5:
            raise Interrupted

    whole = train_sft(config("whole"))
    with pytest.raises(Interrupted):
        train_sft(config("again"), on_progress=interrupt)
    with pytest.raises(ConfigError, match="was interrupted, with other settings"):
        train_sft(config("again", learning_rate=1e-4))
    seen: list[SftProgress] = []
    again = train_sft(config("again"), on_progress=seen.append)
    steps = [progress.step for progress in seen]
    assert steps in ([3, 4, 5, 6], [5, 6])  # the checkpoint of step 4 may have been under way
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(_weights(whole.folder), _weights(again.folder), strict=True))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".checkpoints"] == []


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}], ids=["copies", "pipeline"])
def test_two_ranks_fine_tune_as_one(demo_model: Path, tmp_path: Path, parallel: dict[str, int]) -> None:
    config = _config(demo_model, tmp_path / "one", steps=3)
    alone = train_sft(config)
    trainer = config.trainer.model_copy(update={"ranks": 2, "parallel": config.trainer.parallel.model_copy(update=parallel)})
    sft = config.sft.model_copy(update={"output": tmp_path / "two"})
    Ranks(_fine_tune_rank, config.model_copy(update={"trainer": trainer, "sft": sft}), tmp_path, size=2).join()
    for rank in range(2):
        assert json.loads((tmp_path / f"losses-{rank}.json").read_text()) == pytest.approx(alone.losses, rel=1e-5)
    for ours, theirs in zip(_weights(alone.folder), _weights(tmp_path / "two"), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def _fine_tune_rank(rank: int, config: Config, folder: Path) -> None:
    (folder / f"losses-{rank}.json").write_text(json.dumps(train_sft(config).losses))


def _batch(config: Config) -> list[tuple[list[int], int]]:
    return [(one.token_ids.tolist(), one.num_prompt) for one in Demonstrations(config).batch_at(0)]


def test_a_row_is_prompt_completion_and_end_of_sequence(demo_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "10=", "completion": "01"}\n\n{"prompt": "2=", "completion": "2"}\n')
    rows = _batch(_config(demo_model, tmp_path, source=str(source), batch_size=2))
    assert sorted(rows) == [([3, 2, 12, 2, 3, 1], 3), ([4, 12, 4, 1], 2)]


def test_file_rows_are_shuffled_anew_every_epoch_by_the_seed(demo_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{number}=", "completion": "0"}) + "\n" for number in range(10, 40)))
    found = Demonstrations(_config(demo_model, tmp_path, source=str(source), batch_size=30))
    keys = [[one.token_ids.tobytes() for one in found.batch_at(step)] for step in (0, 1)]
    assert sorted(keys[0]) == sorted(keys[1])
    assert keys[0] != keys[1]


def test_bad_rows_are_named(demo_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    for content, message in (
        ('{"prompt": "1="}', "row 0: column 'completion' is None, expected text; it has prompt"),
        ('{"prompt": "", "completion": "1"}', "row 0: 0 tokens of prompt"),
        ('{"prompt": "1=", "completion": "' + "1" * 300 + '"}', "303 in all; expected at least one of prompt and at most 200"),
        ("[1]", "line 1: a list, expected one JSON object"),
        ("{", "line 1: not JSON"),
        ("", "has no rows"),
    ):
        source.write_text(content)
        with pytest.raises(DataError, match=message):
            _batch(_config(demo_model, tmp_path, source=str(source), batch_size=1))
    with pytest.raises(ConfigError, match="cannot be read"):
        Demonstrations(_config(demo_model, tmp_path, source=str(tmp_path / "none.jsonl")))


def _run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(sys, "argv", ["trainer.sft", *arguments])
    main()


def test_command_line_trains_from_a_file_with_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = demo_config(folder=tmp_path, seed=3)
    make_model(tmp_path / "demo-model", seed=3)
    before = _weights(tmp_path / "demo-model")
    _run_command(monkeypatch, str(config), "sft.steps=2", "sft.batch_size=8")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("step 2/2   loss ")
    tuned = tmp_path / "demo-model-sft"
    assert lines[2].endswith(f"saved to {tuned}")
    assert lines[3] == f"RL starts from it with: pipelinerl run {config} model.path={tuned}"
    assert all(torch.equal(old, new) for old, new in zip(before, _weights(tmp_path / "demo-model"), strict=True)), "the base stays"
    assert not all(torch.equal(old, new) for old, new in zip(before, _weights(tuned), strict=True))
    with pytest.raises(SystemExit, match=r"ConfigError: model\.path: no folder at nowhere"):
        _run_command(monkeypatch, str(config), "model.path=nowhere")


def test_a_config_for_fine_tuning_needs_neither_prompts_nor_rewards(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, config = tmp_path / "rows.jsonl", tmp_path / "sft.toml"
    rows.write_text('{"prompt": "10=", "completion": "01"}\n')
    config.write_text(
        f'[run]\nfolder = "{tmp_path}"\n[model]\npath = "{demo_model}"\ndtype = "float32"\nmax_tokens = 32\n'
        f'[rollout]\nmax_tokens = 8\n[sft]\nsource = "{rows}"\nsteps = 1\nbatch_size = 1\n'
    )
    _run_command(monkeypatch, str(config))
    assert f"saved to {tmp_path / (demo_model.name + '-sft')}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"2 problems\n  - data\.source is missing: .*\n  - reward is missing: name a function in a"):
        load(config)


def test_a_folder_with_something_else_than_a_model_is_not_replaced(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something else than a model, and saving one there would remove it"):
        train_sft(_config(demo_model, tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_a_run_is_no_model_to_be_replaced_though_it_has_a_config(demo_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo-20260101-000000"
    run.mkdir()
    write_run(run, _config(demo_model, tmp_path))
    for folder, says in ((run, "holds something else than a model"), (run / "config.json", "is a file, and a model is a folder")):
        with pytest.raises(ConfigError, match=says):
            refuse_to_replace(folder)
    refuse_to_replace(demo_model)
    refuse_to_replace(tmp_path / "new")


def test_a_folder_beside_the_saved_model_is_left_alone(demo_model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "mine"
    shutil.copytree(demo_model, saved)
    for name in ("mine.old", "mine.draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("kept")
    save_model(Model(demo_model, dtype="float32", temperature=1.0, device=torch.device("cpu")), saved, source=demo_model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine.draft", "mine.old"]
    assert (tmp_path / "mine.old" / "notes").read_text() == "kept"


# --- the demo's task -------------------------------------------------------------------------------------------------------------


def test_held_out_prompts_are_never_trained_on() -> None:
    held_out = {row["prompt"] for row in held_out_prompts()}
    assert len(held_out) == 256
    for rows in (train_prompts(0), train_prompts(1), demonstrations(0)):
        assert not held_out & {row["prompt"] for row in itertools.islice(rows, 50_000)}


def test_prompts_follow_their_seed_and_carry_the_answer() -> None:
    first = list(itertools.islice(train_prompts(1), 20))
    assert first == list(itertools.islice(train_prompts(1), 20))
    assert first != list(itertools.islice(train_prompts(2), 20))
    for row in first:
        assert row["prompt"][-1] == "="
        assert row["answer"] == "".join(sorted(row["prompt"][:-1]))
        assert reward(row["prompt"], row["answer"], row["answer"]) == 1.0
        assert reward(row["prompt"], row["answer"] + "0", row["answer"]) == 0.0


def test_demonstrations_show_each_behaviour_once_for_each_prompt() -> None:
    rows = list(itertools.islice(demonstrations(), 400))
    for start in range(0, 400, 4):
        digits = rows[start]["prompt"][:-1]
        assert {row["prompt"] for row in rows[start : start + 4]} == {f"{digits}="}
        assert [row["completion"] for row in rows[start : start + 4]] == [behave(digits) for behave in BEHAVIOURS]
    assert [behave("402913") for behave in BEHAVIOURS] == ["012349", "402913", "319204", "943210"]


def test_the_model_is_small_ends_sequences_and_follows_its_seed(demo_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model)
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert model.num_parameters() == pytest.approx(1.07e6, rel=0.01)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size == 64
    ids = tokenizer("402913=")["input_ids"]
    assert len(ids) == 7
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "402913="
    make_model(tmp_path / "again", seed=0)
    make_model(tmp_path / "other", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(_weights(demo_model), _weights(tmp_path / "again"), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(_weights(demo_model), _weights(tmp_path / "other"), strict=True))


def test_demo_config_is_fitted_to_folder_seed_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5, 6})
    config = load(demo_config(folder=tmp_path / "a folder", seed=7))
    assert (config.run.folder, config.run.seed, config.model.path) == (tmp_path / "a folder", 7, tmp_path / "a folder" / "demo-model")
    assert (config.engine.cores, config.trainer.cores) == ((3,), (5,))
    assert config.engine.options == {"block_size": 32}
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3})
    assert load(demo_config(folder=tmp_path, seed=7)).engine.cores == ()

"""A trainer that starts again is the one that was killed, bit by bit; a checkpoint is whole or not there; a full disk harms nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.config.file import parse, write_run
from pipelinerl.errors import CheckpointDamaged, ConfigError, LeaseError
from pipelinerl.messages import CheckpointFailed, CheckpointSaved
from pipelinerl.runtime.lease import EPOCH, fence_of
from pipelinerl.storage.checkpoint_folder import check_files, complete, read_manifest, write_manifest
from tests.runtime.test_lease import of_another_machine
from tests.trainer.conductor import make_config
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.portable import state_of
from trainer.data.sample_digest import SampleDigest
from trainer.export import export
from trainer.model.model import Model
from trainer.optimizer import Optimizer

NUM_STEPS = 6


class Trainer:
    """A model, its optimizer and its checkpoints, without a loop."""

    def __init__(
        self, model_folder: Path, run_folder: Path, *, dtype: str = "float32", keep: int = 1, fence: Callable[[], None] = lambda: None
    ) -> None:
        self.model = make_model(model_folder, dtype=dtype)
        self.step, self.optimizer = make_step(self.model, learning_rate=1e-2)
        self.checkpoints = make_checkpoints(self.model, self.optimizer, run_folder, keep=keep, fence=fence)
        self.sample_digest = SampleDigest()
        self.version = 0
        restored = self.checkpoints.restore()
        if restored is not None:
            self.optimizer.round()
            self.version = restored.version
            self.sample_digest.restore(num_samples=restored.num_samples, digest=restored.samples)

    def train(self, until: int) -> None:
        """The same rows for the same step, whoever trains it."""
        for number in range(self.version, until):
            generator = np.random.default_rng(number)
            samples = [make_sample(generator, prompt=4, completion=int(generator.integers(1, 8))) for _ in range(5)]
            batch = make_batch(samples, step=number)
            self.step.add(batch)
            self.sample_digest.add(batch)
            self.step.finish(make_seal(samples, step=number))
            self.sample_digest.finish_step()
        self.version = until

    def save(self) -> list[CheckpointSaved | CheckpointFailed]:
        num_samples, samples = self.sample_digest.whole(lambda sums: None, device=torch.device("cpu"))
        self.checkpoints.begin(self.version, commit=f"commit-{self.version}", num_samples=num_samples, samples=samples)
        self.checkpoints.wait()
        return self.checkpoints.take_news()

    def everything(self) -> dict[str, torch.Tensor]:
        state = state_of(self.model, self.optimizer)
        return {f"{part}.{name}": tensor.clone() for part, tensors in state.items() for name, tensor in tensors.items()}


def make_checkpoints(model: Model, optimizer: Optimizer, run_folder: Path, *, keep: int = 1, **options: Any) -> Checkpoints:
    state = functools.partial(state_of, model, optimizer)
    return Checkpoints(run_folder / "checkpoints", state=state, rank=0, num_ranks=1, keep=keep, **options)


def names(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_after_a_restart_are_those_without_it_bit_by_bit(folders: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    straight = Trainer(folders["qwen3"], tmp_path / "straight", dtype=dtype)
    straight.train(NUM_STEPS)
    killed = Trainer(folders["qwen3"], tmp_path / "killed", dtype=dtype)
    killed.train(2)
    killed.save()
    killed.train(4)  # what came after the checkpoint is gone with its process
    resumed = Trainer(folders["qwen3"], tmp_path / "killed", dtype=dtype)
    assert resumed.version == 2
    resumed.train(NUM_STEPS)
    expected, got = straight.everything(), resumed.everything()
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    weights = [dict(one.model.tensors()) for one in (straight, resumed)]  # in bfloat16, rounded from those that take the updates
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []
    whole = [one.sample_digest.whole(lambda sums: None, device=torch.device("cpu")) for one in (straight, resumed)]
    assert whole[0] == whole[1]
    assert whole[0][0] == 5 * NUM_STEPS


def test_training_on_while_a_checkpoint_is_written_does_not_change_it(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = Trainer(folders["qwen3"], tmp_path)
    trainer.train(1)
    before = trainer.everything()
    trainer.checkpoints.begin(1, commit="c", num_samples=5, samples="0")
    trainer.train(3)
    trainer.checkpoints.wait()
    resumed = Trainer(folders["qwen3"], tmp_path).everything()
    assert [name for name in before if not torch.equal(before[name], resumed[name])] == []


def test_a_manifest_says_what_the_checkpoint_holds(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = Trainer(folders["llama"], tmp_path)
    trainer.train(3)
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking/wandb.json").write_text(json.dumps({"id": "0badcafe"}))
    (saved,) = trainer.save()
    assert isinstance(saved, CheckpointSaved)
    (folder,) = complete(tmp_path / "checkpoints")
    manifest = read_manifest(folder)
    assert (manifest.version, manifest.commit, manifest.num_samples) == (3, "commit-3", 15)
    assert manifest.trackers == {"wandb": "0badcafe"}
    assert (saved.version, saved.commit, saved.num_bytes) == (3, "commit-3", manifest.num_bytes)
    assert {name: path.stat().st_size for name, path in ((path.name, path) for path in folder.iterdir()) if name != "manifest.json"} == {
        name: file.bytes for name, file in manifest.files.items()
    }
    assert set(manifest.files) | {"manifest.json"} == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(("keep", "expected"), [(1, [3]), (2, [2, 3])])
def test_the_newest_stay_and_older_ones_go(folders: dict[str, Path], tmp_path: Path, keep: int, expected: list[int]) -> None:
    trainer = Trainer(folders["llama"], tmp_path, keep=keep)
    for version in (1, 2, 3):
        trainer.train(version)
        trainer.save()
    assert names(tmp_path) == [f"step-{version:06}" for version in expected]


@pytest.mark.parametrize("left", ["step-000002.draft", "step-000002.old", "step-000002"])
def test_half_a_checkpoint_is_never_taken_for_one(folders: dict[str, Path], tmp_path: Path, left: str) -> None:
    """What a kill leaves in the middle of writing or removing; a folder without a manifest is no checkpoint, whatever its name."""
    trainer = Trainer(folders["llama"], tmp_path)
    trainer.train(1)
    trainer.save()
    half = tmp_path / "checkpoints" / left
    shutil.copytree(tmp_path / "checkpoints" / "step-000001", half)
    if not half.suffix:
        (half / "manifest.json").unlink()
    assert Trainer(folders["llama"], tmp_path).version == 1
    assert half.exists() == (not half.suffix)


# --- damage --------------------------------------------------------------------------------------------------------------------------


def save_two(folder: Path, run_folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Checkpoints of versions 1 and 2; return what each holds."""
    trainer = Trainer(folder, run_folder, keep=2)
    held = []
    for version in (1, 2):
        trainer.train(version)
        trainer.save()
        held.append(trainer.everything())
    return held[0], held[1]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_no_bit_of_a_checkpoint_flips_in_silence(folders: dict[str, Path], tmp_path: Path) -> None:
    """One bit in each of 240 places of all its files: either it is found, or what is read is what was written."""
    save_two(folders["llama"], tmp_path)
    folder = tmp_path / "checkpoints" / "step-000002"
    whole = read_manifest(folder)
    chance, found, silent = random.Random(0), 0, []
    for path in sorted(folder.iterdir()):
        written = path.read_bytes()
        for _ in range(80):
            place = chance.randrange(8 * len(written))
            path.write_bytes(flipped(written, place))
            try:
                manifest = read_manifest(folder)
                check_files(folder, manifest)
                silent += [(path.name, place)] * (manifest != whole)
            except CheckpointDamaged as error:
                found += path.name in str(error)
        path.write_bytes(written)
    assert silent == []
    assert found > 230, "but for spaces between the words of the manifest"


def flipped(content: bytes, place: int) -> bytes:
    """The same with one bit changed."""
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [("__0_0.distcp", "flipped"), ("__0_0.distcp", "cut"), (".metadata", "flipped"), (".metadata", "gone"), ("manifest.json", "flipped")],
)
def test_damage_is_told_and_the_newest_whole_checkpoint_is_used(
    folders: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, how: str
) -> None:
    older, _ = save_two(folders["llama"], tmp_path)
    path = tmp_path / "checkpoints" / "step-000002" / name
    if how == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(flipped(content, 8 * 60) if how == "flipped" else content[:-1])
    resumed = Trainer(folders["llama"], tmp_path, keep=2)
    assert resumed.version == 1
    assert same(resumed.everything(), older)
    (damage,) = resumed.checkpoints.damaged
    assert damage.version == 2
    assert name in damage.reason
    assert "expected" in damage.reason
    assert damage.reason in capfd.readouterr().err
    assert names(tmp_path) == ["step-000001", "step-000002.damaged"]
    resumed.train(2)
    resumed.save()
    assert names(tmp_path) == ["step-000001", "step-000002"], "what was set aside goes once a newer one stands"


def test_where_no_checkpoint_is_whole_the_run_starts_from_its_model_and_says_so(folders: dict[str, Path], tmp_path: Path) -> None:
    save_two(folders["llama"], tmp_path)
    for path in (tmp_path / "checkpoints").glob("*/.metadata"):
        path.write_bytes(b"")
    resumed = Trainer(folders["llama"], tmp_path, keep=2)
    assert resumed.version == 0
    assert [damage.version for damage in resumed.checkpoints.damaged] == [1, 2]


@pytest.mark.parametrize(("keep", "expected"), [(1, [1, 2, 3]), (2, [0, 1, 2]), (3, [0, 0, 1])])
def test_a_checkpoint_says_what_is_the_oldest_to_fall_back_to(
    folders: dict[str, Path], tmp_path: Path, keep: int, expected: list[int]
) -> None:
    trainer, oldest = Trainer(folders["llama"], tmp_path, keep=keep), []
    for version in (1, 2, 3):
        trainer.train(version)
        (saved,) = trainer.save()
        assert isinstance(saved, CheckpointSaved)
        oldest.append(saved.oldest)
    assert oldest == expected


def test_an_export_takes_the_newest_whole_one(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_two(folders["qwen3"], tmp_path)
    data = tmp_path / "checkpoints" / "step-000002" / "__0_0.distcp"
    data.write_bytes(flipped(data.read_bytes(), 4_000))
    assert export(make_config(folders["qwen3"]), tmp_path, tmp_path / "model") == 1
    assert "step-000002/__0_0.distcp was damaged" in capsys.readouterr().err
    assert names(tmp_path) == ["step-000001", "step-000002"], "a reader changes nothing"


@pytest.mark.parametrize(
    ("schema", "says"), [(5, "schema is 5, this version .* reads 4"), (3, "schema is 3, this one reads 4"), (1, "knows the way from 2 on")]
)
def test_a_checkpoint_of_another_schema_is_no_damage(folders: dict[str, Path], tmp_path: Path, schema: int, says: str) -> None:
    save_two(folders["llama"], tmp_path)
    folder = tmp_path / "checkpoints" / "step-000002"
    write_manifest(folder, dataclasses.replace(read_manifest(folder), schema=schema))
    with pytest.raises(ConfigError, match=says):
        Trainer(folders["llama"], tmp_path)
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_a_checkpoint_of_another_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = Trainer(folders["llama"], tmp_path)
    trainer.train(1)
    trainer.save()
    with pytest.raises(ConfigError, match="cannot be loaded into this model and optimizer"):
        Trainer(folders["qwen3"], tmp_path)


@pytest.fixture
def full_disk() -> Iterator[Any]:
    """Writing more than 10 kB to a file fails, as on a disk without room, until called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield make_room
    make_room()


def test_a_full_disk_leaves_the_checkpoint_before_intact_and_says_so(folders: dict[str, Path], tmp_path: Path, request: Any) -> None:
    trainer = Trainer(folders["llama"], tmp_path)
    trainer.train(1)
    trainer.save()
    make_room = request.getfixturevalue("full_disk")
    trainer.train(2)
    (failed,) = trainer.save()
    assert isinstance(failed, CheckpointFailed)
    assert "checkpoint 2 could not be written" in failed.error
    assert "File too large" in failed.error
    assert "step-000001 is untouched, and training goes on" in failed.error
    assert names(tmp_path) == ["step-000001"]
    make_room()
    assert Trainer(folders["llama"], tmp_path).version == 1
    trainer.train(3)
    assert isinstance(trainer.save()[0], CheckpointSaved)
    assert names(tmp_path) == ["step-000003"]


def test_the_digest_minds_what_was_trained_and_not_in_which_order() -> None:
    def digest(*rows: tuple[int, list[int]]) -> tuple[int, str]:
        sample_digest = SampleDigest()
        for step, ids in rows:
            generator = np.random.default_rng(0)
            for first_id in ids:
                sample_digest.add(make_batch([make_sample(generator, prompt=1, completion=2)], step=step, first_id=first_id))
        sample_digest.finish_step()
        return sample_digest.whole(lambda sums: None, device=torch.device("cpu"))

    assert digest((0, [1, 2])) == digest((0, [2, 1]))
    assert len({digest((0, [1, 2])), digest((0, [1, 3])), digest((1, [1, 2])), digest((0, [1, 2, 2])), digest((0, [1]))}) == 5


def test_the_digest_of_replicas_is_that_of_one() -> None:
    generator = np.random.default_rng(0)
    batches = [make_batch([make_sample(generator, prompt=1, completion=2)], first_id=number) for number in range(4)]
    alone, halves = SampleDigest(), [SampleDigest(), SampleDigest()]
    for number, batch in enumerate(batches):
        alone.add(batch)
        halves[number % 2].add(batch)
    for sample_digest in (alone, *halves):
        sample_digest.restore(num_samples=3, digest="ffffffffffffffff")
        sample_digest.finish_step()
    parts: list[torch.Tensor] = []
    for half in halves:
        half.whole(lambda sums: parts.append(sums.clone()), device=torch.device("cpu"))

    def add_up(sums: torch.Tensor) -> None:
        sums.copy_(parts[0] + parts[1])

    device = torch.device("cpu")
    assert halves[0].whole(add_up, device=device) == alone.whole(lambda sums: None, device=device)


def test_a_checkpoint_is_exported_as_a_folder_that_transformers_loads(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = Trainer(folders["qwen3"], tmp_path)
    config = make_config(folders["qwen3"])
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        export(config, tmp_path, tmp_path / "model")
    trainer.train(2)
    trainer.save()
    assert export(config, tmp_path, tmp_path / "model") == 2
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    expected = trainer.model.module.state_dict()
    assert exported.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(exported[name], expected[name])] == []


def test_the_manifest_is_plain_json(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = Trainer(folders["llama"], tmp_path)
    trainer.train(1)
    trainer.save()
    assert json.loads((tmp_path / "checkpoints/step-000001/manifest.json").read_text())["version"] == 1


def test_a_trainer_whose_run_was_taken_over_names_no_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    of_another_machine(tmp_path, epoch=5)
    trainer = Trainer(folders["qwen2"], tmp_path, keep=2, fence=fence_of(tmp_path, {EPOCH: "5"}))
    trainer.train(2)
    trainer.save()
    of_another_machine(tmp_path, epoch=6)
    trainer.train(4)
    with pytest.raises(LeaseError, match="this process writes nothing more"):
        trainer.save()
    assert [folder.name for folder in complete(tmp_path / "checkpoints")] == [names(tmp_path)[0]]
    with pytest.raises(LeaseError):
        Trainer(folders["qwen2"], tmp_path, fence=fence_of(tmp_path, {EPOCH: "5"}))


@pytest.mark.slow
def test_a_trainers_process_whose_run_was_taken_over_ends_before_it_touches_anything(folders: dict[str, Path], tmp_path: Path) -> None:
    """As its launcher starts it, with the epoch in its environment."""
    (tmp_path / "checkpoints" / "step-000003.draft").mkdir(parents=True)
    config = parse(
        {"model": {"path": str(folders["qwen2"]), "dtype": "float32"}, "data": {"source": "d"}, "reward": [{"function": "f:g"}]},
        origin="here",
    )
    write_run(tmp_path, config)
    of_another_machine(tmp_path, epoch=6)
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "--run-folder", str(tmp_path)],
        env={**os.environ, EPOCH: "5"},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert ended.returncode != 0
    assert "this process writes nothing more" in ended.stderr
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-000003.draft"], (
        "the other launcher's trainer writes it"
    )

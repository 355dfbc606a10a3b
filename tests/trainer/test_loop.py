"""The whole trainer, over the real transport, against a small orchestrator with an engine of its own."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.config import Config
from pipelinerl.errors import MismatchError, PeerSilent, WeightsError
from pipelinerl.messages import FromTrainer, Tensor
from pipelinerl.metrics import read_journals
from pipelinerl.transport.curve import make_keys
from pipelinerl.transport.zmq import ZmqHub
from pipelinerl.weights.slots import FOLDER, run_token
from tests.trainer.conductor import ROWS_PER_STEP, Conductor, make_config
from trainer.loop import train

Start = Callable[[Config, Path], Awaitable[int]]


async def _in_this_process(config: Config, run_folder: Path) -> int:
    await asyncio.to_thread(train, config, run_folder)
    return 0


async def _as_launched(config: Config, run_folder: Path) -> int:
    return await _launch(config, run_folder, "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "trainer")


async def _launch(config: Config, run_folder: Path, *module: str) -> int:
    (run_folder / "config.json").write_text(config.model_dump_json())
    command = (sys.executable, "-m", *module, "--run-folder", str(run_folder))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    output, _ = await process.communicate()
    (run_folder / "log").write_bytes(output)
    return process.returncode or 0


def _run(start: Start, run_folder: Path, config: Config, **options: Any) -> Conductor:
    """Run a trainer against a conductor with these options until both have ended. Raises what ended the trainer."""

    async def both() -> Conductor:
        make_keys(run_folder)
        hub = ZmqHub(run_folder, "trainer", accepts=FromTrainer)
        try:
            conductor = Conductor(hub, config.model.path, config.trainer.steps, **options)
            async with asyncio.timeout(100):
                served, trained = await asyncio.gather(conductor.run(), start(config, run_folder), return_exceptions=True)
        finally:
            hub.close()
        for ending in (served, trained):
            if isinstance(ending, Exception):
                ending.add_note(f"the orchestrator heard: {conductor.failed}")
                raise ending
        assert trained == 0, (run_folder / "log").read_text()
        return conductor

    return asyncio.run(both())


def _weights(folder: Path) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(folder).state_dict().values())


def _check_whole_run(served: Conductor, run_folder: Path) -> None:
    assert [done.step for done in served.done] == [0, 1, 2]
    assert [policy.version for policy in served.published] == [1, 2, 3]
    for done in served.done:
        assert done.metrics["logprob_gap_max"] < 1e-4
        assert done.metrics["num_micro_batches"] == ROWS_PER_STEP
        assert {"wait_s", "forward_backward_s", "optimizer_s", "publish_s", "tokens_per_s"} <= done.metrics.keys()
    first, *_, last = (served.done[0].metrics, served.done[-1].metrics)
    assert first["grad_norm"] > 0
    assert first["staleness_max"] == last["staleness_max"] == 0
    for saved, published in zip(_weights(run_folder / "model"), served.engine.module.state_dict().values(), strict=True):
        assert torch.equal(saved, published)
    spans = {line["name"] for line in read_journals(run_folder) if line["kind"] == "span" and line["lane"] == "trainer-0"}
    assert spans == {"wait", "forward_backward", "optimizer", "publish"}
    assert not list(FOLDER.glob(f"pipelinerl-{run_token(run_folder)}-*"))


def test_a_run_trains_publishes_and_ends_by_stop(folders: dict[str, Path], tmp_path: Path) -> None:
    served = _run(_as_launched, tmp_path, make_config(folders["qwen3"]))
    _check_whole_run(served, tmp_path)


def test_a_run_in_one_process_reports_every_step(folders: dict[str, Path], tmp_path: Path) -> None:
    served = _run(_in_this_process, tmp_path, make_config(folders["llama"]))
    _check_whole_run(served, tmp_path)


def test_rows_are_pulled_two_ahead_and_each_once(folders: dict[str, Path], tmp_path: Path) -> None:
    served = _run(_in_this_process, tmp_path, make_config(folders["llama"]))
    asked = [(pull.step, pull.index) for pull in served.pulls]
    assert asked[:2] == [(0, 0), (0, 1)]
    assert len(set(asked)) == len(asked)
    for step in range(3):
        indices = [index for asked_step, index in asked if asked_step == step]
        assert ROWS_PER_STEP < len(indices) <= ROWS_PER_STEP + 2


def test_stop_in_the_middle_saves_the_last_policy(folders: dict[str, Path], tmp_path: Path) -> None:
    served = _run(_in_this_process, tmp_path, make_config(folders["qwen2"], steps=50), stop_after=1)
    assert len(served.published) == 2
    for saved, published in zip(_weights(tmp_path / "model"), served.engine.module.state_dict().values(), strict=True):
        assert torch.equal(saved, published)


def test_a_mismatch_ends_the_run_and_reaches_the_orchestrator(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        _run(_in_this_process, tmp_path, make_config(folders["qwen3"]), logprob_error=0.01)
    assert caught.value.__notes__[0].startswith("the orchestrator heard: MismatchError: rollout rollout-")
    assert not (tmp_path / "model").exists()


def test_a_layout_of_another_model_ends_the_run_and_reaches_the_orchestrator(folders: dict[str, Path], tmp_path: Path) -> None:
    wrong = (Tensor(name="model.embed_tokens.weight", shape=(61, 31), dtype="float32", offset_bytes=0, num_bytes=61 * 31 * 4),)
    with pytest.raises(WeightsError, match=r"misshapen: model\.embed_tokens\.weight") as caught:
        _run(_in_this_process, tmp_path, make_config(folders["qwen3"]), layout=wrong)
    assert caught.value.__notes__[0].startswith("the orchestrator heard: WeightsError: ")


def test_a_silent_orchestrator_is_named_with_what_was_awaited(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(PeerSilent, match=r"waited 0\.3 s for the orchestrator to send row 0 of step 1,"):
        _run(_in_this_process, tmp_path, make_config(folders["qwen3"], silent_after_s=0.3), silent_from_step=1)


def test_a_trainer_that_fails_early_leaves_its_last_words(folders: dict[str, Path], tmp_path: Path) -> None:
    make_keys(tmp_path)
    assert asyncio.run(_launch(make_config(folders["qwen3"], ranks=2), tmp_path, "trainer")) == 1
    words = json.loads((tmp_path / "failures" / "trainer-0.json").read_text())
    assert words["error"].startswith("ConfigError: trainer.ranks is 2, but 1 processes were started")

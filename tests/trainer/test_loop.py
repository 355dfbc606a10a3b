"""The whole trainer, over the real transport, against a small orchestrator with an engine of its own."""

import asyncio
import concurrent.futures
import json
import multiprocessing
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.config import Config
from pipelinerl.config.file import write_run
from pipelinerl.errors import MismatchError, PeerSilent, WeightsError
from pipelinerl.messages import FromTrainer, Stop, Tensor, ToTrainer, TrainerReady, TrainingEnded
from pipelinerl.observe.lines import read_journals
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub, ZmqLink
from pipelinerl.weights.shared_names import FOLDER, run_token
from tests.keys import PEERS
from tests.trainer.conductor import ROWS_PER_STEP, Conductor, make_config
from tests.trainer.tiny import make_model
from trainer.__main__ import main
from trainer.loop import train
from trainer.orchestrator_client import OrchestratorClient

pytestmark = pytest.mark.process

Start = Callable[[Config, Path], Awaitable[int]]


async def _in_this_process(config: Config, run_folder: Path) -> int:
    """In a daemon thread: one that hangs fails its test by the timeout, and does not keep the tests from ending."""
    ending: concurrent.futures.Future[int] = concurrent.futures.Future()

    def run() -> None:
        try:
            train(config, run_folder)
            ending.set_result(0)
        except Exception as error:
            ending.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(ending)


async def _as_launched(config: Config, run_folder: Path) -> int:
    return await _launch(config, run_folder, "trainer")


async def _launch(config: Config, run_folder: Path, *module: str) -> int:
    write_run(run_folder, config)
    command = (sys.executable, "-m", *module, "--run-folder", str(run_folder))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    output, _ = await process.communicate()
    (run_folder / "log").write_bytes(output)
    return process.returncode or 0


def _run(start: Start, run_folder: Path, config: Config, **options: Any) -> Conductor:
    """Run a trainer against a conductor with these options until both have ended. Raises what ended the trainer."""
    if not (run_folder / "keys").exists():
        make_keys(run_folder, PEERS)

    async def both() -> Conductor:
        hub = ZmqHub(run_folder, "trainer", accepts=FromTrainer)
        try:
            conductor = Conductor(hub, config.model.path, config.trainer.steps, **options)
            async with asyncio.timeout(110):  # the limit of a test would end it without a word
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


def _check_whole_run(conductor: Conductor, run_folder: Path) -> None:
    assert [done.step for done in conductor.done] == [0, 1, 2]
    assert [policy.version for policy in conductor.published] == [1, 2, 3]
    for done in conductor.done:
        assert done.metrics["logprob_gap_max"] < 1e-4
        assert done.metrics["num_micro_batches"] == ROWS_PER_STEP
        assert {"wait_s", "forward_backward_s", "optimizer_s", "publish_s", "publish_async_s", "tokens_per_s"} <= done.metrics.keys()
    first, *_, last = (conductor.done[0].metrics, conductor.done[-1].metrics)
    assert first["grad_norm"] > 0
    assert first["staleness_max"] == last["staleness_max"] == 0
    for saved, published in zip(_weights(run_folder / "model"), conductor.engine.module.state_dict().values(), strict=True):
        assert torch.equal(saved, published)
    spans = {line["name"] for line in read_journals(run_folder) if line["kind"] == "span" and line["lane"] == "trainer-0"}
    assert spans == {"wait", "forward_backward", "optimizer", "publish", "checkpoint"}
    assert not list(FOLDER.glob(f"pipelinerl-{run_token(run_folder)}-*"))


def test_a_run_trains_publishes_and_ends_by_stop(folders: dict[str, Path], tmp_path: Path) -> None:
    conductor = _run(_as_launched, tmp_path, make_config(folders["qwen3"]))
    _check_whole_run(conductor, tmp_path)


def test_a_run_in_one_process_reports_every_step(folders: dict[str, Path], tmp_path: Path) -> None:
    conductor = _run(_in_this_process, tmp_path, make_config(folders["llama"]))
    _check_whole_run(conductor, tmp_path)


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(config.model_dump() | sections)


def test_a_run_of_adapters_publishes_them_merged_and_saves_them_apart(folders: dict[str, Path], tmp_path: Path) -> None:
    """The conductor's engine samples with what was published: the gaps that `_check_whole_run` bounds judge the merging."""
    conductor = _run(_in_this_process, tmp_path, _with(make_config(folders["qwen3"]), lora={"rank": 4}))
    _check_whole_run(conductor, tmp_path)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_a_run_with_a_critic_and_a_reference_saves_both_models_it_trained(folders: dict[str, Path], tmp_path: Path) -> None:
    algorithm = {"name": "ppo", "overrides": {"advantage": {"kl_coef": 0.01}}}
    config = _with(make_config(folders["llama"]), algorithm=algorithm, reference={"path": folders["llama"]}, critic={"warmup_steps": 1})
    conductor = _run(_in_this_process, tmp_path, config)
    assert [policy.version for policy in conductor.published] == [1, 2, 3]
    first, *_, last = (done.metrics for done in conductor.done)
    assert first["value"] == 0 != last["value"]
    assert "grad_norm" not in first
    assert last["grad_norm"] > 0
    assert last["reference_kl_k3"] > 0
    assert dict(make_model(tmp_path / "critic", gives_values=True).module.named_parameters())["score.weight"].any()


def test_two_rows_are_asked_for_ahead_and_none_twice(folders: dict[str, Path], tmp_path: Path) -> None:
    conductor = _run(_in_this_process, tmp_path, make_config(folders["llama"]))
    asked = [(pull.step, pull.index) for pull in conductor.pulls]
    assert len(set(asked)) == len(asked)
    assert {step: max(index for asked_step, index in asked if asked_step == step) >= ROWS_PER_STEP for step in range(3)} == {
        0: True,
        1: True,
        2: True,
    }


def test_rows_not_taken_are_not_pulled_past_nor_taken_after_stop(folders: dict[str, Path], tmp_path: Path) -> None:
    make_keys(tmp_path, PEERS)
    ready = TrainerReady(replica=0, num_replicas=1, process_id=0, version=0)

    async def pulls() -> list[int]:
        hub = ZmqHub(tmp_path, "trainer", accepts=FromTrainer)
        conductor = Conductor(hub, folders["llama"], 3)
        counts: list[int] = []
        serving = asyncio.create_task(conductor.run())
        with OrchestratorClient(
            lambda: ZmqLink(tmp_path, "trainer", 0, accepts=ToTrainer), ready=ready, num_steps=3, silent_after_s=60
        ) as client:
            for count in (2, 3):
                async with asyncio.timeout(20):
                    while len(conductor.pulls) < count:  # noqa: ASYNC110  # the conductor tells nobody of a pull
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)  # long enough for many more pulls
                counts.append(len(conductor.pulls))
                await asyncio.to_thread(client.take)
            hub.send("trainer-0", Stop(reason="the test is over"))
            assert await asyncio.to_thread(client.wait_for_stop, 20)
            assert isinstance(client.take(), Stop), "told to stop, the loop takes no more of the rows that wait"
        serving.cancel()
        hub.close()
        return counts

    assert asyncio.run(pulls()) == [2, 3]


def test_stop_in_the_middle_saves_the_last_policy(folders: dict[str, Path], tmp_path: Path) -> None:
    conductor = _run(_in_this_process, tmp_path, make_config(folders["qwen2"], steps=50), stop_after=1)
    assert len(conductor.published) == 2
    for saved, published in zip(_weights(tmp_path / "model"), conductor.engine.module.state_dict().values(), strict=True):
        assert torch.equal(saved, published)


def test_a_trainer_told_to_train_no_further_says_all_there_is_and_waits(folders: dict[str, Path], tmp_path: Path) -> None:
    """It had two steps; their policies and the checkpoint of the second, which was not due, come before its last word."""
    conductor = _run(_in_this_process, tmp_path, make_config(folders["qwen2"], steps=50), stop_after=1, ends_first=True)
    assert conductor.ended == TrainingEnded(version=2)
    assert [done.step for done in conductor.done] == [0, 1]
    assert [policy.version for policy in conductor.published] == [1, 2]
    assert conductor.saved[-1].version == 2
    assert max(pull.step for pull in conductor.pulls) == 2, "it had asked ahead, and asked no more"
    for saved, published in zip(_weights(tmp_path / "model"), conductor.engine.module.state_dict().values(), strict=True):
        assert torch.equal(saved, published)


def test_a_mismatch_ends_the_run_and_reaches_the_orchestrator(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        _run(_in_this_process, tmp_path, make_config(folders["qwen3"]), logprob_error=0.01)
    assert caught.value.__notes__[0].startswith("the orchestrator heard: MismatchError: step 0: mean of ")
    assert not (tmp_path / "model").exists()


def test_a_layout_of_another_model_ends_the_run_and_reaches_the_orchestrator(folders: dict[str, Path], tmp_path: Path) -> None:
    wrong = (Tensor(name="model.embed_tokens.weight", shape=(61, 31), dtype="float32", offset_bytes=0, num_bytes=61 * 31 * 4),)
    with pytest.raises(WeightsError, match=r"misshapen: model\.embed_tokens\.weight") as caught:
        _run(_in_this_process, tmp_path, make_config(folders["qwen3"]), layout=wrong)
    assert caught.value.__notes__[0].startswith("the orchestrator heard: WeightsError: ")


def test_a_silent_orchestrator_is_named_with_what_was_awaited(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(PeerSilent, match=r"waited 3 s for the orchestrator to send row 0 of step 1,"):
        _run(
            _in_this_process, tmp_path, make_config(folders["qwen3"], silent_after_s=3.0), stop_after=0, silent_from_step=1, says_stop=False
        )


def test_an_orchestrator_that_has_nothing_to_send_but_lives_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and rewards may take longer for a row than any limit on silence: acknowledgements are signs of life.

    A second client, whose hub reads nothing, shows when the limit is over.
    """
    monkeypatch.setattr("trainer.orchestrator_client.ALIVE_EVERY_S", 0.1)
    monkeypatch.setattr("pipelinerl.transport.zmq.PROBE_EVERY_S", 0.1)
    ready = TrainerReady(replica=0, num_replicas=1, process_id=0, version=0)

    def hub_and_client(run_folder: Path) -> tuple[ZmqHub, OrchestratorClient]:
        make_keys(run_folder, PEERS)
        hub = ZmqHub(run_folder, "trainer", accepts=FromTrainer)
        return hub, OrchestratorClient(
            lambda: ZmqLink(run_folder, "trainer", 0, accepts=ToTrainer), ready=ready, num_steps=3, silent_after_s=3.0
        )

    async def wait() -> None:
        (living, heard), (deaf, unheard) = hub_and_client(tmp_path / "living"), hub_and_client(tmp_path / "deaf")

        async def listen() -> None:
            while True:
                await living.receive()

        listening = asyncio.create_task(listen())
        with heard, unheard:
            taking = asyncio.create_task(asyncio.to_thread(heard.take))
            with pytest.raises(PeerSilent, match=r"waited 3 s for the orchestrator to send row 0 of step 0, and its process gave no sign"):
                await asyncio.wait_for(asyncio.to_thread(unheard.take), 20)
            done, _ = await asyncio.wait({taking}, timeout=0.3)  # a little longer than the other waited
            assert not done, taking.exception()
            heard.wake()
            await taking
        listening.cancel()
        living.close()
        deaf.close()

    asyncio.run(wait())


def test_a_terminated_trainer_removes_its_buffers(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(folders["qwen3"])
    write_run(tmp_path, config)
    monkeypatch.setattr(sys, "argv", ["trainer", "--run-folder", str(tmp_path)])
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    process = multiprocessing.get_context("fork").Process(target=main)

    async def is_running(config: Config, run_folder: Path) -> int:
        return 0

    make_keys(tmp_path, PEERS)
    process.start()
    conductor = _run(is_running, tmp_path, config, stop_after=0, silent_from_step=1, says_stop=False)
    assert (FOLDER / conductor.published[0].buffer).exists()
    process.terminate()
    process.join(30)
    assert process.exitcode == 128 + signal.SIGTERM
    assert not list(FOLDER.glob(f"pipelinerl-{run_token(tmp_path)}-*"))


def test_a_trainer_that_fails_early_leaves_its_last_words(folders: dict[str, Path], tmp_path: Path) -> None:
    make_keys(tmp_path, PEERS)
    assert asyncio.run(_launch(make_config(folders["qwen3"], ranks=2), tmp_path, "trainer")) == 1
    words = json.loads((tmp_path / "failures" / "trainer-0.json").read_text())
    assert words["error"].startswith("ConfigError: trainer.ranks is 2, but this process is one of 1 ")

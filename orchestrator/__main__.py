"""The command `python -m orchestrator --run-folder RUN` starts the one process that holds the run's state."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
from pathlib import Path

from orchestrator.advantages import MethodAdvantages
from orchestrator.data.encoder import encoder_of
from orchestrator.data.sources import prompts_of
from orchestrator.ledger.ledger import Ledger
from orchestrator.parts import Dependencies
from orchestrator.peers.bounds import experts_of, vocabulary_of
from orchestrator.run import Run, RunResult
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.file import load_run
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.messages import FromEngine, FromGateway, FromScorer, FromTrainer
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime import startup
from pipelinerl.runtime.lease import fence_of
from pipelinerl.runtime.machine import cores_and_devices
from pipelinerl.runtime.network import address_of
from pipelinerl.runtime.process import ask_to_replace, crash_report, end_stuck
from pipelinerl.runtime.watch import guarded
from pipelinerl.transport.zmq import ZmqHub


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    parser.add_argument("--interface", help="where to listen; default: run.interface")
    arguments = parser.parse_args()
    run_folder = arguments.run_folder
    with crash_report(run_folder, "orchestrator"):
        with startup.mark("imports", since_s=startup.begun_s()):
            config = load_run(run_folder)
        result = asyncio.run(_run(config, run_folder, address=address_of(arguments.interface or config.run.interface)))
        print(f"{result.reason}: {result.rollouts}", flush=True)


async def _run(config: Config, run_folder: Path, *, address: str) -> RunResult:
    hubs = [
        ZmqHub(run_folder, "engine", accepts=FromEngine, interface=address),
        ZmqHub(run_folder, "scorer", accepts=FromScorer, interface=address),
        ZmqHub(run_folder, "trainer", accepts=FromTrainer, interface=address),
    ]
    if config.gateway is not None:
        hubs.append(ZmqHub(run_folder, "gateway", accepts=FromGateway, interface=address))
    journal = Journal(run_folder, "orchestrator")
    ledger = Ledger(run_folder / "ledger.sqlite", keep_groups=config.run.record_groups, fence=fence_of(run_folder, os.environ))
    try:
        journal.write("run", config=config.model_dump(mode="json"), derived=config.derived(), machine=cores_and_devices())
        with startup.mark("loads the tokenizer, opens the data"):
            tokenizer = load_tokenizer(config.model.path)
            source, held_out = prompts_of(config, encoder=encoder_of(config, tokenizer))
        startup.write(journal)
        stop_tokens = stop_tokens_of(config.model.path, tokenizer=tokenizer, extra=config.rollout.stop_token_ids)
        for sentence in (str(stop_tokens), *stop_tokens.warnings):
            journal.write("choice", text=sentence)
            print(sentence, flush=True)
        method = method_of(config)
        now_s = asyncio.get_running_loop().time
        advantages = MethodAdvantages(
            method,
            config.reward,
            correct_reward=config.algorithm.correct_reward,
            baselines=ledger.baselines(),
            remember=lambda baselines: ledger.store_baselines(baselines, now_s=now_s()),
        )
        run = Run(
            config,
            Dependencies(
                engine_hub=hubs[0],
                scorer_hub=hubs[1],
                trainer_hub=hubs[2],
                gateway_hub=hubs[3] if config.gateway is not None else None,
                source=source,
                held_out=held_out,
                stop_token_ids=stop_tokens.ids,
                group_advantages=advantages,
                step_rules=advantages.step_rules(),
                journal=journal,
                ledger=ledger,
                replace=functools.partial(ask_to_replace, run_folder),
                vocabulary=vocabulary_of(config),
                experts=experts_of(config),
            ),
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, run.stop, "stopped by a signal")
        # A run that goes on soon, after a limit of time, say, need not be evaluated first.
        loop.add_signal_handler(signal.SIGTERM, functools.partial(run.stop, "stopped by a signal", evaluates=False))
        with guarded(config.pipeline.stall_limit_s, end=functools.partial(end_stuck, run_folder, "orchestrator")):
            return await run.run()
    finally:
        for hub in hubs:
            hub.close()
        ledger.close()
        journal.close()


if __name__ == "__main__":
    main()

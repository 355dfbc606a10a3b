"""Opens everything that a run depends on in the orchestrator's process: sockets, journal, ledger, prompts, the method's advantages."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.advantages import MethodAdvantages
from orchestrator.data.encoder import encoder_of
from orchestrator.data.sources import prompts_of
from orchestrator.ledger.ledger import Ledger
from orchestrator.parts import Dependencies
from orchestrator.peers.bounds import experts_of
from orchestrator.stages.leasing import Table
from orchestrator.stages.script_replay import ScriptRecord
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.data.vocabulary import vocabulary_of
from pipelinerl.messages import FromEngine, FromGateway, FromScorer, FromTrainer
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime import startup
from pipelinerl.runtime.lease import fence_of
from pipelinerl.runtime.machine import cores_and_devices
from pipelinerl.runtime.membership import ScaleFolder
from pipelinerl.runtime.process import ask_to_replace
from pipelinerl.transport.zmq import ZmqHub


@contextlib.contextmanager
def opened(
    config: Config,
    run_folder: Path,
    *,
    address: str,
    environment: Mapping[str, str],
    in_script: bool = False,
    record: ScriptRecord | None = None,
    policy: str = "",
    table: Table | None = None,
) -> Iterator[Dependencies]:
    """Open all of it for as long as the block runs, within a running event loop. `environment` names the launcher's lease, see
    `pipelinerl.runtime.lease.fence_of`. `record` is a script's.

    `policy` is its name among several, which meet at the `table`: the first of them speaks with the gateway.
    """
    with contextlib.ExitStack() as at_end:
        roles = {"engine": FromEngine, "scorer": FromScorer, "trainer": FromTrainer}
        roles |= {} if config.gateway is None or (table is not None and table.leasing is not None) else {"gateway": FromGateway}
        hubs = {role: ZmqHub(run_folder, role, accepts=accepts, interface=address) for role, accepts in roles.items()}
        journal = at_end.enter_context(contextlib.closing(Journal(run_folder, "orchestrator")))
        fence = fence_of(run_folder, environment)
        ledger = at_end.enter_context(
            contextlib.closing(Ledger(run_folder / "ledger.sqlite", keep_groups=config.run.record_groups, fence=fence))
        )
        for hub in hubs.values():
            at_end.callback(hub.close)
        journal.write("run", config=config.model_dump(mode="json"), derived=config.derived(), machine=cores_and_devices())
        with startup.mark("loads the tokenizer, opens the data"):
            tokenizer = load_tokenizer(config.model.path)
            source, held_out = prompts_of(config, encoder=encoder_of(config, tokenizer))
        startup.write(journal)
        stop_tokens = stop_tokens_of(config.model.path, tokenizer=tokenizer, extra=config.rollout.stop_token_ids)
        for sentence in (str(stop_tokens), *stop_tokens.warnings):
            journal.write("choice", text=sentence)
            if not in_script:
                print(sentence, flush=True)
        now_s = asyncio.get_running_loop().time
        advantages = MethodAdvantages(
            method_of(config),
            config.reward,
            correct_reward=config.algorithm.correct_reward,
            baselines=ledger.baselines(),
            remember=lambda baselines: ledger.store_baselines(baselines, now_s=now_s()),
        )
        yield Dependencies(
            engine_hub=hubs["engine"],
            scorer_hub=hubs["scorer"],
            trainer_hub=hubs["trainer"],
            gateway_hub=hubs.get("gateway"),
            source=source,
            held_out=held_out,
            stop_token_ids=stop_tokens.ids,
            group_advantages=advantages,
            step_rules=advantages.step_rules(),
            journal=journal,
            ledger=ledger,
            replace=functools.partial(ask_to_replace, run_folder),
            scale=ScaleFolder(run_folder),
            vocabulary=vocabulary_of(config),
            experts=experts_of(config),
            in_script=in_script,
            record=record,
            policy=policy,
            table=table,
        )

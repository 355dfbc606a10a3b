"""`python -m orchestrator.serving --run-folder RUN`: what a run's orchestrator is to engines and trainer, and HTTP for clients."""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import json
import secrets
import signal
import time
from pathlib import Path
from typing import Any

from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.rules.residency import Residency
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.rules.weight_transport import choose_transport
from orchestrator.serving.backend import ServingBackend
from orchestrator.serving.publications import Publications
from orchestrator.serving.trainer import Trainer
from pipelinerl.config import Config, TinkerSection
from pipelinerl.config.file import load_run
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.data.vocabulary import vocabulary_of
from pipelinerl.errors import ConfigError
from pipelinerl.gateway.listening import listen, remember, server_of
from pipelinerl.launch.run_folder import SERVING_FILE, TINKER_FILE
from pipelinerl.messages import FromEngine, FromServingTrainer, LayoutFixed, Stop
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.machine import cores_and_devices
from pipelinerl.runtime.network import address_of
from pipelinerl.runtime.process import ask_to_replace, crash_report, end_stuck
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch, guarded, wait_for
from pipelinerl.tinker.backend import Weights
from pipelinerl.tinker.dispatch import Dispatch
from pipelinerl.tinker.futures import Futures
from pipelinerl.tinker.ledger import Ledger
from pipelinerl.tinker.provenance import Provenance
from pipelinerl.tinker.sampling import Sampled
from pipelinerl.tinker.server import Tinker
from pipelinerl.tinker.sessions import Sessions
from pipelinerl.tinker.training import Training
from pipelinerl.transport.zmq import ZmqHub

MAX_VERSIONS = 1 << 40
"""Versions are numbered up to here: as many as are ever published."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.serving", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    run_folder = parser.parse_args().run_folder
    with crash_report(run_folder, "orchestrator"):
        config = load_run(run_folder)
        if config.tinker is None:
            raise ConfigError(f"{run_folder / 'config.json'} has no section tinker: there is nothing to serve")
        asyncio.run(_Server(config, config.tinker, run_folder).run())
        print("the server was stopped", flush=True)


class _Server:
    """Everything of one server process."""

    def __init__(self, config: Config, section: TinkerSection, run_folder: Path) -> None:
        self._config = config
        self._section = section
        self._run_folder = run_folder
        self._journal = Journal(run_folder, "orchestrator")
        self._ledger = Ledger(run_folder / SERVING_FILE)
        self._watch = Watch(stall_limit_s=config.pipeline.stall_limit_s)
        self._has_begun = False
        address = address_of(config.run.interface)
        self._engine_hub = ZmqHub(run_folder, "engine", accepts=FromEngine, interface=address)
        self._trainer_hub = ZmqHub(run_folder, "trainer", accepts=FromServingTrainer, interface=address)
        # More than one at once, where requests of a client come in bursts; bounded by what the HTTP server takes.
        check = AnnouncementCheck(max_outstanding=section.max_pending * 1024, num_steps=MAX_VERSIONS)
        self._engines = Engines(
            self._peers(self._engine_hub, "engine", config.engine.count, silent_after_s=config.engine.silent_after_s, has_spares=True),
            expected=config.engine.count,
            watch=self._watch,
            credits=Signal(),
            completion_check=CompletionCheck(vocabulary=vocabulary_of(config)),
            announcement_check=check,
            newest=lambda: self._published.newest if self._has_begun else MAX_VERSIONS,
        )
        self._trainer = Trainer(
            self._peers(self._trainer_hub, "trainer", 1, silent_after_s=config.trainer.silent_after_s, failure_ends_run=True),
            on_another=self._on_another_trainer,
            first_request_id=int(1e6 * self._journal.clock()),
        )
        pins = config.lora.rank > 0
        num_steps: collections.Counter[str] = collections.Counter()
        self._published = Publications(
            engines=self._engines,
            trainer=self._trainer,
            residency=Residency(Weights(), num_places=config.weights.adapter_versions or 1 if pins else 1, is_in_place=not pins),
            journal=self._journal,
            commit_deadline_s=config.pipeline.stall_limit_s,
            layout=self._layout,
            num_steps=lambda model_id: num_steps[model_id],
            ledger=self._ledger,
        )
        self._backend = ServingBackend(
            engines=self._engines, trainer=self._trainer, published=self._published, num_steps=num_steps, pins=pins
        )
        self._sessions = Sessions(config.run.folder.absolute() / "saved", ledger=self._ledger, now_s=time.monotonic())
        provenance = Provenance(self._backend.publications, ledger=self._ledger)
        self._training = Training(
            backend=self._backend,
            sessions=self._sessions,
            provenance=provenance,
            journal=self._journal.write,
            rank=config.lora.rank,
            max_staleness=section.max_staleness,
            is_base=functools.partial(is_base, config.model.path),
        )
        self._dispatch = Dispatch(
            ledger=self._ledger,
            training=self._training,
            backend=self._backend,
            folder=run_folder.absolute() / "checkpoints",
            checkpoint_every=section.checkpoint_every,
            max_held_bytes=section.max_held_bytes,
            caught_up=self._published.caught_up,
            clock=self._journal.clock,
        )

    async def run(self) -> None:
        """Wait for engines and trainer, listen, and serve until a signal says to stop."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        self._journal.write("run", config=self._config.model_dump(mode="json"), derived={}, machine=cores_and_devices())
        peers = (self._engines.peers, self._trainer.peers)
        with contextlib.ExitStack() as at_end:
            for closing in (self._ledger, self._journal, self._engine_hub, self._trainer_hub):
                at_end.enter_context(contextlib.closing(closing))
            end = functools.partial(end_stuck, self._run_folder, "orchestrator")
            at_end.enter_context(guarded(self._config.pipeline.stall_limit_s, end=end))
            async with asyncio.TaskGroup() as group:
                service = [group.create_task(one.run()) for one in peers]
                serving = group.create_task(self._serve(stopped))
                stop = group.create_task(stopped.wait())
                await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
                if self._has_begun:
                    await asyncio.wait((serving,))
                for one in peers:
                    one.dismiss(Stop(reason="the server was stopped"))
                for task in (*service, serving, stop):
                    task.cancel()
            self._journal.write("end", reason="the server was stopped", rollouts={}, elapsed_s=0.0)

    async def _serve(self, stopped: asyncio.Event) -> None:
        for what, section, peers in (("engines", self._config.engine, self._engines), ("trainer", self._config.trainer, self._trainer)):
            await wait_for(peers.wait_until_ready(), peer=what, what="to load the model", deadline_s=section.ready_deadline_s)
        self._has_begun = True
        self._published.begin_anew()
        self._dispatch.restart()
        path = self._run_folder / TINKER_FILE
        before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        api_key = before.get("api_key") or f"tml-{secrets.token_urlsafe(32)}"
        listener, address = listen(self._section.interface, self._section.port or before.get("port", 0), section="tinker")
        futures = Futures(max_pending=self._section.max_pending, max_held_bytes=self._section.max_held_bytes)
        tinker = self._tinker(futures, api_key=api_key)
        server = server_of(tinker.app(), max_connections=64 + self._section.max_pending)
        remember(path, {"address": address, "port": listener.getsockname()[1], "api_key": api_key})
        tinker.go_on()
        print(f"listening at {address}", flush=True)
        async with asyncio.TaskGroup() as group:
            beside = (group.create_task(tinker.watch_sessions()), group.create_task(self._dispatch.run()))
            serving = group.create_task(server.serve(sockets=[listener]))
            await stopped.wait()
            futures.close()
            server.should_exit = True
            await serving
            for task in beside:
                task.cancel()

    def _tinker(self, futures: Futures, *, api_key: str) -> Tinker:
        config, folder = self._config, self._config.model.path
        tokenizer = load_tokenizer(folder)
        ends = stop_tokens_of(folder, tokenizer=tokenizer, extra=config.rollout.stop_token_ids)
        settings = json.loads((folder / "config.json").read_text())
        return Tinker(
            sessions=self._sessions,
            futures=futures,
            ledger=self._ledger,
            training=self._training,
            dispatch=self._dispatch,
            sampled=Sampled(backend=self._backend, provenance=self._training.provenance, ends=ends.ids, vocabulary=vocabulary_of(config)),
            section=self._section,
            api_key=api_key,
            model=str(folder),
            architecture=str(settings.get("model_type", "")),
        )

    def _layout(self) -> LayoutFixed:
        """What a trainer that starts must know to publish."""
        ready, weights = self._trainer.ready, self._config.weights
        assert ready is not None, "it has announced itself"
        transports = frozenset(ready.transports).intersection(*(engine.ready.transports for engine in self._engines))
        machines = {engine.peer: engine.ready.machine for engine in self._engines}
        transport, reason = choose_transport(
            weights.transport, trainer=ready.machine, engines=machines, address=weights.address, device_transports=transports
        )
        self._journal.write("choice", text=reason)
        print(reason, flush=True)
        return LayoutFixed(tensors=self._engines.layout(), num_engines=self._config.engine.count, transport=transport)

    def _on_another_trainer(self) -> None:
        if self._has_begun:
            self._published.begin_anew()
            self._dispatch.restart()
            words = "the trainer was started again; its models are brought from their checkpoints, and what came after is replayed"
            self._journal.write("trainer_restarted", models=list(self._sessions.models))
            print(words, flush=True)

    def _peers(self, hub: ZmqHub, role: str, expected: int, **options: Any) -> Peers:
        section = self._config.engine if role == "engine" else self._config.trainer
        return Peers(
            hub,
            role=role,
            expected=expected,
            ready_deadline_s=section.ready_deadline_s,
            replace=functools.partial(ask_to_replace, self._run_folder),
            tell=self._tell,
            max_processes=2 * self._config.run.restarts + 10,
            **options,
        )

    def _tell(self, peer: str, kind: str, words: str, count: int) -> None:
        self._journal.write("violation", peer=peer, what=kind, words=words, count=count)
        print(f"{peer}: {kind}, {count} so far: {words}", flush=True)


def is_base(folder: Path, name: str) -> bool:
    """Return whether a client's name of the base model is that of the one in `folder`: a path to it, the end of one, or its name on the
    Hub, in whose cache it lies."""
    wanted, own = Path(name).parts, folder.absolute().parts
    is_cached = f"models--{name.replace('/', '--')}" in own
    return bool(wanted) and (own[-len(wanted) :] == wanted or is_cached or Path(name).absolute() == folder.absolute())


if __name__ == "__main__":
    main()

"""`python -m pipelinerl.engine --run-folder RUN`: a warm parent that imports everything once, then forks one process for each engine.

Importing vLLM takes 6 to 9 seconds; a fork takes milliseconds, so N engines start in the time of one. The parent runs no torch
operation and touches no device, which keeps the fork safe. One that is killed is forked again, and says so before it loads anything, so
that others are asked for what it had. The parent ends when all engines ended, and takes all down when one fails by an error of its own.
One that was told to end while the others live on was told by an orchestrator that has been killed since: it is forked again, too.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import load_run, with_tensor_parallel
from pipelinerl.engine.environment import make_private_folder, set_environment
from pipelinerl.errors import ConfigError
from pipelinerl.runtime import early, startup
from pipelinerl.runtime.devices import show_first, usable_gpus
from pipelinerl.runtime.imports import of_large_packages
from pipelinerl.runtime.membership import StartedBy, is_own
from pipelinerl.runtime.parts import engines_of
from pipelinerl.runtime.process import crash_report, die_with_parent, how_it_ended, record_failure
from pipelinerl.runtime.restarts import Restarts

LOOK_EVERY_S = 0.05
"""Seconds between two looks for engines that ended. Longer delays those that are forked again."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.engine", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    parser.add_argument("--part", help="K/N: the engines of this machine, one of N; default: all of them")
    parser.add_argument("--elsewhere", help="K/N: part of the engines that the run leaves to other jobs (engine.elsewhere)")
    parser.add_argument("--ids", help="engines that have joined the live run, with commas")
    parser.add_argument("--request-ids", help="the requests that brought those, with commas")
    parser.add_argument("--started-by", type=StartedBy, help="who starts those: launcher or job")
    parser.add_argument("--tensor-parallel-size", type=int, help="of those; default: that of the settings")
    parser.add_argument("--gpus", action="append", default=[], help="UUIDs of the GPUs of one engine, with commas; once for each engine")
    arguments = parser.parse_args(early.arguments(lambda settings: _prepare(Config.model_validate_json(settings))))
    run_folder = arguments.run_folder
    with crash_report(run_folder, _name_of(arguments.part, arguments.elsewhere, arguments.ids)):
        config = load_run(run_folder)
        if arguments.tensor_parallel_size is not None:
            config = with_tensor_parallel(config, arguments.tensor_parallel_size)
        _prepare(config)
        make_private_folder()
        engine_ids = engines_of(
            arguments.part,
            arguments.elsewhere,
            num_here=config.engine.num_here,
            num_elsewhere=config.engine.elsewhere,
            ids=arguments.ids,
        )
        gpus = dict(zip(engine_ids, _gpus_of(engine_ids, arguments.gpus), strict=True))
        requests = dict(zip(engine_ids, map(int, arguments.request_ids.split(",")), strict=True)) if arguments.request_ids else {}
        started_by = arguments.started_by or (StartedBy.JOB if arguments.elsewhere else StartedBy.RUN)
        sys.exit(_Parent(config, run_folder, gpus=gpus, requests=requests, started_by=started_by).run())


def _name_of(part: str | None, elsewhere: str | None, ids: str | None) -> str:
    """The name of this process among those of the run."""
    if ids is not None:
        return f"engines-joined-{ids.partition(',')[0]}"
    number = (elsewhere or part or "").partition("/")[0]
    return "engines" + ("-elsewhere" if elsewhere else "") + (f"-{number}" if number else "")


def _prepare(config: Config) -> None:
    """Import what the engines of a run need; a second time this does nothing."""
    set_environment(num_ranks=config.engine.num_ranks, is_of_run=True, makes_folder=False)
    if config.engine.kind == "vllm" and "pipelinerl.engine.vllm.engine" not in sys.modules:
        with startup.mark("imports vLLM", since_s=startup.begun_s()), of_large_packages():
            from pipelinerl.engine.vllm.imports import import_everything

            import_everything()


def _gpus_of(engine_ids: Sequence[int], given: list[str]) -> list[str]:
    """Each engine's own GPUs; empty where none were given: then the only engine takes what it sees. Raises `ConfigError`."""
    if given and len(given) != len(engine_ids):
        raise ConfigError(f"--gpus was given {len(given)} times for {len(engine_ids)} engines: name the GPUs of each, in their order")
    if not given and len(engine_ids) > 1 and usable_gpus():
        raise ConfigError(
            f"{len(engine_ids)} engines were started by hand on a machine with GPUs, and without --gpus all would take the first one: name"
            " the GPUs of each. `pipelinerl run --dry-run` prints the command line"
        )
    return given or [""] * len(engine_ids)


class _Parent:
    """Forks the engines, and forks those that are killed again. One that has left the run, or that somebody else has started since, is not
    its own any more."""

    def __init__(self, config: Config, run_folder: Path, *, gpus: dict[int, str], requests: dict[int, int], started_by: StartedBy) -> None:
        """`gpus`: the UUIDs of each engine's GPUs, by its number; empty for what it sees. `requests`: those that brought engines which have
        joined."""
        self._started_by = started_by
        self._requests = requests
        self._config = config
        self._gpus = gpus
        self._run_folder = run_folder
        self._children: dict[int, tuple[str, float]] = {}
        """(name, time of its fork in Unix seconds) by process id."""
        self._restarts = Restarts(budget=config.run.restarts, first_wait_s=config.run.restart_wait_s)

    def run(self) -> int:
        """Wait for every child; where one fails, write down how and end all. Returns 1 then, else 0."""
        for engine_id in filter(self._is_own, self._gpus):
            self._fork(f"engine-{engine_id}", wait_s=None)
        verdict = 0
        while self._children:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if not process_id:
                self._call_back()
                time.sleep(LOOK_EVERY_S)
                continue
            engine, forked_at = self._children.pop(process_id)
            code = os.waitstatus_to_exitcode(status)
            if not code or verdict:
                self._restarts.ended_well(engine, now_s=time.time())
                continue
            error = f"{engine} (process {process_id}) {how_it_ended(code)}"
            print(error, file=sys.stderr, flush=True)
            wait_s = self._restarts.next_wait(engine, now_s=time.time(), started_s=forked_at) if code < 0 else None
            if wait_s is not None:
                self._fork(engine, wait_s=wait_s)
                continue
            verdict = 1
            record_failure(self._run_folder, engine, error=error)
            for other in self._children:
                os.kill(other, signal.SIGTERM)
        return verdict

    def _call_back(self) -> None:
        """Fork engines again that ended while others live on, unless the run is ending."""
        for engine in self._restarts.rejoining(now_s=time.time()):
            if not self._is_own(_number_of(engine)):
                continue
            print(f"{engine} was told to end by an orchestrator that is gone; starting it again", file=sys.stderr, flush=True)
            self._fork(engine, wait_s=0.0)

    def _is_own(self, engine_id: int) -> bool:
        size, request_id = self._config.engine.tensor_parallel_size, self._requests.get(engine_id, 0)
        return is_own(self._run_folder, engine_id, self._started_by, request_id=request_id, tensor_parallel_size=size)

    def _fork(self, engine: str, *, wait_s: float | None) -> None:
        """`wait_s`: a replacement waits so long before it loads."""
        parent_id = os.getpid()
        child = os.fork()
        if child:
            self._children[child] = (engine, time.time())
            return
        code = 1
        try:
            die_with_parent(parent_id)
            with crash_report(self._run_folder, engine):
                if own := self._gpus[_number_of(engine)]:
                    show_first(own)
                number = _number_of(engine)
                is_awaited = functools.partial(self._is_own, number)
                request_id = self._requests.get(number, 0)
                _run_engine(number, self._config, self._run_folder, request_id=request_id, wait_s=wait_s, is_awaited=is_awaited)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if code < 0:  # as a rank of it did
                os.kill(os.getpid(), -code)
            os._exit(code)


def _number_of(engine: str) -> int:
    return int(engine.removeprefix("engine-"))


def _run_engine(
    engine_id: int, config: Config, run_folder: Path, *, request_id: int, wait_s: float | None, is_awaited: Callable[[], bool]
) -> None:
    from pipelinerl.engine.server import serve
    from pipelinerl.engine.stop_strings import finder_of
    from pipelinerl.messages import Starting, ToEngine
    from pipelinerl.observe.journal import Journal
    from pipelinerl.transport.zmq import ZmqLink

    link = None
    if not is_awaited():  # it was killed after it had left, and its number may be another's
        return
    if wait_s is not None:
        link = ZmqLink(run_folder, "engine", engine_id, accepts=ToEngine)
        link.send(Starting(process_id=os.getpid()))
        time.sleep(wait_s)
        if not is_awaited():  # it was killed while it was about to leave
            link.close()
            return
    if engine_id < len(config.engine.cores):
        os.sched_setaffinity(0, {config.engine.cores[engine_id]})
    if config.engine.kind == "fake":
        from pipelinerl.engine.fake import FakeEngine

        engine = FakeEngine(
            max_model_tokens=config.model.max_tokens or 4096,
            max_running=config.engine.max_running,
            tensor_parallel_size=config.engine.tensor_parallel_size,
        )
    else:
        from pipelinerl.engine.vllm.engine import VllmEngine
        from pipelinerl.weights.adapters import choose_adapters
        from pipelinerl.weights.network import nccl_settings

        deadline_s = config.engine.ready_deadline_s
        os.environ |= nccl_settings(config.weights, run_folder, "engine", deadline_s=deadline_s, environment=os.environ)
        adapters, choices = choose_adapters(
            config.lora, config.weights, max_staleness=config.pipeline.max_staleness, is_pipelined=config.engine.num_stages > 1
        )
        with startup.mark("loads the model"):
            engine = VllmEngine(
                model=config.model,
                engine=config.engine,
                rollout=config.rollout,
                seed=config.run.seed + engine_id,
                weights=config.weights,
                policies=run_folder / "weights",
                adapters=adapters,
                choices=choices,
                is_colocated=config.takes_turns(engine_id),
                in_sections=config.is_colocated,
            )
    link = link or ZmqLink(run_folder, "engine", engine_id, accepts=ToEngine)
    asks_by_request = config.gateway is not None or config.tinker is not None
    finder = finder_of(config.model.path) if config.rollout.stop or asks_by_request else None
    startup.write(journal := Journal(run_folder, f"engine-{engine_id}"))
    tells_sequences = config.pipeline.migration != "off"
    serve(
        engine,
        engine_id=engine_id,
        link=link,
        journal=journal,
        finder=finder,
        tells_sequences=tells_sequences,
        request_id=request_id,
        is_awaited=is_awaited,
    )


if __name__ == "__main__":
    main()

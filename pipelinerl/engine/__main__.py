"""`python -m pipelinerl.engine --run-folder RUN`: a warm parent that imports everything once, then forks one process for each engine.

Importing vLLM takes 6 to 9 seconds; a fork takes milliseconds, so N engines start in the time of one. The parent runs no torch
operation and touches no device, which keeps the fork safe. It ends when all engines ended, and takes all down when one fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.process import die_with_parent, last_words, read_config, record_failure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.engine", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="run folder")
    run_folder = parser.parse_args().run_folder
    with last_words(run_folder, "engines"):
        config = read_config(run_folder)
        set_environment()
        if config.engine.kind == "vllm":
            from pipelinerl.engine.vllm_engine import import_everything

            import_everything()
        children = {_fork(engine_id, config, run_folder): engine_id for engine_id in range(config.engine.count)}
        sys.exit(_wait_for_all(children, run_folder))


def set_environment() -> None:
    """What vLLM reads from the environment, set before it is imported; values the user has set stand."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not Path("/dev/nvidiactl").exists():
        settings |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _fork(engine_id: int, config: Config, run_folder: Path) -> int:
    parent_id = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent(parent_id)
        with last_words(run_folder, f"engine-{engine_id}"):
            _run_engine(engine_id, config, run_folder)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_engine(engine_id: int, config: Config, run_folder: Path) -> None:
    from pipelinerl.engine.server import serve
    from pipelinerl.messages import ToEngine
    from pipelinerl.metrics import Journal
    from pipelinerl.transport.zmq import ZmqLink

    if config.engine.cores:
        os.sched_setaffinity(0, {config.engine.cores[engine_id]})
    if config.engine.kind == "fake":
        from pipelinerl.engine.fake import FakeEngine

        engine = FakeEngine(max_model_tokens=config.model.max_tokens or 4096, max_running=config.engine.max_running)
    else:
        from pipelinerl.engine.vllm_engine import VllmEngine

        engine = VllmEngine(
            model=config.model,
            engine=config.engine,
            rollout=config.rollout,
            seed=config.run.seed + engine_id,
            weights=config.weights,
            policies=run_folder / "weights",
        )
    link = ZmqLink(run_folder, "engine", engine_id, accepts=ToEngine)
    serve(engine, engine_id=engine_id, link=link, journal=Journal(run_folder, f"engine-{engine_id}"), kv_span=config.weights.kv_span)


def _wait_for_all(children: dict[int, int], run_folder: Path) -> int:
    """Wait for every child; when one fails, write down how and end all. Returns 1 then, else 0."""
    verdict = 0
    while children:
        process_id, status = os.wait()
        engine_id = children.pop(process_id)
        code = os.waitstatus_to_exitcode(status)
        if code and not verdict:
            verdict = 1
            how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            error = f"engine-{engine_id} (process {process_id}) {how}"
            record_failure(run_folder, f"engine-{engine_id}", error=error)
            print(error, file=sys.stderr, flush=True)
            for other in children:
                os.kill(other, signal.SIGTERM)
    return verdict


if __name__ == "__main__":
    main()

"""`python -m pipelinerl.engine.sampling --config FILE --channel FD`: a run's engine by itself, for `pipelinerl try --sample`.

It answers every `Generate` with its `Completion`, under the weights of the model's folder, until the channel closes.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.engine.base import Engine
from pipelinerl.engine.environment import set_environment
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Failed, Generate
from pipelinerl.transport.codec import Decoder
from pipelinerl.transport.stream import Frames, frame


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.engine.sampling", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved settings, as JSON")
    parser.add_argument("--channel", type=int, required=True, help="descriptor of the socket to serve")
    arguments = parser.parse_args()
    config = Config.model_validate_json(arguments.config.read_bytes())
    channel = socket.socket(fileno=arguments.channel)
    try:
        engine = _load(config)
    except ConfigError as error:
        channel.sendall(frame(Failed(error=str(error))))
        return
    serve(engine, channel)


def _load(config: Config) -> Engine:
    if config.engine.kind == "fake":
        from pipelinerl.engine.fake import FakeEngine

        return FakeEngine(max_model_tokens=config.model.max_tokens or 4096, max_running=config.engine.max_running)
    set_environment(num_ranks=config.engine.num_ranks)
    from pipelinerl.engine.vllm.engine import VllmEngine

    return VllmEngine(model=config.model, engine=config.engine, rollout=config.rollout, seed=config.run.seed)


def serve(engine: Engine, channel: socket.socket) -> None:
    """Answer what comes, many at once, until the channel closes; what the engine refuses, or fails, finishes as an error with its words."""
    frames, decoder = Frames(channel), Decoder[Generate](Generate)
    with StagingThread(engine) as stager:
        loop = EngineLoop(engine, engine_id=0, stager=stager)
        while (bodies := frames.receive()) is not None:
            for body in bodies:
                loop.handle(decoder.decode(body))
            while loop.has_work:
                loop.advance()
            channel.sendall(b"".join(map(frame, loop.outbox)))
            loop.outbox.clear()


if __name__ == "__main__":
    main()

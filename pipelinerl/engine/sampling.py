"""`python -m pipelinerl.engine.sampling --config FILE --channel FD`: a run's engine by itself, for `pipelinerl try --sample`.

It answers every `Generate` with its `Completion`, under the weights of the model's folder, until the channel closes.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import numpy as np

from pipelinerl.config import Config
from pipelinerl.engine.base import Engine
from pipelinerl.engine.environment import set_environment
from pipelinerl.errors import ConfigError, EngineError
from pipelinerl.messages import Completion, Failed, Finish, Generate
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
    """Answer what comes, many at once, until the channel closes."""
    frames, decoder = Frames(channel), Decoder[Generate](Generate)
    while (bodies := frames.receive()) is not None:
        for completion in sample(engine, [decoder.decode(body) for body in bodies]):
            channel.sendall(frame(completion))


def sample(engine: Engine, requests: list[Generate]) -> list[Completion]:
    """Serve these to their ends; one that the engine refuses, or fails, finishes as an error with its words."""
    tokens: dict[str, tuple[list[int], list[float]]] = {request.rollout_id: ([], []) for request in requests}
    finishes: dict[str, tuple[Finish, str]] = {}
    for request in requests:
        try:
            engine.submit(request, version=0)
        except EngineError as error:
            finishes[request.rollout_id] = (Finish.ERROR, str(error))
    while len(finishes) < len(requests):
        try:
            chunks = engine.step()
        except EngineError as error:
            finishes |= {name: (Finish.ERROR, str(error)) for name in tokens if name not in finishes}
            break
        for chunk in chunks:
            tokens[chunk.rollout_id][0].extend(chunk.token_ids)
            tokens[chunk.rollout_id][1].extend(chunk.logprobs)
            if chunk.finish is not None:
                finishes[chunk.rollout_id] = (chunk.finish, "")
    return [_completion(request, *tokens[request.rollout_id], *finishes[request.rollout_id]) for request in requests]


def _completion(request: Generate, token_ids: list[int], logprobs: list[float], finish: Finish, error: str) -> Completion:
    return Completion(
        rollout_id=request.rollout_id,
        attempt=request.attempt,
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.zeros(len(token_ids), np.int32),
        finish=finish,
        turn=request.turn,
        error=error,
    )


if __name__ == "__main__":
    main()

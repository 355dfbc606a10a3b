"""The demo's game of several turns as an environment of verifiers 0.4, and a harness that asks within the process, not by a program."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import ProgramResult  # pyright: ignore[reportMissingImports]

from pipelinerl.demo import guess_number


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Any]:
        draw = random.Random(0)
        while True:
            yield GuessTask(GuessData(prompt="guess=", number=draw.randrange(10)))


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        number, said = task.data.number, list[str]()
        async with agents.player.interaction(task) as game:
            heard = await game.turn()
            while not heard.terminated:
                said.append(heard.last_reply)
                reply = guess_number.reply(said, number)
                if reply is None or len(said) == 4:
                    break
                heard = await game.turn(reply[0])
        game.trace.record_reward("found", guess_number.reward(said, number), 1.0)


class Asking(vf.Harness[vf.HarnessConfig]):
    SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER, APPENDS_SYSTEM_PROMPT = True, False, False, True

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(one) for one in prompt]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=120.0) as client:
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)  # pyright: ignore[reportArgumentType]
        return ProgramResult(exit_code=0, stdout=answer.choices[0].message.content or "", stderr="")


__all__ = ["Asking", "GuessEnv", "GuessTaskset"]

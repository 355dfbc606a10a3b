"""The routes of the gateway, and who may use them.

POST /episodes/next                             the run's token: an episode, with a token and a base URL for this attempt
GET  /episodes/{id}                             the token of the attempt, here and below: what was sampled so far
POST /episodes/{id}/reward, /finish, /fail
GET  /episodes/{id}/v1/models
POST /episodes/{id}/v1/chat/completions, /v1/responses
POST /inference/v1/generate
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pipelinerl.config import GatewaySection
from pipelinerl.gateway import chat_completions, fields, generate, responses
from pipelinerl.gateway.episodes import Episode
from pipelinerl.gateway.limits import SendDeadline, read_json
from pipelinerl.gateway.orchestrator import Orchestrator
from pipelinerl.gateway.refusal import RequestRefused, wrong
from pipelinerl.gateway.streaming import whole
from pipelinerl.gateway.turns import Retry, Turns
from pipelinerl.messages import MAX_REWARD, LeaseEnd, Prompt, is_reward

MAX_POLL_S = 60.0
"""Longest wait of one `/episodes/next`; agents ask again. Longer meets the limits of proxies in between."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What samples turns."""

    turns: Turns
    max_tokens: int
    """Tokens of the longest turn."""
    vocabulary: int | None
    """Tokens that the model knows; None where its folder does not say."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The handlers of all routes."""

    orchestrator: Orchestrator
    policies: dict[str, Model]
    """By the policy's name; of one policy, by the name of its model."""
    section: GatewaySection
    address: str
    """URL that agents reach it at."""
    run_token: str

    def app(self) -> Starlette:
        """Return the application."""
        episode = "/episodes/{episode}"
        routes = [
            self._route("/episodes/next", self.next_episode, "POST"),
            self._route(episode, self.state, "GET"),
            self._route(f"{episode}/reward", self.reward, "POST"),
            self._route(f"{episode}/finish", self.finish, "POST"),
            self._route(f"{episode}/fail", self.fail, "POST"),
            self._route(f"{episode}/v1/models", self.models, "GET"),
            self._route(f"{episode}/v1/models/{{model:path}}", self.models, "GET"),
            self._route(f"{episode}/v1/chat/completions", self.chat, "POST"),
            self._route(f"{episode}/v1/responses", self.respond, "POST"),
            self._route("/inference/v1/generate", self.generate, "POST"),
        ]
        handlers: dict[Any, Any] = {HTTPException: _on_http_exception, Exception: _on_bug}
        return Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(SendDeadline)])

    # --- episodes ---

    async def next_episode(self, request: Request) -> Response:
        if not hmac.compare_digest(_bearer(request).encode(), self.run_token.encode()):
            raise RequestRefused(401, "no token of this run: send the one that `pipelinerl run` printed", code="invalid_api_key")
        body = await self._body(request)
        wait_s = body.get("timeout_s", 30.0)
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < math.inf:
            raise wrong(f"timeout_s is {wait_s!r}, expected seconds from 0", param="timeout_s")
        episode = await self._unless_gone(request, self.orchestrator.next_episode(timeout_s=float(min(wait_s, MAX_POLL_S))))
        if episode is None:
            return Response(status_code=204)
        return _json(
            {
                "episode_id": episode.episode_id,
                "attempt": episode.attempt,
                "base_url": f"{self.address}/episodes/{episode.episode_id}/v1",
                "episode_url": f"{self.address}/episodes/{episode.episode_id}",
                "token": self.orchestrator.episodes.token(episode),
                "model": next(iter(self.policies)),
                "models": list(self.policies),
                "deadline_s": episode.left_s(),
                "max_context_tokens": episode.max_context_tokens,
                "prompt": _prompt(episode.prompt),
            }
        )

    async def state(self, request: Request) -> Response:
        episode = self._episode(request)
        turns = [
            {
                "turn": node.index,
                "parent": node.parent,
                "num_given": len(node.given),
                "num_sampled": len(node.turn.token_ids),
                "policy_versions": sorted(set(node.turn.versions.tolist())),
                "reward": part.turn_rewards.get(node.index),
            }
            | ({"model": part.model} if part.model else {})
            for part in episode.played
            for node in part.nodes.values()
        ]
        rewards = {"rewards": {name: part.reward for name, part in episode.parts.items()}} if episode.parts else {}
        return _json({"episode_id": episode.episode_id, "attempt": episode.attempt, "turns": turns, "reward": episode.reward} | rewards)

    async def reward(self, request: Request) -> Response:
        episode = self._episode(request)
        body = await self._body(request)
        reward = _reward(body)
        if reward is None:
            raise wrong("reward is missing: expected a number", param="reward")
        turn, model = body.get("turn"), fields.text(body, "model")
        if turn is None:
            (episode.part(model) if model else episode).reward = reward
            return _json(_rewards(episode.part(model) if model else episode))
        named = (one for one in episode.played if isinstance(turn, str) and one.lease in turn)
        part = episode.part(model) if model else next(named, None) or episode.part("")
        part.turn_rewards[_node(turn, part)] = reward
        return _json(_rewards(part))

    async def finish(self, request: Request) -> Response:
        return await self._end(request, is_failure=False)

    async def fail(self, request: Request) -> Response:
        return await self._end(request, is_failure=True)

    async def _end(self, request: Request, *, is_failure: bool) -> Response:
        episode = self._episode(request, may_be_over=True)
        body = await self._body(request)
        error = (fields.text(body, "error", default="it gave the attempt up") or "it gave the attempt up")[:2000] if is_failure else ""
        wanted = LeaseEnd.FAILED if is_failure else LeaseEnd.FINISHED
        end = episode.end
        if end is None:
            if (reward := _reward(body)) is not None:
                episode.reward = reward
            for name, value in _rewards_by_model(body).items():
                episode.part(name).reward = value
            end = await self.orchestrator.finish(episode, error=error)
        if end is not wanted:
            assert episode.ended is not None, "it is set with the end"
            raise RequestRefused(409, str(episode.ended), code="attempt_over")
        return _json({"episode_id": episode.episode_id, "attempt": episode.attempt, "end": str(end)})

    # --- turns ---

    async def models(self, request: Request) -> Response:
        self._episode(request)
        found = [{"id": name, "object": "model", "created": 0, "owned_by": "pipelinerl"} for name in self.policies]
        if (name := request.path_params.get("model")) is None:
            return _json({"object": "list", "data": found})
        return _json(next((one for one in found if one["id"] == name), None) or self._unknown(name, found[0]))

    async def chat(self, request: Request) -> Response:
        whole = self._episode(request)
        body = await self._body(request)
        model, episode = self._chosen(body, whole)
        asked, wanted = chat_completions.read(body, max_tokens=model.max_tokens, max_messages=self.section.max_messages)
        answers = model.turns.ask(episode, asked, retry=Retry.of(request.headers))
        if asked.is_streamed:
            return _events(chat_completions.stream(answers[0], asked, wanted, turns=model.turns, episode=episode))
        return _json(await chat_completions.answer(answers, asked, wanted, turns=model.turns, episode=episode))

    async def respond(self, request: Request) -> Response:
        whole = self._episode(request)
        body = await self._body(request)
        model, episode = self._chosen(body, whole)
        asked, wanted = responses.read(
            body, remembered=episode.responses, max_tokens=model.max_tokens, max_messages=self.section.max_messages
        )
        one = model.turns.ask(episode, asked, retry=Retry.of(request.headers))[0]

        def remember(done: dict[str, Any]) -> None:
            turn = one.done.result()
            said = model.turns.spoken(turn, asked, lease=episode.lease).message()
            episode.responses[done["id"]] = [*(dict(message) for message in asked.messages), said]

        if asked.is_streamed:
            return _events(responses.stream(one, asked, wanted, turns=model.turns, episode=episode, remember=remember))
        done = await responses.answer(one, asked, wanted, turns=model.turns, episode=episode)
        remember(done)
        return _json(done)

    async def generate(self, request: Request) -> Response:
        found = self.orchestrator.episodes.find(_bearer(request), episode_id=None)
        body = await self._body(request)
        model, episode = self._chosen(body, found)
        token_ids, max_tokens = generate.read(
            body, max_tokens=model.max_tokens, max_context_tokens=episode.max_context_tokens, vocabulary=model.vocabulary
        )
        one = model.turns.ask_tokens(episode, token_ids, max_tokens=max_tokens, retry=Retry.of(request.headers))[0]
        return _json(generate.answer(await whole(one, episode=episode), lease=episode.lease))

    # --- what they share ---

    def _route(self, path: str, handler: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        counts = self.orchestrator.counts

        async def answer(request: Request) -> Response:
            counts["num_requests"] += 1
            try:
                return await handler(request)
            except RequestRefused as refusal:
                counts["num_refused"] += 1
                return _json(refusal.body(), status=refusal.status, headers=refusal.headers())

        return Route(path, answer, methods=[method])

    def _episode(self, request: Request, *, may_be_over: bool = False) -> Episode:
        episode_id = request.path_params["episode"]
        return self.orchestrator.episodes.find(_bearer(request), episode_id=episode_id, may_be_over=may_be_over)

    def _chosen(self, body: dict[str, Any], episode: Episode) -> tuple[Model, Episode]:
        """Return the model that a request names, and what that plays in an episode; of one policy alone, its own whatever the name."""
        part = episode.part(fields.text(body, "model"))
        return self.policies[part.model] if part.model else next(iter(self.policies.values())), part

    def _unknown(self, name: str, only: dict[str, Any]) -> dict[str, Any]:
        if len(self.policies) == 1:
            return only
        words = f"the model {name!r} does not exist: this run has {', '.join(self.policies)}"
        raise RequestRefused(404, words, code="model_not_found", param="model")

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json(request, max_bytes=self.section.max_body_bytes)

    async def _unless_gone(self, request: Request, wait: Any) -> Episode | None:
        """Wait while the client does. An episode that comes when it has gone is given back."""
        waiting, gone = asyncio.ensure_future(wait), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and waiting.done() and (episode := waiting.result()) is not None:
                self.orchestrator.give_back(episode)
            if gone.done():
                raise RequestRefused(499, "the client has gone", code="client_gone")
            return waiting.result()
        finally:
            for task in (waiting, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """Return what an agent is told of its task: the row's columns, and the prompt as text and as messages."""
    return {"prompt_id": prompt.prompt_id, "text": prompt.text, "messages": list(prompt.chat), "columns": dict(prompt.columns)}


def _reward(body: dict[str, Any]) -> float | None:
    reward = body.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float) or not is_reward(reward)):
        raise wrong(f"reward is {str(reward)[:80]!r}, expected a number up to {MAX_REWARD:g} in size", param="reward")
    return None if reward is None else float(reward)


def _rewards(episode: Episode) -> dict[str, Any]:
    return {"reward": episode.reward, "turns": {str(node): value for node, value in episode.turn_rewards.items()}}


def _rewards_by_model(body: dict[str, Any]) -> dict[str, float]:
    """Return the rewards that a request gives policies by their names."""
    found = body.get("rewards") or {}
    if not isinstance(found, dict):
        raise wrong(f"rewards is {str(found)[:80]!r}, expected an object with a number for each model", param="rewards")
    return {name: value for name, one in found.items() if (value := _reward({"reward": one})) is not None}


def _node(turn: Any, episode: Episode) -> int:
    """Return the turn that a reward is for: its number, as `state` lists it, or the id of the answer that it came with."""
    number = turn
    if isinstance(turn, str):
        number = int(tail) if (tail := turn.rpartition("-")[2].rpartition("_")[2]).isdigit() and len(tail) < 10 else None
    if isinstance(number, bool) or not isinstance(number, int) or number not in episode.nodes:
        raise wrong(f"turn is {str(turn)[:80]!r}, expected the number or the id of a turn of this episode", param="turn")
    return number


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json", headers=headers)


def _events(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    refusal = RequestRefused(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code="no_such_route")
    return _json(refusal.body(), status=error.status_code, headers=refusal.headers())


async def _on_bug(request: Request, error: Exception) -> Response:
    refusal = RequestRefused(500, f"the gateway failed: {type(error).__name__}", code="internal_error")
    return _json(refusal.body(), status=500, headers=refusal.headers())

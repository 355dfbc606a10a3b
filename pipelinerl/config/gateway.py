"""The section of a run's settings that lets programs outside of it play its rollouts, over HTTP."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipelinerl.config.base import PositiveFloat, PositiveInt, Section


class GatewaySection(Section):
    interface: str = Field("127.0.0.1", description="address or host name at which the gateway listens; its tokens travel unencrypted")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="0: a free one, kept when the gateway starts again")
    deadline_s: PositiveFloat = Field(600.0, description="longest episode, from its lending; the next attempt is lent after it")
    max_attempts: PositiveInt = Field(3, description="attempts that agents give up, or do not finish in time, before the rollout fails")
    agents_deadline_s: PositiveFloat = Field(3600.0, description="longest wait for any agent to ask for an episode; after it the run ends")
    max_episodes: PositiveInt = Field(256, description="episodes that agents have at once")
    max_episode_tokens: PositiveInt | None = Field(
        None, description="tokens of one episode, in all its contexts; with more than batch.max_tokens it trains in parts; default: that"
    )
    max_requests: PositiveInt = Field(256, description="turns of one episode, in all its contexts")
    max_parallel: PositiveInt = Field(8, description="turns of one episode that are sampled at once")
    max_messages: PositiveInt = Field(2048, description="messages of one request")
    max_body_bytes: PositiveInt = Field(8 << 20, description="bytes of one request's body")
    silent_after_s: PositiveFloat = Field(60.0, description="a gateway not heard of for so long is started again")

"""The section of the settings of `pipelinerl serve`: training loops outside of this program, by Tinker's API."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipelinerl.config.base import PositiveFloat, PositiveInt, Section


class TinkerSection(Section):
    interface: str = Field("127.0.0.1", description="address or host name at which the server listens; its key travels unencrypted")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="0: a free one, kept when the server starts again")
    max_pending: PositiveInt = Field(4096, description="requests of all clients that wait for an answer; more hear 429, and ask again")
    max_held_bytes: PositiveInt = Field(
        1 << 30,
        description="bytes of requests that wait for an answer, and of those that no checkpoint covers, more hear 429; and of answers that"
        " are kept, the oldest are forgotten",
    )
    checkpoint_every: PositiveInt = Field(
        10, description="optimizer steps of a model between two of its checkpoints; what came after the last is computed again after a loss"
    )
    max_body_bytes: PositiveInt = Field(32 << 20, description="bytes of one request's body")
    session_timeout_s: PositiveFloat = Field(
        600.0, description="a client that gave no sign of life for so long loses the models that it has not saved"
    )
    max_staleness: Annotated[int, Field(ge=0)] | None = Field(
        None, description="data with tokens that were sampled more optimizer steps ago are refused; none: ages are only told"
    )

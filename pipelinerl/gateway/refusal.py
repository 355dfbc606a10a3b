"""A request that is not answered as it was meant, in the shape in which OpenAI's API says so."""

from __future__ import annotations

from typing import Any

from pipelinerl.errors import PipelineError


class RequestRefused(PipelineError):
    """An agent's request is refused: `status` is HTTP's; `code` is a word for programs."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the answer's headers: whether the same request may succeed later. OpenAI's SDK reads the first of them."""
        again = {"x-should-retry": "true" if self.status >= 500 or self.status in (408, 429) else "false"}
        return again | ({} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)})


_KINDS = {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}


def wrong(message: str, *, param: str | None = None, code: str = "invalid_value") -> RequestRefused:
    """Return the refusal of a request that says something it may not."""
    return RequestRefused(400, message, code=code, param=param)


def ended(reason: str) -> RequestRefused:
    """Return the refusal of whatever an attempt says that is over."""
    return RequestRefused(409, f"this attempt is over: {reason}. Ask for another episode", code="attempt_over")

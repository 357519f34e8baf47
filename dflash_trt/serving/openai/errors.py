"""Errors as OpenAI's API words them: an object with message, type, param and code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from dflash_trt.errors import InputError
from dflash_trt.runtime.scheduler import QueueFullError

_TYPES = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "queue_full"),
    503: ("server_error", "not_ready"),
    504: ("server_error", "timeout"),
}


class ApiError(Exception):
    """A refusal with its HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def body(self) -> dict[str, Any]:
        kind, code = _TYPES.get(self.status, ("server_error", "engine_failed"))
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        return JSONResponse(self.body(), self.status, headers)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told about a failure of its request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error))
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    return ApiError(500, f"the engine failed: {type(error).__name__}")


def from_validation(errors: list[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a body, by the name of its field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON")
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return ApiError(400, f"{where or 'body'}: {first['msg']}", where or None)

"""The OpenAPI description: errors as they are answered."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(BaseModel):
    """What every refusal and failure looks like."""

    error: ErrorBody


_MEANINGS = {
    400: "The request cannot be used",
    401: "The API key is missing or wrong",
    404: "No such model",
    413: "The body is too large",
    429: "The queue is full; try again later",
    500: "The engine failed",
    503: "The engines are loading, or failed",
    504: "The answer took too long",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorObject, "description": text} for status, text in _MEANINGS.items()
}
NOT_READY: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 503)}


def describe(app: FastAPI) -> None:
    """Take out what the framework adds and this server never answers, 422."""
    schema: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not schema:
            schema.update(get_openapi(title=app.title, version=app.version, routes=app.routes))
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]

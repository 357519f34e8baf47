"""What stands before every route: the API key and the size of a body."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.limits import ServerOptions

_OPEN = ("/health", "/ready")  # probes carry no key


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            self._check_key(scope)
            messages = await self._body(scope, receive)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        await self._app(scope, _replayed(messages, receive), send)

    def _check_key(self, scope: Scope) -> None:
        key = self._options.api_key
        if key is None or scope["path"] in _OPEN:
            return
        given = _header(scope, b"authorization")
        if not hmac.compare_digest(given, b"Bearer " + key.encode()):
            raise ApiError(401, "the API key is missing or wrong")

    async def _body(self, scope: Scope, receive: Receive) -> list[Message]:
        """The whole body, refused as soon as it is too long."""
        limit, size = self._options.max_body, 0
        declared = _header(scope, b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes")
        messages: list[Message] = []
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes")
            if not message.get("more_body", False):
                return messages


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    waiting = iter(messages)

    async def replayed() -> Message:
        return next(waiting, None) or await receive()

    return replayed

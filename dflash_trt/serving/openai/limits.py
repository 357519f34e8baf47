"""What a server takes on, and how it presents itself."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.errors import InputError


@dataclass(frozen=True)
class ServerOptions:
    """max_queue: requests that may wait for a slot, more are answered 429; max_tokens: most tokens
    of one answer, 0 for what the engine holds; max_body: bytes of a request; request_seconds: an
    answer that takes longer is ended with an error; send_seconds: a client that reads nothing for
    so long is dropped; model: the name clients use, None for the engine directory's own."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model: str | None = None
    max_queue: int = 64
    max_tokens: int = 0
    max_body: int = 1 << 20
    request_seconds: float = 600.0
    send_seconds: float = 30.0
    threads: int = 0

    def __post_init__(self) -> None:
        for name, low in (("port", 0), ("max_queue", 1), ("max_tokens", 0), ("max_body", 1)):
            if getattr(self, name) < low:
                flag = name.replace("_", "-")
                raise InputError(f"{flag} {getattr(self, name)}: must be {low} or more")
        for name in ("request_seconds", "send_seconds"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name.replace('_', '-')}: must be above 0")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise InputError("api-key: must be ASCII and not empty")

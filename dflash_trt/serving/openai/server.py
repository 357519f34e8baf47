"""Running the server until it is told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_trt.engines.directory import read_manifest
from dflash_trt.serving.openai.app import create_app
from dflash_trt.serving.openai.host import EngineHost
from dflash_trt.serving.openai.limits import ServerOptions


def build_server(folder: Path, options: ServerOptions) -> uvicorn.Server:
    """A server that is not started yet. What is wrong with the directory shows here."""
    read_manifest(folder, verify=False)
    return server_of(create_app(EngineHost(folder, options), options), options)


def server_of(app: FastAPI, options: ServerOptions) -> uvicorn.Server:
    """A server of `app`, not started yet."""
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=_protocol(options.send_seconds),
        log_level="warning",
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=64 * 1024,
    )
    return uvicorn.Server(config)


def _protocol(send_seconds: float) -> type[asyncio.Protocol]:
    class Protocol(H11Protocol):
        """Drops a client that leaves what is sent to it unread, and what is held for it."""

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(send_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stalled.cancel()

    return Protocol


def serve(folder: Path, options: ServerOptions) -> None:
    build_server(folder, options).run()

"""Running the server until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_trt.engines.directory import read_manifest
from dflash_trt.serving.openai.app import create_app
from dflash_trt.serving.openai.host import EngineHost
from dflash_trt.serving.openai.limits import ServerOptions


def build_server(folder: Path, options: ServerOptions) -> uvicorn.Server:
    """A server that is not started yet. What is wrong with the directory shows here.

    Of an engine of several ranks it is rank 0's, and the engines are loaded: the other ranks stay in
    here until rank 0 ends, and then end themselves.
    """
    host = EngineHost(folder, options)
    if read_manifest(folder, verify=False).tensor_parallel > 1:
        host.load()
        # A server that was stopped raises the signal again; rank 0 must not die of it unheard.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return server_of(create_app(host, options), options)


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

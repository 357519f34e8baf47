"""Running the server until it is told to stop."""

from __future__ import annotations

from pathlib import Path

import uvicorn

from dflash_trt.engines.directory import read_manifest
from dflash_trt.serving.openai.app import create_app
from dflash_trt.serving.openai.host import EngineHost
from dflash_trt.serving.openai.limits import ServerOptions


def build_server(folder: Path, options: ServerOptions) -> uvicorn.Server:
    """A server that is not started yet. What is wrong with the directory shows here."""
    read_manifest(folder, verify=False)
    app = create_app(EngineHost(folder, options), options)
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=64 * 1024,
    )
    return uvicorn.Server(config)


def serve(folder: Path, options: ServerOptions) -> None:
    build_server(folder, options).run()

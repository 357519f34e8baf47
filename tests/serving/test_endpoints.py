"""A concurrency sweep over a running OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.bench.endpoints import find_server
from dflash_trt.bench.interactivity import run_level, sweep
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions
from dflash_trt.serving.openai.limits import ServerOptions
from tests.serving.conftest import Served, serving

QUESTIONS = ["Why is the sky blue?", "What is two plus two?"]
OPTIONS = GenerationOptions(20, ignore_eos=True)


def test_a_sweep_counts_what_the_server_counted(served: Served) -> None:
    """With and without drafting in one run; the requests that count are the runtime's own."""
    server = find_server(f"{served.url}/v1/")
    assert server.name.startswith("tiny at http")
    assert server.count(QUESTIONS[0]) == len(served.runtime.prompt_ids(QUESTIONS[0]))
    drafted_before = served.runtime.metrics.requests.drafted
    plain, drafted = sweep(server, QUESTIONS, [2], OPTIONS)
    assert served.runtime.metrics.requests.drafted > drafted_before
    for level in (plain, drafted):
        assert (level.requests, level.failed, level.output_tokens) == (4, 0, 80)
        assert level.tpot_ms["p50"] > 0
        assert level.input_tokens == 2 * sum(map(server.count, QUESTIONS))
    own = served.runtime.generate(QUESTIONS, OPTIONS)
    cycles, committed = (sum(getattr(g.metrics, n) for g in own) for n in ("cycles", "committed"))
    assert drafted.acceptance_length == pytest.approx(committed / cycles, abs=2e-3)
    assert plain.acceptance_length is None


def test_requests_that_fail_are_counted(served: Served) -> None:
    """A prompt that the engine cannot hold is refused; the other requests of the level go on."""
    server = find_server(served.url)
    _, lines = run_level(server, [QUESTIONS[0], "x" * 600], 2, OPTIONS)
    assert [line.failure is None for line in lines] == [True, False]
    assert "the engine holds 512" in str(lines[1].failure)
    with pytest.raises(InputError, match=r"concurrency 1, autoregressive: .* 512"):
        sweep(server, ["x" * 600], [1], OPTIONS)


def test_what_cannot_be_asked(served: Served) -> None:
    with pytest.raises(InputError, match="does not serve the model 'gpt-17', but tiny"):
        find_server(served.url, "gpt-17")
    with pytest.raises(InputError, match=r"127\.0\.0\.1:1/v1/models: .*refused"):
        find_server("http://127.0.0.1:1")


def test_a_server_with_a_key(tiny_engine: Path) -> None:
    with serving(tiny_engine, ServerOptions(api_key="secret", threads=1)) as locked:
        with pytest.raises(InputError, match="401"):
            find_server(locked.url)
        server = find_server(locked.url, key="secret")
        (_, (line,)) = run_level(server, QUESTIONS[:1], 1, OPTIONS)
        assert (line.failure, line.tokens) == (None, 20)

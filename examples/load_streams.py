"""Many streams at once against a running server: no error, no mixed-up answer, memory flat.

    dflash-trt serve engines/small --port 8000 &
    python examples/load_streams.py http://127.0.0.1:8000/v1 --streams 64 --seconds 240 --pid $!
    python examples/load_streams.py grpc://127.0.0.1:8001/small --pid PID   # a Triton server's model

Every answer is compared with the one that the same question got when it was alone. Some clients go
away in the middle. The exit status is 1 where anything is wrong. Memory is that of the process and
of those it started. Needs `pip install openai psutil`, or `tritonclient[grpc]` for the second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Protocol

import numpy as np
import psutil

QUESTIONS = [f"What is {n} plus {n + 7}?" for n in range(16)]


class Server(Protocol):
    def ask(self, question: str) -> AsyncIterator[str]:
        """Pieces of the answer's text; closing the iterator cancels the request."""
        ...


class OpenAIServer:
    def __init__(self, url: str, key: str, tokens: int) -> None:
        from openai import AsyncOpenAI

        self._client, self._tokens = AsyncOpenAI(base_url=url, api_key=key, max_retries=0), tokens

    async def ask(self, question: str) -> AsyncIterator[str]:
        stream = await self._client.chat.completions.create(
            model=await self._model(), messages=[{"role": "user", "content": question}],
            temperature=0, max_tokens=self._tokens, stream=True,
        )  # fmt: skip
        async with stream:
            async for chunk in stream:
                yield chunk.choices[0].delta.content or ""

    async def _model(self) -> str:
        if not hasattr(self, "_name"):
            self._name = (await self._client.models.list()).data[0].id
        return self._name


class TritonServer:
    """Model `name` of a Triton server, over gRPC."""

    def __init__(self, address: str, name: str, tokens: int) -> None:
        from tritonclient.grpc import aio

        self._library, self._name, self._tokens = aio, name, tokens
        self._client = aio.InferenceServerClient(address)

    async def ask(self, question: str) -> AsyncIterator[str]:
        async def one() -> AsyncIterator[dict]:
            inputs = [self._input("text_input", "BYTES", np.array([question], np.object_))]
            inputs.append(self._input("max_tokens", "INT32", np.array([self._tokens], np.int32)))
            inputs.append(self._input("stream", "BOOL", np.array([True])))
            yield {"model_name": self._name, "inputs": inputs}

        responses = self._client.stream_infer(one())
        try:
            async for result, error in responses:
                if error is not None:
                    raise error
                yield result.as_numpy("text_output")[0].decode()
        finally:
            responses.cancel()

    def _input(self, name: str, dtype: str, values: np.ndarray):
        made = self._library.InferInput(name, list(values.shape), dtype)
        made.set_data_from_numpy(values)
        return made


@dataclass
class Load:
    """What all streams share."""

    server: Server
    alone: dict[str, str]
    end: float
    counts: Counter[str] = field(default_factory=Counter)
    first_text: list[float] = field(default_factory=list)


def main() -> int:
    args = _arguments()
    load, memory = asyncio.run(_run(args))
    report = _report(load, memory, args)
    print(json.dumps(report, indent=1))
    return int(report["errors"] > 0 or report["mixed_up"] > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--leave", type=float, default=0.1, help="share of clients that go away")
    parser.add_argument("--pid", type=int, help="process whose memory is watched")
    parser.add_argument("--key", default="none")
    return parser.parse_args()


def _server(args: argparse.Namespace) -> Server:
    if args.url.startswith("grpc://"):
        address, _, name = args.url.removeprefix("grpc://").partition("/")
        return TritonServer(address, name, args.tokens)
    return OpenAIServer(args.url, args.key, args.tokens)


async def _run(args: argparse.Namespace) -> tuple[Load, list[int]]:
    server = _server(args)
    alone = {q: "".join([piece async for piece in server.ask(q)]) for q in QUESTIONS}
    load = Load(server, alone, time.monotonic() + args.seconds)
    watch = asyncio.create_task(_watch(args.pid, load.end))
    await asyncio.gather(*(_stream(load, i, args.leave) for i in range(args.streams)))
    return load, await watch


async def _watch(pid: int | None, end: float) -> list[int]:
    """Resident bytes of the process and its children, once a second."""
    seen: list[int] = []
    while pid is not None and time.monotonic() < end:
        process = psutil.Process(pid)
        family = (process, *process.children(recursive=True))
        seen.append(sum(each.memory_info().rss for each in family))
        await asyncio.sleep(1)
    return seen


async def _stream(load: Load, index: int, leave: float) -> None:
    draw = random.Random(index)
    while time.monotonic() < load.end:
        question = draw.choice(QUESTIONS)
        try:
            await _one(load, question, leaves=draw.random() < leave)
        except Exception as error:
            load.counts["errors"] += 1
            load.counts[type(error).__name__] += 1
            await asyncio.sleep(0.5)


async def _one(load: Load, question: str, leaves: bool) -> None:
    begin, text = time.monotonic(), ""
    async with aclosing(load.server.ask(question)) as pieces:
        async for piece in pieces:
            if piece and not text:
                load.first_text.append(time.monotonic() - begin)
            text += piece
            if text and leaves:
                load.counts["left"] += 1
                return
    load.counts["answers"] += 1
    load.counts["mixed_up"] += text != load.alone[question]


def _report(load: Load, memory: list[int], args: argparse.Namespace) -> dict:
    report = {
        "streams": args.streams,
        "seconds": args.seconds,
        **{name: load.counts[name] for name in ("answers", "left", "errors", "mixed_up")},
        "first_text_seconds_p50": _percentile(load.first_text, 50),
        "first_text_seconds_p95": _percentile(load.first_text, 95),
    }
    if memory:
        quarter = max(len(memory) // 4, 1)
        quarters = [max(memory[i : i + quarter]) for i in range(0, 4 * quarter, quarter)]
        report["memory_mb_start_end"] = [round(memory[i] / 1e6) for i in (0, -1)]
        report["memory_mb_peak_by_quarter"] = [round(peak / 1e6) for peak in quarters]
    return report


def _percentile(values: list[float], percent: int) -> float | None:
    return round(quantiles(values, n=100)[percent - 1], 3) if len(values) > 1 else None


if __name__ == "__main__":
    raise SystemExit(main())

"""Many streams at once against a running server: no error, no mixed-up answer, memory flat.

    dflash-trt serve engines/small --port 8000 &
    python examples/load_streams.py http://127.0.0.1:8000/v1 --streams 64 --seconds 90 --pid $!

Every answer is compared with the one that the same question got when it was alone. Some clients go
away in the middle. The exit status is 1 where anything is wrong. Needs `pip install openai psutil`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import quantiles

import psutil
from openai import AsyncOpenAI, OpenAI

QUESTIONS = [f"What is {n} plus {n + 7}?" for n in range(16)]


@dataclass
class Load:
    """What all streams share."""

    client: AsyncOpenAI
    model: str
    tokens: int
    alone: dict[str, str]
    end: float
    counts: Counter[str] = field(default_factory=Counter)
    first_text: list[float] = field(default_factory=list)


def main() -> int:
    args = _arguments()
    client = OpenAI(base_url=args.url, api_key=args.key, max_retries=0)
    model = client.models.list().data[0].id
    alone = {q: _text(_ask(client, model, q, args.tokens)) for q in QUESTIONS}
    load, memory = asyncio.run(_run(args, model, alone))
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


def _ask(client: OpenAI | AsyncOpenAI, model: str, question: str, tokens: int):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=tokens, stream=True
    )


def _text(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


async def _run(args: argparse.Namespace, model: str, alone: dict[str, str]):
    async with AsyncOpenAI(base_url=args.url, api_key=args.key, max_retries=0) as client:
        load = Load(client, model, args.tokens, alone, time.monotonic() + args.seconds)
        watch = asyncio.create_task(_watch(args.pid, load.end))
        await asyncio.gather(*(_stream(load, i, args.leave) for i in range(args.streams)))
        return load, await watch


async def _watch(pid: int | None, end: float) -> list[int]:
    """Resident bytes, once a second."""
    seen: list[int] = []
    while pid is not None and time.monotonic() < end:
        seen.append(psutil.Process(pid).memory_info().rss)
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
    stream = await _ask(load.client, load.model, question, load.tokens)
    async with stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                if not text:
                    load.first_text.append(time.monotonic() - begin)
                text += chunk.choices[0].delta.content
                if leaves:
                    load.counts["left"] += 1
                    return
    load.counts["answers"] += 1
    load.counts["mixed_up"] += text != load.alone[question]


def _report(load: Load, memory: list[int], args: argparse.Namespace) -> dict:
    third = len(memory) // 3
    report = {
        "streams": args.streams,
        "seconds": args.seconds,
        **{name: load.counts[name] for name in ("answers", "left", "errors", "mixed_up")},
        "first_text_seconds_p50": _percentile(load.first_text, 50),
        "first_text_seconds_p95": _percentile(load.first_text, 95),
    }
    if third:
        report["memory_mb_second_third"] = round(max(memory[third : 2 * third]) / 1e6, 1)
        report["memory_mb_last_third"] = round(max(memory[2 * third :]) / 1e6, 1)
    return report


def _percentile(values: list[float], percent: int) -> float | None:
    return round(quantiles(values, n=100)[percent - 1], 3) if len(values) > 1 else None


if __name__ == "__main__":
    raise SystemExit(main())

"""dflash-trt run: answer a question with an engine directory."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dflash_trt.runtime.generate import Generation, GenerationOptions, Runtime


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "run",
        help="answer a question",
        description="Answer a question; the text is printed as it comes, then a line of figures.",
    )
    parser.add_argument("engine", type=Path, metavar="DIR", help="engine directory")
    parser.add_argument("question", help="the user's turn; the chat template is applied")
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="most tokens to generate (default: 256)"
    )
    parser.add_argument(
        "--block",
        type=int,
        help="tokens per verify call, 2 to the engine's (default: the engine's)",
    )
    parser.add_argument("--no-draft", action="store_true", help="decode one token at a time")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="decode again without drafting and print the speed-up",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    runtime = Runtime.load(args.engine)
    prompt = runtime.prompt_ids(args.question) if args.question else []
    options = GenerationOptions(args.max_tokens, draft=not args.no_draft, width=args.block)
    generation = _answer(runtime, prompt, options, echo=not args.json)
    baseline = None
    if args.compare and options.draft:
        baseline = runtime.generate(prompt, GenerationOptions(args.max_tokens, draft=False))
    if args.json:
        print(json.dumps(_object(runtime, generation, baseline)))
    else:
        print(f"\n\n{_figures(generation, baseline)}")
    return 0


def _answer(
    runtime: Runtime, prompt: list[int], options: GenerationOptions, echo: bool
) -> Generation:
    generation = Generation()
    stream = runtime.codec.stream()
    for tokens in runtime.steps(prompt, options, generation):
        _show(stream.push(tokens), echo)
    _show(stream.finish(), echo)
    return generation


def _show(text: str, echo: bool) -> None:
    if echo:
        sys.stdout.write(text)
        sys.stdout.flush()


def _object(runtime: Runtime, generation: Generation, baseline: Generation | None) -> dict:
    content = {
        "text": runtime.codec.text(generation.tokens),
        "token_ids": generation.tokens,
        "finish_reason": generation.finish_reason,
        **generation.metrics.summary(),
    }
    if baseline is not None:
        content["speedup"] = round(_speedup(generation, baseline), 3)
    return content


def _speedup(generation: Generation, baseline: Generation) -> float:
    return generation.metrics.tokens_per_second / baseline.metrics.tokens_per_second


def _figures(generation: Generation, baseline: Generation | None) -> str:
    m = generation.metrics
    parts = [f"{m.tokens} tokens", f"{m.tokens_per_second:.1f} tokens/s"]
    if m.drafted:
        parts += [
            f"acceptance length {m.acceptance_length:.2f}",
            f"{m.drafts_wasted} drafts wasted",
        ]
    if baseline is not None and baseline.metrics.tokens > 1:
        rate = baseline.metrics.tokens_per_second
        parts.append(
            f"speed-up {_speedup(generation, baseline):.2f}x over {rate:.1f} tokens/s undrafted"
        )
    return " · ".join(parts)

"""dflash-trt run: answer a question with an engine directory."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import Generation, GenerationOptions, Runtime
from dflash_trt.runtime.harmony import Delta as Part
from dflash_trt.runtime.harmony import whole_messages
from dflash_trt.runtime.harmony_codec import HarmonyCodec

_DEFAULT = GenerationOptions()


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "run",
        help="answer a question",
        description="Answer a question; the text is printed as it comes, then a line of figures.",
    )
    parser.add_argument("engine", type=Path, metavar="DIR", help="engine directory")
    parser.add_argument("question", help="the user's turn; the chat template is applied")
    parser.add_argument("--no-draft", action="store_true", help="decode one token at a time")
    parser.add_argument(
        "--adaptive", action="store_true", help="blocks as long as it pays, as measured, or none"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="decode again without drafting and print the speed-up",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--channels",
        action="store_true",
        help="print all channels of an answer in Harmony, each under its name (default: the final one)",
    )
    _add_options(parser)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Options that become fields of `GenerationOptions`, with its defaults."""
    for flag, kind, text in (
        ("max-tokens", int, "most tokens to generate"),
        ("min-tokens", int, "no end before so many tokens"),
        ("temperature", float, "0 takes the most likely token"),
        ("top-k", int, "draw from the k most likely tokens, 0: from all"),
        ("top-p", float, "draw from the most likely tokens that make up this probability"),
        ("min-p", float, "drop tokens less likely than this share of the most likely one"),
        ("repetition-penalty", float, "divide logits of tokens seen before"),
        ("presence-penalty", float, "subtract from logits of generated tokens"),
        ("frequency-penalty", float, "subtract for every time a token was generated"),
    ):
        default = getattr(_DEFAULT, flag.replace("-", "_"))
        parser.add_argument(
            f"--{flag}", type=kind, default=default, help=f"{text} (default: {default:g})"
        )
    parser.add_argument(
        "--block", type=int, dest="width",
        help="tokens per verify call, 2 to the engine's (default: the engine's)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, help="same seed, same answer (default: drawn)")
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="end the answer after so long"
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log-probabilities, and N best tokens",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the model's end")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable"
    )
    parser.add_argument(
        "--stop-token-id", action="append", type=int, default=[], dest="stop_token_ids",
        metavar="ID", help="end at this token; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--logit-bias", action="append", type=_bias, default=[], metavar="ID=BIAS",
        help="add BIAS to a token's logit; repeatable",
    )  # fmt: skip


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def _options(args: argparse.Namespace) -> GenerationOptions:
    names = {f.name for f in fields(GenerationOptions)} & vars(args).keys()
    values = {name: getattr(args, name) for name in names}
    values |= {"stop": tuple(args.stop), "stop_token_ids": tuple(args.stop_token_ids)}
    return GenerationOptions(
        **{**values, "logit_bias": dict(args.logit_bias), "draft": not args.no_draft}
    )


def run(args: argparse.Namespace) -> int:
    options = _options(args)
    runtime = Runtime.load(args.engine)
    if args.channels and not isinstance(runtime.codec, HarmonyCodec):
        raise InputError(f"channels: {args.engine}'s chat format has none")
    prompt = runtime.prompt_ids(args.question) if args.question else []
    echo = "" if args.json else "channels" if args.channels else "text"
    generation, parts = _answer(runtime, prompt, options, echo)
    baseline = None
    if args.compare and options.draft:
        # An unseeded answer is compared with plain sampling under the seed that it drew.
        seed = generation.seed if options.seed is None else options.seed
        baseline = runtime.generate(prompt, replace(options, draft=False, width=None, seed=seed))
    if args.json:
        print(json.dumps(_object(generation, baseline) | _channels(parts)))
    else:
        hidden = not args.channels and any(not part.shown for part in parts)
        note = " · thoughts and calls are left out, --channels prints them" if hidden else ""
        print(f"\n\n{_figures(generation, baseline)}{note}")
    return 0


def _answer(
    runtime: Runtime, prompt: list[int], options: GenerationOptions, echo: str
) -> tuple[Generation, list[Part]]:
    """The answer and, in Harmony, its messages. echo: what is printed as it comes, the `text`, all
    `channels` or nothing."""
    generation, codec = Generation(), runtime.codec
    stream = codec.chat.stream() if isinstance(codec, HarmonyCodec) else None
    parts: list[Part] = []
    for delta in runtime.deltas(prompt, options, generation):
        new = stream.push(delta.tokens) if stream else []
        if stream and delta.finish_reason is not None:
            new += stream.finish()
        if echo == "channels":
            print(_titled(parts[-1:], new), end="", flush=True)
        elif echo:
            print(delta.text, end="", flush=True)
        parts += new
    if stream and stream.broken:
        print(f"dflash-trt: the answer leaves the Harmony format: {stream.broken}", file=sys.stderr)
    return generation, whole_messages(parts)


def _titled(last: list[Part], new: list[Part]) -> str:
    """The text of `new`, each message under its channel and whom it is for."""
    text = ""
    for part in new:
        if not last or last[0].message != part.message:
            to = f" to {part.recipient}" if part.recipient else ""
            text += ("\n\n" if last else "") + f"[{part.channel}{to}]\n"
        text, last = text + part.text, [part]
    return text


def _channels(parts: list[Part]) -> dict:
    """The messages of an answer in Harmony."""
    keys = ("channel", "recipient", "text")
    messages = [{key: getattr(part, key) for key in keys} for part in parts]
    return {"messages": messages} if messages else {}


def _object(generation: Generation, baseline: Generation | None) -> dict:
    content = {
        "text": generation.text,
        "token_ids": generation.tokens,
        "finish_reason": generation.finish_reason,
        "stop": generation.stop,
        "seed": generation.seed,
        "drafting": generation.drafting,
        "usage": generation.usage,
        **generation.metrics.summary(),
    }
    if generation.logprobs:
        content["logprobs"] = [asdict(entry) for entry in generation.logprobs]
    if baseline is not None:
        content["same_as_undrafted"] = generation.tokens == baseline.tokens
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

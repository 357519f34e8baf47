"""A race of two drafters that draft the same tokens: one call per block against one per token.

    python examples/drafting_race.py                      # controlled: 1.43x
    python examples/drafting_race.py --drafts 16          # 2.00x
    python examples/drafting_race.py engines/small --question "Why is the sky blue?"

The first two run a written formula, in ticks of one drafter pass. The last runs a pair of engines both
ways, one behind the other, and then shows both at the speed that was measured. Without a terminal
there is no animation, only the result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflash_trt.bench.race import Course, Racer, gap, race_engines
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.request import check_request

WIDTH, FRAMES_PER_SECOND = 40, 20
SIGNS = {"sequential": "=", "block": "#"}  # told apart without colour
COLOURS = {"sequential": "dark_orange", "block": "dodger_blue2"}
_DEFAULT = Course()


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    try:
        if args.engine is None:
            _controlled(args)
        else:
            _measured(args)
    except InputError as error:
        print(f"drafting_race: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("drafting_race: interrupted", file=sys.stderr)
        return 130
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A race of two drafters that draft the same tokens: by block and by token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("engine", nargs="?", type=Path, help="engine directory to race for real")
    for flag, kind, text in (
        ("drafts", int, "K: tokens drafted per cycle"),
        ("passes", int, "S: passes of the block drafter"),
        ("verify", float, "V: time of a verify, in drafter passes"),
        ("acceptance", float, "probability that a draft is accepted"),
    ):
        parser.add_argument(f"--{flag}", type=kind, default=getattr(_DEFAULT, flag), help=text)
    parser.add_argument("--tokens", type=int, default=200, help="length of the race")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the animation")
    parser.add_argument(
        "--question",
        default="Anna reads 20 pages a day. How many days does she need for 260 pages?",
        help="what the engines answer",
    )
    return parser


def _controlled(args: argparse.Namespace) -> None:
    course = Course(args.drafts, args.passes, args.verify, args.acceptance)
    if args.tokens < 1:
        raise InputError(f"tokens {args.tokens}: must be 1 or more")
    racers = course.run(args.tokens, args.seed)
    title = (
        f"K = {course.drafts} drafts, S = {course.passes} passes, verify V = {course.verify:g}, "
        f"acceptance {course.acceptance:g}"
    )
    console = Console(highlight=False)
    _show(console, title, racers, "ticks", args.seconds)
    console.print(_results(racers, "ticks", 1.0))
    console.print(
        f"gap (K + V) / (S + V) = ({course.drafts} + {course.verify:g}) / ({course.passes} + "
        f"{course.verify:g}) = {course.gap:.2f}x; expected tokens per cycle "
        f"(1 - a^(K+1)) / (1 - a) = {course.acceptance_length:.2f}"
    )


def _measured(args: argparse.Namespace) -> None:
    runtime = Runtime.load(args.engine)
    prompt = runtime.prompt_ids(args.question)
    check_request(prompt, GenerationOptions(args.tokens), runtime.engines)
    *pair, tokens = race_engines(runtime.engines, prompt, args.tokens)
    racers = (pair[0], pair[1])
    console = Console(highlight=False)
    title = f"{runtime.manifest.name}, MEASURED: the same {len(tokens)} tokens by both"
    _show(console, title, racers, "s", racers[0].time)
    console.print(_results(racers, "ms", 1e3))
    t_token, t_block = (_mean(r, "draft") / r.calls * 1e3 for r in racers)
    verify = sum(_mean(r, "verify") for r in racers) / 2 * 1e3
    drafts = racers[0].calls
    expected = (drafts * t_token + verify) / (t_block + verify)
    console.print(
        f"a call for one token {t_token:.2f} ms, for the block {t_block:.2f} ms, a verify "
        f"{verify:.2f} ms\n({drafts} x {t_token:.2f} + {verify:.2f}) / ({t_block:.2f} + "
        f"{verify:.2f}) = {expected:.2f}x; measured over the race {gap(*racers):.2f}x"
    )


def _show(
    console: Console, title: str, racers: tuple[Racer, Racer], unit: str, seconds: float
) -> None:
    """The animation, over `seconds`; nothing where there is no terminal."""
    console.print(title)
    if not console.is_terminal:
        return
    end = max(racer.time for racer in racers)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        begin = time.perf_counter()
        while (share := (time.perf_counter() - begin) / max(seconds, 1e-9)) < 1:
            live.update(_frame(racers, share * end, unit), refresh=True)
            time.sleep(1 / FRAMES_PER_SECOND)
    console.print(_frame(racers, end, unit))


def _frame(racers: Sequence[Racer], now: float, unit: str) -> Group:
    lines = [Text(f"time {now:.1f} {unit}")]
    for racer in racers:
        tokens, doing = racer.at(now)
        filled = round(WIDTH * tokens / racer.tokens)
        track = SIGNS[racer.name] * filled + "." * (WIDTH - filled)
        line = Text(f"{racer.name:>10} ")
        line.append(track, style=COLOURS[racer.name])
        lines.append(line.append(f" {tokens:4d} tokens  {doing}"))
    return Group(*lines)


def _results(racers: Sequence[Racer], unit: str, scale: float) -> Table:
    caption = f"calls of the drafter, draft and verify: per cycle; times in {unit}"
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), caption=caption)
    names = ("drafter", "calls", "draft", "verify", "cycles", "tokens", "per cycle", "time", "gap")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for racer in racers:
        table.add_row(
            racer.name, str(racer.calls), f"{_mean(racer, 'draft') * scale:.2f}",
            f"{_mean(racer, 'verify') * scale:.2f}", str(len(racer.legs)), str(racer.tokens),
            f"{racer.tokens / len(racer.legs):.2f}", f"{racer.time * scale:.0f}",
            f"{racer.time / racers[1].time:.2f}x",
        )  # fmt: skip
    return table


def _mean(racer: Racer, part: str) -> float:
    return sum(getattr(leg, part) for leg in racer.legs) / len(racer.legs)


if __name__ == "__main__":
    sys.exit(main())

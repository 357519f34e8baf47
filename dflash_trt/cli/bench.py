"""dflash-trt bench: acceptance and speed of an engine directory over prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dflash_trt.bench.acceptance import acceptance_png
from dflash_trt.bench.batches import batch_table, check_batches
from dflash_trt.bench.compare import Comparison, compare, top_gap
from dflash_trt.bench.figure import need_matplotlib
from dflash_trt.bench.prompts import read_prompts
from dflash_trt.cli.prompts import add_prompts
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.metrics import total


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "bench",
        help="measure acceptance and speed over prompts",
        description="Measure acceptance and speed over prompts, greedy, one request at a time.",
    )
    parser.add_argument("engine", type=Path, metavar="DIR", help="engine directory")
    add_prompts(parser)
    parser.add_argument(
        "--block",
        type=int,
        help="tokens per verify call, 2 to the engine's (default: the engine's)",
    )
    parser.add_argument(
        "--compare-autoregressive", action="store_true",
        help="decode every prompt without drafting too: speed-up, c, and whether tokens are equal",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=_sizes, default=[], metavar="N,..", dest="batches",
        help="answer the prompts again N at a time, for each N: plain, drafted, and as far as it pays",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument(
        "--report", type=Path, metavar="FILE.png",
        help="draw acceptance per slot, accepted lengths and where the time went (extra plots)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers with commas, such as 1,2,4") from None


def run(args: argparse.Namespace) -> int:
    _check_outputs(args)
    runtime = Runtime.load(args.engine)
    prompts = [runtime.prompt_ids(p) for p in read_prompts(args.prompts, args.limit)]
    check_batches(runtime, args.batches, len(prompts))
    options = GenerationOptions(args.max_tokens, width=args.block)
    console = Console(stderr=True)
    with Progress(console=console) as bar:
        task = bar.add_task("bench", total=len(prompts))
        result = compare(
            runtime,
            prompts,
            options,
            args.compare_autoregressive,
            lambda done: bar.update(task, completed=done),
        )
    report = result.report()
    Console().print(_table(report))
    if result.plain:
        report["differences"] = _list_differences(runtime, prompts, result, console)
    if args.batches:
        report["batches"] = _measure_batches(runtime, prompts, args.batches, options, console)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.report:
        drafted = total(g.metrics for g in result.drafted)
        title = f"{runtime.manifest.name}: {len(prompts)} prompts, {drafted.tokens} tokens, greedy"
        args.report.write_bytes(acceptance_png(drafted, title))
    return 0


def _measure_batches(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    options: GenerationOptions,
    console: Console,
) -> list[dict[str, Any]]:
    with Progress(console=console) as bar:
        task = bar.add_task("batches", total=len(batches))
        rows = batch_table(
            runtime, prompts, batches, options, lambda done: bar.update(task, completed=done)
        )
    for columns, values in (_THROUGHPUT, _HOST):
        table = Table(*columns, box=box.MARKDOWN)
        for row in rows:
            table.add_row(*map(str, values(row)))
        Console().print(table)
    return rows


Columns = tuple[tuple[str, ...], Callable[[dict[str, Any]], Iterable[Any]]]
_THROUGHPUT: Columns = (
    ("batch", "plain", "DFlash", "adaptive tok/s", "acceptance", "drafts/cycle", "changed"),
    lambda row: (
        row["batch"],
        *row["tokens_per_second"].values(),
        row["acceptance_length"],
        row["drafts_per_cycle"],
        " ".join(map(str, row["changed"].values())),
    ),
)
_HOST: Columns = (
    ("batch", "cycle ms: text after", "beside", "host ms: text after", "beside"),
    lambda row: (
        row["batch"],
        *(
            row["host"].get(way, {}).get(time, "-")  # short answers may have no cycle of one way
            for time in ("cycle_ms", "host_ms")
            for way in ("after", "beside")
        ),
    ),
)


def _check_outputs(args: argparse.Namespace) -> None:
    """Before minutes of measuring."""
    for path in (args.json, args.report):
        if path and not path.parent.is_dir():
            raise InputError(f"{path}: there is no directory {path.parent}")
    if args.report:
        if args.report.suffix != ".png":
            raise InputError(f"report {args.report}: the picture is a PNG, so name it FILE.png")
        need_matplotlib()


def _table(report: dict[str, Any]) -> Table:
    table = Table("figure", "value")
    for key, value in report.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            shown = " ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in value)
        else:
            shown = str(value)
        table.add_row(key, shown)
    return table


def _list_differences(
    runtime: Runtime, prompts: Sequence[Sequence[int]], result: Comparison, console: Console
) -> list[dict[str, float]]:
    """Where drafted and plain answers part, and how near the target's two best tokens were there."""
    found = []
    for prompt, position in result.differences():
        same = [*prompts[prompt], *result.plain[prompt].tokens[:position]]
        gap = round(top_gap(runtime, same), 5)
        found.append({"prompt": prompt, "position": position, "top2_gap": gap})
        console.print(f"prompt {prompt}: differs from token {position} on, top-2 logit gap {gap}")
    return found

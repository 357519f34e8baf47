"""How many tokens per second each user gets, at what throughput, with and without DFlash.

    python examples/latency_at_interactivity.py engines/small --concurrency 1,2,4 -o figures

Sweeps concurrency over the runtime, plain decoding against DFlash in the same run, and writes a
table, CSV, JSON, two PNG plots and a page of HTML. With `--modelled b200 --target gpt-oss-120b` it
draws what the planner expects of a GPU instead; such figures are marked as modelled.

    dflash-trt serve engines/small --port 8000 &
    python examples/latency_at_interactivity.py --url http://127.0.0.1:8000 --concurrency 1,2,4

asks a server, OpenAI-compatible or Triton, from the outside.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dflash_trt.bench.endpoints import Endpoint, LocalRuntime, find_server
from dflash_trt.bench.interactivity import Level, comparison, sweep
from dflash_trt.bench.plots import figures, report_html
from dflash_trt.bench.prompts import lengthened, read_prompts
from dflash_trt.errors import InputError
from dflash_trt.planner.calibration import GRAPHS
from dflash_trt.planner.hardware import find_gpu
from dflash_trt.planner.interactivity import curves
from dflash_trt.planner.roofline import Setting
from dflash_trt.planner.shapes import find_plan
from dflash_trt.runtime.generate import GenerationOptions, Runtime

QUESTIONS = (
    "A baker sells 14 loaves at 3 dollars and 9 cakes at 8 dollars. How much does she earn?",
    "A train goes 60 km in the first hour and 45 km in the second. How far does it go in all?",
    "Tom has 5 boxes of 12 pencils and gives away 17. How many pencils does he have left?",
    "Write a Python function that returns the largest number in a list.",
    "Explain in two sentences why the sky is blue.",
    "Anna reads 20 pages a day. How many days does she need for a book of 260 pages?",
    "Write a short poem about autumn.",
    "A shirt costs 25 dollars and is sold with 20 percent off. What is the price now?",
)
_NOT_SHOWN = (
    "input", "requests", "all tok/s",
    "TTFT p90", "TTFT p99", "TPOT p90", "TPOT p99", "chunk p90", "chunk p99",
)  # fmt: skip
_MODEL_NOTE = (
    "Nothing here was measured. Constants of the software: {software.source}. GPU: {gpu.source}. "
    "docs/planner.md holds the model against published measurements."
)
DEFINITIONS = (
    "TTFT: from submission to the first token. TPOT: (end-to-end - TTFT) / (output tokens - 1). "
    "Interactivity: 1 / TPOT, here from the median. Throughput: output tokens of all users over the "
    "wall time. Inter-chunk latency is the time between two deliveries, which with blocks carry "
    "several tokens: it is not TPOT. Tokens are counted, not chunks.",
    "equal concurrency: ratio of throughputs with the same number of users. equal interactivity: "
    "ratio of throughputs where each user gets the same rate; it grows without bound towards the "
    "interactivity at which plain decoding ends.",
)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    try:
        title, levels, notes = _modelled(args) if args.modelled else _measured(args)
        _write(title, levels, notes, args.output)
    except (InputError, OSError) as error:
        print(f"latency_at_interactivity: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Throughput and latency over interactivity, with and without DFlash."
    )
    parser.add_argument("engine", nargs="?", type=Path, help="engine directory")
    parser.add_argument(
        "--concurrency", help="users at once (default: 1,2,4,8 as far as the engine has slots)"
    )
    parser.add_argument("--prompts", type=Path, help="prompts file (default: eight questions)")
    parser.add_argument("--url", help="ask a running server instead, OpenAI-compatible or Triton")
    parser.add_argument("--model", help="model of the server (the first it lists)")
    parser.add_argument("--api-key-file", type=Path, help="file with the key that the server wants")
    parser.add_argument(
        "--isl", type=int, help="input tokens per request, about (default: the prompts as they are)"
    )
    parser.add_argument("--osl", type=int, default=64, help="output tokens per request (64)")
    parser.add_argument("--block", type=int, help="tokens per verify call (the engine's)")
    parser.add_argument("--modelled", metavar="GPU", help="draw the planner's model of this GPU")
    parser.add_argument("--target", default="gpt-oss-120b", help="target of the model")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the model")
    parser.add_argument("--tau", type=float, default=4.4, help="acceptance length of the model")
    parser.add_argument("-o", "--output", type=Path, default=Path("interactivity"), metavar="DIR")
    return parser


def _concurrencies(text: str | None, slots: int | None) -> list[int]:
    if text is None:
        return [users for users in (1, 2, 4, 8) if slots is None or users <= slots]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"concurrency '{text}': wants numbers separated by commas") from None


Findings = tuple[str, list[Level], Sequence[str]]  # title, levels, notes


def _measured(args: argparse.Namespace) -> Findings:
    endpoint = _endpoint(args)
    prompts = read_prompts(args.prompts) if args.prompts else list(QUESTIONS)
    if args.isl is not None:
        prompts = lengthened(prompts, args.isl, endpoint.count)
    options = GenerationOptions(args.osl, width=args.block, ignore_eos=True)
    console = Console(stderr=True)
    if endpoint.slots == 1:
        console.print("one slot, one user: an engine built with --max-batch 8 shows the curve")
    levels = sweep(
        endpoint, prompts, _concurrencies(args.concurrency, endpoint.slots), options,
        progress=lambda what: console.print(what, highlight=False),
    )  # fmt: skip
    return f"{endpoint.name}, measured", levels, DEFINITIONS


def _endpoint(args: argparse.Namespace) -> Endpoint:
    if (args.engine is None) == (args.url is None):
        raise InputError("name an engine directory, --url of a server, or --modelled GPU")
    if args.engine is not None:
        return LocalRuntime(Runtime.load(args.engine))
    if args.block is not None:
        raise InputError("block: a server drafts its engine's block; leave it out with --url")
    key = args.api_key_file.read_text().strip() if args.api_key_file else None
    return find_server(args.url, args.model, key)


def _modelled(args: argparse.Namespace) -> Findings:
    plan, gpu = find_plan(args.target), find_gpu(args.modelled)
    setting = Setting(plan, gpu, GRAPHS, plan.precision, 1, 2048, plan.block, args.tp)
    both = curves(setting, args.tau, _concurrencies(args.concurrency, None))
    levels = [
        _modelled_level(mode, point.batch, point.interactivity, point.throughput, args.tau)
        for mode, curve in (("autoregressive", both.plain), ("dflash", both.dflash))
        for point in curve
    ]
    note = _MODEL_NOTE.format(software=setting.software, gpu=gpu)
    return (
        f"MODELLED, not measured: {plan.name} on {args.tp} x {gpu.name}",
        levels,
        (note, *DEFINITIONS),
    )


def _modelled_level(
    mode: str, batch: int, interactivity: float, throughput: float, tau: float
) -> Level:
    acceptance = tau if mode == "dflash" else None
    tpot = {"p50": round(1e3 / interactivity, 3)}
    return Level(mode, batch, 0, 0, 1.0, 0, round(throughput), acceptance, {}, tpot, {})


def _write(title: str, levels: list[Level], notes: Sequence[str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rows = [level.row() for level in levels]
    ratios = comparison(levels)
    console = Console()
    shown = [{key: row[key] for key in row if key not in _NOT_SHOWN} for row in rows]
    console.print(_table(title, shown), _table("ratios of throughput", ratios))
    for note in notes:
        console.print(note, highlight=False)
    (out / "levels.json").write_text(json.dumps({"title": title, "levels": rows, "ratios": ratios}))
    with (out / "levels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["title", *rows[0]])
        writer.writeheader()
        writer.writerows({"title": title, **row} for row in rows)
    images = figures(levels, title)
    for name, data in images.items():
        (out / f"{name}.png").write_bytes(data)
    tables = {"levels": rows, "ratios of throughput": ratios}
    (out / "index.html").write_text(report_html(title, images, tables, notes))
    console.print(f"written to {out}", highlight=False)


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    keys = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    for key in keys:
        table.add_column(key.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in keys))
    return table


def _cell(value: Any) -> str:
    """Four digits or so: the table has 80 columns."""
    if value is None:
        return "-"
    if isinstance(value, float) and value >= 100:
        return f"{value:.{int(value < 1000)}f}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())

"""dflash-trt simulate: what a TensorRT engine's quantisation costs, measured without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from dflash_trt.bench.prompts import read_prompts
from dflash_trt.bench.simulate import Measurement, measure, report
from dflash_trt.cli.prompts import add_prompts
from dflash_trt.engines.directory import read_manifest
from dflash_trt.engines.simulation import build_simulation
from dflash_trt.errors import InputError


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "simulate",
        help="measure on the CPU what a TensorRT engine's quantisation costs",
        description="Run a TensorRT engine's quantised weights and activations on the CPU and "
        "compare it with another precision: top-1 agreement, perplexity, acceptance length.",
    )
    parser.add_argument("engine", type=Path, metavar="DIR", help="TensorRT engine directory")
    parser.add_argument(
        "--against", type=Path, required=True, metavar="DIR",
        help="the same pair in another precision, usually bf16",
    )  # fmt: skip
    add_prompts(parser)
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="text to measure perplexity on"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check_pair(args.engine, args.against)
    prompts, text = read_prompts(args.prompts, args.limit), _read_text(args.text)
    console = Console(stderr=True)
    with console.status("simulate") as status:

        def simulate(engine: Path, answers: list[list[int]] | None) -> Measurement:
            with TemporaryDirectory() as folder:
                cpu = Path(folder) / "engine"
                build_simulation(engine, cpu, lambda what: status.update(f"{engine}: {what}"))
                return measure(
                    cpu, prompts, text, args.max_tokens, answers,
                    lambda what: status.update(f"{engine}: {what}"),
                )  # fmt: skip

        reference = simulate(args.against, None)
        found = simulate(args.engine, [g.tokens for g in reference.generations])
    figures = report(found, reference)
    Console().print(_table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _check_pair(engine: Path, reference: Path) -> None:
    first, second = (read_manifest(path, verify=False) for path in (engine, reference))
    for model in ("target", "drafter"):
        if getattr(first, model).config != getattr(second, model).config:
            raise InputError(
                f"{engine} and {reference} hold different models: their {model}s differ"
            )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def _table(figures: dict) -> Table:
    table = Table("figure", "value")
    for key, value in figures.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        table.add_row(key, str(shown))
    return table

"""dflash-trt weights: the weights of an engine whose plans were compiled without the checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dflash_trt.checkpoints import hub
from dflash_trt.cli.build import checkpoints_of, recipe_of
from dflash_trt.engines.tensorrt_add_weights import add_weights


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "weights",
        help="write the weights of an engine whose plans were compiled without the checkpoint",
        description="Write weights, tokenizer and chat template of a TensorRT engine directory that "
        "was built while the checkpoints were absent. The checkpoints must be those that the "
        "plans were compiled for.",
    )
    parser.add_argument("engine", type=Path, metavar="DIR", help="engine directory")
    parser.add_argument(
        "--target", required=True, metavar="NAME|PATH|ID", help="as for `dflash-trt build`"
    )
    parser.add_argument(
        "--drafter", metavar="PATH|ID", help="drafter folder or hub id (default: the recipe's)"
    )
    parser.add_argument(
        "--download", action="store_true", help="fetch a recipe's checkpoints that are not here"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    begin, console = perf_counter(), Console(stderr=True)
    recipe = recipe_of(args.target, args.drafter)
    download = args.download or hub.is_hub_id(args.target)
    target, drafter = checkpoints_of(recipe, args.drafter, download)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("check engine", total=None)

        def progress(what: str) -> None:
            bar.update(task, description=what)

        add_weights(args.engine, target, drafter, progress)
        bar.update(task, description="done", total=1, completed=1)
    for file in sorted(
        args.engine.glob("weights*.safetensors")
    ):  # one more for each of several ranks
        console.print(f"{file}: {file.stat().st_size / 1e6:.1f} MB", highlight=False)
    console.print(f"written in {perf_counter() - begin:.1f} s", highlight=False)
    return 0

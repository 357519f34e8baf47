"""dflash-trt build: compile a target and its drafter into an engine directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dflash_trt.bench.check import acceptance_check, verdict
from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.cli import build_tensorrt
from dflash_trt.engines.build import CPU_PRECISIONS, BuildOptions, build_cpu
from dflash_trt.errors import InputError
from dflash_trt.recipes import Recipe, find_recipe, packaged_file, recipe_names


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "build",
        help="compile a target and its drafter into an engine directory",
        description="Compile a target and its DFlash drafter into a pair of engines.",
    )
    parser.add_argument(
        "--target",
        required=True,
        metavar="NAME|PATH",
        help=f"a recipe ({', '.join(recipe_names())}), a Hugging Face folder, or a GGUF file",
    )
    parser.add_argument(
        "--drafter", type=Path, metavar="PATH", help="drafter folder (default: the recipe's)"
    )
    parser.add_argument("--block", type=int, help="tokens per verify call (default: the recipe's)")
    parser.add_argument(
        "--precision", help=f"{', '.join(CPU_PRECISIONS)} (default: the recipe's, or fp32)"
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=1,
        help="refinement passes of the drafter, 1 or 2 (default: 1)",
    )
    parser.add_argument(
        "--max-seq-len",
        type=int,
        help="tokens of prompt and answer together (default: 2048, or what the target takes)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="engine directory (default: engines/NAME)"
    )
    parser.add_argument(
        "--backend",
        choices=("cpu", *build_tensorrt.BACKENDS),
        default="cpu",
        help="what runs the engines (default: cpu)",
    )
    parser.add_argument(
        "--max-batch", type=int, default=1, help="sequences that run at once (default: 1)"
    )
    build_tensorrt.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    recipe = _recipe(args.target, args.drafter)
    target = open_target(_target_path(recipe))
    drafter = open_drafter((args.drafter or recipe.folder / recipe.drafter).resolve())
    precision = args.precision or (recipe.precision if args.backend == "cpu" else "bf16")
    block = args.block if args.block is not None else recipe.block or drafter.config.block
    options = BuildOptions(
        name=f"{recipe.name}-{precision}",
        block=block,
        precision=precision,
        passes=args.passes,
        max_batch=args.max_batch,
        max_seq_len=args.max_seq_len
        or min(recipe.max_seq_len, target.config.max_positions - block),
        chat_arguments=recipe.chat_arguments,
    )
    out = args.output or Path("engines") / options.name
    console = Console(stderr=True)
    begin = perf_counter()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("read checkpoints", total=None)

        def progress(what: str) -> None:
            bar.update(task, description=what)

        reports = []
        if args.backend == "cpu":
            build_cpu(target, drafter, options, out, progress)
            progress("check acceptance")
            accepted = verdict(acceptance_check(out))
        else:
            reports = build_tensorrt.build(args, target, drafter, options, out, progress)
        bar.update(task, description="done", total=1, completed=1)
    if reports:
        build_tensorrt.print_reports(console, reports)
    else:
        console.print(accepted, highlight=False)
    console.print(f"{out}: built in {perf_counter() - begin:.1f} s", highlight=False)
    return 0


def _recipe(target: str, drafter: Path | None) -> Recipe:
    path = Path(target)
    if not path.exists():
        return find_recipe(target)
    if drafter is None:
        raise InputError(f"{target}: a target given as a path needs --drafter PATH")
    return Recipe(name=path.stem.lower(), folder=Path(), target=target, drafter="", block=0)


def _target_path(recipe: Recipe) -> Path:
    if recipe.package:
        return packaged_file(recipe.package, recipe.file)
    return (recipe.folder / recipe.target).resolve()

"""dflash-trt build: compile a target and its drafter into an engine directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dflash_trt.bench.check import acceptance_check, verdict
from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint, hub, open_drafter
from dflash_trt.checkpoints.described import AbsentTensors
from dflash_trt.checkpoints.modelopt import ModelOptTensors
from dflash_trt.cli import build_tensorrt, dry_run
from dflash_trt.engines.build import (
    CPU_PRECISIONS,
    BuildOptions,
    build_cpu,
    wide_verify_note,
)
from dflash_trt.engines.memory import keep_little_free_memory
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.api import load
from dflash_trt.planner.hardware import GPUS
from dflash_trt.recipes import Recipe, find_recipe, recipe_for, recipe_names


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "build",
        help="compile a target and its drafter into an engine directory",
        description="Compile a target and its DFlash drafter into a pair of engines.",
    )
    parser.add_argument(
        "--target",
        required=True,
        metavar="NAME|PATH|ID",
        help=f"a recipe ({', '.join(recipe_names())}), a Hugging Face folder, a GGUF file, or an "
        "id of the Hugging Face hub",
    )
    parser.add_argument(
        "--drafter", metavar="PATH|ID", help="drafter folder or hub id (default: the recipe's)"
    )
    parser.add_argument(
        "--download", action="store_true", help="fetch a recipe's checkpoints that are not here"
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
        help="what runs the engines (default: the recipe's, or cpu)",
    )
    parser.add_argument(
        "--max-batch", type=int, default=1, help="sequences that run at once (default: 1)"
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N",
        help="ranks that share the target, one GPU or process each (tensor parallel; default: 1)",
    )  # fmt: skip
    build_tensorrt.add_arguments(parser)
    dry_run.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    recipe = recipe_of(args.target, args.drafter)
    console = Console(stderr=True)
    say = partial(console.print, highlight=False, soft_wrap=True)
    args.backend = _backend(args, recipe, say)
    if args.compute_capability is None and args.backend == recipe.backend:
        args.compute_capability = ",".join(recipe.capabilities)
    download = args.download or (hub.is_hub_id(args.target) and not args.dry_run)
    described = args.dry_run and not args.download
    target, drafter = checkpoints_of(recipe, args.drafter, download, described)
    options = _options(args, recipe, target, drafter)
    note = wide_verify_note(options, drafter.config)
    if note:
        say(note)
    if args.dry_run:
        return dry_run.run(args, target, drafter, options)
    if memory := _memory(args, recipe, options):
        say(memory)
    for tensors in (target.tensors, drafter.tensors):
        own = tensors.precision if isinstance(tensors, ModelOptTensors) else ""
        if own == options.precision:
            say(f"{tensors.origin}: built with the export's own {own} scales")
    out = args.output or Path("engines") / options.name
    absent = [c.tensors for c in (target, drafter) if isinstance(c.tensors, AbsentTensors)]
    if absent and args.backend != "cpu":
        args.no_weights = True
        names = " and ".join(tensors.origin for tensors in absent)
        say(
            f"{names}: not here, so plans only; once they are: dflash-trt weights {out} "
            f"--target {args.target} --download, or --target PATH --drafter PATH"
        )
    keep_little_free_memory()
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
            if options.ranks == 1:
                progress("check acceptance")
                accepted = verdict(acceptance_check(out))
            else:
                accepted = f"run it with: mpirun -n {options.ranks} dflash-trt run {out} QUESTION"
        else:
            reports = build_tensorrt.build(args, target, drafter, options, out, progress)
        bar.update(task, description="done", total=1, completed=1)
    if reports:
        build_tensorrt.print_reports(console, reports, out)
    else:
        console.print(accepted, highlight=False)
    console.print(f"{out}: built in {perf_counter() - begin:.1f} s", highlight=False)
    return 0


def _options(
    args: argparse.Namespace, recipe: Recipe, target: TargetCheckpoint, drafter: DrafterCheckpoint
) -> BuildOptions:
    precision = args.precision or _usual_precision(args.backend, recipe, target)
    best = recipe.best_block.get(precision) or recipe.block or drafter.config.block
    block = args.block if args.block is not None else best
    longest = min(recipe.max_seq_len, target.config.max_positions - block)
    return BuildOptions(
        name=f"{recipe.name}-{precision}" + (f"-tp{args.tp}" if args.tp > 1 else ""),
        block=block,
        precision=precision,
        passes=args.passes,
        max_batch=args.max_batch,
        ranks=args.tp,
        max_seq_len=args.max_seq_len or longest,
        chat_arguments=recipe.chat_arguments,
    )


def _memory(args: argparse.Namespace, recipe: Recipe, options: BuildOptions) -> str:
    """What the recipe says of the memory, where the build is as the recipe has it."""
    own = (recipe.backend, recipe.precision, recipe.max_seq_len, 1, 1)
    asked = (args.backend, options.precision, options.max_seq_len, options.max_batch, options.ranks)
    if not recipe.memory_gb or args.drafter or asked != own:
        return ""
    plans_for = build_tensorrt.asked_capabilities(args)
    gpus = ", ".join(name for name in recipe.gpus if GPUS[name].capability in plans_for)
    room = f"; room for that is on: {gpus}" if gpus else ""
    return f"{recipe.name}: {recipe.memory_gb} GB where it runs, for one sequence{room}"


def _usual_precision(backend: str, recipe: Recipe, target: TargetCheckpoint) -> str:
    """The recipe's, where it is for this backend; that of an export, which TensorRT takes as it is."""
    if backend == recipe.backend:
        return recipe.precision
    if backend == "cpu":
        return "fp32"
    return target.tensors.precision if isinstance(target.tensors, ModelOptTensors) else "bf16"


def _backend(args: argparse.Namespace, recipe: Recipe, say: Callable[[str], None]) -> str:
    """What was asked for, else the recipe's; a recipe's backend is named with the reason."""
    if args.backend:
        return args.backend
    if recipe.backend != "cpu":
        wanted = args.compute_capability or ", ".join(recipe.capabilities)
        say(
            f"backend {recipe.backend}, which the recipe {recipe.name} is for; compute "
            f"capability {wanted}{'' if args.compute_capability else ', likewise'}"
        )
        if not args.dry_run:
            load(recipe.backend)
    return recipe.backend


def checkpoints_of(
    recipe: Recipe, drafter: str | None, download: bool, described: bool = False
) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    """Both checkpoints; `described`: by the recipe's own table where it has one."""
    known = described and recipe.target_config
    target = recipe.described_target() if known else recipe.open_target(download)
    if drafter:
        path = hub.download(drafter) if hub.is_hub_id(drafter) else Path(drafter)
        return target, open_drafter(path.resolve())
    if described and recipe.drafter_config:
        return target, recipe.described_drafter()
    return target, recipe.open_drafter(download)


def recipe_of(target: str, drafter: str | None) -> Recipe:
    """The recipe of that name or hub id, or one made for a path or another hub id."""
    path = Path(target)
    known = path.exists() or hub.is_hub_id(target)
    if not known:
        return find_recipe(target)
    if recipe := recipe_for(target):
        return recipe
    if drafter is None:
        raise InputError(f"{target}: a target given as a path or hub id needs --drafter")
    base = Path.cwd()
    return Recipe(name=path.stem.lower(), folder=base, target=target, drafter="", block=0)

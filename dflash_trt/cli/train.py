"""dflash-trt train: a drafter for a target, from prompts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_trt.errors import InputError
from dflash_trt.recipes import find_recipe, packaged_file
from dflash_trt.training.pipeline import STEPS, Training, TrainOptions
from dflash_trt.training.recipe import Recipe, load_recipe

_DEFAULT = {f.name: f.default for f in fields(TrainOptions)}


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "train",
        help="train a drafter for a target",
        description="Train a DFlash drafter on the target's own answers. Needs the extra [train].",
    )
    which = f"{', '.join(STEPS)} (default: all)"
    parser.add_argument("steps", nargs="*", metavar="STEP", help=which)
    parser.add_argument("--target", required=True, metavar="NAME|PATH")
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE.jsonl")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--recipe", type=Path, metavar="FILE.toml", help="see docs/training.md")
    parser.add_argument("--layers", type=int, help=f"draft layers (default: {Recipe.layers})")
    parser.add_argument("--block", type=int, help=f"block length (default: {Recipe.block})")
    parser.add_argument("--mask-token", type=int, help="id of a token that answers never hold")
    _number(parser, "--taps", "target layers the drafter reads")
    _number(parser, "--samples", "answers per prompt, the first greedy")
    _number(parser, "--max-tokens", "longest answer")
    _number(parser, "--temperature", "of the drawn answers")
    _number(parser, "--slots", "answers made at a time")
    _number(parser, "--max-seq-len", "longest prompt and answer together")
    _number(parser, "--threads", "threads, 0 for all cores")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for the fit step")
    parser.add_argument("--resume", action="store_true", help="go on where a run was cut short")
    parser.set_defaults(run=run)


def _number(parser: argparse.ArgumentParser, flag: str, what: str) -> None:
    default: Any = _DEFAULT[flag[2:].replace("-", "_")]
    told = f"{what} (default: {default})"
    parser.add_argument(flag, type=type(default), default=default, help=told)


def run(args: argparse.Namespace) -> int:
    if unknown := [s for s in args.steps if s not in STEPS]:
        raise InputError(f"step '{unknown[0]}': the steps are {', '.join(STEPS)}")
    steps = [s for s in STEPS if not args.steps or s in args.steps]
    if "fit" in steps:
        _need_torch()
    training = Training(_options(args))
    for step in steps:
        _run_step(training, step)
    return 0


def _need_torch() -> None:
    try:
        import matplotlib  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"training needs {error.name}: install it with pip install 'dflash-trt[train]'"
        ) from error


def _options(args: argparse.Namespace) -> TrainOptions:
    recipe = load_recipe(args.recipe) if args.recipe else Recipe()
    given = {n: getattr(args, n) for n in ("layers", "block", "mask_token")}
    recipe = replace(recipe, **{n: v for n, v in given.items() if v is not None})
    names = {f.name for f in fields(TrainOptions)} - {"recipe", "target"}
    values = {n: getattr(args, n) for n in names}
    return TrainOptions(target=_target(args.target), recipe=recipe, **values)


def _target(name: str) -> Path:
    if Path(name).exists():
        return Path(name)
    recipe = find_recipe(name)
    if recipe.package:
        return packaged_file(recipe.package, recipe.file)
    return (recipe.folder / recipe.target).resolve()


def _run_step(training: Training, step: str) -> None:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(step, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if step == "fit":
            training.run_fit(_fit_report(bar, task))
        else:
            getattr(training, f"run_{step}")(report)


def _fit_report(bar: Progress, task: Any) -> Callable[[Any], None]:
    def report(progress: Any) -> None:
        what = f"fit, loss {progress.loss:.3f}, acceptance {progress.tau:.2f}"
        bar.update(task, completed=progress.step, total=progress.steps, description=what)
        if progress.held_out:
            held = ", ".join(f"{d} {tau:.2f}" for d, tau in sorted(progress.held_out.items()))
            bar.console.print(f"step {progress.step}: held out {held}", highlight=False)

    return report

"""The command line: one module per verb, nothing but argument handling."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import dflash_trt
from dflash_trt.cli import (
    bench,
    build,
    inspect,
    plan,
    run,
    serve,
    simulate,
    train,
    triton,
    weights,
)
from dflash_trt.errors import InputError
from dflash_trt.supervisor import supervise

# These take away what they have begun, also where they are asked to end.
_CLEANING = (build.run, weights.run, simulate.run)
VERBS = (build, weights, run, inspect, bench, simulate, train, plan, serve, triton)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="dflash-trt",
        description="Lossless speculative decoding with DFlash drafters, compiled ahead of time.",
    )
    top.add_argument("--version", action="version", version=f"dflash-trt {dflash_trt.__version__}")
    verbs = top.add_subparsers(metavar="COMMAND", required=True)
    for verb in VERBS:
        verb.add_parser(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 2 where the input cannot be used, with one sentence."""
    args = parser().parse_args(argv)
    if argv is None:
        supervise(sys.argv[1:])
        if args.run in _CLEANING:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return args.run(args)
    except InputError as error:
        print(f"dflash-trt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dflash-trt: interrupted", file=sys.stderr)
        return 130

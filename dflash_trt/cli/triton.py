"""dflash-trt triton: a model repository for Triton Inference Server."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from dflash_trt.serving.triton.repository import RepositoryOptions, write_repository

_DEFAULT = RepositoryOptions()


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "triton",
        help="write a model repository for Triton Inference Server",
        description="Write a Triton model repository whose one model owns both engines.",
    )
    parser.add_argument("engine", type=Path, metavar="DIR", help="engine directory")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="REPO", help="model repository"
    )
    parser.add_argument("--name", help="the model's name (default: the engine's)")
    parser.add_argument(
        "--max-batch", type=int, default=_DEFAULT.max_batch, metavar="N",
        help="rows of a request: tensors have a batch dimension, as with tensorrtllm_backend "
        "(default: none, as with vllm_backend)",
    )  # fmt: skip
    parser.add_argument("--copy", action="store_true", help="copy the engines into the repository")
    parser.add_argument(
        "--environment", type=Path, metavar="VENV",
        help="virtual environment to run the model in (default: the server's python3)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=int, default=_DEFAULT.threads,
        help="threads of the CPU engines, 0: one per core (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--max-queue", type=int, default=_DEFAULT.max_queue,
        help="requests that may wait for a slot (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    values = {field.name: getattr(args, field.name) for field in fields(RepositoryOptions)}
    target = write_repository(args.engine, args.output, RepositoryOptions(**values))
    print(f"{target}: tritonserver --model-repository={args.output}")
    return 0

"""The arguments of commands that answer a file of prompts."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE.jsonl",
        help="one JSON object per line, with prompt, question or messages",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, help="use the first N prompts")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="tokens per answer (default: 128)"
    )

"""dflash-trt inspect: what an engine directory holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dflash_trt.cli.inspect_tensorrt import print_plans
from dflash_trt.engines.directory import Manifest, read_manifest


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "inspect",
        help="show what an engine directory holds",
        description="Check an engine directory's files against their hashes and show what it is.",
    )
    parser.add_argument("engine", type=Path, metavar="DIR", help="engine directory")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    manifest = read_manifest(args.engine)
    console = Console()
    console.print(_facts(manifest))
    console.print(_files(manifest))
    print_plans(console, args.engine)
    return 0


def _facts(m: Manifest) -> Table:
    table = Table(title=m.name, show_header=False)
    drafted = f"{m.drafted} tokens per cycle, {m.passes} pass{'es' if m.passes > 1 else ''}"
    chosen, vocabulary = m.drafter.config["draft_vocab_size"], m.drafter.config["vocab_size"]
    rows = {
        "backend": f"{m.backend}, {m.precision}",
        "target": f"{m.target.source} ({m.target.digest[:19]}…)",
        "drafter": f"{m.drafter.source} ({m.drafter.digest[:19]}…), trained block {m.trained_block}",
        "block": f"verifies {m.block}, drafts {drafted}",
        "draft vocabulary": f"{chosen or vocabulary} of {vocabulary} tokens",
        "taps": ", ".join(map(str, m.taps)),
        "sequence": f"{m.max_seq_len} tokens, batch {m.max_batch}",
        "chat format": m.chat_format,
        "stop ids": ", ".join(map(str, m.stop_ids)),
        "weights": f"{len(m.weights)} tensors",
        "versions": ", ".join(f"{k} {v}" for k, v in m.versions.items()),
        "runs on": ", ".join(f"{k} {v}" for k, v in m.target_requirements.items()),
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table


def _files(m: Manifest) -> Table:
    table = Table("file", "MB", "sha256")
    for name, entry in m.files.items():
        table.add_row(name, f"{entry['size'] / 1e6:.2f}", entry["sha256"][:16])
    return table

"""dflash-trt serve: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from dflash_trt.errors import InputError
from dflash_trt.serving.openai.limits import ServerOptions

_DEFAULT = ServerOptions()


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "serve",
        help="serve an engine directory over HTTP, as OpenAI's API",
        description="Serve an engine directory over HTTP, as OpenAI's API, until interrupted.",
    )
    parser.add_argument("engine", type=Path, metavar="DIR", help="engine directory")
    parser.add_argument(
        "--api-key-file", type=Path, help="file with the key that clients must send"
    )
    for flag, kind, text in (
        ("host", str, "address to listen on"),
        ("port", int, "port to listen on"),
        ("api-key", str, "key that clients must send (visible in the process list)"),
        ("model", str, "name that clients use (default: the engine's)"),
        ("max-queue", int, "requests that may wait for a slot; more are answered 429"),
        ("max-tokens", int, "most tokens of one answer, 0: what the engine holds"),
        ("max-body", int, "most bytes of a request"),
        ("request-seconds", float, "an answer that takes longer ends with an error"),
        ("send-seconds", float, "a client that reads nothing for so long is dropped"),
        ("threads", int, "threads of the CPU engines, 0: one per core"),
    ):
        default = getattr(_DEFAULT, flag.replace("-", "_"))
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(f"--{flag}", type=kind, default=default, help=text + shown)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    values = {field.name: getattr(args, field.name) for field in fields(ServerOptions)}
    if args.api_key_file is not None:
        values["api_key"] = _key(args.api_key_file)
    options = ServerOptions(**values)
    try:
        from dflash_trt.serving.openai.server import build_server
    except ModuleNotFoundError as error:
        raise InputError(
            f"serve: {error.name} is not installed; pip install 'dflash-trt[serve]'"
        ) from None
    server = build_server(args.engine, options)
    print(f"dflash-trt: http://{options.host}:{options.port}/v1", flush=True)
    server.run()
    return 0


def _key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"api-key-file {path}: {error}") from None

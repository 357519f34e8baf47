"""Writing a model repository that a stock Triton server loads."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.engines.directory import read_manifest
from dflash_trt.errors import InputError
from dflash_trt.serving.triton.tensors import INPUTS, OUTPUTS, Tensor

_MARK = "# Written by dflash-trt triton."
_MODEL = '''"""The model is part of the installed package."""

from dflash_trt.serving.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class RepositoryOptions:
    """name: None for the engine directory's own; max_batch: 0 for tensors without a batch dimension
    (as with vllm_backend), else the rows of a request (as with tensorrtllm_backend); copy: put the
    engines into the repository; environment: a virtual environment for Triton to run the model in."""

    name: str | None = None
    max_batch: int = 0
    copy: bool = False
    environment: Path | None = None
    threads: int = 0
    max_queue: int = 256

    def __post_init__(self) -> None:
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise InputError(f"name {self.name!r}: use letters, digits, dots, dashes, underscores")
        if not 0 <= self.max_batch <= 4096:
            raise InputError(f"max-batch {self.max_batch}: must be 0 to 4096")
        if self.max_queue < 1:
            raise InputError(f"max-queue {self.max_queue}: must be 1 or more")
        if self.environment is not None and not (self.environment / "bin" / "python3").exists():
            raise InputError(f"environment {self.environment}: has no bin/python3")


def write_repository(engine: Path, repository: Path, options: RepositoryOptions) -> Path:
    """Write REPOSITORY/NAME, replacing only what was written by us; returns its path."""
    name = options.name or read_manifest(engine, verify=options.copy).name
    target = repository / name
    _check_replaceable(target)
    work = repository / f".{name}.{os.getpid()}.partial"
    shutil.rmtree(work, ignore_errors=True)
    try:
        _fill(work, name, engine, options)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    config = target / "config.pbtxt"
    if not (config.is_file() and config.read_text().startswith(_MARK)):
        raise InputError(f"{target}: exists and is not ours, so it is not replaced")


def _fill(work: Path, name: str, engine: Path, options: RepositoryOptions) -> None:
    version = work / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_MODEL)
    where = str(engine.resolve())
    if options.copy:
        shutil.copytree(engine, version / "engine")
        where = "engine"
    (work / "config.pbtxt").write_text(config_text(name, where, options))


def config_text(name: str, engine: str, options: RepositoryOptions) -> str:
    """config.pbtxt. `engine` is a path, a relative one within the version's folder."""
    parameters = {
        "engine_directory": engine,
        "threads": str(options.threads),
        "max_queue": str(options.max_queue),
    }
    if options.environment is not None:
        parameters["EXECUTION_ENV_PATH"] = str(options.environment.resolve())
    lines = [
        _MARK,
        f"name: {_quoted(name)}",
        'backend: "python"',
        f"max_batch_size: {options.max_batch}",
        "model_transaction_policy { decoupled: true }",
        "instance_group [ { count: 1, kind: KIND_MODEL } ]",
        *_section("input", INPUTS, "optional: true"),
        *_section("output", OUTPUTS, ""),
        *(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
            for key, value in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _section(kind: str, tensors: Iterable[Tensor], more: str) -> Iterable[str]:
    for tensor in tensors:
        dims = "[ -1 ]" if tensor.many else "[ 1 ]"
        content = f'name: "{tensor.name}", data_type: TYPE_{tensor.dtype}, dims: {dims}'
        yield f"{kind} [ {{ {', '.join(filter(None, (content, more)))} }} ]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

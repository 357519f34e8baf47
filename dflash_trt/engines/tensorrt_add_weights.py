"""Weights for an engine directory whose plans were compiled without the checkpoint.

What is written lies in a folder of its own until it is complete, and counts from when `engine.json`
names it: a run that is killed leaves an engine without weights, and can be started again.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoints.described import AbsentTensors
from dflash_trt.config import DrafterConfig, TargetConfig
from dflash_trt.engines.build import (
    BuildOptions,
    Sources,
    describe,
    source_graphs,
    write_text_format,
)
from dflash_trt.engines.directory import Identity, Manifest, read_manifest, write_manifest
from dflash_trt.engines.tensorrt_directory import (
    TensorRTOptions,
    read_plans,
    with_room,
    write_weights_of,
)
from dflash_trt.engines.tensorrt_weights import FILE
from dflash_trt.errors import InputError

_PARTIAL = ".weights.partial"
# What a checkpoint may say otherwise than the recipe did: no plan depends on it.
_FREE = frozenset({"stop_ids", "tokens"})


def add_weights(
    path: Path,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    progress: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write the weights, tokenizer and chat template of the engine directory at `path`.

    Raises `InputError` where the engine has its weights, or was built for other checkpoints. Names
    and shapes are compared before anything big is read; one source weight is in memory at a time.
    """
    manifest = read_manifest(path)
    _check_engine(path, manifest)
    content = read_plans(path)
    options = _options(manifest)
    own = TensorRTOptions(manifest.backend, tuple(content["capabilities"]), content["chunk"])
    _check_model(target, manifest.target)
    _check_model(drafter, manifest.drafter)
    if target.config.token_count > manifest.vocab_size:
        raise InputError(
            f"{target.tensors.origin}: its tokenizer has {target.config.token_count} entries, the "
            f"engine's plans choose from {manifest.vocab_size}; build the engine again"
        )
    sources = source_graphs(target, drafter, with_room(options, own))
    _check_table(sources, manifest, path)
    progress("hash checkpoints")
    made = describe(
        target, drafter, options, sources, manifest.backend,
        manifest.target_requirements, manifest.versions,
    )  # fmt: skip
    for found, built in ((made.target, manifest.target), (made.drafter, manifest.drafter)):
        _check_digest(found, built, path)
    work = path / _PARTIAL
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        reports = list(content["plans"].values())
        write_weights_of(work, target, drafter, sources, options, reports, progress)
        write_text_format(work, target)
        for file in work.iterdir():
            file.replace(path / file.name)
    finally:
        shutil.rmtree(work)
    progress("hash files")
    made = dataclasses.replace(made, vocab_size=manifest.vocab_size)
    write_manifest(path, made)
    return made


def _check_engine(path: Path, manifest: Manifest) -> None:
    if manifest.backend == "cpu":
        raise InputError(f"{path}: an engine of the cpu backend has its weights from the build")
    if FILE in manifest.files:
        raise InputError(f"{path}: has its weights already; build the engine again for others")


def _options(manifest: Manifest) -> BuildOptions:
    """What the engine was built with."""
    made_by_checkpoint = ("bos_token", "eos_token")
    arguments = manifest.chat_arguments.items()
    return BuildOptions(
        name=manifest.name,
        block=manifest.block,
        precision=manifest.precision,
        passes=manifest.passes,
        max_seq_len=manifest.max_seq_len,
        max_batch=manifest.max_batch,
        ranks=manifest.tensor_parallel,
        chat_arguments={k: v for k, v in arguments if k not in made_by_checkpoint},
    )


def _check_model(checkpoint: TargetCheckpoint | DrafterCheckpoint, built: Identity) -> None:
    """The engine was built for this configuration."""
    origin = checkpoint.tensors.origin
    if isinstance(checkpoint.tensors, AbsentTensors):
        raise InputError(
            f"{origin}: the checkpoint is not here; give its folder as a path, or --download"
        )
    found = _plain(checkpoint.config)
    for key, wanted in built.config.items():
        if key not in _FREE and found.get(key) != wanted:
            raise InputError(
                f"{origin}: its {key} is {found.get(key)}, the engine's {wanted}; it was built for "
                f"{built.source}"
            )


def _plain(config: TargetConfig | DrafterConfig) -> Mapping[str, Any]:
    """As `engine.json` has it."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_json()))
    return values


def _check_table(sources: Sources, manifest: Manifest, path: Path) -> None:
    """The graphs of these checkpoints ask for the weights that the plans were compiled with."""
    made = json.loads(json.dumps([dataclasses.asdict(w) for w in sources.weights.values()]))
    for found, wanted in zip(made, manifest.weights, strict=False):
        if found != wanted:
            raise InputError(
                f"{path}: its plans take {wanted['name']} {wanted['shape']}, this checkpoint makes "
                f"{found['name']} {found['shape']}; build the engine again"
            )
    if len(made) != len(manifest.weights):
        raise InputError(
            f"{path}: its plans take {len(manifest.weights)} weights, this checkpoint makes "
            f"{len(made)}; build the engine again"
        )


def _check_digest(found: Identity, built: Identity, path: Path) -> None:
    if built.digest not in (AbsentTensors("").digest(), found.digest):
        raise InputError(
            f"{found.source}: is another checkpoint than {path} was built with, though of the same "
            f"sizes ({found.digest[:19]}…, not {built.digest[:19]}…)"
        )

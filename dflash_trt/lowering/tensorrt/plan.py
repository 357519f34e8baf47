"""What a plan is to be made of: which outputs of a source graph, for which shapes, how precise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Range = tuple[int, int, int]

PRECISIONS = ("bf16", "fp8", "nvfp4")
# How a mixture of experts is compiled (see `experts`).
EXPERTS = ("plugin", "layers")


@dataclass(frozen=True)
class PlanRequest:
    """One plan: `graph` is the path of a source graph, `letters` the sizes of its dimensions.

    `letters` maps every letter of the graph's dimensions to (smallest, usual, largest); equal
    numbers make the dimension fixed. `outputs` are the wanted outputs of the source graph; what
    they do not need is not compiled. `weights` names the graph inputs that are weights, with their
    kinds (see `models.graph.Weight`), which decides on their precision; `kept` are bf16 all the same.
    `experts` is one of `EXPERTS`.
    """

    name: str
    graph: str
    outputs: tuple[str, ...]
    letters: Mapping[str, Range]
    weights: Mapping[str, str]
    precision: str = "bf16"
    activations: str = "BF16"
    kept: tuple[str, ...] = ()
    experts: str = "plugin"

    def fixed(self, letter: str) -> int | None:
        low, _, high = self.letters[letter]
        return low if low == high else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PlanRequest:
        letters = {key: tuple(sizes) for key, sizes in values["letters"].items()}
        lists = {key: tuple(values[key]) for key in ("outputs", "kept")}
        return cls(**{**values, **lists, "letters": letters})


@dataclass(frozen=True)
class Binding:
    """One input or output of a plan.

    `role` is `state`, `weight`, `cache` or `scratch`; a scratch output exists for the compiler's
    sake only and may share memory with the other scratch outputs of the plan. `alias` names the
    input whose memory an output must be bound to. -1 in `shape` stands for the batch.
    `made_of` says how a weight that is not simply the source weight is made from it: (weight of the
    source graph, part), part being `fp8`, `nvfp4`, `block_scale`, `scale` or `inverse_input_scale`.
    """

    name: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    alias: str = ""
    made_of: tuple[str, str] = ("", "")


@dataclass
class NetworkReport:
    """What was written: bindings, layers by kind, and what became of each op of ours."""

    bindings: list[Binding] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)
    ours: dict[str, list[str]] = field(default_factory=dict)
    plugins: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

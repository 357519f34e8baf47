"""Typed descriptions of a target and of a drafter, read from their `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_trt.errors import InputError


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base `theta`, and the checkpoint's scaling dictionary if it has one."""

    theta: float
    scaling: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        scaling = self.scaling or {}
        return str(scaling.get("rope_type", scaling.get("type", "default")))


@dataclass(frozen=True)
class Experts:
    """A mixture of `count` experts, `per_token` of them chosen; see the op `MixtureOfExperts`."""

    count: int
    per_token: int
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class TargetConfig:
    """A decoder-only target. Sizes are counts of elements; `window` 0 means full attention.

    vocab_size: rows of embedding and lm_head; tokens: entries of the tokenizer where those rows are
    more, else 0.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_positions: int
    tied_embeddings: bool
    attention_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    attention_sinks: bool = False
    experts: Experts | None = None
    tokens: int = 0

    @property
    def lm_head(self) -> str:
        """The tensor that holds the lm_head."""
        return "model.embed_tokens.weight" if self.tied_embeddings else "lm_head.weight"

    @property
    def token_count(self) -> int:
        """Tokens that exist: logits behind them are padding and never leave the graph."""
        return self.tokens or self.vocab_size

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter; `window_causal` holds for layers with a window only.

    num_target_layers: 0 where the checkpoint does not say; draft_vocab_size: tokens that it drafts, 0
    for all of the target's; own_lm_head, own_embedding: those are not the target's.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_positions: int
    block: int
    mask_id: int
    taps: tuple[int, ...]
    num_target_layers: int
    attention_bias: bool = False
    windows: tuple[int, ...] = ()
    window_causal: bool = True
    draft_vocab_size: int = 0
    own_lm_head: bool = False
    own_embedding: bool = False

    @property
    def token_map(self) -> bool:
        """Whether its tokens have other ids than the target's."""
        return 0 < self.draft_vocab_size < self.vocab_size

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def causal(self, layer: int) -> bool:
        return self.window_causal and self.window(layer) > 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class ConfigReader:
    """Reads keys of a `config.json`; an error names the key and the file it came from."""

    values: Mapping[str, Any]
    origin: str
    seen: set[str] = field(default_factory=set)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise InputError(f"{self.origin}: the key '{key}' is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InputError(
                f"{self.origin}: '{key}' is {value!r}, not an integer of {minimum} or more"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            what = "missing" if value is None else f"{value!r}, not a number"
            raise InputError(f"{self.origin}: the key '{key}' is {what}")
        return float(value)

    def decoder(self) -> dict[str, Any]:
        """What targets and drafters have in common, under the names of our configurations."""
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_layers": self.integer("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": self.integer("head_dim", hidden // heads),
            "rms_norm_eps": self.number("rms_norm_eps"),
            "rope": self.rope(),
            "max_positions": self.integer("max_position_embeddings"),
        }

    def rope(self) -> Rope:
        """`rope_parameters` (newer files) or `rope_theta` with `rope_scaling` (older ones)."""
        parameters = dict(self.get("rope_parameters", None) or self.get("rope_scaling", None) or {})
        theta = parameters.pop("rope_theta", None)
        if theta is None:
            theta = self.number("rope_theta", 10000.0)
        rope = Rope(float(theta), parameters)
        return rope if rope.kind != "default" else Rope(rope.theta)

    def windows(self, num_layers: int) -> tuple[int, ...]:
        """Sliding window of each layer from `layer_types`, 0 for full attention."""
        types = self.get("layer_types", None)
        if not types or all(kind == "full_attention" for kind in types):
            return ()
        if len(types) != num_layers:
            raise InputError(
                f"{self.origin}: 'layer_types' names {len(types)} layers instead of {num_layers}"
            )
        size = self.integer("sliding_window")
        known = {"full_attention": 0, "sliding_attention": size}
        for kind in types:
            if kind not in known:
                raise InputError(f"{self.origin}: unknown layer type '{kind}'")
        return tuple(known[kind] for kind in types)

"""Targets and drafters as a roofline sees them: bytes and operations."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.errors import InputError

# Bits stored per weight, block scales included.
BITS = {"bf16": 16.0, "fp8": 8.0, "nvfp4": 4.5, "mxfp4": 4.25}


@dataclass(frozen=True)
class Experts:
    """count per layer, chosen per token, inner size; three matrices each."""

    count: int
    chosen: int
    inner: int


@dataclass(frozen=True)
class Shape:
    """A decoder-only model. window: length of every second layer's sliding window (0: none);
    head: whether the lm_head is counted (a drafter borrows the target's)."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: Experts | None = None
    window: int = 0

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's four projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.experts.inner if self.experts else 0

    @property
    def dense_weights(self) -> int:
        """Weights of all layers that every token reads: attention, router, dense MLP."""
        own = 3 * self.hidden * self.ffn
        if self.experts:
            own = self.hidden * self.experts.count
        return self.layers * (self.attention_weights + own)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def active_weights(self) -> int:
        """Weights that one token is multiplied with, lm_head included."""
        chosen = self.layers * self.expert_weights * self.experts.chosen if self.experts else 0
        return self.dense_weights + chosen + self.head_weights

    def touched_experts(self, tokens: int) -> float:
        """Experts of a layer that `tokens` tokens read, if each chooses at random."""
        if not self.experts:
            return 0.0
        share = self.experts.chosen / self.experts.count
        return self.experts.count * (1 - (1 - share) ** tokens)

    def kv_bytes(self, context: int) -> float:
        """Bytes of keys and values (bf16) that one sequence of `context` tokens reads."""
        per_token = 2 * 2 * self.kv_heads * self.head_dim
        short = min(context, self.window) if self.window else context
        return (
            per_token * (self.layers - self.layers // 2) * context
            + per_token * (self.layers // 2) * short
        )


@dataclass(frozen=True)
class Plan:
    """A target with its drafter: precision of most weights, taps, trained block."""

    name: str
    target: Shape
    drafter: Shape
    precision: str
    block: int
    taps: int = 5

    def weight_bytes(self, precision: str, ranks: int = 1) -> float:
        """Bytes of both models on each rank; embedding, lm_head and attention of a MoE stay bf16.

        Layers and lm_head are cut. Embedding and drafter are not, for which cut ranks have a whole
        lm_head as well.
        """
        t, d = self.target, self.drafter
        wide = BITS["bf16"] / 8
        rest = wide if t.experts else BITS[precision] / 8
        experts = t.layers * t.expert_weights * (t.experts.count if t.experts else 0)
        cut = t.dense_weights * rest + experts * BITS[precision] / 8 + t.head_weights * wide
        draft = (d.dense_weights + self.taps * t.hidden * d.hidden) * wide
        heads = 2 if ranks > 1 else 1
        return cut / ranks + heads * t.head_weights * wide + draft


PLANS = {
    plan.name: plan
    for plan in (
        Plan(
            "qwen3-8b",
            Shape(36, 4096, 12288, 32, 8, 128, 151936),
            Shape(5, 4096, 12288, 32, 8, 128, 151936),
            "bf16",
            16,
        ),
        Plan(
            "qwen3-4b",
            Shape(36, 2560, 9728, 32, 8, 128, 151936),
            Shape(5, 2560, 9728, 32, 8, 128, 151936),
            "bf16",
            16,
        ),
        Plan(
            "llama-3.1-8b",
            Shape(32, 4096, 14336, 32, 8, 128, 128256),
            Shape(5, 4096, 12288, 32, 8, 128, 128256),
            "bf16",
            10,
        ),
        Plan(
            "gpt-oss-20b",
            Shape(24, 2880, 2880, 64, 8, 64, 201088, Experts(32, 4, 2880), 128),
            Shape(8, 2880, 7680, 64, 8, 64, 201088),
            "mxfp4",
            8,
        ),
        Plan(
            "gpt-oss-120b",
            Shape(36, 2880, 2880, 64, 8, 64, 201088, Experts(128, 4, 2880), 128),
            Shape(8, 2880, 7680, 64, 8, 64, 201088),
            "mxfp4",
            10,
        ),
    )
}


def find_plan(name: str) -> Plan:
    if name not in PLANS:
        raise InputError(f"target '{name}': the planner knows {', '.join(PLANS)}")
    return PLANS[name]

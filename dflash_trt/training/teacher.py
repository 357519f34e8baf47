"""The target's distribution behind every row: soft labels without storing logits.

The last tap lies near the target's end, so the layers behind it, run again over the stored rows,
give the logits that the target had there, at the price of a layer or two.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_trt.errors import InputError
from dflash_trt.training.drafter import Angles, DrafterShape


class Teacher:
    """Layers ``last tap + 1 ..`` of a llama-style target, frozen."""

    def __init__(
        self, shape: DrafterShape, target: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.shape = shape
        self.layers = range(shape.taps[-1] + 1, shape.target_layers)
        self._weights = {n: t.float().to(device) for n, t in target.items() if ".embed_" not in n}
        missing = [
            n for n in self.layers if f"model.layers.{n}.input_layernorm.weight" not in target
        ]
        if missing:
            raise InputError(
                f"distill needs the layers {missing} behind the last tap: tap a later one"
            )

    @torch.no_grad()
    def __call__(self, last_tap: Tensor) -> Tensor:
        """last_tap [S, T, H] -> normed hidden states [S, T, H] that lm_head turns into logits."""
        x = last_tap.float()
        positions = torch.arange(x.shape[1], device=x.device)[None]
        angles = Angles.at(positions, self.shape.head_dim, self.shape.rope_theta)
        for layer in self.layers:
            x = self._layer(x, angles, f"model.layers.{layer}.")
        return self._norm(x, "model.norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.shape.eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])

    def _layer(self, x: Tensor, angles: Angles, name: str) -> Tensor:
        h = self._norm(x, f"{name}input_layernorm")
        split = (-1, self.shape.head_dim)
        q, k, v = (self._linear(h, f"{name}self_attn.{p}_proj").unflatten(-1, split) for p in "qkv")
        q, k = (angles.rotate(t).to(v.dtype) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self._linear(out.transpose(1, 2).flatten(2), f"{name}self_attn.o_proj")
        h = self._norm(x, f"{name}post_attention_layernorm")
        gate = F.silu(self._linear(h, f"{name}mlp.gate_proj"))
        up = self._linear(h, f"{name}mlp.up_proj")
        return x + self._linear(gate * up, f"{name}mlp.down_proj")

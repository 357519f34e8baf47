"""The DFlash drafter as a PyTorch module, laid out for training on many blocks at once.

Shape letters: S sequences, T context rows, A anchors (blocks) per sequence, K block length,
H hidden, N query heads, V key/value heads, G = N / V, D head dimension, W = taps * H.

Parameter names are the published checkpoint's, so that export is a plain dump.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_trt.errors import InputError


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter; widths of ``fc`` and embedding are the target's."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int
    block: int
    taps: tuple[int, ...]
    mask_token: int
    vocab: int
    target_layers: int
    rope_theta: float = 10000.0
    eps: float = 1e-6
    max_positions: int = 8192

    def __post_init__(self) -> None:
        bad = [t for t in self.taps if not 0 <= t < self.target_layers]
        if bad or not self.taps:
            raise InputError(f"taps {list(self.taps)} must lie in 0..{self.target_layers - 1}")
        if not 0 <= self.mask_token < self.vocab:
            raise InputError(
                f"mask_token {self.mask_token} is outside the vocabulary of {self.vocab}"
            )
        if self.block < 2:
            raise InputError(f"block must be at least 2, got {self.block}")
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads")


class Norm(nn.Module):
    """RMS norm in fp32 whatever the matmul precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True)
class Angles:
    """cos and sin tables [..., D/2] of one set of absolute positions."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float) -> Angles:
        steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
        angle = positions.float()[..., None] / theta ** (steps / head_dim)
        return cls(angle.cos(), angle.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """x [..., heads, D], rotated in halves (not interleaved)."""
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[..., None, :], self.sin[..., None, :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Block queries over the context strictly before the anchor, and over their own block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, inner = shape.hidden, shape.heads * shape.head_dim
        narrow = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(hidden, inner, bias=False)
        self.k_proj = nn.Linear(hidden, narrow, bias=False)
        self.v_proj = nn.Linear(hidden, narrow, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim))

    def keys(self, x: Tensor, angles: Angles) -> Tensor:
        """The same norm and rotation for injected and for block keys."""
        return angles.rotate(self.k_norm(self._heads(self.k_proj(x)))).to(_matmul_dtype(x))

    def forward(
        self, x: Tensor, context: Tensor, here: Angles, there: Angles, hidden_rows: Tensor
    ) -> Tensor:
        """x [S,A,K,H], context [S,T,H], hidden_rows bool [S,1,A,1,T] -> [S,A,K,H]."""
        S, A, K, _ = x.shape
        V, D = self.shape.kv_heads, self.shape.head_dim
        G = self.shape.heads // V
        q = here.rotate(self.q_norm(self._heads(self.q_proj(x)))) * D**-0.5
        q = q.view(S, A, K, V, G, D).permute(0, 3, 1, 2, 4, 5).to(_matmul_dtype(x))
        far_k = self.keys(context, there).permute(0, 2, 3, 1)  # [S,V,D,T]
        far_v = self._heads(self.v_proj(context)).transpose(1, 2)  # [S,V,T,D]
        near_k = self.keys(x, here).permute(0, 3, 1, 4, 2)  # [S,V,A,D,K]
        near_v = self._heads(self.v_proj(x)).permute(0, 3, 1, 2, 4)  # [S,V,A,K,D]
        far = (q.reshape(S, V, A * K * G, D) @ far_k).view(S, V, A, K * G, -1)
        near = q.reshape(S, V, A, K * G, D) @ near_k
        scores = torch.cat([far.masked_fill(hidden_rows, -torch.inf), near], -1)
        far_p, near_p = scores.softmax(-1).to(scores.dtype).split([far.shape[-1], K], -1)
        out = (far_p.reshape(S, V, A * K * G, -1) @ far_v).view(S, V, A, K * G, D)
        out = (out + near_p @ near_v).view(S, V, A, K, G, D)
        return self.o_proj(out.permute(0, 2, 3, 1, 4, 5).reshape(S, A, K, V * G * D))


def _matmul_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Mlp(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: Tensor, context: Tensor, here: Angles, there: Angles, hidden_rows: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, here, there, hidden_rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """fc + hidden_norm make the shared context; the layers run over all blocks at once."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)

    def forward(self, taps: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states of every slot of every block.

        taps [S,T,W]: features of rows 0..T; blocks [S,A,K,H]: embedded [anchor, MASK x (K-1)];
        anchors int [S,A]: the anchor's position. Returns [S,A,K,H], slot j for position anchor+j.
        """
        context = self.hidden_norm(self.fc(taps))
        here = self._angles(block_positions(anchors, blocks.shape[2]))
        there = self._angles(torch.arange(taps.shape[1], device=taps.device)[None])
        hidden_rows = context_mask(anchors, taps.shape[1]).logical_not()[:, None, :, None]
        x = blocks
        for layer in self.layers:
            x = layer(x, context, here, there, hidden_rows)
        return self.norm(x)

    def _angles(self, positions: Tensor) -> Angles:
        return Angles.at(positions, self.shape.head_dim, self.shape.rope_theta)


def block_positions(anchors: Tensor, block: int) -> Tensor:
    """Absolute positions of a block's slots: anchor, anchor+1, ... [..., K]."""
    return anchors[..., None] + torch.arange(block, device=anchors.device)


def context_mask(anchors: Tensor, rows: int) -> Tensor:
    """True where a context row may be seen: strictly before the anchor. [..., T]."""
    return torch.arange(rows, device=anchors.device) < anchors[..., None]


_WARM = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@torch.no_grad()
def warm_start(drafter: Drafter, target: Mapping[str, Tensor]) -> list[str]:
    """Copy the target's last layers and final norm where shapes agree; returns what was copied.

    ``fc`` starts as the identity over the last tap, so that the first context resembles what those
    layers were trained on; the other taps come in small.
    """
    shape, copied = drafter.shape, []
    first = shape.target_layers - shape.layers
    pairs = {"norm.weight": "model.norm.weight"}
    for n in range(shape.layers):
        for part in _WARM:
            pairs[f"layers.{n}.{part}.weight"] = f"model.layers.{first + n}.{part}.weight"
    own = dict(drafter.named_parameters())
    for mine, theirs in pairs.items():
        if theirs in target and target[theirs].shape == own[mine].shape:
            own[mine].copy_(target[theirs])
            copied.append(mine)
    drafter.fc.weight.mul_(0.3)
    drafter.fc.weight[:, -shape.hidden :] += torch.eye(shape.hidden)
    return copied

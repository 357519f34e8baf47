"""What TensorRT's layers and our plugins compute, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.plugins.reference import run_op

ELEMENTWISE = {
    "SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "LESS": np.less,
    "GREATER": np.greater, "EQUAL": np.equal, "AND": np.logical_and,
    "OR": np.logical_or, "MAX": np.maximum, "MIN": np.minimum,
}  # fmt: skip
PARTS = ("blocks", "scales", "bias")
UNARY = {"SQRT": np.sqrt, "RECIP": lambda x: 1 / x, "NOT": np.logical_not}


def shuffle(layer: Any, x: np.ndarray, dims: np.ndarray | None) -> np.ndarray:
    """Permute, reshape (0 copies a dimension), permute."""
    x = x.transpose([layer.first_transpose[i] for i in range(x.ndim)])
    wanted = list(dims) if dims is not None else _reshape_dims(layer)
    if wanted is not None:
        x = x.reshape(
            [x.shape[i] if d == 0 and dims is None else int(d) for i, d in enumerate(wanted)]
        )
    return x.transpose([layer.second_transpose[i] for i in range(x.ndim)])


def _reshape_dims(layer: Any) -> list[int] | None:
    try:
        dims = layer.reshape_dims
    except ValueError:
        return None
    return None if dims is None else list(dims)


def rotary(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray, size: int
) -> np.ndarray:
    """x [B, N, S, D], rotated by halves."""
    half = (size or x.shape[-1]) // 2
    c, s = cos[positions][:, None], sin[positions][:, None]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([low * c - high * s, high * c + low * s, rest], axis=-1)


def attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: Any, lengths: Any, causal: str
) -> np.ndarray:
    """softmax(q keys^T) values; `lengths` of keys exist; LOWER_RIGHT aligns the last row with them."""
    _, heads, rows, _ = q.shape
    group = heads // keys.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (keys, values))
    key = np.arange(k.shape[2])
    end = lengths[:, None, None, None]
    visible = key < end
    if causal == "LOWER_RIGHT":
        visible = visible & (key <= end - rows + np.arange(rows)[None, None, :, None])
    if mask is not None:
        visible = visible & mask
    # Rows that no one may see hold poison: they must not take part at all.
    used = np.where(np.arange(k.shape[2])[None, None, :, None] < end, k, 0)
    logits = np.where(visible, q @ used.swapaxes(-1, -2), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ np.where(np.arange(v.shape[2])[None, None, :, None] < end, v, 0)


def plugin(kind: str, settings: dict[str, Any], inputs: tuple[np.ndarray, ...]) -> Any:
    """A plugin by the reference function of its op; caches are changed in place."""
    return globals()[f"_{kind}"](settings, inputs)


def _SpeculativeVerify(settings, inputs):
    names = ("logits", "tokens", "rows", "lengths")
    results = {"accepted": np.int32, "anchor": np.int64, "context": np.int32}
    return tuple(run_op("SpeculativeVerify", dict(zip(names, inputs, strict=True)), results))


def _ConfidenceCommit(settings, inputs):
    names = ("logits", "drafts", "committed", "share")
    results = {"new_drafts": np.int64, "new_committed": np.bool_}
    given = dict(zip(names, inputs, strict=True))
    return tuple(run_op("ConfidenceCommit", given, results, final=settings["final"]))


def _MixtureOfExperts(settings, inputs):
    names = ("x", "router_logits", *(f"{m}_{p}" for m in ("gate_up", "down") for p in PARTS))
    attributes = {name: settings[name] for name in ("top_k", "alpha", "limit")}
    given = dict(zip(names, inputs, strict=True))
    return run_op("MixtureOfExperts", given, {"y": np.float32}, **attributes)[0]


def _KVInjection(settings, inputs):
    caches = inputs[5:]
    names = [f"{kind}_cache.{i}" for i in range(len(caches) // 2) for kind in "kv"]
    given = dict(zip(["kv", "k_norm", "lengths", "cos", "sin", *names], inputs, strict=True))
    results = run_op(
        "KVInjection", given, {f"{n}.out": np.float32 for n in names},
        kv_heads=settings["kv_heads"], epsilon=settings["epsilon"],
    )  # fmt: skip
    for cache, result in zip(caches, results, strict=True):
        cache[:] = result
    return np.zeros(len(inputs[2]), np.int32)


def _BlockWrite(settings, inputs):
    k, v, lengths, cos, sin, k_cache, v_cache = inputs
    heads, dim = settings["kv_heads"], settings["head_dim"]
    split = [x.reshape(*x.shape[:2], heads, dim).transpose(0, 2, 1, 3) for x in (k, v)]
    positions = lengths[:, None] + np.arange(k.shape[1])
    keys = rotary(split[0], cos, sin, positions, 0)
    for b, start in enumerate(lengths):
        k_cache[b, :, start : start + k.shape[1]] = keys[b]
        v_cache[b, :, start : start + k.shape[1]] = split[1][b]
    return np.zeros(len(lengths), np.int32)

"""The attention ops' reference functions against loops over sequences, heads and rows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.run import run_op

HEADS, KV_HEADS, DIM, CAPACITY, ROWS = 4, 2, 8, 24, 3
LENGTHS = np.array([0, 5, 17], np.int32)
SHAPE = {"heads": HEADS, "kv_heads": KV_HEADS, "scale": DIM**-0.5}


def rotate(x: np.ndarray, position: int, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = x[: DIM // 2], x[DIM // 2 :]
    c, s = cos[position], sin[position]
    return np.concatenate([a * c - b * s, b * c + a * s])


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    visible: np.ndarray,
    sink: float,
) -> np.ndarray:
    logits = np.append((keys @ q)[visible] * DIM**-0.5, sink)
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum())[:-1] @ values[visible]


def expected(inputs: dict[str, np.ndarray], causal: bool, window: int) -> np.ndarray:
    out = np.zeros((len(LENGTHS), ROWS, HEADS, DIM), np.float32)
    cos, sin = inputs["cos"], inputs["sin"]
    for b, length in enumerate(LENGTHS):
        for h in range(HEADS):
            kv = h // (HEADS // KV_HEADS)
            keys = inputs["k_cache"][b, kv, : length + ROWS].copy()
            values = inputs["v_cache"][b, kv, : length + ROWS].copy()
            for j in range(ROWS):
                own = slice(kv * DIM, (kv + 1) * DIM)
                keys[length + j] = rotate(inputs["k"][b, j, own], length + j, cos, sin)
                values[length + j] = inputs["v"][b, j, own]
            for j in range(ROWS):
                t = length + j
                q = rotate(inputs["q"][b, j, h * DIM : (h + 1) * DIM], t, cos, sin)
                p = np.arange(length + ROWS)
                visible = p <= t if causal else p >= 0
                if window:
                    visible = visible & (p > t - window) & (p < t + window)
                out[b, j, h] = attend(q, keys, values, visible, inputs["sinks"][h])
    return out.reshape(len(LENGTHS), ROWS, -1)


@pytest.fixture
def inputs() -> dict[str, np.ndarray]:
    """Random inputs; what no row may read is NaN."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    batch = len(LENGTHS)
    values = {
        "q": normal(batch, ROWS, HEADS * DIM),
        "k": normal(batch, ROWS, KV_HEADS * DIM),
        "v": normal(batch, ROWS, KV_HEADS * DIM),
        "k_cache": normal(batch, KV_HEADS, CAPACITY, DIM),
        "v_cache": normal(batch, KV_HEADS, CAPACITY, DIM),
        "lengths": LENGTHS,
        "cos": normal(CAPACITY, DIM // 2),
        "sin": normal(CAPACITY, DIM // 2),
        "sinks": np.full(HEADS, -np.inf, np.float32),
    }
    for b, length in enumerate(LENGTHS):
        for cache in ("k_cache", "v_cache"):
            values[cache][b, :, length:] = np.nan
    return values


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_cached_attention(inputs: dict[str, np.ndarray], window: int, sinks: bool) -> None:
    if sinks:
        inputs["sinks"] = np.linspace(-1, 2, HEADS).astype(np.float32)
    out, keys, values = run_op(
        "CachedAttention", list(inputs.values()), ("out", "k", "v"), window=window, **SHAPE
    )
    np.testing.assert_allclose(out, expected(inputs, causal=True, window=window), atol=2e-6)
    for b, length in enumerate(LENGTHS):
        assert np.isnan(keys[b, :, length + ROWS :]).all()
        np.testing.assert_array_equal(keys[b, :, :length], inputs["k_cache"][b, :, :length])
        own = inputs["v"][b].reshape(ROWS, KV_HEADS, DIM).swapaxes(0, 1)
        np.testing.assert_array_equal(values[b, :, length : length + ROWS], own)


@pytest.mark.parametrize(("window", "causal"), [(0, 0), (6, 1), (6, 0)])
def test_block_attention(inputs: dict[str, np.ndarray], window: int, causal: int) -> None:
    (out,) = run_op(
        "BlockAttention", list(inputs.values()), ("out",), window=window, causal=causal, **SHAPE
    )
    np.testing.assert_allclose(out, expected(inputs, bool(causal), window), atol=2e-6)


def test_kv_injection_normalises_rotates_and_writes(inputs: dict[str, np.ndarray]) -> None:
    layers, random = 2, np.random.default_rng(1)
    batch = len(LENGTHS)
    kv = random.standard_normal((batch, ROWS, layers, 2, KV_HEADS, DIM)).astype(np.float32)
    norm = random.standard_normal((layers, DIM)).astype(np.float32)
    caches = [inputs[f"{n}_cache"] for _ in range(layers) for n in "kv"]
    args = [kv.reshape(batch, ROWS, -1), norm, LENGTHS, inputs["cos"], inputs["sin"], *caches]
    names = [f"{n}{i}" for i in range(layers) for n in "kv"]
    outputs = run_op(
        "KVInjection", args, names, draft_layers=layers, kv_heads=KV_HEADS, epsilon=1e-5
    )
    got = dict(zip(names, outputs, strict=True))
    for b, layer, r, h in np.ndindex(batch, layers, ROWS, KV_HEADS):
        position = LENGTHS[b] + r
        key, value = kv[b, r, layer, :, h]
        normed = key / np.sqrt((key**2).mean() + 1e-5) * norm[layer]
        rotated = rotate(normed, position, inputs["cos"], inputs["sin"])
        np.testing.assert_allclose(got[f"k{layer}"][b, h, position], rotated, atol=1e-6)
        np.testing.assert_array_equal(got[f"v{layer}"][b, h, position], value)

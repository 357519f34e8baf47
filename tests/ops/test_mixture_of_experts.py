"""MixtureOfExperts and its MXFP4 decoding, against transformers and against the written rule."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.ops.mixture_of_experts import E8M0_VALUES
from tests.ops.run import run_op

EXPERTS, HIDDEN, INNER, ALPHA, LIMIT = 6, 64, 32, 1.702, 7.0


def packed(random: np.random.Generator, rows: int, size: int) -> list[np.ndarray]:
    """Blocks and scales of all experts, every byte value possible, and a bias."""
    blocks = random.integers(0, 256, (EXPERTS, rows, size // 2), dtype=np.uint8)
    scales = random.integers(122, 130, (EXPERTS, rows, size // 32), dtype=np.uint8)
    return [blocks, scales, random.standard_normal((EXPERTS, rows)).astype(np.float32)]


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The rule of the format: sign, two exponent bits, one mantissa bit; low half first."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(len(blocks), -1)
    magnitude, sign = codes & 7, np.where(codes & 8, -1.0, 1.0)
    exponent, mantissa = magnitude >> 1, magnitude & 1
    values = np.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1.0))
    factors = np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
    return (sign * values * factors).astype(np.float32)


@pytest.fixture
def weights() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [*packed(random, 2 * INNER, HIDDEN), *packed(random, HIDDEN, INNER)]


def test_decode_follows_the_format() -> None:
    """All byte values under all scales but NaN's, in one go."""
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (255, 1))
    scales = np.repeat(np.arange(255, dtype=np.uint8), 16)[:, None]
    (values,) = run_op("DecodeMXFP4", [blocks, scales], ["values"])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(values, unpacked(blocks, scales))
    assert np.isnan(E8M0_VALUES[255])


def test_decode_equals_transformers_bit_for_bit(weights: list[np.ndarray]) -> None:
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales, _ = weights[:3]
    stored = torch.from_numpy(blocks.reshape(EXPERTS, 2 * INNER, HIDDEN // 32, 16))
    truth = mxfp4.convert_moe_packed_tensors(stored, torch.from_numpy(scales))
    for expert in range(EXPERTS):
        (values,) = run_op("DecodeMXFP4", [blocks[expert], scales[expert]], ["values"])
        assert torch.equal(torch.from_numpy(values.T.copy()).bfloat16(), truth[expert])
        np.testing.assert_array_equal(values.T, truth[expert].float().numpy())


def expected(x: np.ndarray, logits: np.ndarray, weights: list[np.ndarray], k: int) -> np.ndarray:
    gate_up_blocks, gate_up_scales, gate_up_bias, down_blocks, down_scales, down_bias = weights
    out = np.zeros_like(x)
    for row in np.ndindex(*x.shape[:2]):
        chosen = np.argsort(-logits[row], kind="stable")[:k]
        shares = np.exp(logits[row][chosen] - logits[row].max())
        for expert, share in zip(chosen, shares / shares.sum(), strict=True):
            both = unpacked(gate_up_blocks[expert], gate_up_scales[expert]) @ x[row]
            both += gate_up_bias[expert]
            gate, up = np.minimum(both[0::2], LIMIT), np.clip(both[1::2], -LIMIT, LIMIT)
            inner = gate * 0.5 * (1 + np.tanh(0.5 * ALPHA * gate)) * (up + 1)
            down = unpacked(down_blocks[expert], down_scales[expert]) @ inner + down_bias[expert]
            out[row] += share * down
    return out


@pytest.mark.parametrize("k", [1, 3])
def test_follows_the_rule(weights: list[np.ndarray], k: int) -> None:
    """Values far beyond the limit too; equal logits go to the lower expert."""
    random = np.random.default_rng(1)
    x = random.standard_normal((2, 5, HIDDEN)).astype(np.float32)
    logits = random.integers(-2, 3, (2, 5, EXPERTS)).astype(np.float32)
    (y,) = run_op(
        "MixtureOfExperts", [x, logits, *weights], ["y"], top_k=k, alpha=ALPHA, limit=LIMIT
    )
    truth = expected(x, logits, weights, k)
    np.testing.assert_allclose(y, truth, atol=1e-5 * np.abs(truth).max())

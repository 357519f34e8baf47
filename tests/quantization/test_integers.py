"""Integer forms of weights: what is stored is as near to the weight as its levels allow."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.quantization.integers import BLOCK, BLOCKS4, BLOCKS8, COLUMNS8, IntegerForm

INNER, OUTER = 4096, 601  # quantised in three pieces, the last of another size


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    """[K, N], every column of another size; one holds nothing."""
    random = np.random.default_rng(0)
    values = random.standard_normal((INNER, OUTER)) * 10.0 ** random.uniform(-3, 2, OUTER)
    values[:, 300] = 0
    return values.astype(np.float32)


@pytest.mark.parametrize("form", [BLOCKS8, BLOCKS4], ids=lambda form: form.name)
def test_blocks_are_near_their_weight(weight: np.ndarray, form: IntegerForm) -> None:
    q, scale, zero = form.quantize(weight)
    if form.bits == 4:
        q, zero = (np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1) for x in (q, zero))
    assert q.shape == (OUTER, INNER // BLOCK, BLOCK)
    assert scale.shape == zero.shape == (OUTER, INNER // BLOCK)
    back = (q.astype(np.float32) - zero[..., None]) * scale[..., None]
    blocks = weight.T.reshape(q.shape)
    assert (np.abs(back - blocks) <= 1.001 * scale[..., None]).all()
    spread = np.ptp(blocks, -1)
    used = spread > 0
    np.testing.assert_allclose(scale[used] * (2**form.bits - 1), spread[used], rtol=1e-5)


def test_columns_are_near_their_weight(weight: np.ndarray) -> None:
    q, scale = COLUMNS8.quantize(weight)
    assert (q.shape, scale.shape) == ((INNER, OUTER), (OUTER,))
    assert (np.abs(q * scale - weight) <= 0.501 * scale).all()
    used = scale != 1
    np.testing.assert_array_equal(np.abs(q[:, used]).max(0), 127)

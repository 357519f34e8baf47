"""FP8 and NVFP4: codes against ml_dtypes, and what scales promise."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dflash_trt.quantization import fp8, nvfp4

VALUES = st.floats(-1e4, 1e4, width=32)


@settings(max_examples=50, deadline=None)
@given(arrays(np.float32, (32, 5), elements=VALUES))
def test_fp8_error_is_bounded_by_half_a_step_of_the_column(weight):
    codes, scale = fp8.encode(weight)
    back = fp8.decode(codes, scale)
    bound = np.maximum(np.abs(weight) * 2**-4, scale * 2**-10)
    assert (np.abs(back - weight) <= bound * (1 + 1e-5)).all()
    assert np.isfinite(back).all()
    peaks = np.abs(codes.astype(np.float32)).max(axis=0)
    assert (peaks[np.abs(weight).max(axis=0) > 1e-30] == fp8.LARGEST).all(), "a scale per column"


def test_fp8_saturates_where_a_cast_makes_nan():
    assert np.isnan(np.float32(1000).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert fp8.to_e4m3(np.float32([1000, -1000])).astype(np.float32).tolist() == [448, -448]


def test_nvfp4_values_are_those_of_ml_dtypes_and_the_lower_index_is_in_the_low_half():
    codes = np.arange(16, dtype=np.uint8)
    decoded = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(nvfp4.VALUES, decoded)
    packed = nvfp4.pack(np.array([[1, 2, 15, 0]], np.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]
    np.testing.assert_array_equal(nvfp4.unpack(packed), [[1, 2, 15, 0]])


@settings(max_examples=50, deadline=None)
@given(arrays(np.float32, (32, 3), elements=st.floats(-100, 100, width=32)))
def test_nvfp4_error_is_bounded_by_the_largest_of_the_block(weight):
    """Steps of E2M1 are up to a third of the block's largest; its scale adds 2^-4 of that."""
    packed, blocks, scale = nvfp4.encode(weight)
    assert packed.shape == (3, 16)
    assert blocks.shape == (3, 2)
    if np.abs(weight).max() > 1e-30:
        assert blocks.astype(np.float32).max() == fp8.LARGEST, "scales of blocks use their range"
    back = nvfp4.decode(packed, blocks, scale)
    peak = np.abs(weight.T.reshape(3, 2, 16)).max(-1).repeat(16, -1).reshape(3, 32).T
    assert (np.abs(back - weight) <= peak * 0.25 + 1e-30 + np.abs(weight).max() * 2**-9).all()


@pytest.mark.parametrize("module", [fp8, nvfp4])
@pytest.mark.parametrize("peak", [0.0, 1e-3, 1.0, 37.0, 3e4])
def test_input_scales_are_powers_of_two_that_keep_a_quarter_more_in_range(module, peak):
    scale = module.input_scale(peak)
    assert np.log2(scale) == round(np.log2(scale))
    largest = fp8.LARGEST if module is fp8 else nvfp4.LARGEST * fp8.LARGEST
    assert 1.25 * peak / scale <= largest
    assert 2.5 * peak / scale > largest or not peak, "no coarser than it has to be"
    seen = module.simulate(np.full((1, 16), peak, np.float32), scale)
    np.testing.assert_allclose(seen, peak, rtol=0.13)


@pytest.mark.parametrize("module", [fp8, nvfp4])
@pytest.mark.parametrize("value", [1e-45, -1e-45, 1e-38, 1e-36])
def test_denormal_weights_and_peaks_make_no_scale_of_zero(module, value):
    parts = module.encode(np.full((16, 2), value, np.float32))
    np.testing.assert_allclose(module.decode(*parts), value, rtol=0.07, atol=2e-38)
    assert np.float32(module.input_scale(abs(value))) > 0


@pytest.mark.parametrize("module", [fp8, nvfp4])
def test_zeros_stay_zeros(module):
    with np.errstate(all="raise"):
        parts = module.encode(np.zeros((16, 4), np.float32))
    assert not module.decode(*parts).any()

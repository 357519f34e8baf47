"""Rounding inside a graph against the quantisation code, bit for bit."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper

from dflash_trt.ops.domain import DOMAIN, OPSET_IMPORTS, with_domain_import
from dflash_trt.ops.rounding import RoundE4M3, RoundNVFP4
from dflash_trt.quantization import fp8, nvfp4


def session(function) -> ort.InferenceSession:
    info = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["a", "b", "c"]) for n in "xy")
    x, y = info
    node = helper.make_node(function.name, ["x"], ["y"], domain=DOMAIN)
    functions = [with_domain_import(f.to_function_proto()) for f in (RoundE4M3, RoundNVFP4)]
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y]),
        opset_imports=OPSET_IMPORTS, functions=functions, ir_version=11,
    )  # fmt: skip
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


ROUND_E4M3, ROUND_NVFP4 = session(RoundE4M3), session(RoundNVFP4)
# Every border between two values of either format, and what lies around it.
HALVES = np.arange(-1024, 1025, dtype=np.float32) / 16
ACTIVATIONS = arrays(
    np.float32, (2, 3, 32), elements=st.floats(-600, 600, width=32) | st.sampled_from(HALVES)
)


def assert_same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(found + 0.0, wanted + 0.0)  # a zero has no sign here


@settings(max_examples=100, deadline=None)
@given(ACTIVATIONS)
def test_e4m3(x):
    (found,) = ROUND_E4M3.run(None, {"x": x})
    assert_same_bits(found, fp8.simulate(x, 1.0))


@settings(max_examples=100, deadline=None)
@given(ACTIVATIONS)
def test_nvfp4(x):
    (found,) = ROUND_NVFP4.run(None, {"x": x})
    assert_same_bits(found, nvfp4.simulate(x, 1.0))


@pytest.mark.parametrize("peak", [0.0, 1e-3, 6.0, 6.5, 3000.0, 1e6])
def test_nvfp4_blocks_of_every_size(peak):
    """From blocks whose scale rounds to zero to those whose scale saturates."""
    rng = np.random.default_rng(1)
    x = (rng.uniform(-1, 1, (2, 5, 64)) * peak).astype(np.float32)
    x[0, 0, :16] = 0
    (found,) = ROUND_NVFP4.run(None, {"x": x})
    assert_same_bits(found, nvfp4.simulate(x, 1.0))

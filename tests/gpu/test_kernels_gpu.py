"""Every kernel of the plugins on the GPU: result against the reference, bandwidth against a copy.

The kernels are compiled ahead of time and launched as a plan would do it. `make test-gpu`.
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.engines.cuda import Memory, Stream
from tests.plugins.reference import run_op

pytestmark = pytest.mark.gpu


class Device:
    """Arrays on the GPU by name, and launches of one plugin's kernels."""

    def __init__(self, kind, capability: int) -> None:
        from dflash_plugins.base import build_cubins
        from dflash_plugins.launch import LoadedKernels

        self.kind, self.stream, self.memory = kind, Stream(), Memory()
        self.loaded = LoadedKernels(build_cubins(kind, (capability,)), capability)

    def tensor(self, name: str, array: np.ndarray):
        from dflash_plugins.base import Tensor

        address = self.memory.allocate(name, array.nbytes)
        self.stream.upload(address, np.ascontiguousarray(array))
        self.stream.wait()
        return Tensor(address, array.shape)

    def run(self, inputs, outputs) -> None:
        size = self.kind.workspace_bytes([t.shape for t in inputs])
        workspace = self.memory.allocate("workspace", size)
        for launch in self.kind.launches(inputs, outputs, workspace):
            self.loaded.launch(launch, self.stream.handle)
        self.stream.wait()

    def fetch(self, tensor, dtype) -> np.ndarray:
        array = np.zeros(tensor.shape, dtype)
        self.stream.download(array, tensor.address)
        self.stream.wait()
        return array


def make(name: str, settings: dict, capability: int, monkeypatch) -> Device:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from dflash_plugins.registry import KINDS

    return Device(KINDS[name](settings), capability)


@pytest.mark.parametrize(("batch", "width", "vocabulary"), [(1, 8, 49152), (3, 16, 201088)])
def test_speculative_verify(capability, monkeypatch, batch, width, vocabulary):
    rng = np.random.default_rng(0)
    settings = {"dtype": "FLOAT", "vocabulary": vocabulary, "width": width}
    device = make("SpeculativeVerify", settings, capability, monkeypatch)
    given = {
        "logits": rng.integers(0, 50, (batch, width, vocabulary)).astype(np.float32),
        "tokens": rng.integers(0, vocabulary, (batch, width)),
        "rows": np.tile(np.arange(width), (batch, 1)),
        "lengths": rng.integers(0, 99, batch).astype(np.int32),
    }
    given["tokens"][:, 1:3] = given["logits"].argmax(-1)[:, :2]
    kinds = {"accepted": np.int32, "anchor": np.int64, "context": np.int32}
    wanted = run_op("SpeculativeVerify", given, kinds)
    inputs = [device.tensor(name, array) for name, array in given.items()]
    outputs = [device.tensor(n, np.full(batch, -9, t)) for n, t in kinds.items()]
    device.run(inputs, outputs)
    for tensor, dtype, expected in zip(outputs, kinds.values(), wanted, strict=True):
        np.testing.assert_array_equal(device.fetch(tensor, dtype), expected)


@pytest.mark.parametrize("final", [0, 1])
def test_confidence_commit(capability, monkeypatch, final):
    rng = np.random.default_rng(1)
    batch, slots, vocabulary = 2, 15, 49152
    settings = {"dtype": "FLOAT", "vocabulary": vocabulary, "slots": slots, "final": final}
    device = make("ConfidenceCommit", settings, capability, monkeypatch)
    given = {
        "logits": rng.normal(0, 3, (batch, slots, vocabulary)).astype(np.float32),
        "drafts": rng.integers(0, vocabulary, (batch, slots)),
        "committed": rng.random((batch, slots)) < 0.3,
        "share": np.array([5]),
    }
    kinds = {"new_drafts": np.int64, "new_committed": np.bool_}
    wanted = run_op("ConfidenceCommit", given, kinds, final=final)
    inputs = [device.tensor(name, array) for name, array in given.items()]
    outputs = [device.tensor(n, np.zeros((batch, slots), t)) for n, t in kinds.items()]
    device.run(inputs, outputs)
    for tensor, dtype, expected in zip(outputs, kinds.values(), wanted, strict=True):
        np.testing.assert_array_equal(device.fetch(tensor, dtype), expected)


def test_kv_injection(capability, monkeypatch):
    rng = np.random.default_rng(2)
    batch, rows, layers, heads, dim, capacity = 2, 5, 3, 3, 64, 40
    settings = {
        "dtype": "FLOAT", "layers": layers, "kv_heads": heads, "head_dim": dim,
        "capacity": capacity, "cache_dim": dim, "epsilon": 1e-5,
    }  # fmt: skip
    device = make("KVInjection", settings, capability, monkeypatch)
    shapes = {
        "kv": (batch, rows, layers * 2 * heads * dim), "k_norm": (layers, dim),
        "lengths": (batch,), "cos": (capacity, dim // 2), "sin": (capacity, dim // 2),
        **{f"{k}_cache.{i}": (batch, heads, capacity, dim) for i in range(layers) for k in "kv"},
    }  # fmt: skip
    given = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    given["lengths"] = np.array([0, 31], np.int32)
    caches = [name for name in given if "_cache" in name]
    wanted = run_op(
        "KVInjection", given, {f"{n}.out": np.float32 for n in caches}, kv_heads=heads, epsilon=1e-5
    )
    inputs = [device.tensor(name, array) for name, array in given.items()]
    device.run(inputs, [device.tensor("done", np.ones(batch, np.int32))])
    for tensor, expected in zip(inputs[5:], wanted, strict=True):
        found = device.fetch(tensor, np.float32)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_reading_the_logits_is_near_the_bandwidth_of_a_copy(capability, monkeypatch):
    """The first launch of two plugins reads all logits once; a copy reads and writes as much."""
    from time import perf_counter

    from dflash_trt.engines.cuda import check, runtime

    rows, vocabulary = 128, 201088
    settings = {"dtype": "BF16", "vocabulary": vocabulary, "width": 16}
    device = make("SpeculativeVerify", settings, capability, monkeypatch)
    size = rows * vocabulary * 2
    logits, copy = (device.memory.allocate(n, size) for n in ("logits", "copy"))
    device.stream.zero(logits, size)
    workspace = device.memory.allocate("w", device.kind.workspace_bytes([(), (), (8, 16), ()]))
    from dflash_plugins.vocabulary import partials

    parts = partials.fields(workspace, rows, vocabulary)
    launch = partials.launch(logits, rows, vocabulary, parts)
    cuda = runtime()
    kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice

    def seconds(work) -> float:
        work()
        device.stream.wait()
        begin = perf_counter()
        for _ in range(20):
            work()
        device.stream.wait()
        return (perf_counter() - begin) / 20

    reading = seconds(lambda: device.loaded.launch(launch, device.stream.handle))
    copying = seconds(
        lambda: check(cuda.cudaMemcpyAsync(copy, logits, size, kind, device.stream.handle))
    )
    achieved, possible = size / reading, 2 * size / copying
    print(f"best_of_tile {achieved / 1e9:.0f} GB/s, copy {possible / 1e9:.0f} GB/s")
    assert achieved > 0.5 * possible


@pytest.mark.parametrize(("batch", "size", "rows"), [(1, 1, 16), (1, 16, 16), (4, 40, 32)])
def test_mixture_of_experts(capability, monkeypatch, batch, size, rows):
    """Sizes of gpt-oss with fewer experts; the inner activation and the result are rounded to bf16."""
    import ml_dtypes

    rng = np.random.default_rng(3)
    hidden, experts, top_k = 2880, 8, 4
    attributes = {"top_k": top_k, "alpha": 1.702, "limit": 7.0}
    settings = {
        "dtype": "BF16", "hidden": hidden, "inner": hidden, "experts": experts, "rows": rows,
        **attributes,
    }  # fmt: skip
    device = make("MixtureOfExperts", settings, capability, monkeypatch)
    given = {
        "x": rng.normal(0, 1, (batch, size, hidden)),
        "router_logits": rng.normal(0, 1, (batch, size, experts)),
    }
    for name, height in (("gate_up", 2 * hidden), ("down", hidden)):
        given[f"{name}_blocks"] = rng.integers(0, 256, (experts, height, hidden // 2), np.uint8)
        given[f"{name}_scales"] = rng.integers(116, 122, (experts, height, hidden // 32), np.uint8)
        given[f"{name}_bias"] = rng.normal(0, 1, (experts, height))
    stored = {
        n: a if a.dtype == np.uint8 else a.astype(ml_dtypes.bfloat16) for n, a in given.items()
    }
    plain = {n: a if a.dtype == np.uint8 else a.astype(np.float32) for n, a in stored.items()}
    (wanted,) = run_op("MixtureOfExperts", plain, {"y": np.float32}, **attributes)
    inputs = [device.tensor(name, array) for name, array in stored.items()]
    y = device.tensor("y", np.full((batch, size, hidden), np.nan, ml_dtypes.bfloat16))
    device.run(inputs, [y])
    found = device.fetch(y, ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(found, wanted, atol=2**-7 * np.abs(wanted).max(), rtol=0)

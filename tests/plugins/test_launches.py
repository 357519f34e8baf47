"""What a plugin launches, in the interpreter: addresses in the order that it gives them, types by its
kernels' signatures, one workspace. As a plan would do it on the device."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from tests.plugins.reference import run_op

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install 'dflash-trt[tensorrt-rtx]'")

from dflash_plugins.base import Tensor  # noqa: E402
from dflash_plugins.registry import KINDS  # noqa: E402
from dflash_plugins.table import SETTINGS  # noqa: E402

TYPES = {
    "*bf16": torch.bfloat16, "*fp32": torch.float32, "*i32": torch.int32, "*i64": torch.int64,
    "*u8": torch.uint8, "*i8": torch.int8,
}  # fmt: skip
POISON = 0x7B


class Host:
    """Arrays by address, and launches of one plugin's kernels on them."""

    def __init__(self, name: str, **settings: object) -> None:
        self.kind = KINDS[name](settings)
        self.arrays: list[np.ndarray] = []

    def tensor(self, array: np.ndarray) -> Tensor:
        self.arrays.append(np.ascontiguousarray(array))
        return Tensor(self.arrays[-1].ctypes.data, array.shape)

    def array(self, tensor: Tensor) -> np.ndarray:
        return next(a for a in self.arrays if a.ctypes.data == tensor.address)

    def run(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        size = self.kind.workspace_bytes([t.shape for t in inputs])
        workspace = self.tensor(np.full(size, POISON, np.uint8))
        kernels = {kernel.name: kernel for kernel in self.kind.kernels()}
        for launch in self.kind.launches(inputs, outputs, workspace.address):
            kernel, values = kernels[launch.kernel], iter(launch.arguments)
            arguments = [self._argument(kind, values) for kind in kernel.signature.values()]
            kernel.function[launch.grid](*arguments, **kernel.constants)

    def _argument(self, kind: str | tuple[str, ...], values: Iterator[int | float]) -> object:
        if isinstance(kind, tuple):
            return tuple(self._argument(part, values) for part in kind)
        value = next(values)
        return self._behind(int(value), TYPES[kind]) if kind.startswith("*") else value

    def _behind(self, address: int, dtype: object) -> object:
        """The memory from `address` to the end of the array that it lies in."""
        for array in self.arrays:
            begin = address - array.ctypes.data
            if 0 <= begin < array.nbytes:
                whole = array.view(np.uint8).reshape(-1)
                end = begin + (len(whole) - begin) // dtype.itemsize * dtype.itemsize
                return torch.from_numpy(whole[begin:end]).view(dtype)
        raise AssertionError(f"{address} is no address of anything")


@pytest.mark.parametrize("name", SETTINGS)
def test_signatures_are_those_of_the_functions(name: str) -> None:
    """The device takes arguments by their place."""
    for kernel in KINDS[name](SETTINGS[name]).kernels():
        names = kernel.function.arg_names
        assert list(kernel.signature) == names[: len(kernel.signature)], kernel.name
        assert set(kernel.constants) == set(names[len(kernel.signature) :]), kernel.name


def test_speculative_verify() -> None:
    rng = np.random.default_rng(0)
    batch, width, vocabulary = 3, 4, 4100
    given = {
        "logits": rng.integers(0, 50, (batch, width, vocabulary)).astype(np.float32),
        "tokens": rng.integers(0, vocabulary, (batch, width + 2)),
        "rows": np.tile(np.arange(1, width + 1), (batch, 1)),
        "lengths": rng.integers(0, 99, batch).astype(np.int32),
    }
    given["tokens"][1, 2:4] = given["logits"].argmax(-1)[1, :2]
    kinds = {"accepted": np.int32, "anchor": np.int64, "context": np.int32}
    wanted = run_op("SpeculativeVerify", given, kinds)
    assert len(set(wanted[0])) > 1
    host = Host("SpeculativeVerify", dtype="FLOAT", vocabulary=vocabulary, width=width)
    outputs = [host.tensor(np.full(batch, -9, kind)) for kind in kinds.values()]
    host.run([host.tensor(array) for array in given.values()], outputs)
    for tensor, expected in zip(outputs, wanted, strict=True):
        np.testing.assert_array_equal(host.array(tensor), expected)


@pytest.mark.parametrize("final", [0, 1])
def test_confidence_commit(final: int) -> None:
    rng = np.random.default_rng(1)
    batch, slots, vocabulary = 2, 5, 4100
    given = {
        "logits": rng.normal(0, 3, (batch, slots, vocabulary)).astype(np.float32),
        "drafts": rng.integers(0, vocabulary, (batch, slots)),
        "committed": rng.random((batch, slots)) < 0.3,
        "share": np.array([2]),
    }
    kinds = {"new_drafts": np.int64, "new_committed": np.bool_}
    wanted = run_op("ConfidenceCommit", given, kinds, final=final)
    settings = {"dtype": "FLOAT", "vocabulary": vocabulary, "slots": slots, "final": final}
    host = Host("ConfidenceCommit", **settings)
    outputs = [host.tensor(np.zeros((batch, slots), kind)) for kind in kinds.values()]
    host.run([host.tensor(array) for array in given.values()], outputs)
    for tensor, expected in zip(outputs, wanted, strict=True):
        np.testing.assert_array_equal(host.array(tensor), expected)


CACHE = {"dtype": "FLOAT", "kv_heads": 3, "head_dim": 8, "capacity": 11, "cache_dim": 8}


def cache_case(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """lengths [2] and tables for `CACHE`, with room for `rows` more."""
    table = (CACHE["capacity"], CACHE["head_dim"] // 2)
    return {
        "lengths": np.array([0, CACHE["capacity"] - rows], np.int32),
        "cos": rng.normal(0, 1, table).astype(np.float32),
        "sin": rng.normal(0, 1, table).astype(np.float32),
    }


def test_kv_injection() -> None:
    rng = np.random.default_rng(2)
    rows, layers, shape = 4, 2, (2, 3, 11, 8)
    caches = [f"{kind}_cache.{i}" for i in range(layers) for kind in "kv"]
    given = {
        "kv": rng.normal(0, 1, (2, rows, layers * 2 * 3 * 8)).astype(np.float32),
        "k_norm": rng.normal(0, 1, (layers, 8)).astype(np.float32),
        **cache_case(rng, rows),
        **{name: rng.normal(0, 1, shape).astype(np.float32) for name in caches},
    }
    kinds = {f"{name}.out": np.float32 for name in caches}
    wanted = run_op("KVInjection", given, kinds, kv_heads=3, epsilon=1e-5)
    host = Host("KVInjection", **CACHE, layers=layers, epsilon=1e-5)
    inputs = [host.tensor(array) for array in given.values()]
    done = host.tensor(np.ones(2, np.int32))
    host.run(inputs, [done])
    for tensor, expected in zip(inputs[5:], wanted, strict=True):
        np.testing.assert_allclose(host.array(tensor), expected, rtol=1e-5, atol=1e-5)
    assert host.array(done).tolist() == [0, 0]


def test_block_write() -> None:
    rng = np.random.default_rng(3)
    rows, case = 5, cache_case(rng, 5)
    keys, values = rng.normal(0, 1, (2, 2, rows, 3 * 8)).astype(np.float32)
    (rotated,) = run_op("RotateHeads", {"x": keys, **case}, {"out": np.float32}, heads=3)
    host = Host("BlockWrite", **CACHE)
    caches = [host.tensor(np.zeros((2, 3, 11, 8), np.float32)) for _ in range(2)]
    inputs = [host.tensor(array) for array in (keys, values, *case.values())]
    host.run([*inputs, *caches], [host.tensor(np.ones(2, np.int32))])
    split = values.reshape(2, rows, 3, 8).transpose(0, 2, 1, 3)
    for cache, expected in zip(caches, (rotated, split), strict=True):
        for b, start in enumerate(case["lengths"]):
            found = host.array(cache)[b, :, start : start + rows]
            np.testing.assert_allclose(found, expected[b], rtol=1e-5, atol=1e-5)


def test_mixture_of_experts() -> None:
    rng = np.random.default_rng(4)
    hidden, inner, experts, attributes = 96, 64, 5, {"top_k": 2, "alpha": 1.702, "limit": 7.0}
    given = {
        "x": rng.normal(0, 1, (2, 3, hidden)),
        "router_logits": rng.normal(0, 1, (2, 3, experts)),
    }
    for name, height, width in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        given[f"{name}_blocks"] = rng.integers(0, 256, (experts, height, width // 2), np.uint8)
        given[f"{name}_scales"] = rng.integers(118, 124, (experts, height, width // 32), np.uint8)
        given[f"{name}_bias"] = rng.normal(0, 1, (experts, height))
    stored = {
        n: a if a.dtype == np.uint8 else a.astype(ml_dtypes.bfloat16) for n, a in given.items()
    }
    plain = {n: a if a.dtype == np.uint8 else a.astype(np.float32) for n, a in stored.items()}
    (wanted,) = run_op("MixtureOfExperts", plain, {"y": np.float32}, **attributes)
    sizes = {"hidden": hidden, "inner": inner, "experts": experts, "rows": 16}
    host = Host("MixtureOfExperts", dtype="BF16", **sizes, **attributes)
    y = host.tensor(np.full((2, 3, hidden), np.nan, ml_dtypes.bfloat16))
    host.run([host.tensor(array) for array in stored.values()], [y])
    bound = 3 * 2**-8 * np.abs(wanted).max()  # as in test_mixture_of_experts
    np.testing.assert_allclose(host.array(y).astype(np.float32), wanted, atol=bound, rtol=0)

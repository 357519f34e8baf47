"""The network while it grows: values by name, and small words for TensorRT's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.plan import Binding, NetworkReport, PlanRequest

TENSOR_TYPES: dict[int, str] = {
    onnx.TensorProto.INT32: "INT32",
    onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.BOOL: "BOOL",
}
NUMPY_TYPES = {
    "BF16": ml_dtypes.bfloat16,
    "HALF": np.float16,
    "FLOAT": np.float32,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class CacheView:
    """A cache as later nodes see it: the engine input, and what must have run before it is read."""

    tensor: Any
    name: str
    done: Any = None


@dataclass
class Network:
    """A TensorRT network with its values by the names of the source graph."""

    trt: Any
    definition: Any
    request: PlanRequest
    report: NetworkReport = field(default_factory=NetworkReport)
    values: dict[str, Any] = field(default_factory=dict)
    dimensions: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    folded: dict[str, np.ndarray] = field(default_factory=dict)
    sinks: dict[str, str] = field(default_factory=dict)
    plugins: dict[str, Any] = field(default_factory=dict)
    kept: list[np.ndarray] = field(default_factory=list)
    memo: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    node: str = ""

    @property
    def real(self) -> Any:
        """The type of activations."""
        return getattr(self.trt.DataType, self.request.activations)

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What several nodes need the same of is written once."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    # -- inputs and outputs

    def add_input(
        self, name: str, dtype: str, shape: Sequence[int], role: str, made_of: Any = ("", "")
    ) -> Any:
        tensor = self.definition.add_input(name, getattr(self.trt.DataType, dtype), tuple(shape))
        if tensor is None:
            raise InputError(f"the input '{name}' was not accepted by TensorRT")
        self.report.bindings.append(
            Binding(name, "input", dtype, tuple(shape), role, made_of=made_of)
        )
        return tensor

    def mark_output(self, tensor: Any, name: str, role: str, alias: str = "") -> None:
        tensor.name = name
        self.definition.mark_output(tensor)
        shape = tuple(tensor.shape)
        dtype = tensor.dtype.name
        self.report.bindings.append(Binding(name, "output", dtype, shape, role, alias))

    # -- words for layers

    def out(self, layer: Any, label: str = "", index: int = 0) -> Any:
        """A layer's output; the layer is named after the node that is being written."""
        if layer is None:
            raise InputError(f"node '{self.node}': TensorRT did not accept a layer ({label})")
        layer.name = f"{self.node}/{label}#{self.definition.num_layers}"
        return layer.get_output(index)

    def constant(self, value: Any, dtype: str) -> Any:
        array = np.ascontiguousarray(value, NUMPY_TYPES.get(dtype) or np.dtype(dtype.lower()))
        array = array.reshape(np.shape(value))
        self.kept.append(array)
        if dtype == "BF16":
            weights = self.trt.Weights(self.trt.DataType.BF16, array.ctypes.data, array.size)
        else:
            weights = self.trt.Weights(array)
        return self.out(self.definition.add_constant(array.shape, weights), "constant")

    def elementwise(self, a: Any, b: Any, operation: str) -> Any:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.out(self.definition.add_elementwise(a, b, kind), operation.lower())

    def unary(self, a: Any, operation: str) -> Any:
        kind = getattr(self.trt.UnaryOperation, operation)
        return self.out(self.definition.add_unary(a, kind), operation.lower())

    def cast(self, a: Any, dtype: Any) -> Any:
        kind = getattr(self.trt.DataType, dtype) if isinstance(dtype, str) else dtype
        if a.dtype == kind:
            return a
        return self.out(self.definition.add_cast(a, kind), "cast")

    def matmul(self, a: Any, b: Any, transpose_b: bool = False) -> Any:
        plain = self.trt.MatrixOperation.NONE
        second = self.trt.MatrixOperation.TRANSPOSE if transpose_b else plain
        return self.out(self.definition.add_matrix_multiply(a, plain, b, second), "matmul")

    def permute(self, a: Any, order: Sequence[int]) -> Any:
        layer = self.definition.add_shuffle(a)
        layer.first_transpose = self.trt.Permutation(list(order))
        return self.out(layer, "permute")

    def reshape(self, a: Any, dims: Sequence[int], order: Sequence[int] | None = None) -> Any:
        """Reshape to `dims` (0 copies, one -1 is inferred), then permute by `order`."""
        layer = self.definition.add_shuffle(a)
        layer.reshape_dims = tuple(dims)
        if order is not None:
            layer.second_transpose = self.trt.Permutation(list(order))
        return self.out(layer, "reshape")

    def concat(self, parts: Sequence[Any], axis: int) -> Any:
        layer = self.definition.add_concatenation(list(parts))
        layer.axis = axis
        return self.out(layer, "concat")

    def gather(self, data: Any, indices: Any, axis: int = 0) -> Any:
        return self.out(self.definition.add_gather(data, indices, axis), "gather")

    def reduce(self, a: Any, operation: str, axis: int, keep: bool) -> Any:
        kind = getattr(self.trt.ReduceOperation, operation)
        return self.out(self.definition.add_reduce(a, kind, 1 << axis, keep), operation.lower())

    # -- shapes

    def size(self, tensor: Any, axis: int) -> Any:
        """The size of one axis as an int64 tensor [1]: a constant where it is fixed."""
        fixed = tensor.shape[axis]
        if fixed >= 0:
            return self.once(("int64", fixed), lambda: self.constant([fixed], "INT64"))
        shape = self.out(self.definition.add_shape(tensor), "shape")
        return self.out(self.definition.add_slice(shape, (axis,), (1,), (1,)), "size")

    def slice_last(self, a: Any, start: int, size: int) -> Any:
        """a[..., start : start + size]."""
        return self.slice_axis(a, len(a.shape) - 1, start, size)

    def slice_axis(self, a: Any, axis: int, start: int, size: int) -> Any:
        """a[start : start + size] along `axis`; other axes whole, also where their size varies."""
        rank = len(a.shape)
        starts = [start if i == axis else 0 for i in range(rank)]
        sizes = [size if i == axis else max(a.shape[i], 0) for i in range(rank)]
        layer = self.definition.add_slice(a, starts, sizes, [1] * rank)
        if any(d < 0 for i, d in enumerate(a.shape) if i != axis):
            parts = [
                self.once(("int64", size), lambda: self.constant([size], "INT64"))
                if i == axis
                else self.size(a, i)
                for i in range(rank)
            ]
            layer.set_input(2, self.concat(parts, 0))
        return self.out(layer, "slice")

    def flatten_rows(self, x: Any) -> Any:
        """[B, S, H] -> [B*S, H]."""
        return self.reshape(x, (-1, x.shape[-1]))

    def unflatten_rows(self, y: Any, like: Any) -> Any:
        """[B*S, N] -> [B, S, N], S as in `like` [B, S, ...]."""
        steps, width = like.shape[1], y.shape[-1]
        if steps >= 0:
            return self.reshape(y, (-1, steps, width))
        layer = self.definition.add_shuffle(y)
        dims = [self.size(like, 0), self.size(like, 1), self.size(y, 1)]
        layer.set_input(1, self.concat(dims, 0))
        return self.out(layer, "reshape")

    def per_feature(self, vector: Any, rank: int) -> Any:
        """A weight [H] as [1, .., 1, H], to be broadcast over a tensor of `rank` dimensions."""
        key = ("feature", vector.name, rank)
        return self.once(key, lambda: self.reshape(vector, (1,) * (rank - 1) + (-1,)))

    def scalar(self, value: float, rank: int, dtype: str) -> Any:
        key = ("scalar", value, rank, dtype)
        return self.once(key, lambda: self.constant(np.full((1,) * rank, value), dtype))

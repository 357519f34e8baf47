"""The few CUDA calls that the TensorRT engine makes, through cuda-python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_trt.errors import InputError


def runtime() -> Any:
    """cuda-python's runtime module; a missing package is one sentence."""
    try:
        from cuda.bindings import runtime as cudart
    except ImportError as error:
        raise InputError(
            "the package cuda-python is not installed: pip install 'dflash-trt[tensorrt-rtx]'"
        ) from error
    return cudart


def check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None


def capability() -> int:
    """Compute capability of the first GPU, such as 120; refused where there is none."""
    cudart = runtime()
    status, count = cudart.cudaGetDeviceCount()
    if int(status) != 0 or count == 0:
        raise InputError("TensorRT engines need an NVIDIA GPU with a CUDA driver; none was found")
    kinds = cudart.cudaDeviceAttr
    major, minor = (
        check(cudart.cudaDeviceGetAttribute(kind, 0))
        for kind in (
            kinds.cudaDevAttrComputeCapabilityMajor,
            kinds.cudaDevAttrComputeCapabilityMinor,
        )
    )
    return 10 * int(major) + int(minor)


class Stream:
    """One stream with copies and graphs on it."""

    def __init__(self) -> None:
        self._cuda = runtime()
        self.handle = int(check(self._cuda.cudaStreamCreate()))

    def upload(self, address: int, array: np.ndarray) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        check(
            self._cuda.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, kind, self.handle)
        )

    def download(self, array: np.ndarray, address: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        check(
            self._cuda.cudaMemcpyAsync(array.ctypes.data, address, array.nbytes, kind, self.handle)
        )

    def copy_rows(self, to: int, pitch: int, source: int, width: int, rows: int) -> None:
        """Rows of `width` bytes, packed at `source`, to rows that are `pitch` bytes apart."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        check(
            self._cuda.cudaMemcpy2DAsync(to, pitch, source, width, width, rows, kind, self.handle)
        )

    def zero(self, address: int, size: int) -> None:
        check(self._cuda.cudaMemsetAsync(address, 0, size, self.handle))

    def wait(self) -> None:
        check(self._cuda.cudaStreamSynchronize(self.handle))

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` puts on the stream; the result plays it again without Python inside."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        check(self._cuda.cudaStreamBeginCapture(self.handle, mode))
        work()
        graph = check(self._cuda.cudaStreamEndCapture(self.handle))
        executable = check(self._cuda.cudaGraphInstantiate(graph, 0))
        return lambda: check(self._cuda.cudaGraphLaunch(executable, self.handle))


class Memory:
    """Device memory by name, allocated once and kept."""

    def __init__(self) -> None:
        self._cuda = runtime()
        self.addresses: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def allocate(self, name: str, size: int) -> int:
        self.addresses[name] = int(check(self._cuda.cudaMalloc(max(size, 256))))
        self.sizes[name] = size
        return self.addresses[name]

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]

    def __contains__(self, name: str) -> bool:
        return name in self.addresses

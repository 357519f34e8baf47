"""Loading compiled kernels and launching them on a stream, through cuda-python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_plugins.aot import Cubin

THREADS_PER_WARP = 32
DEFAULT_SHARED_LIMIT = 48 * 1024
# The compiler appends two pointers (scratch, profiling) to every kernel's parameters.
TRAILING_POINTERS = 2

CTYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


@dataclass(frozen=True)
class Launch:
    """One launch: kernel by name, grid, and run-time arguments with pointers as addresses."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[int | float, ...]


def pack_parameters(kinds: Sequence[str], values: Sequence[int | float]) -> list[Any]:
    """ctypes values for a kernel's parameters, the two trailing pointers included."""
    if len(kinds) != len(values):
        raise ValueError(f"the kernel takes {len(kinds)} arguments, {len(values)} were given")
    packed: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        packed.append(ctypes.c_void_p(int(value)) if kind.startswith("*") else CTYPES[kind](value))
    return packed + [ctypes.c_void_p(0) for _ in range(TRAILING_POINTERS)]


def check(result: tuple[Any, ...]) -> Any:
    """Unwrap a driver call; raise with the driver's name for the error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


class LoadedKernels:
    """The kernels of one plugin on the current device, loaded once and kept."""

    def __init__(self, cubins: Sequence[Cubin], capability: int) -> None:
        own = [cubin for cubin in cubins if cubin.capability == capability]
        if not own:
            held = sorted({cubin.capability for cubin in cubins})
            raise RuntimeError(
                f"the plan carries kernels for capabilities {held}, this GPU has {capability}"
            )
        self._cubins = {cubin.name: cubin for cubin in own}
        self._functions = {cubin.name: _load(cubin) for cubin in own}

    def launch(self, launch: Launch, stream: int) -> None:
        from cuda.bindings import driver

        cubin, function = self._cubins[launch.kernel], self._functions[launch.kernel]
        parameters = pack_parameters(cubin.arguments, launch.arguments)
        pointers = (ctypes.c_void_p * len(parameters))(
            *(ctypes.addressof(parameter) for parameter in parameters)
        )
        threads = cubin.num_warps * THREADS_PER_WARP
        check(
            driver.cuLaunchKernel(
                function, *launch.grid, threads, 1, 1, cubin.shared, stream,
                ctypes.addressof(pointers), 0,
            )
        )  # fmt: skip


def _load(cubin: Cubin) -> Any:
    from cuda.bindings import driver

    module = check(driver.cuModuleLoadData(cubin.code))
    function = check(driver.cuModuleGetFunction(module, cubin.symbol.encode()))
    if cubin.shared > DEFAULT_SHARED_LIMIT:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, cubin.shared))
    return function


def device_capability() -> int:
    """Compute capability of the current device, such as 120."""
    from cuda.bindings import driver

    device = check(driver.cuCtxGetDevice())
    names = driver.CUdevice_attribute
    major = check(
        driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    )
    minor = check(
        driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    )
    return 10 * int(major) + int(minor)

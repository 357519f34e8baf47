"""The TensorRT module in use: the full package or TensorRT-RTX, behind one code path."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from dflash_trt.errors import InputError

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
# Compute capabilities that each backend can compile for and that have matrix products in bf16. The
# full package compiles for the GPU it runs on, and its libraries come with the GPU's software.
CAPABILITIES = {
    "tensorrt": (90, 100, 103, 120, 121),
    "tensorrt-rtx": (80, 86, 89, 120, 121),
}
# The first compute capability with matrix products in a precision: Ampere, Ada, Blackwell.
FIRST = {"bf16": 80, "fp8": 89, "nvfp4": 100}


@dataclass(frozen=True)
class Api:
    """A TensorRT module, the backend it stands for and the version that plans are tied to."""

    backend: str
    module: ModuleType
    version: str


def load(backend: str) -> Api:
    """Import the module of `backend`; a missing package is one sentence with the extra's name."""
    if backend not in MODULES:
        raise InputError(f"unknown TensorRT backend '{backend}'; known: {', '.join(MODULES)}")
    try:
        module = importlib.import_module(MODULES[backend])
    except ImportError as error:
        raise InputError(_advice(backend, error)) from error
    return Api(backend, module, str(module.__version__))


def _advice(backend: str, error: ImportError) -> str:
    if backend == "tensorrt-rtx":
        return (
            "the package tensorrt-rtx-cu13 is not installed: pip install 'dflash-trt[tensorrt-rtx]'"
        )
    return (
        f"the full TensorRT package (11 or newer) cannot be imported ({error}); it builds on a "
        "machine with its libraries and a GPU only, elsewhere use --backend tensorrt-rtx"
    )


def check_capabilities(backend: str, capabilities: tuple[int, ...]) -> None:
    """Refuse a compute capability that the backend cannot compile for."""
    known = CAPABILITIES[backend]
    for capability in capabilities:
        if capability not in known:
            names = ", ".join(f"{c / 10:.1f}" for c in known)
            raise InputError(
                f"--backend {backend} cannot compile for compute capability "
                f"{capability / 10:.1f}; it can for {names}"
            )
    if not capabilities:
        raise InputError("no compute capability was given, for example 12.0")


def check_units(precision: str, capabilities: tuple[int, ...]) -> None:
    """Refuse a precision that a GPU has no matrix products for."""
    for capability in capabilities:
        if capability < FIRST[precision]:
            raise InputError(
                f"precision '{precision}': GPUs of compute capability {capability / 10:.1f} have no "
                f"products in it, those of {FIRST[precision] / 10:.1f} and later do"
            )

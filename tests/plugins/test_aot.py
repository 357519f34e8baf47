"""Kernels compiled ahead of time: what a plan carries, and how it is launched."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="pip install 'dflash-trt[tensorrt-rtx]'")

from dflash_plugins.aot import Cubin, flat_arguments, pack, unpack
from dflash_plugins.base import Tensor
from dflash_plugins.launch import LoadedKernels, pack_parameters
from dflash_plugins.registry import KINDS
from dflash_plugins.table import SETTINGS

CUBINS = [
    Cubin("a", "a_sym", 120, 4, 0, ("*bf16", "i32"), b"code of a"),
    Cubin("b", "b_sym", 121, 1, 512, ("*fp32",), b"b"),
]


def test_kernels_survive_the_way_through_a_plan():
    assert unpack(*pack(CUBINS)) == CUBINS


def test_a_gpu_without_kernels_is_named_with_those_there_are():
    with pytest.raises(RuntimeError, match=r"\[120, 121\], this GPU has 90"):
        LoadedKernels(CUBINS, 90)


def test_parameters_are_packed_by_their_types_with_two_pointers_behind():
    packed = pack_parameters(("*bf16", "i32"), (0x1000, -3))
    assert [type(p) for p in packed] == [ctypes.c_void_p, ctypes.c_int32] + [ctypes.c_void_p] * 2
    assert packed[0].value == 0x1000
    assert packed[1].value == -3
    wide, real = pack_parameters(("i64", "fp32"), (1 << 40, 0.5))[:2]
    assert (wide.value, real.value) == (1 << 40, 0.5)
    with pytest.raises(ValueError, match="takes 2 arguments, 1"):
        pack_parameters(("*bf16", "i32"), (1,))


def test_arguments_keep_their_order_and_tuples_are_spread():
    signature = {"x": "*bf16", "caches": ("*fp32", "*bf16"), "rows": "i32"}
    assert flat_arguments(signature) == ("*bf16", "*fp32", "*bf16", "i32")


SHAPES = {
    "KVInjection": [(2, 4, 8192), (8, 64), (2,), (9, 32), (9, 32), *[(2, 8, 9, 64)] * 16],
    "BlockWrite": [(2, 4, 512), (2, 4, 512), (2,), (9, 32), (9, 32), *[(2, 8, 9, 64)] * 2],
    "ConfidenceCommit": [(2, 15, 201088), (2, 15), (2, 15), (1,)],
    "SpeculativeVerify": [(2, 16, 201088), (2, 16), (2, 16), (2,)],
    "MixtureOfExperts": [
        (2, 16, 2880),
        (2, 16, 128),
        (128, 5760, 1440),
        (128, 5760, 90),
        (128, 5760),
        (128, 2880, 1440),
        (128, 2880, 90),
        (128, 2880),
    ],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_launches_fit_the_kernels_signatures(name):
    """As many arguments as the kernel takes, no two tensors mixed up in the workspace."""
    kind = KINDS[name](SETTINGS[name])
    assert len(SHAPES[name]) == len(kind.input_types())
    inputs = [Tensor(0x1000 * (i + 1), shape) for i, shape in enumerate(SHAPES[name])]
    outputs = [Tensor(0x900000 + i, inputs[o.like].shape) for i, o in enumerate(kind.outputs())]
    kernels = {kernel.name: kernel for kernel in kind.kernels()}
    launches = kind.launches(inputs, outputs, 0x5000000)
    assert {launch.kernel for launch in launches} == set(kernels)
    for launch in launches:
        arguments = flat_arguments(kernels[launch.kernel].signature)
        pack_parameters(arguments, launch.arguments)
    parts = [a for x in launches for a in x.arguments if a >= 0x5000000]
    if parts:
        assert max(parts) < 0x5000000 + kind.workspace_bytes([t.shape for t in inputs])
    used = {a for launch in launches for a in launch.arguments}
    assert {t.address for t in (*inputs, *outputs)} <= used


def test_no_kernel_spills_and_bulk_loads_are_sixteen_bytes_wide():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "dflash_plugins.table", "--capability", "120"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 11
    for _, kernel, _, registers, spills, _, load, store in rows:
        assert int(spills) == 0
        assert 0 < int(registers) < 200
        if kernel in ("write_rows", "best_of_tile", "gate_up", "down", "combine"):
            assert int(load) == 16
        if kernel in ("write_rows", "down", "combine"):
            assert int(store) == 16

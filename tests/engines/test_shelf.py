"""The quantising half of a TensorRT build, without its compiler."""

from __future__ import annotations

import tempfile
from threading import Event
from time import sleep

import numpy as np
import pytest

from dflash_trt.engines import tensorrt_directory, tensorrt_weights
from dflash_trt.engines.build import BuildOptions
from dflash_trt.engines.directory import read_manifest
from dflash_trt.engines.tensorrt_directory import TensorRTOptions, build_tensorrt, read_plans
from dflash_trt.engines.tensorrt_weights import Encoded, Shelf
from dflash_trt.errors import InputError
from dflash_trt.quantization import calibration
from tests.engines.conftest import BLOCK, CHUNK, SLOTS

OPTIONS = BuildOptions("tiny", BLOCK, "fp8", max_seq_len=64, max_batch=SLOTS)


def test_a_shelf_gives_back_what_was_put(tmp_path):
    """In any type and order; afterwards nothing lies in the folder."""
    made = [np.arange(24, dtype=t).reshape(4, 6) for t in (np.uint8, np.float32, np.int64)]
    with Shelf(tmp_path) as shelf:
        for number, array in enumerate(made):
            parts = {"a": array, "b": array.T}
            shelf.put(str(number), Encoded(parts, np.float32([[number]]), 0.5))
        for number, array in reversed(list(enumerate(made))):
            found = shelf.take(str(number))
            np.testing.assert_array_equal(found.parts["a"], array)
            np.testing.assert_array_equal(found.parts["b"], array.T)
            assert (found.parts["b"].dtype, found.scale[0, 0]) == (array.dtype, number)
    assert list(tmp_path.iterdir()) == []


def test_a_shelf_is_no_file_of_the_engine(tiny_plans, tiny_checkpoints, tmp_path, monkeypatch):
    """Also where an open file keeps a name, as on NFS."""
    named = tempfile.NamedTemporaryFile
    monkeypatch.setattr(tensorrt_weights.tempfile, "TemporaryFile", named)
    reports = list(read_plans(tiny_plans["fp8"])["plans"].values())
    monkeypatch.setattr(tensorrt_directory, "compile_plans", lambda *_: reports)
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=CHUNK)
    build_tensorrt(*tiny_checkpoints, OPTIONS, own, tmp_path / "e")
    known = read_manifest(tiny_plans["fp8"]).files
    assert read_manifest(tmp_path / "e").files.keys() == {
        name for name in known if not name.endswith(".engine")
    }


@pytest.fixture
def build(tiny_checkpoints, tmp_path, monkeypatch):
    """A build with another compiler and another way to quantise; pieces of one weight."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")
    monkeypatch.setattr(calibration, "PIECE_BYTES", 1)

    def run(compiler, encode):
        monkeypatch.setattr(tensorrt_directory, "compile_plans", compiler)
        monkeypatch.setattr(tensorrt_directory, "encode", encode)
        own = TensorRTOptions("tensorrt-rtx", (120,), chunk=CHUNK)
        build_tensorrt(*tiny_checkpoints, OPTIONS, own, tmp_path / "e")

    yield run
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_ends_does_not_wait_for_all_weights(build):
    """Ctrl-C in the compiler, while the first weight is being quantised."""
    begun, quantised = Event(), []

    def interrupted(*_):
        begun.wait()
        raise KeyboardInterrupt

    def slow(weight, *_):
        quantised.append(weight.shape)
        begun.set()
        sleep(0.2)
        return Encoded({}, np.float32([[1]]), 1.0)

    with pytest.raises(KeyboardInterrupt):
        build(interrupted, slow)
    assert len(quantised) == 1


def test_weights_that_cannot_be_quantised_end_the_compiler(build):
    def endless(plans, folder, backend, capabilities, progress):
        while True:
            sleep(0.01)
            progress("compile")

    def refusing(*_):
        raise InputError("no such weight")

    with pytest.raises(InputError, match="no such weight"):
        build(endless, refusing)

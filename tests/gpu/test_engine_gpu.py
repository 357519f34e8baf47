"""Plans on the GPU against the CPU engine, token by token, with and without CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.engines.onnxruntime import OnnxRuntimePair
from dflash_trt.lowering.tensorrt.api import CAPABILITIES
from tests.tiny import tiny_drafter, tiny_target

pytestmark = pytest.mark.gpu
BLOCK = 4


@pytest.fixture(scope="module")
def engines(capability, tmp_path_factory):
    """(folder of the GPU engine, CPU engine), both of the same tiny pair."""
    from dflash_trt.engines.tensorrt_directory import TensorRTOptions, build_tensorrt

    backend = "tensorrt-rtx" if capability in CAPABILITIES["tensorrt-rtx"] else "tensorrt"
    folder = tmp_path_factory.mktemp("gpu")
    pair = open_target(tiny_target(folder / "t")), open_drafter(tiny_drafter(folder / "d"))
    common = {"block": BLOCK, "max_seq_len": 64, "max_batch": 2}
    options = BuildOptions("gpu", precision="bf16", **common)
    own = TensorRTOptions(backend, (capability,), chunk=8, step=True)
    build_tensorrt(*pair, options, own, folder / "gpu")
    build_cpu(*pair, BuildOptions("cpu", precision="fp32", **common), folder / "cpu")
    return folder / "gpu", OnnxRuntimePair(folder / "cpu", threads=1)


def generate(pair, prompt, cycles: int, width: int = BLOCK) -> list[int]:
    pair.release(0)
    for begin in range(0, len(prompt), 8):
        pair.prefill(0, prompt[begin : begin + 8], inject=width > 1)
    found = [int(pair.anchor[0])]
    for _ in range(cycles):
        if width > 1:
            pair.draft([0], width - 1)
        pair.verify([0], width)
        found += [*pair.tokens[0, 1 : int(pair.accepted[0])].tolist(), int(pair.anchor[0])]
    return found


@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_equal_those_of_the_cpu_engine(engines, graphs):
    """bf16 against fp32: the tiny model's margins are wide, the first tokens must agree."""
    from dflash_trt.engines.tensorrt import TensorRTPair

    folder, cpu = engines
    gpu = TensorRTPair(folder, graphs=graphs)
    prompt = np.arange(3, 24, dtype=np.int64)
    assert generate(gpu, prompt, 4)[:4] == generate(cpu, prompt, 4)[:4]


def test_speculative_equals_autoregressive_and_graphs_change_nothing(engines):
    from dflash_trt.engines.tensorrt import TensorRTPair

    folder, _ = engines
    prompt = np.arange(40, 60, dtype=np.int64)
    plain, played = (TensorRTPair(folder, graphs=g) for g in (False, True))
    drafted = generate(plain, prompt, 6)
    assert generate(played, prompt, 6) == drafted
    steps = generate(played, prompt, len(drafted), width=1)
    assert steps[: len(drafted)] == drafted


def test_logits_rows_are_those_of_the_cpu_engine(engines):
    """After a prefill and after a verify; bf16 against fp32."""
    from dflash_trt.engines.tensorrt import TensorRTPair

    folder, cpu = engines
    gpu, rows = TensorRTPair(folder), []
    for pair in (gpu, cpu):
        pair.release(1)
        pair.prefill(1, np.arange(3, 10, dtype=np.int64), inject=True, logits=True)
        found = [np.array(pair.logits[0, 0])]
        pair.draft([1], BLOCK - 1)
        pair.verify([1], BLOCK, logits=True)
        rows.append([*found, np.array(pair.logits[0, 0])])
    np.testing.assert_allclose(rows[0], rows[1], atol=0.15)

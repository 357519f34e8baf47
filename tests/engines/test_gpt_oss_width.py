"""A layer pair of gpt-oss at full width: the CPU engine against transformers, the weights file of plans.

Hidden and inner size 2880, 64 heads over 8, four experts to a token, MXFP4; one sliding and one full
layer, random weights. The everyday run has eight experts a layer; `-m large` has gpt-oss-120b's
128. Window and vocabulary are small, so that a few tokens cross the one and the other costs nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.checkpoints import DrafterCheckpoint, open_drafter, open_target
from dflash_trt.checkpoints.described import AbsentTensors, DescribedTarget
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.engines.onnxruntime import OnnxRuntimePair
from dflash_trt.engines.tensorrt_directory import TensorRTOptions, build_tensorrt
from tests import tiny
from tests.engines.weights_file import check_weights_file
from tests.ops.run import run_op
from tests.tiny_gpt_oss import tiny_gpt_oss

SIZE, INNER, LAYERS = 2880, 2880, 2
PROMPT = np.array([17, 250, 3, 99, 42])
LARGE = pytest.param(128, marks=pytest.mark.large)


@pytest.fixture(scope="module", params=[8, LARGE])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(target, drafter) on disk."""
    folder = tmp_path_factory.mktemp("width")
    target = tiny_gpt_oss(
        folder / "target", hidden_size=SIZE, intermediate_size=INNER, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=request.param, sliding_window=4,
        num_experts_per_tok=4, num_hidden_layers=LAYERS,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    drafter = tiny.tiny_drafter(
        folder / "drafter", hidden_size=SIZE, num_hidden_layers=1, num_target_layers=LAYERS,
        layer_types=["full_attention"], block_size=2,
        dflash_config={"target_layer_ids": [0, 1], "mask_token_id": tiny.MASK_ID},
    )  # fmt: skip
    return target, drafter


def reference(folder: Path):
    """The checkpoint in transformers, fp32. Only the experts that tokens select are unpacked, by its
    own function: all of them would take 12 GB a layer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig.from_pretrained(folder)
    config.quantization_config, config._attn_implementation = None, "eager"
    config.num_local_experts = 1  # experts and routers are replaced below
    model = transformers.GptOssForCausalLM(config).float().eval()
    stored = load_file(folder / "model.safetensors")
    for index, layer in enumerate(model.model.layers):
        prefix, router = f"model.layers.{index}.mlp", layer.mlp.router
        for name in ("weight", "bias"):
            setattr(router, name, torch.nn.Parameter(stored[f"{prefix}.router.{name}"].float()))
        router.num_experts = len(router.bias)

        def run(x, chosen, shares, prefix=f"{prefix}.experts"):
            used = chosen.unique()
            config.num_local_experts = len(used)
            few = GptOssExperts(config)
            for name in ("gate_up_proj", "down_proj"):
                blocks, scales, bias = (
                    stored[f"{prefix}.{name}_{part}"][used] for part in ("blocks", "scales", "bias")
                )
                unpacked = convert_moe_packed_tensors(blocks, scales).float()
                setattr(few, name, torch.nn.Parameter(unpacked))
                setattr(few, f"{name}_bias", torch.nn.Parameter(bias.float()))
            return few(x, torch.searchsorted(used, chosen), shares)

        layer.mlp.experts.forward = run
    others = {n: t.float() for n, t in stored.items() if ".mlp." not in n}
    missing, unexpected = model.load_state_dict(others, strict=False)
    assert not unexpected
    assert all(".mlp." in name for name in missing)
    return model


def test_the_cpu_engine_equals_transformers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Logits behind the prompt and of a verified block, across the window of 4."""
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    pair = open_target(folders[0]), open_drafter(folders[1])
    build_cpu(*pair, BuildOptions("width", block=2, max_seq_len=64), tmp_path / "e")
    engine = OnnxRuntimePair(tmp_path / "e", verify=False)
    engine.prefill(0, PROMPT, inject=True, logits=True)
    behind = engine.logits[0].copy()
    engine.draft([0], 1)
    engine.verify([0], 2, logits=True)
    found = np.concatenate([behind, engine.logits[0]])
    ids = np.concatenate([PROMPT, engine.tokens[0]])
    with torch.inference_mode():
        logits = reference(folders[0])(torch.tensor(ids[None]), use_cache=False).logits[0]
    wanted = logits[len(PROMPT) - 1 :].numpy()
    assert np.ptp(wanted) > 1
    np.testing.assert_allclose(found, wanted[:, : found.shape[1]], atol=1e-4)


def test_mxfp4_is_decoded_as_transformers_does(folders: tuple[Path, Path]) -> None:
    """Bit for bit, the two matrices of the last expert."""
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    target = open_target(folders[0])
    for name in ("gate_up_proj", "down_proj"):
        source = f"model.layers.{LAYERS - 1}.mlp.experts.{name}"
        blocks, scales = (target.tensors.read(f"{source}_{p}")[-1] for p in ("blocks", "scales"))
        (values,) = run_op("DecodeMXFP4", [blocks.reshape(len(blocks), -1), scales], ["values"])
        given = torch.from_numpy(blocks[None].copy()), torch.from_numpy(scales[None].copy())
        (truth,) = mxfp4.convert_moe_packed_tensors(*given)
        np.testing.assert_array_equal(values.T, truth.float().numpy())


# What the command `dflash-trt weights` is, and then its process's peak memory in bytes.
COMMAND = """
import sys
from pathlib import Path
from dflash_trt.cli import main
assert main(sys.argv[1:]) == 0
lines = Path("/proc/self/status").read_text().splitlines()
print(*(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")))
"""


def test_the_weights_file_is_what_the_plans_ask_for(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Plans from the configurations alone, then weights: every tensor of the table, and no more than
    1.3 times their size in memory, the program included."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")
    target = DescribedTarget(open_target(folders[0]).config, AbsentTensors("a/target"))
    drafter = DrafterCheckpoint(open_drafter(folders[1]).config, AbsentTensors("a/drafter"))
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=8, weights=False)
    options = BuildOptions("width", block=2, max_seq_len=64, precision="bf16")
    engine = tmp_path / "e"
    build_tensorrt(target, drafter, options, own, engine)
    arguments = ["weights", engine, "--target", folders[0], "--drafter", folders[1]]
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert int(ended.stdout) < 1.3 * (engine / "weights.safetensors").stat().st_size
    check_weights_file(engine, *folders)

"""gpt-oss against transformers: sinks, alternating windows, yarn, biases, MXFP4 experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoints import open_target
from tests import tiny, tiny_gpt_oss

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
transformers = pytest.importorskip("transformers")
parity = pytest.importorskip("tests.models.parity")


def reference(folder: Path) -> torch.nn.Module:
    """The checkpoint in transformers, experts unpacked by its own function, computed in fp32."""
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig.from_pretrained(folder)
    config.quantization_config = None
    config._attn_implementation = "eager"
    model = transformers.GptOssForCausalLM(config).float().eval()
    stored = load_file(folder / "model.safetensors")
    state = {n: t.float() for n, t in stored.items() if t.dtype != torch.uint8}
    for name in stored:
        if name.endswith("_blocks"):
            short = name.removesuffix("_blocks")
            state[short] = convert_moe_packed_tensors(
                stored[name], stored[f"{short}_scales"]
            ).float()
    model.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("changes", [{}, {"num_experts_per_tok": 1, "num_key_value_heads": 8}])
def test_logits_and_features(tmp_path: Path, changes: dict) -> None:
    """Rows in front of, across and behind the window of 8."""
    folder = tiny_gpt_oss.tiny_gpt_oss(tmp_path / "t", **changes)
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB, (3, 45))
    parity.check_ragged(reference(folder), open_target(folder), ids, [1, 6, 37])


def test_gates_and_ups_beyond_the_clamp(tmp_path: Path) -> None:
    """Values of a plain random checkpoint never reach it; biases of eight do, on either side."""
    folder = tiny_gpt_oss.tiny_gpt_oss(tmp_path / "t")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("gate_up_proj_bias"):
            tensors[name] = (40 * tensors[name].astype(np.float32)).astype(tensors[name].dtype)
    save_file(tensors, path)
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB, (3, 45))
    parity.check_ragged(reference(folder), open_target(folder), ids, [1, 6, 37])


def test_stop_ids_come_from_both_files(tmp_path: Path) -> None:
    target = open_target(tiny_gpt_oss.tiny_gpt_oss(tmp_path / "t"))
    assert target.config.stop_ids == (tiny.EOS_ID, 258, 259)

"""What is refused as a drafter, by name, and what the configuration of one may look like."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoints import check_pair, open_drafter, open_target
from dflash_trt.checkpoints.drafter import drafter_config
from dflash_trt.errors import InputError
from tests import tiny
from tests.models.test_drafter_kinds import speculators_drafter

OWN = {"target_layer_ids": [0], "mask_token_id": 1}


def config_of(tmp_path: Path, **changes: object) -> dict:
    folder = tiny.tiny_drafter(tmp_path / "d", **changes)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"dflash_config": {**OWN, "selector_rank": 8}}, "DFlash2"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"markov_rank": 256}, "DSpark"),
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"speculators_model_type": "dflash", "projector_type": "domino"}, "Domino"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3"),
        ({"speculators_model_type": "eagle3"}, "EAGLE-3"),
    ],
)
def test_lookalikes_by_configuration(tmp_path: Path, changes: dict, name: str) -> None:
    with pytest.raises(InputError, match=f"a {name} drafter .*only DFlash"):
        drafter_config(config_of(tmp_path, **changes), "config.json")


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("layers.0.attention_conv.base_kernel", "DFlash2"),
        ("candidate_selector.hidden_projection.weight", "DFlash2"),
        ("markov_head.weight", "DSpark"),
        ("confidence_head.weight", "DSpark"),
        ("prefix_gru.weight_ih", "Domino"),
        ("midlayer.self_attn.q_proj.weight", "EAGLE-3"),
    ],
)
def test_lookalikes_by_tensors(tmp_path: Path, tensor: str, name: str) -> None:
    """The configuration says plain DFlash, the weights do not."""
    folder = tiny.tiny_drafter(tmp_path / "d")
    path = folder / "model.safetensors"
    save_file({**load_file(path), tensor: np.zeros(4, np.float32)}, path)
    with pytest.raises(InputError, match=f"a {name} drafter \\('{tensor}'\\)"):
        open_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs the number 'factor'"),
        ({"dflash_config": {**OWN, "use_swa": True}}, "'swa_window_size' is missing"),
        ({"dflash_config": {**OWN, "block_size": 5}}, r"'block_size' is given twice, as \[5, 8\]"),
        ({"layer_types": ["sliding_attention"] * 2}, "'sliding_window' is missing"),
        ({"layer_types": ["linear_attention"] * 2, "sliding_window": 8}, "unknown layer type"),
        ({"is_causal": True}, "makes all layers causal"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        drafter_config(config_of(tmp_path, **changes), "config.json")


def test_names_may_carry_a_prefix(tmp_path: Path) -> None:
    folder = tiny.tiny_drafter(tmp_path / "d")
    path = folder / "model.safetensors"
    plain = open_drafter(folder).tensors.names()
    save_file({f"model.{name}": t for name, t in load_file(path).items()}, path)
    assert open_drafter(folder).tensors.names() == plain


def test_speculators(tmp_path: Path) -> None:
    """A full draft vocabulary needs no map; a part of it without lm_head and map is an error."""
    folder, tensors = speculators_drafter(tmp_path / "d")
    target = open_target(tiny.tiny_target(tmp_path / "t"))
    check_pair(target.config, open_drafter(folder).config, "d")
    path = folder / "model.safetensors"
    own = ("lm_head.weight", "embed_tokens.weight")
    borrowing = {k: v for k, v in tensors.items() if k not in own}
    save_file(borrowing, path)
    part = open_drafter(folder).config
    assert (part.token_map, part.own_lm_head, part.own_embedding) == (True, False, False)
    save_file({k: v for k, v in borrowing.items() if k != "d2t"}, path)
    with pytest.raises(InputError, match=r"has neither 'lm_head\.weight' nor 'd2t'"):
        open_drafter(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "draft_vocab_size": tiny.VOCAB}))
    whole = open_drafter(folder).config
    assert (whole.draft_vocab_size, whole.token_map, whole.own_embedding) == (0, False, False)
    with pytest.raises(InputError, match="the anchor's slot predicts too"):
        drafter_config({**config, "sample_from_anchor": True}, "config.json")

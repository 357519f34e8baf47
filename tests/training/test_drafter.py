"""The module: who sees whom, and that the authors' package computes the same."""

from __future__ import annotations

import pytest
import torch
import toy

from dflash_trt.errors import InputError
from dflash_trt.training import zlab
from dflash_trt.training.drafter import Drafter, block_positions, context_mask, warm_start


def random_drafter(**changes: object) -> Drafter:
    torch.manual_seed(0)
    drafter = Drafter(toy.shape(**changes))
    with torch.no_grad():
        for p in drafter.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    return drafter.eval()


def test_context_ends_strictly_before_the_anchor():
    mask = context_mask(torch.tensor([[0, 2, 5]]), rows=5)
    assert mask.int().tolist() == [[[0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]]


def test_positions_are_absolute_from_the_anchor():
    assert block_positions(torch.tensor([7]), 3).tolist() == [[7, 8, 9]]


def test_every_context_row_and_slot_is_seen_exactly_where_it_may_be():
    """Change one input at a time: outputs of block 0 (anchor 3) and block 1 (anchor 6) tell."""
    drafter = random_drafter()
    taps, blocks = torch.randn(1, 8, 64), torch.randn(1, 2, 4, 32)
    anchors = torch.tensor([[3, 6]])
    with torch.no_grad():
        base = drafter(taps, blocks, anchors)
        for row in range(8):
            other = taps.clone()
            other[0, row] += 1
            moved = (drafter(other, blocks, anchors) != base).any(-1)[0].all(-1)
            assert moved.tolist() == [row < 3, row < 6], f"context row {row}"
        for block in range(2):
            for slot in range(4):
                other = blocks.clone()
                other[0, block, slot] += 1
                moved = (drafter(taps, other, anchors) != base).any(-1)[0]
                assert moved[block].all(), f"slot {slot} is not seen by its whole block"
                assert not moved[1 - block].any(), f"slot {slot} of block {block} leaks"


def test_padding_does_not_change_what_is_computed():
    drafter = random_drafter()
    taps, blocks = torch.randn(1, 5, 64), torch.randn(1, 1, 4, 32)
    anchors = torch.tensor([[5]])
    longer = torch.cat([taps, torch.randn(1, 3, 64)], 1)
    with torch.no_grad():
        torch.testing.assert_close(
            drafter(taps, blocks, anchors), drafter(longer, blocks, anchors), atol=1e-5, rtol=1e-5
        )


def test_hidden_states_equal_the_authors_package(tmp_path):
    """Exported, loaded by `dflash`, fed the same context and block. Tolerance: fp32 rounding."""
    model = pytest.importorskip("dflash.model")
    drafter = random_drafter(rope_theta=1e5, eps=1e-5)
    zlab.export(drafter, tmp_path, torch.float32)
    theirs = model.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert theirs.mask_token_id == toy.MASK
    assert theirs.block_size == 4
    assert list(theirs.target_layer_ids) == list(toy.TAPS)
    taps, block = torch.randn(1, 9, 64), torch.randn(1, 4, 32)
    with torch.no_grad():
        ours = drafter(taps, block[None], torch.tensor([[9]]))[0]
        expected = theirs(
            position_ids=torch.arange(13)[None], noise_embedding=block, target_hidden=taps
        )
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_export_and_load_round_trip_in_bf16(tmp_path):
    drafter = random_drafter()
    zlab.export(drafter, tmp_path)
    again = zlab.load(tmp_path)
    assert again.shape == drafter.shape
    for (name, a), b in zip(drafter.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_warm_start_copies_the_last_layers():
    drafter = Drafter(toy.shape(layers=1))
    q = torch.randn(32, 32)
    copied = warm_start(drafter, {"model.layers.2.self_attn.q_proj.weight": q})
    assert copied == ["layers.0.self_attn.q_proj.weight"]
    assert torch.equal(drafter.layers[0].self_attn.q_proj.weight, q)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"taps": (0, 3)}, r"taps \[0, 3\] must lie in 0..2"),
        ({"mask_token": 24}, "mask_token 24 is outside the vocabulary of 24"),
        ({"block": 1}, "block must be at least 2, got 1"),
        ({"kv_heads": 3}, "4 heads are not a multiple of 3 kv_heads"),
    ],
)
def test_impossible_shapes_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        toy.shape(**changes)

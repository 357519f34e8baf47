"""The tokens that a drafter with a part of the vocabulary drafts, and their rows of the lm_head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_trt.checkpoints import open_drafter, open_target, safetensors
from dflash_trt.checkpoints.base import TargetCheckpoint
from dflash_trt.checkpoints.described import AbsentTensors, DescribedTarget
from dflash_trt.checkpoints.draft_head import NAME, draft_head
from dflash_trt.checkpoints.drafter import DrafterCheckpoint
from dflash_trt.errors import InputError
from tests import tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetCheckpoint:
    return open_target(tiny.tiny_target(tmp_path_factory.mktemp("target") / "t"))


def drafter(folder: Path, d2t: np.ndarray, size: int = 0) -> DrafterCheckpoint:
    tiny.tiny_drafter(folder)
    path = folder / "config.json"
    changed = json.loads(path.read_text()) | {"draft_vocab_size": size or len(d2t)}
    path.write_text(json.dumps(changed))
    save_file({"d2t": d2t}, folder / "d2t.safetensors")
    return open_drafter(folder)


def offsets(ids: list[int]) -> np.ndarray:
    return np.array(ids) - np.arange(len(ids))


def test_rows_are_found_in_every_piece(
    tmp_path: Path, target: TargetCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and last row, and pieces of 96 rows: one with three of them, one with none."""
    monkeypatch.setattr(safetensors, "_PIECE_BYTES", 96 * tiny.HIDDEN * 4)
    ids = [0, 4, 95, tiny.VOCAB - 1]
    head = draft_head(target, drafter(tmp_path / "d", offsets(ids)))
    assert head.names() == {NAME}
    assert head.shape(NAME) == (4, tiny.HIDDEN)
    assert [len(piece) for piece in head.rows(NAME)] == [3, 0, 1]
    whole = target.tensors.read(target.config.lm_head)
    np.testing.assert_array_equal(head.read(NAME), whole[ids])
    np.testing.assert_array_equal(head.read_part(NAME, 1, 1, 3), whole[ids][:, 1:3])


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        (offsets([3, 3]), "the token ids of 'd2t' do not rise"),
        (offsets([5, 2]), "the token ids of 'd2t' do not rise"),
        (offsets([-1, 2]), f"'d2t' makes ids from -1 to 2, the target has {tiny.VOCAB} tokens"),
        (offsets([2, tiny.VOCAB]), f"'d2t' makes ids from 2 to {tiny.VOCAB}, the target has"),
        (np.zeros(2, np.float32), r"'d2t' is float32 \[2\], not 2 integers"),
        (np.zeros((2, 1), np.int64), r"'d2t' is int64 \[2, 1\], not 2 integers"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(
    tmp_path: Path, target: TargetCheckpoint, d2t: np.ndarray, said: str
) -> None:
    with pytest.raises(InputError, match=f"d: {said}"):
        draft_head(target, drafter(tmp_path / "d", d2t, 2))


def test_without_the_target_its_rows_are_absent(tmp_path: Path, target: TargetCheckpoint) -> None:
    absent = AbsentTensors("elsewhere")
    described = DescribedTarget(target.config, absent)
    assert draft_head(described, drafter(tmp_path / "d", offsets([1]))) is absent

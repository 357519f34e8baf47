"""The rows of a target's lm_head that a drafter chooses from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_trt.checkpoints import safetensors
from dflash_trt.checkpoints.described import AbsentTensors
from dflash_trt.checkpoints.draft_head import NAME, draft_head
from dflash_trt.checkpoints.safetensors import SafetensorsFolder
from dflash_trt.errors import InputError

HEAD = np.arange(60, dtype=np.float32).reshape(20, 3)


def folder(path: Path, **tensors: np.ndarray) -> SafetensorsFolder:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return SafetensorsFolder(path)


@pytest.fixture
def target(tmp_path: Path) -> SafetensorsFolder:
    return folder(tmp_path / "target", head=HEAD)


def drafter(path: Path, ids: list[int]) -> SafetensorsFolder:
    return folder(path, d2t=np.array(ids, np.int64) - np.arange(len(ids)))


def test_rows_are_found_in_every_piece(
    tmp_path: Path, target: SafetensorsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and last row, and pieces of six rows: one with three of them, one with none."""
    monkeypatch.setattr(safetensors, "_PIECE_BYTES", 6 * 3 * 4)
    ids = [0, 4, 5, 6, 19]
    head = draft_head(target, "head", drafter(tmp_path / "drafter", ids))
    assert head.names() == {NAME}
    assert head.shape(NAME) == (5, 3)
    assert [len(piece) for piece in head.rows(NAME)] == [3, 1, 0, 1]
    np.testing.assert_array_equal(head.read(NAME), HEAD[ids])
    np.testing.assert_array_equal(head.read_part(NAME, 1, 1, 3), HEAD[ids][:, 1:3])


@pytest.mark.parametrize("ids", [[3, 3], [5, 2], [-1, 2], [2, 20], []])
def test_a_map_that_does_not_rise_or_leaves_the_vocabulary_is_refused(
    tmp_path: Path, target: SafetensorsFolder, ids: list[int]
) -> None:
    head = draft_head(target, "head", drafter(tmp_path / "drafter", ids))
    with pytest.raises(
        InputError, match=r"drafter: the token ids of 'd2t' do not rise from 0 to 19"
    ):
        head.shape(NAME)


def test_a_map_is_a_list_of_integers(tmp_path: Path, target: SafetensorsFolder) -> None:
    head = draft_head(target, "head", folder(tmp_path / "drafter", d2t=np.zeros(4, np.float32)))
    with pytest.raises(InputError, match="'d2t' is no list of integers"):
        head.shape(NAME)


def test_without_one_of_the_checkpoints_there_is_none(
    tmp_path: Path, target: SafetensorsFolder
) -> None:
    absent = AbsentTensors("elsewhere")
    assert draft_head(target, "head", absent) is absent
    assert draft_head(absent, "head", drafter(tmp_path / "drafter", [1])) is absent

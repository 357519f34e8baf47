"""The two pure functions that say what of a block is committed."""

from __future__ import annotations

import pytest

from dflash_trt.runtime.acceptance import clip_block, commit_block


@pytest.mark.parametrize("agreed", [0, 1, 2, 3])
def test_commit_up_to_the_first_difference(agreed: int) -> None:
    """Rejection at once, in the middle, full acceptance; rows behind a rejection are not read."""
    drafts, own = [5, 6, 7], [5, 6, 7, 8]
    own[agreed] = 9
    read: list[int] = []

    def choose(row: int) -> int:
        read.append(row)
        return own[row]

    assert commit_block(drafts, choose) == [*drafts[:agreed], 9]
    assert read == list(range(agreed + 1))


def test_nothing_drafted_commits_the_targets_own_token() -> None:
    assert commit_block([], lambda row: 4) == [4]


@pytest.mark.parametrize(
    ("accepted", "width", "committed"),
    [
        (1, 4, [9]),
        (3, 4, [5, 6, 9]),
        (4, 4, [5, 6, 7, 9]),
        (4, 3, [5, 6, 7]),
        (4, 2, [5, 6]),
        (2, 1, [5]),
        (1, 1, [9]),
    ],
)
def test_a_shorter_block_ends_with_the_draft_that_the_target_agreed_to(
    accepted: int, width: int, committed: list[int]
) -> None:
    assert clip_block(accepted, [5, 6, 7], 9, width) == committed

"""Which tokens of a verified block are committed. Pure, in the order of the paper.

The target's own token is taken row by row, by arg max or by a draw from the processed distribution
p of that row; a draft is accepted when it is that token. For a drafted token x this accepts with
probability p(x) and commits, where it rejects, a draw from p without x: the exact rule for a
one-hot proposal. And since the draw of a position does not depend on the draft, the output is the
one that plain sampling with the same seed gives, whatever the drafter says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def commit_block(drafts: Sequence[int], choose: Callable[[int], int]) -> list[int]:
    """Committed tokens: the accepted drafts, then the target's own (1 to len(drafts) + 1 tokens).

    choose(j) is the target's token behind j accepted drafts; it is called for j = 0, 1, .. in order
    and only while every draft before was accepted.
    """
    committed = []
    for j, draft in enumerate(drafts):
        committed.append(choose(j))
        if committed[j] != draft:
            return committed
    committed.append(choose(len(drafts)))
    return committed


def clip_block(accepted: int, drafts: Sequence[int], anchor: int, width: int) -> list[int]:
    """Committed tokens of a block that the engine verified greedily and this request has shorter.

    accepted: rows that the engine committed (accepted drafts + 1); anchor: its token behind them;
    width: the request's own block. A draft behind the clip is the target's own token there.
    """
    if accepted <= width:
        return [*drafts[: accepted - 1], anchor]
    return list(drafts[:width])

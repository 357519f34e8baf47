"""Labels, positions and what may be seen: pinned slot by slot."""

from __future__ import annotations

import numpy as np
import toy

from dflash_trt.training.blocks import (
    NO_LABEL,
    anchor_range,
    block_labels,
    block_tokens,
    draw_anchors,
    make_batch,
)
from dflash_trt.training.store import Sequence

TOKENS = np.array([5, 6, 7, 8, 9, 10], np.int32)
GREEDY = np.array([-1, 7, 8, 9, 10, 11], np.int32)  # row i: what the target says behind row i


def test_slot_j_is_asked_for_the_token_at_anchor_plus_j():
    labels = block_labels(TOKENS, GREEDY, np.array([1]), block=4)
    assert labels.tolist() == [[NO_LABEL, 7, 8, 9]]
    # the EAGLE habit, one row further, is another answer
    assert labels.tolist() != block_labels(TOKENS, GREEDY, np.array([2]), block=4).tolist()


def test_choices_written_one_row_off_do_not_give_the_text():
    """Guards against features written with a shift: nothing past the first slot survives."""
    shifted = np.roll(GREEDY, 1)
    labels = block_labels(TOKENS, shifted, np.array([2]), block=4)
    assert labels[0, 1] != TOKENS[3]
    assert labels[0, 2:].tolist() == [NO_LABEL, NO_LABEL]


def test_no_label_past_the_end():
    labels = block_labels(TOKENS, GREEDY, np.array([3, 4]), block=4)
    assert labels.tolist() == [[NO_LABEL, 9, 10, NO_LABEL], [NO_LABEL, 10, NO_LABEL, NO_LABEL]]


def test_a_sampled_answer_is_asked_for_the_greedy_token_and_nothing_after_it_left_the_path():
    text = np.array([5, 6, 7, 20, 9, 10], np.int32)
    labels = block_labels(text, GREEDY, np.array([1, 3]), block=4)
    assert labels[0].tolist() == [NO_LABEL, 7, 8, NO_LABEL]  # 8 was wanted, 20 stands there
    assert labels[1].tolist() == [NO_LABEL, 9, 10, NO_LABEL]


def test_slots_hold_the_anchor_then_masks():
    labels = np.array([[NO_LABEL, 1, 2, 3]])
    tokens, left = block_tokens(np.array([9], np.int32), labels, mask_token=23)
    assert tokens.tolist() == [[9, 23, 23, 23]]
    assert left is labels


def test_reveal_shows_true_tokens_and_does_not_ask_for_them_again():
    labels = np.tile(np.array([[NO_LABEL, 1, 2, NO_LABEL]]), (200, 1))
    anchors = np.full(200, 9, np.int32)
    rng = np.random.default_rng(0)
    tokens, left = block_tokens(anchors, labels, mask_token=23, reveal=1.0, rng=rng)
    shown = tokens[:, 1:] != 23
    assert 0 < shown.sum() < shown.size
    assert (tokens[:, 1:][shown] == labels[:, 1:][shown]).all()
    assert (left[:, 1:][shown] == NO_LABEL).all()
    assert (left[:, 1:][~shown] == labels[:, 1:][~shown]).all()
    assert (tokens[:, 0] == 9).all()


def test_anchors_are_answer_tokens_with_a_successor():
    one = Sequence(prompt=0, sample=0, domain="x", start=0, length=6, prompt_length=3)
    assert list(anchor_range(one)) == [3, 4]
    assert draw_anchors(one, 10, np.random.default_rng(0)).tolist() == [3, 4]


def test_anchors_are_redrawn():
    one = Sequence(prompt=0, sample=0, domain="x", start=0, length=200, prompt_length=3)
    draws = {tuple(draw_anchors(one, 5, np.random.default_rng(s))) for s in range(5)}
    assert len(draws) == 5


def test_batch_positions_tokens_and_padding(tmp_path):
    store = toy.store(tmp_path)
    first, second = store.sequences[:2]
    batch = make_batch(store, [first, second], [np.array([10, 20]), np.array([9])], block=4)
    text = store.tokens[first.start : first.stop]
    assert batch.anchors.tolist() == [[10, 20], [9, 0]]
    assert batch.tokens[0, 1].tolist() == [text[20], toy.MASK, toy.MASK, toy.MASK]
    assert batch.labels[0, 1].tolist() == [NO_LABEL, *text[21:24]]
    assert (batch.labels[1, 1] == NO_LABEL).all()
    assert batch.taps.shape == (2, 23, store.meta.width)  # up to the row before the last slot

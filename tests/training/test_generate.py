"""Answers in batches: the same whoever shares the batch, and after a kill."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.errors import InputError
from dflash_trt.training.answers import read_answers
from dflash_trt.training.features import write_features
from dflash_trt.training.generate import GenerateOptions, Job, generate
from dflash_trt.training.store import FeatureStore, StoreMeta

VOCAB, STOP = 40, 39
OPTIONS = GenerateOptions(max_tokens=30, min_tokens=3, stop_ids=(STOP,), seed=1)


class FakeEngine:
    """Logits depend on the slot's last two tokens and its length alone."""

    def __init__(self, slots: int, capacity: int = 64) -> None:
        self.slots, self.capacity = slots, capacity
        self.lengths = np.zeros(slots, np.int32)
        self._last = np.zeros(slots, np.int64)

    def _logits(self, slot: int, token: int) -> np.ndarray:
        seed = [int(token), int(self._last[slot]), int(self.lengths[slot])]
        return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)

    def prefill(self, slot, prompt):
        self.lengths[slot], self._last[slot] = len(prompt), prompt[-2]
        logits = self._logits(slot, prompt[-1])
        self._last[slot] = prompt[-1]
        return logits

    def decode(self, tokens):
        self.lengths += 1
        out = np.stack([self._logits(i, t) for i, t in enumerate(tokens)])
        self._last = tokens.copy()
        return out

    def read(self, text, first):
        features = np.tile(np.asarray(text, np.float32)[:, None], (1, 6))
        greedy = np.full(len(text), 7, np.int32)
        return features, greedy


def jobs(count: int = 12) -> list[Job]:
    return [Job(i, s, "x", (i + 1, i + 2, i + 3)) for s in (0, 1) for i in range(count)]


def made(path, slots: int, some=None) -> dict:
    generate(FakeEngine(slots), some or jobs(), OPTIONS, path)
    return {(a.prompt, a.sample): a.ids for a in read_answers(path) if a.ids}


def test_answers_do_not_depend_on_the_batch(tmp_path):
    alone, together = made(tmp_path / "1", 1), made(tmp_path / "8", 8)
    assert len(alone) > 10
    assert alone == together


def test_sampled_answers_differ_from_greedy_ones_and_end_at_the_stop_id(tmp_path):
    found = made(tmp_path / "a", 4)
    both = [i for i in range(12) if (i, 0) in found and (i, 1) in found]
    assert any(found[i, 0] != found[i, 1] for i in both)
    assert all(STOP not in ids[:-1] and len(ids) <= 30 for ids in found.values())


def test_a_killed_run_goes_on(tmp_path):
    whole = made(tmp_path / "whole", 4)
    path = tmp_path / "cut"
    made(path, 4, jobs()[:5])
    path.write_text(path.read_text() + '{"prompt": 11, "sam')
    assert made(path, 4) == whole


def test_a_prompt_without_room_for_an_answer_is_passed_over(tmp_path):
    long = Job(99, 0, "x", tuple(range(1, 38)))
    assert (99, 0) not in made(tmp_path / "a", 2, [long, *jobs(2)])


def test_what_gave_nothing_is_not_tried_again(tmp_path):
    path = tmp_path / "a"
    assert len(made(path, 4)) < len(jobs())  # some are too short
    before = path.read_text()
    assert generate(FakeEngine(4), jobs(), OPTIONS, path) == 0
    assert path.read_text() == before


def test_temperature_must_be_positive():
    with pytest.raises(InputError, match="temperature must be positive, got 0"):
        GenerateOptions(temperature=0)


def test_features_follow_answers_and_nothing_is_asked_after_the_end(tmp_path):
    made(tmp_path / "a", 4)
    meta = StoreMeta(hidden=3, taps=(0, 1), mask_token=0, target="fake")
    args = (FakeEngine(1), tmp_path / "a", tmp_path / "store", meta, (STOP,))
    added = write_features(*args)
    assert write_features(*args) == 0
    store = FeatureStore(tmp_path / "store")
    assert len(store) == added
    for s in store:
        greedy, text = store.greedy[s.start : s.stop], store.tokens[s.start : s.stop]
        assert (greedy[: s.prompt_length - 1] == -1).all()
        assert (
            greedy[s.prompt_length - 1 :] == np.where(text == STOP, -1, 7)[s.prompt_length - 1 :]
        ).all()

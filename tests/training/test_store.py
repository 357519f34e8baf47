"""What is on disk survives a kill, and says what is wrong with it."""

from __future__ import annotations

import numpy as np
import pytest
import toy

from dflash_trt.errors import InputError
from dflash_trt.training.answers import Answer, answer_line, read_answers
from dflash_trt.training.store import FeatureStore, StoreMeta, StoreWriter


def append(writer: StoreWriter, prompt: int, rows: int = 4) -> None:
    taps = np.full((rows, toy.META.width), prompt, np.uint16)
    ids = np.full(rows, prompt, np.int32)
    writer.append(taps, ids, ids, prompt=prompt, sample=0, domain="x", prompt_length=1)


def test_rows_come_back(tmp_path):
    with StoreWriter(tmp_path, toy.META) as writer:
        append(writer, 3)
        append(writer, 5, rows=2)
    store = FeatureStore(tmp_path)
    assert [s.prompt for s in store] == [3, 5]
    assert store.tokens.tolist() == [3, 3, 3, 3, 5, 5]
    assert (store.taps[4:] == 5).all()


def test_a_killed_writer_loses_only_the_sequence_it_was_at(tmp_path):
    with StoreWriter(tmp_path, toy.META) as writer:
        append(writer, 3)
    with (tmp_path / "taps.bin").open("ab") as file:
        file.write(b"half a row")
    with (tmp_path / "index.jsonl").open("a") as file:
        file.write('{"prompt": 9, "sam')
    with StoreWriter(tmp_path, toy.META) as writer:
        assert writer.done() == {(3, 0)}
        append(writer, 5)
    store = FeatureStore(tmp_path)
    assert [s.prompt for s in store] == [3, 5]
    assert (store.taps[4:] == 5).all()


def test_faults_are_named(tmp_path):
    with pytest.raises(InputError, match="is not a feature store"):
        FeatureStore(tmp_path)
    wrong = r"taps must be uint16 \[2, 64\], got float32"
    with StoreWriter(tmp_path, toy.META) as writer, pytest.raises(InputError, match=wrong):
        writer.append(
                np.zeros((2, 64), np.float32), np.zeros(2, np.int32), np.zeros(2, np.int32),
                prompt=0, sample=0, domain="x", prompt_length=1,
            )  # fmt: skip
    with pytest.raises(InputError, match="holds no sequence"):
        FeatureStore(tmp_path)
    other = StoreMeta(hidden=32, taps=(1,), mask_token=2, target="other")
    with pytest.raises(InputError, match="holds features of"):
        StoreWriter(tmp_path, other)
    with StoreWriter(tmp_path, toy.META) as writer:
        append(writer, 3)
    (tmp_path / "tokens.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"is shorter than index\.jsonl says"):
        FeatureStore(tmp_path)
    (tmp_path / "store.json").write_text('{"hidden": 1, "colour": 2}')
    with pytest.raises(InputError, match="unknown keys: colour"):
        FeatureStore(tmp_path)


def test_answers_round_trip_and_a_torn_line_is_no_answer(tmp_path):
    path, one = tmp_path / "answers.jsonl", Answer(3, 1, "math", (1, 2), (4, 5))
    path.write_text(answer_line(one) + answer_line(one)[:20])
    assert list(read_answers(path)) == [one]
    path.write_text('{"prompt": 1, "colour": 2}\n')
    with pytest.raises(InputError, match="missing or unknown keys: colour"):
        list(read_answers(path))

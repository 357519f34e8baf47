"""The features step: each answer through the target once; taps and choices go to the store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.training.answers import read_answers
from dflash_trt.training.store import StoreMeta, StoreWriter

FLUSH_EVERY = 50


class Reader(Protocol):
    """What the step needs: see ``engine.SlotEngine.read``."""

    def read(
        self, text: Sequence[int], first: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]: ...


def bf16_bits(features: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to bfloat16, as bit patterns: values of 3e4 are real, so float16 is too small."""
    return features.astype(ml_dtypes.bfloat16).view(np.uint16)


def write_features(
    engine: Reader,
    answers: Path,
    folder: Path,
    meta: StoreMeta,
    stop_ids: Collection[int],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Store every answer that the store lacks; returns how many were added."""
    with StoreWriter(folder, meta) as writer:
        done = writer.done()
        todo = [a for a in read_answers(answers) if a.ids and (a.prompt, a.sample) not in done]
        for number, answer in enumerate(todo, 1):
            text = np.asarray(answer.prompt_ids + answer.ids, np.int32)
            features, greedy = engine.read(text.tolist(), len(answer.prompt_ids) - 1)
            greedy[np.isin(text, list(stop_ids))] = -1  # nothing follows the end
            greedy[: len(answer.prompt_ids) - 1] = -1
            writer.append(
                bf16_bits(features), text, greedy,
                prompt=answer.prompt, sample=answer.sample, domain=answer.domain,
                prompt_length=len(answer.prompt_ids),
            )  # fmt: skip
            if number % FLUSH_EVERY == 0:
                writer.flush()
            report(number, len(todo))
    return len(todo)

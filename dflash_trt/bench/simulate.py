"""What quantisation costs: a simulated engine against a simulated reference, on the CPU.

Both generate answers with their own drafters; both read the same text and the reference's answers,
token by token, and are asked at each position for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from dflash_trt.engines.onnxruntime_build import session_options
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import Generation, GenerationOptions, Runtime
from dflash_trt.runtime.metrics import total
from dflash_trt.runtime.text import Message

WINDOW = 512  # tokens of a text that are read at once; the first of each window is not predicted
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Reading:
    """Positions of several texts one after the other: the most likely token int64 and the natural
    logarithm of the true one's probability."""

    best: np.ndarray
    logprobs: np.ndarray

    @property
    def perplexity(self) -> float:
        return exp(-float(self.logprobs.mean()))


@dataclass(frozen=True)
class Measurement:
    """One engine's answers, and what it made of the text and of the reference's answers."""

    generations: list[Generation]
    text: Reading
    answers: Reading

    @property
    def acceptance_length(self) -> float:
        return total(g.metrics for g in self.generations).acceptance_length


def measure(
    engine: Path, prompts: Sequence[str | Sequence[Message]], text: str, max_tokens: int,
    answers: Sequence[Sequence[int]] | None = None, progress: Progress = lambda _: None,
) -> Measurement:  # fmt: skip
    """Measure a CPU engine. `answers`: token ids for each prompt, the engine's own if not given."""
    runtime = Runtime.load(engine)
    ids = [runtime.prompt_ids(prompt) for prompt in prompts]
    generations = []
    for number, prompt in enumerate(ids, 1):
        progress(f"answer {number} of {len(ids)}")
        generations.append(runtime.generate(prompt, GenerationOptions(max_tokens)))
    if answers is None:
        answers = [generation.tokens for generation in generations]
    progress("read the text")
    session = ort.InferenceSession(
        engine / "target.onnx", session_options(0), providers=["CPUExecutionProvider"]
    )
    tokens = runtime.codec.ids(text)
    size = min(WINDOW, runtime.manifest.max_seq_len)
    windows = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
    pieces = [(w, 1) for w in windows if len(w) > 1]
    if not pieces:
        raise InputError("the text has fewer than two tokens; nothing can be predicted in it")
    whole = [([*p, *a], len(p)) for p, a in zip(ids, answers, strict=True) if len(a)]
    return Measurement(generations, _read(session, pieces), _read(session, whole))


def _read(session: ort.InferenceSession, texts: Sequence[tuple[Sequence[int], int]]) -> Reading:
    """For each (ids, first): what the target says of ids[first:] when it is given what is before."""
    best, logprobs = [], []
    for ids, first in texts:
        rows = np.arange(first - 1, len(ids) - 1)
        logits = _logits(session, np.asarray(ids[:-1], np.int64), rows)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        true = shifted[np.arange(len(rows)), ids[first:]]
        logprobs.append(true - np.log(np.exp(shifted).sum(axis=-1)))
        best.append(logits.argmax(axis=-1))
    return Reading(np.concatenate(best), np.concatenate(logprobs))


def _logits(session: ort.InferenceSession, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Logits [W, V] behind the tokens at `rows` [W] of `ids` [S]."""
    feeds = {"tokens": ids[None], "lengths": np.zeros(1, np.int32), "rows": rows[None]}
    for value in session.get_inputs():
        if value.name not in feeds:
            _, heads, _, dim = value.shape
            feeds[value.name] = np.zeros((1, heads, len(ids), dim), np.float32)
    (logits,) = session.run(["logits"], feeds)
    return logits[0]


def report(engine: Measurement, reference: Measurement) -> dict[str, Any]:
    """The figures; each pair is (engine, reference)."""
    same = [
        a.tokens == b.tokens for a, b in zip(engine.generations, reference.generations, strict=True)
    ]
    return {
        "prompts": len(same),
        "answers_that_differ": same.count(False),
        "top1_agreement": {
            "text": _share(engine.text.best == reference.text.best),
            "answers": _share(engine.answers.best == reference.answers.best),
        },
        "positions": {"text": len(engine.text.best), "answers": len(engine.answers.best)},
        "perplexity": _both(engine.text.perplexity, reference.text.perplexity),
        "acceptance_length": _both(engine.acceptance_length, reference.acceptance_length),
    }


def _share(same: np.ndarray) -> float:
    return round(float(same.mean()), 4)


def _both(engine: float, reference: float) -> dict[str, float]:
    return {"engine": round(engine, 3), "reference": round(reference, 3)}

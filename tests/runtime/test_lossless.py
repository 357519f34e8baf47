"""Speculative output equals autoregressive output of the same engine, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.engines.onnxruntime import PREFILL_CHUNK, OnnxRuntimePair
from dflash_trt.runtime.cycle import Cycle, Lane
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.sampling import Chooser
from tests import tiny

PROMPTS = [
    "What is the capital of France?",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
    "Write a Python function that reverses a list.",
    "List three colours.",
]


def chooser(prompt: list[int]) -> Chooser:
    return Chooser(prompt, GenerationOptions(), (), tiny.VOCAB)


def start(cycle: Cycle, lane: Lane, prompt: list[int]) -> int:
    """Prefill slot 0, chunk by chunk; the first token behind the prompt."""
    ids = np.asarray(prompt)
    for begin in range(0, len(ids), PREFILL_CHUNK):
        end = begin + PREFILL_CHUNK
        token = cycle.prefill(lane, ids[begin:end], last=end >= len(ids))
    assert token is not None
    return token


def plain_tokens(engines: OnnxRuntimePair, prompt: list[int], count: int) -> list[int]:
    engines.release(0)
    cycle, lane = Cycle(engines), Lane(0, 1, chooser(prompt))
    tokens = [start(cycle, lane, prompt)]
    while len(tokens) < count:
        tokens += cycle.step([lane])[0].committed
    return tokens[:count]


class Oracle(OnnxRuntimePair):
    """Drafts the target's own continuation, right up to a slot drawn for each block."""

    def follow(self, truth: list[int], start: int, random: np.random.Generator) -> None:
        self.truth, self.start, self.random = truth, start, random

    def draft(self, slots: Sequence[int], count: int) -> None:
        super().draft(slots, count)
        block = self._batch.view("tokens", 1, 1 + count)[0]
        position = self.context[0] - self.start + 1
        known = self.truth[position : position + count]
        block[1 : 1 + len(known)] = known
        wrong = int(self.random.integers(1, count + 2))
        if wrong <= count:
            block[wrong] = (block[wrong] + 1) % tiny.VOCAB


@pytest.mark.parametrize("width", [2, 5, 8])
def test_every_accepted_length_on_a_tiny_model(tiny_engine: Path, width: int) -> None:
    """Accepted runs of every length 0 .. width-1 happen, and the tokens stay the target's."""
    engines = Oracle(tiny_engine)
    random = np.random.default_rng(width)
    seen = set()
    for size in (1, 2, 40, PREFILL_CHUNK, PREFILL_CHUNK + 1, 300):
        prompt = random.integers(0, 256, size).tolist()
        truth = plain_tokens(engines, prompt, 100)
        engines.follow(truth, size, random)
        engines.release(0)
        cycle, lane = Cycle(engines), Lane(0, width, chooser(prompt))
        tokens = [start(cycle, lane, prompt)]
        while len(tokens) < 80:
            (step,) = cycle.step([lane])
            seen.add(step.accepted)
            tokens += step.committed
        assert tokens[:80] == truth[:80]
    assert seen == set(range(width))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("block", [2, 5, 8])
def test_a_random_drafter(
    tiny_checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint],
    tmp_path: Path,
    block: int,
    passes: int,
) -> None:
    out = tmp_path / "engine"
    options = BuildOptions("t", block=block, passes=passes, max_seq_len=512)
    build_cpu(*tiny_checkpoints, options, out)
    runtime = Runtime.load(out)
    random = np.random.default_rng(0)
    for size in (1, 30, 200):
        prompt = random.integers(0, 256, size).tolist()
        drafted = runtime.generate(prompt, GenerationOptions(60, ignore_eos=True))
        plain = runtime.generate(prompt, GenerationOptions(60, draft=False, ignore_eos=True))
        assert drafted.tokens == plain.tokens
        assert len(drafted.tokens) == 60


def test_nothing_is_left_of_an_earlier_request(tiny_engine: Path) -> None:
    """Two requests in one runtime give what two fresh runtimes give, acceptance included."""
    a, b = [1] * 150, [5, 9, 200, 31]
    options = GenerationOptions(50, ignore_eos=True)
    shared = Runtime.load(tiny_engine)
    for prompt in (a, b):
        fresh = Runtime.load(tiny_engine).generate(prompt, options)
        again = shared.generate(prompt, options)
        assert again.tokens == fresh.tokens
        assert again.metrics.accepted_by_slot == fresh.metrics.accepted_by_slot


@pytest.mark.parametrize("passes", [1, 2])
def test_the_shipped_drafter(
    smollm2: tuple[TargetCheckpoint, DrafterCheckpoint], tmp_path: Path, passes: int
) -> None:
    """Real model, trained drafter, several kinds of prompt; and drafts are indeed accepted."""
    out = tmp_path / "engine"
    build_cpu(*smollm2, BuildOptions("s", block=8, passes=passes, max_seq_len=512), out)
    runtime = Runtime.load(out)
    committed = cycles = 0
    for text in PROMPTS:
        prompt = runtime.prompt_ids(text)
        plain = runtime.generate(prompt, GenerationOptions(32, draft=False))
        for width in (2, 5, 8):
            drafted = runtime.generate(prompt, GenerationOptions(32, width=width))
            assert drafted.tokens == plain.tokens
        committed += drafted.metrics.committed
        cycles += drafted.metrics.cycles
    assert committed / cycles > 1.2

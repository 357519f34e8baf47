"""Built engines with several slots: real caches, real lanes, real threads."""

from __future__ import annotations

import asyncio
import gc
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.engines import onnxruntime
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.engines.onnxruntime import OnnxRuntimePair
from dflash_trt.engines.onnxruntime_build import batch_sizes
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import Generation, GenerationOptions, Runtime
from dflash_trt.runtime.text import TextCodec
from tests import tiny
from tests.runtime.test_scheduler import options

GREEDY = GenerationOptions(40, ignore_eos=True)
SAMPLED = GenerationOptions(
    40, ignore_eos=True, temperature=0.9, top_p=0.95, presence_penalty=0.4, seed=11, logprobs=2
)


@pytest.fixture(scope="module")
def engine(
    tiny_checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Six slots: batch sizes 1, 2, 4 and 6."""
    out = tmp_path_factory.mktemp("engines") / "batched"
    options = BuildOptions("batched", block=6, max_seq_len=384, max_batch=6)
    build_cpu(*tiny_checkpoints, options, out)
    return out


class Helpful(OnnxRuntimePair):
    """Puts known continuations in place of drafts, up to a slot that differs by lane and cycle, so
    that random weights accept runs of all lengths."""

    truths: dict[int, list[int]]
    turn = 0

    def draft(self, slots: Sequence[int], count: int) -> None:
        super().draft(slots, count)
        self.turn += 1
        blocks = self._batch.view("tokens", len(self._lanes(slots)), 1 + count)
        for lane, slot in enumerate(slots):
            truth = self.truths.get(int(self.first[slot]), [])
            done = int(self.context[slot]) - int(self.prompt_size[slot]) + 1
            right = truth[done : done + (self.turn + lane) % (count + 1)]
            blocks[lane, 1 : 1 + len(right)] = right

    def prefill(self, slot: int, chunk: np.ndarray, inject: bool, logits: bool = False) -> None:
        if self.context[slot] == 0:
            self.first[slot] = chunk[0]
        super().prefill(slot, chunk, inject, logits)
        self.prompt_size[slot] = self.context[slot]

    def follow(self, truths: dict[int, list[int]]) -> None:
        """Answers by the first token of their prompt."""
        self.truths = truths
        self.first, self.prompt_size = (np.zeros(self.manifest.max_batch, int) for _ in "ab")


def prompts(count: int) -> list[list[int]]:
    """Different lengths, some longer than a prefill piece; the first tokens differ."""
    random = np.random.default_rng(4)
    sizes = [1, 30, 140, 7, 60, 200, 12, 129]
    return [[i, *random.integers(0, 256, sizes[i % 8] - 1).tolist()] for i in range(count)]


def helpful_runtime(engine: Path, truths: dict[int, list[int]]) -> Runtime:
    engines = Helpful(engine, threads=1)
    engines.follow(truths)
    return Runtime(engines, TextCodec(engine, {}))


@pytest.fixture(scope="module")
def helpful(engine: Path) -> Runtime:
    """Told nothing yet."""
    return helpful_runtime(engine, {})


def same(a: Generation, b: Generation) -> None:
    assert (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)
    assert [e.token for e in a.logprobs] == [e.token for e in b.logprobs]
    for x, y in zip(a.logprobs, b.logprobs, strict=True):
        assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
        assert [lp for _, lp in x.top] == pytest.approx([lp for _, lp in y.top], abs=1e-4)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_many_together_equal_the_same_alone(engine: Path, options: GenerationOptions) -> None:
    """32 prompts on 6 slots, drafted, against each alone without drafting; and with accepted runs."""
    asked = prompts(32)
    runtime = Runtime.load(engine, threads=1)
    alone = [runtime.generate(p, replace(options, draft=False)) for p in asked]
    helpful = helpful_runtime(engine, {i: g.tokens for i, g in enumerate(alone)})
    together = helpful.generate(asked, options)
    for a, b in zip(alone, together, strict=True):
        same(a, b)
    assert set(helpful.metrics.acceptance) == set(range(1, 7))


@settings(max_examples=25, deadline=None)
@given(options(), st.integers(2, 6), st.integers(0, 7))
def test_any_greedy_options_on_real_engines(
    helpful: Runtime, wish: GenerationOptions, width: int, index: int
) -> None:
    """Penalties, bias, min_tokens and ends in any combination: drafted, with accepted runs, and
    plain."""
    prompt, greedy = prompts(8)[index], replace(wish, temperature=0.0)
    plain = helpful.generate(prompt, replace(greedy, draft=False))
    assert isinstance(helpful.engines, Helpful)
    helpful.engines.follow({index: plain.tokens})
    try:
        same(helpful.generate(prompt, replace(greedy, width=width)), plain)
    finally:
        helpful.engines.follow({})


@pytest.mark.parametrize("width", [2, 3, 6])
def test_a_seed_gives_its_tokens_at_any_block_length(engine: Path, width: int) -> None:
    runtime = Runtime.load(engine, threads=1)
    prompt = prompts(3)[2]
    plain = runtime.generate(prompt, replace(SAMPLED, draft=False))
    helpful = helpful_runtime(engine, {2: plain.tokens})
    drafted = helpful.generate(prompt, replace(SAMPLED, width=width))
    same(drafted, plain)
    assert drafted.metrics.acceptance_length > 1
    other = runtime.generate(prompt, replace(SAMPLED, seed=12))
    assert other.tokens != plain.tokens


def test_a_lane_touches_its_own_slot_only(engine: Path) -> None:
    """Checksums: a step on slots 1 and 3 leaves the used rows of all others as they were, and a
    draft leaves the target's caches alone."""
    engines = OnnxRuntimePair(engine, threads=1)
    for slot, prompt in enumerate(prompts(6)):
        engines.prefill(slot, np.asarray(prompt[:100]), inject=True)

    def sums(model: str, slot: int) -> list[int]:
        used = int(engines.context[slot])
        caches = engines._caches[model][slot].values()
        return [zlib.crc32(c.numpy()[:, :, :used].tobytes()) for c in caches]

    before = {(m, s): sums(m, s) for m in ("target", "drafter") for s in range(6)}
    slots = [1, 3, 4]  # a batch of 4: the fourth lane is filled with an idle slot
    engines.draft(slots, 5)
    assert all(sums("target", s) == before["target", s] for s in range(6))
    engines.verify(slots, 6)
    for model, slot in before:
        if slot not in slots:
            assert sums(model, slot) == before[model, slot]


def test_batch_sizes() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(6) == (1, 2, 4, 6)
    assert batch_sizes(8) == (1, 2, 4, 8)


def test_lanes_are_different_slots(engine: Path) -> None:
    """Idle lanes are slots that nobody asked for: two lanes of one slot would write the same rows."""
    engines = OnnxRuntimePair(engine, threads=1)
    for count in range(1, 7):
        for slots in permutations(range(6), count):
            lanes = engines._lanes(slots)
            assert lanes[:count] == slots
            assert len(set(lanes)) == len(lanes) == min(s for s in (1, 2, 4, 6) if s >= count)


def test_caches_that_do_not_fit_are_refused(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: what all caches of all slots take must be free."""
    pair = OnnxRuntimePair(engine, threads=1)
    caches = [c.numpy() for m in pair._caches.values() for slot in m for c in slot.values()]
    assert pair.cache_bytes == sum(cache.nbytes for cache in caches)

    class Memory:
        available = pair.cache_bytes

    monkeypatch.setattr(onnxruntime.psutil, "virtual_memory", lambda: Memory)
    OnnxRuntimePair(engine, threads=1)
    Memory.available -= 1
    with pytest.raises(
        InputError, match=r"KV cache: 6 slots x 384 tokens = 0.00 GB, and .* smaller --max-b"
    ):
        OnnxRuntimePair(engine)


# The asynchronous side


def test_streams_run_together_and_add_up(engine: Path) -> None:
    runtime = Runtime.load(engine, threads=1)
    asked = prompts(8)
    alone = [runtime.generate(p, GREEDY) for p in asked]

    async def collect(prompt: list[int]) -> tuple[list[int], str, str | None]:
        deltas = [delta async for delta in runtime.stream(prompt, GREEDY)]
        tokens = [t for delta in deltas for t in delta.tokens]
        return tokens, "".join(d.text for d in deltas), deltas[-1].finish_reason

    async def everything() -> list[tuple[list[int], str, str | None]]:
        return await asyncio.gather(*map(collect, asked))

    for (tokens, text, reason), a in zip(asyncio.run(everything()), alone, strict=True):
        assert (tokens, text, reason) == (a.tokens, a.text, a.finish_reason)


def test_leaving_a_stream_cancels_its_request(engine: Path) -> None:
    runtime = Runtime.load(engine, threads=1)

    async def leave() -> Generation:
        generation = Generation()
        stream = runtime.stream([1, 2], replace(GREEDY, max_tokens=350), generation)
        async for _ in stream:
            break
        await stream.aclose()
        while generation.finish_reason is None:
            await asyncio.sleep(0.01)
        return generation

    assert asyncio.run(leave()).finish_reason == "cancelled"
    left = runtime.deltas([1, 2], replace(GREEDY, max_tokens=350))
    next(left)
    left.close()
    assert runtime.generate([1, 2], GREEDY).finish_reason == "length"
    assert runtime.metrics.finished["cancelled"] == 2


def test_more_prompts_than_the_queue_holds(engine: Path) -> None:
    engines = OnnxRuntimePair(engine, threads=1)
    runtime = Runtime(engines, TextCodec(engine, {}), queue_limit=2)
    answers = runtime.generate([[i] for i in range(20)], GenerationOptions(3, ignore_eos=True))
    assert [len(a.tokens) for a in answers] == [3] * 20


def test_kinds_of_prompts(engine: Path) -> None:
    """A question, messages and token ids, one or several; several are a list of answers."""
    runtime = Runtime.load(engine, threads=1)
    options = GenerationOptions(4, ignore_eos=True)
    text, messages = "hi", [{"role": "user", "content": "hi"}]
    ids = runtime.prompt_ids(text)
    one = runtime.generate(text, options)
    assert one.tokens == runtime.generate(messages, options).tokens
    assert one.tokens == runtime.generate(ids, options).tokens
    several = runtime.generate([text, messages, ids, np.asarray(ids)], options)
    assert [g.tokens for g in several] == [one.tokens] * 4


def test_memory_does_not_grow_with_requests(engine: Path) -> None:
    """5,000 short requests: less than a kilobyte each, which other threads of the tests may take."""
    runtime = Runtime.load(engine, threads=1)
    options = GenerationOptions(2, ignore_eos=True, temperature=1.0)
    process = psutil.Process()

    def some(count: int) -> int:
        runtime.generate([[i % tiny.VOCAB] for i in range(count)], options)
        gc.collect()
        return process.memory_info().rss

    some(1500)
    before = some(500)
    assert max(some(500) for _ in range(10)) - before < 5_000_000


def test_drafts_do_not_depend_on_company(engine: Path) -> None:
    """The same blocks are drafted in batches whose lanes change places as alone: what was injected
    is each slot's own. Wrong features would only lower acceptance, silently."""
    engines = OnnxRuntimePair(engine, threads=1)
    asked = prompts(3)

    def blocks(orders: list[list[int]]) -> dict[int, list[list[int]]]:
        drafted: dict[int, list[list[int]]] = {s: [] for s in orders[0]}
        for slot in orders[0]:
            engines.release(slot)
            engines.prefill(slot, np.asarray(asked[slot][:100]), inject=True)
        for order in orders:
            engines.draft(order, 5)
            engines.verify(order, 6)
            for lane, slot in enumerate(order):
                drafted[slot].append(engines.tokens[lane].tolist())
        return drafted

    alone = {slot: blocks([[slot]] * 12)[slot] for slot in range(3)}
    assert blocks([[0, 1, 2], [2, 0, 1], [1, 2, 0]] * 4) == alone


def test_drafts_are_those_of_the_committed_tokens(engine: Path) -> None:
    """Whatever was committed of a block, more or less than the engine did, and however slots changed
    places, the next drafts are those of a slot that was given all committed tokens as its prompt."""
    engines, fresh = (OnnxRuntimePair(engine, threads=1) for _ in "ab")
    random, held = np.random.default_rng(7), dict(enumerate(prompts(3)))

    def start(pair: OnnxRuntimePair, slot: int, ids: list[int]) -> None:
        pair.release(slot)
        for begin in range(0, len(ids), 128):
            pair.prefill(slot, np.asarray(ids[begin : begin + 128]), inject=True)

    for slot, ids in held.items():
        start(engines, slot, ids)
    for cycle in range(15):
        if cycle == 8:  # a slot that was used has a new sequence
            held[1] = prompts(4)[3]
            start(engines, 1, held[1])
        order = random.permutation(3).tolist()
        width = 1 if cycle % 3 == 2 else 6  # single steps between blocks
        engines.draft(order, width - 1)
        engines.verify(order, width)
        blocks = engines.tokens.tolist()
        for slot, block, count in zip(order, blocks, engines.accepted.tolist(), strict=True):
            start(fresh, 0, held[slot])
            fresh.commit(0, 0, block[0])
            fresh.draft([0], width - 1)
            fresh.verify([0], width)
            assert fresh.tokens[0].tolist() == block
            assert (fresh.accepted[0], fresh.anchor[0]) == (count, engines.anchor[slot])
            if random.random() < 0.6:
                count = int(random.integers(1, width + 1))
                engines.commit(slot, count, int(random.integers(0, tiny.VOCAB)))
            held[slot] = [*held[slot], *block[:count]]
            assert engines.context[slot] == len(held[slot])

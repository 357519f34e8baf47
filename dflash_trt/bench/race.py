"""The drafting race: one drafter called once per block against the same called once per token.

Everything else is equal: both draft the same tokens, and the same tokens of them are accepted. With K
drafted tokens per cycle, S passes of a block drafter and a verify that takes V drafter passes,

    sequential cycle = K + V,   block cycle = S + V,   gap = (K + V) / (S + V)

for one pass of the drafter takes the same time whatever it drafts, as long as reading its weights is
what takes the time. Acceptance decides how many cycles there are and not the gap: a draft that is
accepted with probability a, as all before it were, gives (1 - a^(K+1)) / (1 - a) tokens per cycle,
the target's own included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from dflash_trt.errors import InputError
from dflash_trt.runtime.acceptance import clip_block
from dflash_trt.runtime.cycle import EnginePair


@dataclass(frozen=True)
class Leg:
    """One cycle of a racer: time drafting, time verifying, tokens committed by it."""

    draft: float
    verify: float
    committed: int

    @property
    def time(self) -> float:
        return self.draft + self.verify


@dataclass(frozen=True)
class Racer:
    """Its cycles in order; `calls` of the drafter in each."""

    name: str
    calls: int
    legs: tuple[Leg, ...]

    @property
    def time(self) -> float:
        return sum(leg.time for leg in self.legs)

    @property
    def tokens(self) -> int:
        return sum(leg.committed for leg in self.legs)

    def at(self, time: float) -> tuple[int, str]:
        """Tokens committed by then, and what it is doing."""
        tokens = 0
        for leg in self.legs:
            if time < leg.draft:
                call = int(time / leg.draft * self.calls) + 1
                return tokens, f"drafting {call}/{self.calls}"
            if time < leg.time:
                return tokens, "verifying"
            tokens, time = tokens + leg.committed, time - leg.time
        return tokens, "done"


def gap(sequential: Racer, block: Racer) -> float:
    """How many times as long the sequential drafter takes."""
    return sequential.time / block.time


@dataclass(frozen=True)
class Course:
    """The controlled race. drafts: K; passes: S; verify: V, in drafter passes; acceptance: a."""

    drafts: int = 8
    passes: int = 2
    verify: float = 12.0
    acceptance: float = 0.8

    def __post_init__(self) -> None:
        for name, low in (("drafts", 1), ("passes", 1), ("verify", 0)):
            if getattr(self, name) < low:
                raise InputError(f"{name} {getattr(self, name):g}: must be {low} or more")
        if self.passes > self.drafts:
            raise InputError(f"passes {self.passes}: more than the {self.drafts} drafted tokens")
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"acceptance {self.acceptance:g}: must be 0 to 1")

    @property
    def gap(self) -> float:
        return (self.drafts + self.verify) / (self.passes + self.verify)

    @property
    def acceptance_length(self) -> float:
        """Expected tokens per cycle."""
        return sum(self.acceptance**i for i in range(self.drafts + 1))

    def run(self, tokens: int, seed: int = 0) -> tuple[Racer, Racer]:
        """Sequential and block over the same draws, until `tokens` are committed. Time is in ticks
        of one drafter pass."""
        draw = random.Random(seed)
        committed: list[int] = []
        left = tokens
        while left > 0:
            accepted = 0
            while accepted < self.drafts and draw.random() < self.acceptance:
                accepted += 1
            committed.append(accepted + 1)
            left -= accepted + 1
        return (
            self._racer("sequential", self.drafts, committed),
            self._racer("block", self.passes, committed),
        )

    def _racer(self, name: str, calls: int, committed: Sequence[int]) -> Racer:
        return Racer(name, calls, tuple(Leg(calls, self.verify, n) for n in committed))


def race_engines(
    engines: EnginePair, prompt: Sequence[int], tokens: int
) -> tuple[Racer, Racer, list[int]]:
    """The race on a pair of engines: (sequential, block, tokens committed by both), in seconds.

    The block drafter is called once per cycle for all slots. The sequential one is called once per
    token, for one slot each; what both verify is the block, which it is given off the clock. Its
    later calls inject the last features once more, a small part of a call.
    """
    drafts = engines.manifest.block - 1
    for sequential in (True, False):
        _run(engines, prompt, 2 * drafts, sequential)  # warm-up
    slow, slow_tokens = _run(engines, prompt, tokens, sequential=True)
    fast, fast_tokens = _run(engines, prompt, tokens, sequential=False)
    assert slow_tokens == fast_tokens, "the same drafts were accepted differently"
    if not fast:
        raise InputError("the answer is a single token: nothing is drafted, so there is no race")
    return Racer("sequential", drafts, slow), Racer("block", 1, fast), fast_tokens


def _run(
    engines: EnginePair, prompt: Sequence[int], limit: int, sequential: bool
) -> tuple[tuple[Leg, ...], list[int]]:
    """Greedy, up to an end token, `limit` tokens, or a full cache."""
    m, slot, legs = engines.manifest, (0,), []
    tokens = [_prefill(engines, prompt)]
    while len(tokens) < limit and not set(tokens) & set(m.stop_ids):
        if engines.context[0] + 1 >= m.max_seq_len:
            break
        if sequential:
            draft = sum(_timed(lambda: engines.draft(slot, 1)) for _ in range(m.block - 1))
            engines.draft(slot, m.block - 1)
        else:
            draft = _timed(lambda: engines.draft(slot, m.block - 1))
        verify = _timed(lambda: engines.verify(slot, m.block))
        drafts, anchor = engines.tokens[0, 1:].tolist(), int(engines.anchor[0])
        committed = clip_block(int(engines.accepted[0]), drafts, anchor, m.block)
        legs.append(Leg(draft, verify, len(committed)))
        tokens += committed
    return tuple(legs), tokens


def _prefill(engines: EnginePair, prompt: Sequence[int]) -> int:
    """The first token behind the prompt."""
    engines.release(0)
    ids = np.asarray(prompt, np.int64)
    for begin in range(0, len(ids), engines.prefill_chunk):
        engines.prefill(0, ids[begin : begin + engines.prefill_chunk], inject=True)
    return int(engines.anchor[0])


def _timed(call: Callable[[], None]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin

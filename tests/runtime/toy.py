"""A target and drafters in numpy, behind the protocol that the cycle drives: fast and exact."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from dflash_trt.runtime.cycle import EnginePair


class ToyPair:
    """The target's logits depend on the last two tokens; `skill` is how often a draft is its arg max.

    Fulfils `EnginePair`. A slot's "cache" is its list of tokens, and every call checks the lengths
    that the runtime claims against it. Rejected rows stay in the list's tail until overwritten, as
    in a real cache.
    """

    prefill_chunk = 8
    cache_bytes = 0

    def __init__(
        self,
        vocab: int = 24,
        slots: int = 1,
        block: int = 6,
        skill: float = 0.7,
        seed: int = 0,
        max_seq_len: int = 512,
        stop_ids: tuple[int, ...] = (),
        drafter_positions: int = 10_000,
    ) -> None:
        self.table = np.random.default_rng(seed).normal(0, 1.5, (vocab, vocab, vocab))
        self.table = self.table.astype(np.float32)
        self.manifest = SimpleNamespace(
            block=block, vocab_size=vocab, max_batch=slots, max_seq_len=max_seq_len,
            capacity=max_seq_len + block, stop_ids=stop_ids, mask_id=0,
            drafter=SimpleNamespace(config={"max_positions": drafter_positions}),
        )  # fmt: skip
        self.widths = range(1, block + 1)
        self.skill, self.random = skill, np.random.default_rng(seed + 1)
        self.context, self.anchor = np.zeros(slots, np.int32), np.zeros(slots, np.int64)
        self.cached: list[list[int]] = [[] for _ in range(slots)]
        self.rows = np.zeros(slots, np.int32)
        self.injected = np.zeros(slots, np.int32)
        self.calls = 0

    def row(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits behind `tokens`."""
        a, b = [0, 0, *tokens][-2:]
        return self.table[a, b]

    def release(self, slot: int) -> None:
        self.context[slot] = self.rows[slot] = self.injected[slot] = 0

    def prefill(self, slot: int, chunk: np.ndarray, inject: bool, logits: bool = False) -> None:
        held = self.cached[slot][: self.context[slot]] + chunk.tolist()
        self.cached[slot] = held
        row = self.row(held)
        self.context[slot], self.anchor[slot], self.rows[slot] = len(held), row.argmax(), 0
        if inject:
            self.injected[slot] += len(chunk)
        self.logits = row[None, None]

    def draft(self, slots: Sequence[int], count: int) -> None:
        self.tokens = np.zeros((len(slots), 1 + count), np.int64)
        for lane, slot in enumerate(slots):
            self.injected[slot] += self.rows[slot]
            block = [int(self.anchor[slot])]
            held = self.cached[slot][: self.context[slot]]
            for _ in range(count):
                right = self.random.random() < self.skill
                best = int(self.row(held + block).argmax())
                block.append(best if right else int(self.random.integers(self.manifest.vocab_size)))
            self.tokens[lane] = block

    def verify(self, slots: Sequence[int], width: int, logits: bool = False) -> None:
        self.calls += 1
        if width == 1:
            self.tokens = self.anchor[list(slots)][:, None]
        self.accepted = np.zeros(len(slots), np.int32)
        self.logits = np.zeros((len(slots), width, self.manifest.vocab_size), np.float32)
        for lane, slot in enumerate(slots):
            held = self.cached[slot][: self.context[slot]]
            block = self.tokens[lane].tolist()
            rows = np.stack([self.row(held + block[: j + 1]) for j in range(width)])
            agreed = 0
            while agreed < width - 1 and rows[agreed].argmax() == block[agreed + 1]:
                agreed += 1
            self.logits[lane] = rows
            self.cached[slot] = held + block
            self.accepted[lane] = self.rows[slot] = agreed + 1
            self.context[slot] += agreed + 1
            self.anchor[slot] = rows[agreed].argmax()

    def commit(self, slot: int, accepted: int, anchor: int) -> None:
        self.context[slot] += accepted - self.rows[slot]
        self.rows[slot], self.anchor[slot] = accepted, anchor


class ToyCodec:
    """Token n is the letter n of the alphabet; streams like `TextCodec`."""

    stop_ids = ()

    def stream(self, prompt: Sequence[int] = ()) -> ToyCodec:
        return self

    def push(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)

    def finish(self) -> str:
        return ""


def as_engines(toy: ToyPair) -> EnginePair:
    return toy  # type: ignore[return-value]

"""The generate step: the target's own answers to the prompts, many at a time, resumable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dflash_trt.errors import InputError
from dflash_trt.runtime.loops import loops
from dflash_trt.training.answers import Answer, answer_line, read_answers

LOOK_FOR_LOOPS = 32  # tokens between two looks; an answer that loops is not worth finishing


class Engine(Protocol):
    """What generation needs: see ``engine.SlotEngine``."""

    slots: int
    capacity: int
    lengths: NDArray[np.int32]

    def prefill(self, slot: int, prompt: Sequence[int]) -> NDArray[np.float32]: ...
    def decode(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Job:
    """One answer to make. Sample 0 is greedy, the others are drawn at the temperature."""

    prompt: int
    sample: int
    domain: str
    ids: tuple[int, ...]

    def answered(self, ids: Sequence[int]) -> Answer:
        return Answer(self.prompt, self.sample, self.domain, self.ids, tuple(ids))


@dataclass(frozen=True)
class GenerateOptions:
    max_tokens: int = 200
    min_tokens: int = 12
    temperature: float = 0.8
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise InputError(f"temperature must be positive, got {self.temperature}")


class _Slot:
    """A job under way. Its random numbers are its own, whoever shares the batch."""

    def __init__(self, job: Job, options: GenerateOptions) -> None:
        self.job, self.options = job, options
        self.ids: list[int] = []
        self._rng = np.random.default_rng([options.seed, job.prompt, job.sample])

    def take(self, logits: NDArray[np.float32]) -> int:
        """Choose the next token from logits [V]."""
        if self.job.sample:
            noise = self._rng.gumbel(size=len(logits)).astype(np.float32)
            logits = logits / np.float32(self.options.temperature) + noise
        self.ids.append(int(logits.argmax()))
        return self.ids[-1]

    @property
    def finished(self) -> bool:
        return self.ids[-1] in self.options.stop_ids or len(self.ids) >= self.options.max_tokens

    @property
    def useless(self) -> bool:
        return len(self.ids) % LOOK_FOR_LOOPS == 0 and loops(self.ids)

    def answer(self) -> Answer:
        useful = not loops(self.ids) and len(self.ids) >= self.options.min_tokens
        return self.job.answered(self.ids if useful else ())


def answers(engine: Engine, jobs: Sequence[Job], options: GenerateOptions) -> Iterator[Answer]:
    """One for each job as it ends, without tokens where they loop or are too few."""
    waiting = deque(jobs)
    active: list[_Slot | None] = [None] * engine.slots
    tokens = np.zeros(engine.slots, np.int64)
    while waiting or any(active):
        yield from _fill(engine, waiting, active, tokens, options)
        for i, slot in enumerate(active):
            if slot is None:
                engine.lengths[i] = 0
        logits = engine.decode(tokens)
        for i, slot in enumerate(active):
            if slot is not None:
                tokens[i] = slot.take(logits[i])
                if slot.finished or slot.useless:
                    active[i] = None
                    yield slot.answer()


def _fill(
    engine: Engine,
    waiting: deque[Job],
    active: list[_Slot | None],
    tokens: NDArray[np.int64],
    options: GenerateOptions,
) -> Iterator[Answer]:
    """Give every free slot a job; a prompt that leaves no room for an answer is passed over."""
    for i in range(len(active)):
        while waiting and active[i] is None:
            job = waiting.popleft()
            if len(job.ids) + options.max_tokens > engine.capacity:
                yield job.answered(())
                continue
            slot = _Slot(job, options)
            tokens[i] = slot.take(engine.prefill(i, job.ids))
            if slot.finished:
                yield slot.answer()
            else:
                active[i] = slot


def pending(jobs: Sequence[Job], path: Path) -> list[Job]:
    """Jobs that the file does not know yet."""
    done = {(a.prompt, a.sample) for a in read_answers(path)} if path.is_file() else set()
    return [j for j in jobs if (j.prompt, j.sample) not in done]


def generate(
    engine: Engine,
    jobs: Sequence[Job],
    options: GenerateOptions,
    path: Path,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Append the missing answers to ``path``; returns how many are worth learning from. Killed, it
    goes on."""
    _drop_torn_line(path)
    left, kept = pending(jobs, path), 0
    with path.open("a") as file:
        for done, answer in enumerate(answers(engine, left, options), 1):
            file.write(answer_line(answer))
            file.flush()
            kept += bool(answer.ids)
            report(done, len(left))
    return kept


def _drop_torn_line(path: Path) -> None:
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])

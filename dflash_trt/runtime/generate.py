"""Generating: from a prompt to tokens, with or without drafting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from dflash_trt.engines.onnxruntime import PREFILL_CHUNK, OnnxRuntimePair
from dflash_trt.errors import InputError
from dflash_trt.runtime.cycle import Cycle, EnginePair
from dflash_trt.runtime.metrics import GenerationMetrics
from dflash_trt.runtime.text import Message, TextCodec


@dataclass(frozen=True)
class GenerationOptions:
    """max_tokens: at most so many new tokens; draft: False decodes one token at a time; width:
    tokens per verify call, 2 to the engine's block (None: the block)."""

    max_tokens: int = 256
    draft: bool = True
    width: int | None = None
    ignore_eos: bool = False


@dataclass
class Generation:
    """A finished request: its tokens, why it ended (`stop` or `length`), and its metrics."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    metrics: GenerationMetrics = field(default_factory=GenerationMetrics)


class TimedPair:
    """Passes calls on to a pair of engines and adds up the time spent in them."""

    def __init__(self, engines: EnginePair) -> None:
        self._engines = engines
        self.manifest = engines.manifest
        self.seconds = 0.0

    accepted = property(lambda self: self._engines.accepted)
    anchor = property(lambda self: self._engines.anchor)
    context = property(lambda self: self._engines.context)

    def tokens(self, count: int) -> list[int]:
        return self._engines.tokens(count)

    def reset(self) -> None:
        self._engines.reset()

    def prefill(self, chunk: np.ndarray) -> None:
        self._engines.prefill(chunk)

    def decode(self) -> None:
        begin = perf_counter()
        self._engines.decode()
        self.seconds += perf_counter() - begin

    def draft(self, rows: int, slots: int) -> None:
        begin = perf_counter()
        self._engines.draft(rows, slots)
        self.seconds += perf_counter() - begin

    def verify(self, width: int) -> None:
        begin = perf_counter()
        self._engines.verify(width)
        self.seconds += perf_counter() - begin


class Runtime:
    """An engine directory, loaded: text in, text out."""

    def __init__(self, engines: EnginePair, codec: TextCodec) -> None:
        self.manifest = engines.manifest
        self.codec = codec
        self._engines = TimedPair(engines)

    @classmethod
    def load(cls, path: Path, threads: int = 0) -> Runtime:
        """Load an engine directory; everything in it is checked first."""
        engines = OnnxRuntimePair(path, threads)
        return cls(engines, TextCodec(path, engines.manifest.chat_arguments))

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a question or of chat messages, with the assistant's turn open."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.codec.chat_ids(messages)

    def generate(self, prompt: Sequence[int], options: GenerationOptions) -> Generation:
        """All tokens behind `prompt` (token ids), greedy."""
        generation = Generation()
        for _ in self.steps(prompt, options, generation):
            pass
        return generation

    def steps(
        self, prompt: Sequence[int], options: GenerationOptions, generation: Generation
    ) -> Iterator[list[int]]:
        """The new tokens of each call as they come; `generation` is filled along the way."""
        self._check(prompt, options)
        metrics = generation.metrics
        metrics.prompt_tokens = len(prompt)
        cycle = Cycle(self._engines, PREFILL_CHUNK, options.width if options.draft else 1)
        begin = perf_counter()
        tokens = self._take([cycle.start(prompt)], options, generation)
        metrics.ttft = perf_counter() - begin
        yield tokens
        while not self._done(generation, options, cycle.context):
            begin, engine_before = perf_counter(), self._engines.seconds
            step = cycle.step()
            tokens = self._take(step.committed, options, generation)
            metrics.count(step)
            spent = perf_counter() - begin
            metrics.decode_seconds += spent
            metrics.host_seconds += spent - (self._engines.seconds - engine_before)
            yield tokens

    def _check(self, prompt: Sequence[int], options: GenerationOptions) -> None:
        if not prompt:
            raise InputError("the prompt is empty")
        if options.max_tokens < 1:
            raise InputError(f"max-tokens {options.max_tokens}: at least one token is generated")
        if len(prompt) >= self.manifest.max_seq_len:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, the engine holds "
                f"{self.manifest.max_seq_len} with the answer"
            )
        width = options.width
        if width is not None and not 2 <= width <= self.manifest.block:
            raise InputError(
                f"width {width}: this engine verifies 2 to {self.manifest.block} tokens"
            )

    def _take(
        self, committed: Sequence[int], options: GenerationOptions, generation: Generation
    ) -> list[int]:
        """Keep committed tokens up to the first stop id and the token limit."""
        kept = []
        for token in committed[: options.max_tokens - len(generation.tokens)]:
            if token in self.manifest.stop_ids and not options.ignore_eos:
                generation.finish_reason = "stop"
                break
            kept.append(token)
        generation.tokens += kept
        generation.metrics.tokens = len(generation.tokens)
        return kept

    def _done(self, generation: Generation, options: GenerationOptions, context: int) -> bool:
        full = context + 1 >= self.manifest.max_seq_len
        enough = len(generation.tokens) >= options.max_tokens
        return generation.finish_reason == "stop" or enough or full

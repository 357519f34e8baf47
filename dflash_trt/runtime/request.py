"""One request: what it asked for, what it has got, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dflash_trt.errors import InputError
from dflash_trt.runtime.cycle import EnginePair, Lane, StepResult
from dflash_trt.runtime.metrics import GenerationMetrics
from dflash_trt.runtime.options import GenerationOptions
from dflash_trt.runtime.sampling import Chooser, TokenLogprobs
from dflash_trt.runtime.text import StopFinder, TextCodec


@dataclass(frozen=True)
class Delta:
    """What one cycle added. The last delta of a request has a finish reason; `error` ends it too.

    Texts of all deltas joined are the answer; text may lag behind tokens while a character or a stop
    text is incomplete.
    """

    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    error: BaseException | None = None


@dataclass
class Generation:
    """An answer. finish_reason: `stop`, `length`, `cancelled` or `deadline`, None while it runs;
    stop: the token id or text that ended it; drafting: whether blocks were drafted, or why not."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop: int | str | None = None
    seed: int | None = None
    drafting: str = "on"
    metrics: GenerationMetrics = field(default_factory=GenerationMetrics)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts as OpenAI's API names them."""
        counts = {
            "prompt_tokens": self.metrics.prompt_tokens,
            "completion_tokens": len(self.tokens),
        }
        return {**counts, "total_tokens": sum(counts.values())}


class Request:
    """The life of one request: waiting, prefilling (`slot` is set), decoding, ended.

    Two sides, which may be at work at once: `lane`, `begin` and `advance` are the engines' (`tokens`,
    `chooser`, counts); `news` makes text of what they took, and alone writes tokens, text and end of
    `generation`. `sink` is told of every change, from one thread at a time.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        engines: EnginePair,
        codec: TextCodec,
        sink: Callable[[Delta], None],
        generation: Generation | None = None,
    ) -> None:
        check_request(prompt, options, engines)
        manifest = engines.manifest
        self.prompt: NDArray[np.int64] = np.asarray(prompt, np.int64)
        self.options, self.sink = options, sink
        self.generation = generation or Generation()
        self.tokens: list[int] = []  # of the answer, told or not
        self.slot = -1
        self.prefilled = 0
        self.cancelled = False
        stop_ids = set(options.stop_token_ids) | set(
            () if options.ignore_eos else (*manifest.stop_ids, *codec.stop_ids)
        )
        self._stop_ids = stop_ids
        self._max_seq_len = manifest.max_seq_len
        self._widest = (options.width or engines.widths[-1]) if options.draft else 1
        self._drafter_ends = _drafter_ends(engines)
        self._drafts_only = 1 not in engines.widths
        self._stream, self._finder = codec.stream(prompt), StopFinder(options.stop)
        self._end: tuple[str, int | None] | None = None  # reason and stop id, known, perhaps untold
        self._engine_before = 0.0
        self._submitted = self._first_token = perf_counter()
        self.chooser = Chooser(prompt, options, stop_ids, manifest.vocab_size)
        self.generation.metrics.prompt_tokens = len(prompt)
        if not options.greedy:
            self.generation.seed = self.chooser.seed
        if not options.draft:
            self.generation.drafting = "off: not asked for"

    # Where it stands

    @property
    def ended(self) -> bool:
        """Its end was told."""
        return self.generation.finish_reason is not None

    @property
    def complete(self) -> bool:
        """No more tokens are wanted; the last ones may not have been told yet."""
        return self.ended or self._end is not None

    @property
    def overdue(self) -> bool:
        limit = self.options.deadline
        return limit is not None and perf_counter() - self._submitted > limit

    @property
    def width(self) -> int:
        """Tokens of its longest block; 1 without drafting, also where the drafter's positions end."""
        context = len(self.prompt) + max(len(self.tokens) - 1, 0)
        return self._widest if self._draftable(context) else 1

    def _draftable(self, context: int) -> bool:
        """Whether the drafter has positions for a block behind so many tokens."""
        return context + self._widest <= self._drafter_ends

    @property
    def adaptive(self) -> bool:
        """Whether it takes shorter blocks too, or none."""
        return self.options.adaptive and self.width > 1

    def lane(self, width: int | None = None) -> Lane:
        """Its part in the next call. width: what is best for the batch, if it is `adaptive`."""
        own = self.width
        if own < self._widest:
            self.generation.drafting = f"off: the drafter ends at {self._drafter_ends} positions"
        if not self.adaptive or width is None:
            return Lane(self.slot, own, self.chooser)
        width = min(width, own)
        shorter = f"on: blocks of {width}" if width < own else "on"
        self.generation.drafting = shorter if width > 1 else "off: slower than without"
        return Lane(self.slot, width, self.chooser, follow=True)

    def next_chunk(self, size: int) -> NDArray[np.int64]:
        return self.prompt[self.prefilled : self.prefilled + size]

    # What happens to it

    def admitted(self, slot: int) -> None:
        self.slot = slot
        self.generation.metrics.queue_seconds = perf_counter() - self._submitted

    def begin(self, token: int, engine_seconds: float) -> None:
        """The first token, at the end of the prefill; engine_seconds: spent by all calls so far."""
        self._first_token, self._engine_before = perf_counter(), engine_seconds
        self.generation.metrics.ttft = self._first_token - self._submitted
        self._take([token])

    def advance(self, step: StepResult, context: int, engine_seconds: float) -> None:
        """The tokens of one cycle. context: cached tokens; engine_seconds as in `begin`."""
        metrics = self.generation.metrics
        metrics.count(step)
        ends = self._drafts_only and not self._draftable(context)
        self._take(step.committed, full=ends or context + 1 >= self._max_seq_len)
        metrics.decode_seconds = perf_counter() - self._first_token
        metrics.engine_seconds = engine_seconds - self._engine_before

    def end(self, reason: str) -> None:
        """End it from outside: cancelled, or past its deadline."""
        self._end = (reason, None)

    def fail(self, error: BaseException) -> Delta:
        self.generation.finish_reason = "error"
        return Delta(finish_reason="error", error=error)

    def _take(self, committed: Sequence[int], full: bool = False) -> None:
        """Keep committed tokens up to the first end; what comes behind it never was."""
        for token in committed:
            if token in self._stop_ids:
                self._end = ("stop", token)
                return
            self.tokens.append(token)
            if len(self.tokens) >= self.options.max_tokens:
                self._end = ("length", None)
                return
        if full:
            self._end = ("length", None)

    # What the client gets

    def news(self) -> Delta:
        """The tokens taken since the last time, with their text; a stop text in it ends the answer."""
        g, text = self.generation, ""
        begin = len(g.tokens)
        for token in self.tokens[begin:]:
            g.tokens.append(token)
            text += self._push_text(token)
            if self.ended:
                break
        if self._end is not None and not self.ended:
            text += self._finished(*self._end)
        tokens, logprobs = g.tokens[begin:], self.chooser.logprobs[begin : len(g.tokens)]
        g.logprobs += logprobs
        g.text += text
        g.metrics.tokens = len(g.tokens)
        return Delta(tuple(tokens), text, tuple(logprobs), g.finish_reason)

    def send(self, delta: Delta) -> None:
        """A client that cannot be told loses its own request, not the others theirs."""
        try:
            self.sink(delta)
        except Exception:
            self.cancelled = True

    def _push_text(self, token: int) -> str:
        armed = len(self.generation.tokens) >= self.options.min_tokens
        shown, stop = self._finder.push(self._stream.push([token]), armed)
        if stop is not None:
            self.generation.finish_reason, self.generation.stop = "stop", stop
        return shown

    def _finished(self, reason: str, stop: int | None) -> str:
        """Note the end; returns the text that was held back."""
        self.generation.finish_reason, self.generation.stop = reason, stop
        held, found = self._finder.push(self._stream.finish())
        if found is not None:
            self.generation.finish_reason, self.generation.stop = "stop", found
        return held + self._finder.finish()


def _drafter_ends(engines: EnginePair) -> int:
    """Positions of the drafter."""
    manifest = engines.manifest
    ends: int = manifest.drafter.config.get("max_positions", manifest.capacity)
    return ends


def check_request(prompt: Sequence[int], options: GenerationOptions, engines: EnginePair) -> None:
    """Refuse what these engines cannot do."""
    manifest = engines.manifest
    if not len(prompt):
        raise InputError("the prompt is empty")
    if len(prompt) >= manifest.max_seq_len:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, the engine holds "
            f"{manifest.max_seq_len} with the answer"
        )
    blocks = [width for width in engines.widths if width > 1]
    if options.width is not None and options.width not in blocks:
        most = f" to {blocks[-1]}" if len(blocks) > 1 else ""
        raise InputError(f"width {options.width}: this engine verifies {blocks[0]}{most} tokens")
    if not options.draft and 1 not in engines.widths:
        raise InputError("draft: this engine decodes no single tokens; build it with --step")
    ends, block = _drafter_ends(engines), options.width or blocks[-1]
    if 1 not in engines.widths and len(prompt) + block > ends:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, the drafter ends at {ends} with a block of "
            f"{block}, and this engine decodes no single tokens; build it with --step"
        )
    for what, ids in (
        ("the prompt", prompt),
        ("logit-bias", options.logit_bias),
        ("stop-token-ids", options.stop_token_ids),
    ):
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < manifest.vocab_size:
                raise InputError(
                    f"{what}: token {token} is outside the vocabulary of {manifest.vocab_size}"
                )

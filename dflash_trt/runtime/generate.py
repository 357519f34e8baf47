"""The runtime's API: from prompts to answers, at once or as they come, alone or many together.

    runtime = Runtime.load(Path("engines/smollm2-135m-int8"))
    answer = runtime.generate("Why is the sky blue?", GenerationOptions(temperature=0.7, seed=1))
    answers = runtime.generate(["One?", "Two?"], GenerationOptions(64))   # in one batch
    async for delta in runtime.stream("Why?", GenerationOptions(64)):
        print(delta.text, end="")

Methods may be called from any thread. A thread of the runtime's own runs the cycles while there is
work and ends when there is none; a second one makes text meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import cast, overload

import numpy as np

from dflash_trt.engines.directory import Manifest, read_manifest
from dflash_trt.engines.onnxruntime import OnnxRuntimePair
from dflash_trt.runtime.cycle import EnginePair
from dflash_trt.runtime.harmony_codec import HarmonyCodec
from dflash_trt.runtime.metrics import RuntimeMetrics
from dflash_trt.runtime.options import GenerationOptions
from dflash_trt.runtime.request import Delta, Generation, Request
from dflash_trt.runtime.scheduler import QueueFullError, Scheduler
from dflash_trt.runtime.text import Message, TextCodec

__all__ = ["Delta", "Generation", "GenerationOptions", "Prompt", "QueueFullError", "Runtime"]

Prompt = str | Sequence[int] | Sequence[Message]
_DEFAULT = GenerationOptions()


class Runtime:
    """An engine directory, loaded: text in, text out.

    A prompt is a question (the chat template is applied), a list of chat messages, or token ids.
    """

    def __init__(self, engines: EnginePair, codec: TextCodec, queue_limit: int = 256) -> None:
        self.engines = engines  # another's to drive only while no request runs
        self.manifest = engines.manifest
        self.codec = codec
        self._scheduler = Scheduler(engines, queue_limit)
        self._lock = Lock()
        self._thread: Thread | None = None

    @classmethod
    def load(
        cls, path: Path, threads: int = 0, queue_limit: int = 256, start_ranks: bool = False
    ) -> Runtime:
        """Load an engine directory; everything in it is checked first.

        threads: 0 for one per core; queue_limit: requests that may wait for a slot. An engine of
        several ranks is loaded by as many processes under `mpirun`: it comes back on rank 0 only,
        the others follow rank 0 until it ends and then end themselves. With start_ranks this process
        is rank 0 and starts the others.
        """
        engines = _load_engines(path, threads, start_ranks)
        return cls(engines, _codec(path, engines.manifest), queue_limit)

    @property
    def metrics(self) -> RuntimeMetrics:
        return self._scheduler.metrics

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a question or of chat messages, with the assistant's turn open."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.codec.chat_ids(messages)

    # Answers at once

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts to mypy
        self, prompt: Prompt, options: GenerationOptions = ...
    ) -> Generation: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], options: GenerationOptions = ...
    ) -> list[Generation]: ...
    def generate(
        self, prompt: Prompt | Sequence[Prompt], options: GenerationOptions = _DEFAULT
    ) -> Generation | list[Generation]:
        """The answer to a prompt, or the answers to a list of prompts, batched, in their order."""
        if _is_one(prompt):
            return self._finish_all([cast(Prompt, prompt)], options)[0]
        return self._finish_all(cast(Sequence[Prompt], prompt), options)

    def _finish_all(
        self, prompts: Sequence[Prompt], options: GenerationOptions
    ) -> list[Generation]:
        running: deque[_Answer] = deque()
        done: list[Generation] = []
        try:
            for prompt in prompts:
                while (answer := self._try(prompt, options)) is None:
                    if not running:
                        raise QueueFullError("the queue is full; try again later")
                    done.append(running.popleft().finish())
                running.append(answer)
            while running:
                done.append(running.popleft().finish())
        finally:
            for answer in running:
                answer.request.cancelled = True
        return done

    def _try(self, prompt: Prompt, options: GenerationOptions) -> _Answer | None:
        try:
            return _Answer(self, prompt, options, Generation())
        except QueueFullError:
            return None

    # Answers as they come

    def deltas(
        self, prompt: Prompt, options: GenerationOptions, generation: Generation | None = None
    ) -> Iterator[Delta]:
        """What each cycle adds, as it comes; `generation` is filled along the way.

        Leaving the loop early cancels the request.
        """
        answer = _Answer(self, prompt, options, generation or Generation())
        try:
            yield from answer
        finally:
            answer.request.cancelled = True

    def steps(
        self, prompt: Sequence[int], options: GenerationOptions, generation: Generation
    ) -> Iterator[list[int]]:
        """The new tokens of each cycle as they come; `generation` is filled along the way."""
        for delta in self.deltas(prompt, options, generation):
            yield list(delta.tokens)

    async def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions = _DEFAULT,
        generation: Generation | None = None,
    ) -> AsyncIterator[Delta]:
        """What each cycle adds, as it comes; closing the iterator cancels the request."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Delta] = asyncio.Queue()

        def sink(delta: Delta) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, delta)

        request = self.submit(prompt, options, sink, generation)
        try:
            while True:
                delta = await arrived.get()
                yield _checked(delta)
                if delta.finish_reason is not None:
                    return
        finally:
            request.cancelled = True

    # The thread that runs the cycles

    def submit(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        sink: Callable[[Delta], None],
        generation: Generation | None = None,
    ) -> Request:
        """Queue a request; `sink` gets its deltas in a thread of the runtime's own. To cancel it, set
        `cancelled`: the slot is free within one cycle and a last delta says so."""
        ids = self._ids(prompt)
        request = Request(ids, options, self.engines, self.codec, sink, generation)
        with self._lock:
            self._scheduler.submit(request)
            if self._thread is None:
                self._thread = Thread(target=self._work, name="dflash-cycles", daemon=True)
                self._thread.start()
        return request

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
            return self.prompt_ids(cast(str | Sequence[Message], prompt))
        return cast(Sequence[int], prompt)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._scheduler.busy:
                    self._thread = None
                    return
            try:
                self._scheduler.step()
            except Exception as error:
                self._scheduler.fail(error)


class _Answer:
    """A request whose deltas are read from another thread."""

    def __init__(
        self, runtime: Runtime, prompt: Prompt, options: GenerationOptions, generation: Generation
    ) -> None:
        self._arrived: SimpleQueue[Delta] = SimpleQueue()
        self.request = runtime.submit(prompt, options, self._arrived.put, generation)

    def __iter__(self) -> Iterator[Delta]:
        while True:
            delta = self._arrived.get()
            yield _checked(delta)
            if delta.finish_reason is not None:
                return

    def finish(self) -> Generation:
        for _ in self:
            pass
        return self.request.generation


def _load_engines(path: Path, threads: int, start_ranks: bool) -> EnginePair:
    """The pair of an engine directory by its backend."""
    manifest = read_manifest(path, verify=False)
    if manifest.backend == "cpu" and manifest.tensor_parallel > 1:
        from dflash_trt.engines.ranks import join_ranks

        return join_ranks(path, manifest.tensor_parallel, threads, start_ranks)
    if manifest.backend == "cpu":
        return OnnxRuntimePair(path, threads)
    from dflash_trt.engines.tensorrt import TensorRTPair

    return TensorRTPair(path)


def _codec(path: Path, manifest: Manifest) -> TextCodec:
    """How an engine directory's text is made."""
    if manifest.chat_format == "harmony":
        return HarmonyCodec(path, manifest.chat_arguments)
    return TextCodec(path, manifest.chat_arguments)


def _checked(delta: Delta) -> Delta:
    if delta.error is not None:
        raise delta.error
    return delta


def _is_one(prompt: Prompt | Sequence[Prompt]) -> bool:
    """A single prompt: text, token ids, or messages; not a list of such."""
    if isinstance(prompt, str) or not len(prompt):
        return True
    return not isinstance(prompt[0], str | Sequence | np.ndarray)

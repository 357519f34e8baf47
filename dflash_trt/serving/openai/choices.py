"""Several requests of one client, as one stream of what their cycles add."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from dflash_trt.runtime.generate import Delta, Generation, GenerationOptions
from dflash_trt.runtime.request import Request
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.host import EngineHost

Job = tuple[Sequence[int], GenerationOptions]


class Choices:
    """Submits all jobs or none; `deltas` is read once, and closing it frees the slots.

    The queue between is bounded by max_tokens: a client that reads slowly does not hold a slot.
    """

    def __init__(self, host: EngineHost, jobs: Sequence[Job], seconds: float) -> None:
        self._host, self._seconds = host, seconds
        self._arrived: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._requests: list[Request] = []
        try:
            for index, job in enumerate(jobs):
                self._submit(index, *job)
        except BaseException:
            self.cancel()
            raise

    @property
    def generations(self) -> list[Generation]:
        return [request.generation for request in self._requests]

    def cancel(self) -> None:
        for request in self._requests:
            request.cancelled = True

    def _submit(self, index: int, ids: Sequence[int], options: GenerationOptions) -> None:
        def sink(delta: Delta) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, delta))

        self._requests.append(self._host.runtime.submit(ids, options, sink))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, delta) as they come; the first failure ends all."""
        left = len(self._requests)
        deadline = self._loop.time() + self._seconds
        try:
            while left:
                index, delta = await self._next(deadline)
                if delta.error is not None:
                    self._host.failed(delta.error)
                    raise delta.error
                left -= delta.finish_reason is not None
                yield index, delta
            self._host.answered()
        finally:
            self.cancel()

    async def _next(self, deadline: float) -> tuple[int, Delta]:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._arrived.get()
        except TimeoutError:
            message = f"no answer within {self._seconds:g} seconds"
            raise ApiError(504, message) from None

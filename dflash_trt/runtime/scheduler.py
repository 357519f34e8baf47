"""Who runs next: requests join and leave a batch between two cycles.

A step admits waiting requests to free slots in the order they came, runs one piece of one prompt, in
turn among those being prefilled, and one cycle of everything that decodes. So a long prompt delays
the others by one piece per cycle, and every slot advances in every cycle.

Telling lags one call behind: while the engines run, a second thread makes text of the tokens of the
cycle before, looks for stop texts and hands out deltas. Ends that tokens alone decide (end tokens,
max_tokens, a full cache) are known before the next call. A request that turns out to have ended in
its text has run one cycle too many by then: its tokens are dropped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dflash_trt.errors import InputError
from dflash_trt.runtime.cycle import Cycle, EnginePair, Lane
from dflash_trt.runtime.drafting import DraftControl
from dflash_trt.runtime.metrics import RuntimeMetrics
from dflash_trt.runtime.request import Delta, Request

_Result = TypeVar("_Result")


class QueueFullError(InputError):
    """More requests wait than the runtime was set up to hold; the client should come back later."""


class Scheduler:
    """Requests on the slots of one pair of engines. `step` belongs to one thread at a time;
    `submit`, and setting `Request.cancelled`, may come from any."""

    def __init__(self, engines: EnginePair, queue_limit: int = 256) -> None:
        m = engines.manifest
        self.metrics = RuntimeMetrics(m.max_batch, m.block, engines.cache_bytes)
        self._engines, self._cycle = engines, Cycle(engines)
        self._control = DraftControl(engines.widths)
        self._queue_limit = queue_limit
        self._arrived: deque[Request] = deque()  # the only thing that other threads touch
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self._decoding: list[Request] = []
        self._untold: dict[Request, None] = {}  # in order; with tokens or an end to tell
        self._teller = ThreadPoolExecutor(1, "dflash-text")
        self._free = list(range(engines.manifest.max_batch))

    @property
    def queued(self) -> int:
        return len(self._arrived) + len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._untold or self._arrived or self._waiting or self._holding)

    @property
    def _holding(self) -> list[Request]:
        """Requests that hold a slot."""
        return [*self._prefilling, *self._decoding]

    def submit(self, request: Request) -> None:
        if self.queued >= self._queue_limit:
            self.metrics.refused += 1
            raise QueueFullError(f"{self.queued} requests are waiting already; try again later")
        self._arrived.append(request)

    def step(self) -> None:
        """One cycle."""
        self._drop_cancelled()
        self._admit()
        self._prefill()
        self._decode()
        self._observe()

    def fail(self, error: BaseException) -> None:
        """End everything after an engine's failure."""
        self._waiting.extend(_drained(self._arrived))
        for request in dict.fromkeys((*self._untold, *self._waiting, *self._holding)):
            if not request.ended:
                self._send(request, request.fail(error))
        self._untold.clear()
        self._forget_complete()

    # Parts of a step

    def _drop_cancelled(self) -> None:
        self._waiting.extend(_drained(self._arrived))
        for request in (*self._waiting, *self._holding):
            if request.cancelled or request.overdue:
                request.end("cancelled" if request.cancelled else "deadline")
                self._untold[request] = None
        self._forget_complete()

    def _admit(self) -> None:
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.admitted(heapq.heappop(self._free))
            self._prefilling.append(request)

    def _prefill(self) -> None:
        if not self._prefilling:
            return
        request = self._prefilling.popleft()
        chunk = request.next_chunk(self._engines.prefill_chunk)
        request.prefilled += len(chunk)
        last = request.prefilled == len(request.prompt)
        self._prefilling.appendleft(request)  # still known if the engine fails
        lane = request.lane()
        token = self._run(lambda: self._cycle.prefill(lane, chunk, last))
        self._prefilling.popleft()
        if token is None:
            self._prefilling.append(request)
        else:
            self._decoding.append(request)
            request.begin(token, self._cycle.engine_seconds)
            self._untold[request] = None
        self._forget_complete()

    def _decode(self) -> None:
        if not self._decoding:
            self._tell()
            return
        lanes = self._lanes()
        results = self._run(lambda: self._cycle.step(lanes))
        self.metrics.cycles[max(lane.width for lane in lanes)].observe(self._cycle.step_seconds)
        if any(lane.follow for lane in lanes):
            self._control.observe(results, self._cycle.step_seconds)
        for request, result in zip(self._decoding, results, strict=True):
            if not request.ended:  # in its text, meanwhile
                self.metrics.count(result)
                context = int(self._engines.context[request.slot])
                request.advance(result, context, self._cycle.engine_seconds)
                self._untold[request] = None
        self._forget_complete()

    def _lanes(self) -> list[Lane]:
        """Parts of all that decode. The width is free where nobody asks for one: beside a block that
        is drafted anyway, others cost nothing."""
        free = [request.width for request in self._decoding if request.adaptive]
        width = max((r.width for r in self._decoding if not r.adaptive), default=1)
        if free and width == 1:
            width = self._control.width(len(self._decoding), len(free), max(free))
        return [request.lane(width) for request in self._decoding]

    def _run(self, call: Callable[[], _Result]) -> _Result:
        """A call of the engines, with telling beside it. The engines' side of a request (its slot,
        its chooser) is the caller's all the time, its text the teller's until this returns."""
        if not self._untold:
            return call()
        telling = self._teller.submit(self._tell)
        try:
            return call()
        finally:
            telling.result()

    def _tell(self) -> None:
        for request in list(self._untold):
            self._send(request, request.news())
            del self._untold[request]

    def _send(self, request: Request, delta: Delta) -> None:
        if request.ended:
            self.metrics.finish(request.generation)
        request.send(delta)

    def _forget_complete(self) -> None:
        """Free the slots of what wants no more tokens."""
        for queue in (self._waiting, self._prefilling, self._decoding):
            for request in [request for request in queue if request.complete]:
                queue.remove(request)
                self._free_slot(request)

    def _free_slot(self, request: Request) -> None:
        if request.slot >= 0:
            self._engines.release(request.slot)
            heapq.heappush(self._free, request.slot)
            request.slot = -1

    def _observe(self) -> None:
        m = self.metrics
        m.queued, m.slots_used = self.queued, m.slots - len(self._free)
        m.tokens_cached = int(self._engines.context.sum())


def _drained(queue: deque[Request]) -> Iterator[Request]:
    while queue:
        yield queue.popleft()

"""One Triton request: its rows are requests of the runtime, answers go back as they come."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any, Protocol

from numpy.typing import NDArray

from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import Delta, Generation, Runtime
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.scheduler import QueueFullError
from dflash_trt.serving.triton.replies import arrays, outputs, whole
from dflash_trt.serving.triton.wishes import Tensors, Wish, read_wish, rows


class Channel(Protocol):
    """The way back to one client. `final` may be sent once and ends it."""

    def send(self, tensors: Mapping[str, NDArray[Any]], final: bool) -> None: ...
    def fail(self, message: str, kind: str) -> None: ...
    def is_cancelled(self) -> bool: ...


class Exchange:
    """`closed` after the one final response. Deltas arrive in a thread of the runtime's, where nothing
    may be raised."""

    def __init__(self, channel: Channel, batched: bool) -> None:
        self._channel, self._batched = channel, batched
        self._requests: list[Request] = []
        self._lock = Lock()
        self._left = 0
        self.closed = False

    def start(self, tensors: Tensors, runtime: Runtime) -> None:
        """Submit every row; what is wrong with one ends the whole."""
        try:
            wishes = [read_wish(row, runtime) for row in rows(tensors, self._batched)]
            self._left = len(wishes)
            for index, wish in enumerate(wishes):
                self._submit(_RowAnswer(index, wish), wish, runtime)
        except Exception as error:
            self._fail(error)

    def poll(self) -> None:
        """Pass a client's cancellation on. The final response frees what Triton looks it up in: asked
        beside or after it, the server dies of a segmentation fault."""
        with self._lock:
            cancelled = not self.closed and self._channel.is_cancelled()
        if cancelled:
            self.cancel()

    def cancel(self) -> None:
        for request in self._requests:
            request.cancelled = True

    def _submit(self, answer: _RowAnswer, wish: Wish, runtime: Runtime) -> None:
        def sink(delta: Delta) -> None:
            try:
                self._receive(answer, delta)
            except Exception as error:
                self._fail(error)

        request = runtime.submit(wish.prompt, wish.options, sink, answer.generation)
        self._requests.append(request)

    def _receive(self, answer: _RowAnswer, delta: Delta) -> None:
        if delta.error is not None:
            return self._fail(delta.error)
        if delta.finish_reason == "cancelled":
            return self._close_with("the request was cancelled", "CANCELLED")
        values = answer.add(delta)
        with self._lock:
            if self.closed or values is None:
                return
            self._left -= delta.finish_reason is not None
            last = self._left == 0
            self._channel.send(arrays(values, self._batched), final=last)
            self.closed = last

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, QueueFullError):
            self._close_with(str(error), "UNAVAILABLE")
        elif isinstance(error, InputError):
            self._close_with(str(error), "INVALID_ARG")
        else:
            self._close_with(f"the engine failed: {type(error).__name__}: {error}", "INTERNAL")

    def _close_with(self, message: str, kind: str) -> None:
        self.cancel()
        with self._lock:
            if not self.closed:
                self.closed = True
                self._channel.fail(message, kind)


class _RowAnswer:
    """Gathers a row's deltas: all at the end, or each as it comes where the client streams."""

    def __init__(self, index: int, wish: Wish) -> None:
        self._index, self._wish = index, wish
        self.generation = Generation()
        self._told = False

    def add(self, delta: Delta) -> dict[str, Any] | None:
        """The values to send now."""
        if not self._wish.stream:
            if delta.finish_reason is None:
                return None
            delta = whole(self.generation)
        values = outputs(self._wish, delta, self.generation, echo=not self._told)
        self._told = True
        return {**values, "batch_index": self._index}

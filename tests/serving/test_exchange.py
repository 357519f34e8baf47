"""A request's way back to Triton, over a channel of our own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_trt.runtime.generate import Runtime
from dflash_trt.serving.triton.exchange import Exchange
from tests.serving.conftest import wait_for

TENSORS = {"text_input": np.array([b"Why?"], np.object_), "max_tokens": np.array([3], np.int32)}


class Channel:
    """Notes what was sent; while it is asked for a cancellation, it waits for the end."""

    def __init__(self, broken: bool = False) -> None:
        self.ended, self.asked = Event(), Event()
        self.ended_while_asked = False
        self.finals = 0
        self.errors: list[str] = []
        self._broken = broken

    def send(self, tensors: Mapping[str, NDArray], final: bool) -> None:
        if self._broken:
            raise ValueError("no room")
        if final:
            self.finals += 1
            self.ended.set()

    def fail(self, message: str, kind: str) -> None:
        self.errors.append(f"{kind}: {message}")
        self.ended.set()

    def is_cancelled(self) -> bool:
        self.asked.set()
        self.ended_while_asked = self.ended.wait(0.5)
        return False


@pytest.fixture(scope="module")
def runtime(tiny_engine: Path) -> Runtime:
    return Runtime.load(tiny_engine, threads=1)


def test_nothing_ends_while_a_cancellation_is_asked_for(runtime: Runtime) -> None:
    """Triton's answer is looked up in what the final response frees: the whole server crashed, once
    in some dozens of answers, with every other client's connection."""
    channel = Channel()
    exchange = Exchange(channel, batched=False)
    asking = Thread(target=exchange.poll)
    asking.start()
    assert channel.asked.wait(10)
    exchange.start(TENSORS, runtime)
    asking.join()
    assert not channel.ended_while_asked
    assert channel.ended.wait(10)
    wait_for(lambda: exchange.closed)
    channel.asked.clear()
    exchange.poll()
    assert not channel.asked.is_set()
    assert (channel.finals, channel.errors) == (1, [])


def test_an_answer_that_cannot_be_sent_is_an_error(runtime: Runtime) -> None:
    channel = Channel(broken=True)
    exchange = Exchange(channel, batched=False)
    exchange.start(TENSORS, runtime)
    assert channel.ended.wait(10)
    assert channel.errors == ["INTERNAL: the engine failed: ValueError: no room"]
    assert exchange.closed

"""A request's way back to Triton, over a channel of our own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.serving.triton.exchange import Exchange
from tests.serving.conftest import wait_for

TENSORS = {"text_input": np.array([b"Why?"], np.object_), "max_tokens": np.array([3], np.int32)}


class Channel:
    """Notes what was sent; while it is asked for a cancellation, it waits for the end."""

    def __init__(self, broken: bool = False) -> None:
        self.ended, self.asked = Event(), Event()
        self.ended_while_asked = False
        self.finals = 0
        self.sent: list[Mapping[str, NDArray]] = []
        self.errors: list[str] = []
        self._broken = broken

    def send(self, tensors: Mapping[str, NDArray], final: bool) -> None:
        if self._broken:
            raise ValueError("no room")
        self.sent.append(tensors)
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


def test_pieces_of_a_streamed_answer(runtime: Runtime) -> None:
    """The prompt is in the first one only; sums of log-probabilities are of all pieces so far."""
    flags = ("stream", "return_cumulative_logprob", "return_num_output_tokens")
    tensors = TENSORS | {name: np.array([True]) for name in flags}
    tensors |= {"exclude_input_in_output": np.array([False]), "max_tokens": np.array([9], np.int32)}
    channel = Channel()
    exchange = Exchange(channel, batched=False)
    exchange.start(tensors, runtime)
    assert channel.ended.wait(10)
    wanted = runtime.generate("Why?", GenerationOptions(9, logprobs=0))
    assert len(channel.sent) > 1
    text = b"".join(piece["text_output"][0] for piece in channel.sent).decode()
    assert text == "Why?" + wanted.text
    counts = [int(piece["num_output_tokens"][0]) for piece in channel.sent]
    assert sum(counts) == len(wanted.tokens)
    sums = np.cumsum([entry.logprob for entry in wanted.logprobs])
    for piece, end in zip(channel.sent, np.cumsum(counts), strict=True):
        assert piece["cumulative_logprob"][0] == pytest.approx(sums[end - 1], rel=1e-5)


def test_rows_have_their_own_answers(runtime: Runtime) -> None:
    texts = ["Why?", "How?"]
    tensors = {
        "text_input": np.array([[text.encode()] for text in texts], np.object_),
        "max_tokens": np.array([[5], [7]], np.int32),
        "return_log_probs": np.array([[True], [True]]),
    }
    channel = Channel()
    Exchange(channel, batched=True).start(tensors, runtime)
    assert channel.ended.wait(10)
    found = {int(piece["batch_index"][0, 0]): piece for piece in channel.sent}
    assert sorted(found) == [0, 1]
    for index, (text, count) in enumerate(zip(texts, (5, 7), strict=True)):
        wanted = runtime.generate(text, GenerationOptions(count, logprobs=0))
        assert found[index]["output_ids"][0].tolist() == wanted.tokens
        logprobs = [entry.logprob for entry in wanted.logprobs]
        assert found[index]["output_log_probs"][0] == pytest.approx(logprobs, rel=1e-5)

"""From generations and deltas to the objects of OpenAI's API."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from dflash_trt.runtime.generate import Delta, Generation
from dflash_trt.runtime.sampling import TokenLogprobs
from dflash_trt.runtime.text import TextCodec
from dflash_trt.serving.openai.readers import Reader, whole_calls

Json = dict[str, Any]
_FIGURES = ("acceptance_length", "acceptance_per_slot", "drafts_wasted", "cycles", "ttft_ms")


def figures(generation: Generation) -> Json:
    """What drafting did for one choice."""
    summary = generation.metrics.summary()
    return {
        "drafting": generation.drafting,
        "seed": generation.seed,
        **{name: summary[name] for name in _FIGURES},
    }


def usage(generations: Sequence[Generation], prompts: int) -> Json:
    """Token counts; choices of one prompt count it once."""
    per_prompt = len(generations) // prompts
    prompt = sum(g.metrics.prompt_tokens for g in generations[::per_prompt])
    completion = sum(len(g.tokens) for g in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class Answer(ABC):
    """What chat and plain completions have in common. `chunk_kind` is the object of a stream."""

    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, model: str, fingerprint: str, codec: TextCodec, prompts: int) -> None:
        self._head = {
            "id": f"{self.prefix}-{token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._codec, self._prompts = codec, prompts

    def whole(self, generations: Sequence[Generation]) -> Json:
        choices = [self._choice(i, g) for i, g in enumerate(generations)]
        counts = usage(generations, self._prompts)
        return {**self._head, "object": self.kind, "choices": choices, "usage": counts}

    def opening(self, index: int) -> Json | None:
        """The chunk before a choice's first text."""
        return None

    def chunk(self, index: int, delta: Delta, generation: Generation) -> Json | None:
        """The chunk for a delta; None where there is nothing to tell."""
        choice = self._part(index, delta)
        if delta.finish_reason is not None:
            choice["dflash"] = self._figures(index, generation)
        elif not (delta.logprobs or self._carries(choice)):
            return None
        return self._chunk([choice])

    def closing(self, generations: Sequence[Generation]) -> Json:
        """The chunk with the usage, behind all choices."""
        return self._chunk([]) | {"usage": usage(generations, self._prompts)}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    @abstractmethod
    def _carries(self, choice: Json) -> bool:
        """Whether there is anything to read in a choice of a chunk."""

    @abstractmethod
    def _choice(self, index: int, generation: Generation) -> Json:
        """A choice of the whole answer."""

    @abstractmethod
    def _part(self, index: int, delta: Delta) -> Json:
        """A choice of a chunk."""

    def _figures(self, index: int, generation: Generation) -> Json:
        return figures(generation)

    def _token(self, token: int) -> str:
        return self._codec.text([token])


class ChatAnswer(Answer):
    """chat.completion and its chunks."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, fingerprint: str, codec: TextCodec, readers: Sequence[Reader]
    ) -> None:
        """`readers`: one for each choice."""
        super().__init__(model, fingerprint, codec, prompts=1)
        self._readers = readers

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def _choice(self, index: int, generation: Generation) -> Json:
        g = generation
        fields = self._readers[index].read(Delta(tuple(g.tokens), g.text, (), g.finish_reason))
        calls = whole_calls(fields.pop("tool_calls", []))
        message = {"role": "assistant", "content": None if calls else "", "refusal": None, **fields}
        return {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(g.logprobs),
            "finish_reason": self._reason(index, g.finish_reason),
            "dflash": self._figures(index, g),
        }

    def _part(self, index: int, delta: Delta) -> Json:
        return {
            "index": index,
            "delta": self._readers[index].read(delta),
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": self._reason(index, delta.finish_reason),
        }

    def _figures(self, index: int, generation: Generation) -> Json:
        problem = self._readers[index].problem
        return figures(generation) | ({"chat_format": problem} if problem else {})

    def _reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if self._readers[index].called and reason == "stop" else reason

    def _carries(self, choice: Json) -> bool:
        return bool(choice["delta"])

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> Json | None:
        if not entries:
            return None
        content = [
            self._entry(e.token, e.logprob) | {"top_logprobs": [self._entry(*t) for t in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._token(token)
        whole = "\ufffd" not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


class TextAnswer(Answer):
    """text_completion, which streams under the same name."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, fingerprint: str, codec: TextCodec, prompts: int) -> None:
        super().__init__(model, fingerprint, codec, prompts)
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, generation: Generation) -> Json:
        return {
            "index": index,
            "text": generation.text,
            "logprobs": self._logprobs(index, generation.logprobs),
            "finish_reason": generation.finish_reason,
            "dflash": self._figures(index, generation),
        }

    def _part(self, index: int, delta: Delta) -> Json:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }

    def _carries(self, choice: Json) -> bool:
        return bool(choice["text"])

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> Json | None:
        if not entries:
            return None
        tokens = [self._token(e.token) for e in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [e.logprob for e in entries],
            "top_logprobs": [{self._token(t): value for t, value in e.top} for e in entries],
            "text_offset": [self._offset(index, token) for token in tokens],
        }

    def _offset(self, index: int, token: str) -> int:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(token)
        return offset

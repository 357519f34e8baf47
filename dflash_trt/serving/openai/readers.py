"""Readers of one choice: from what cycles add to the fields of a chat message."""

from __future__ import annotations

from typing import Any, Protocol

from dflash_trt.runtime.generate import Delta
from dflash_trt.runtime.harmony import Delta as Part
from dflash_trt.runtime.harmony import HarmonyStream
from dflash_trt.serving.openai.tools import ToolParser, call_id

Json = dict[str, Any]


class Reader(Protocol):
    """called: tools were; problem: why the answer cannot be read to its end, empty where it can."""

    @property
    def called(self) -> bool: ...
    @property
    def problem(self) -> str: ...
    def read(self, delta: Delta) -> Json:
        """What `delta` adds to `content`, `reasoning_content` and `tool_calls`, those that it does.
        A call's first piece has id and name, all its pieces have its index."""
        ...


class TextReader:
    """The text is the content."""

    called, problem = False, ""

    def read(self, delta: Delta) -> Json:
        return {"content": delta.text} if delta.text else {}


class ToolTextReader:
    """Calls stand in the text, as the chat template's own turns write them."""

    problem = ""

    def __init__(self) -> None:
        self._parser = ToolParser()

    @property
    def called(self) -> bool:
        return bool(self._parser.calls)

    def read(self, delta: Delta) -> Json:
        text, calls = self._parser.push(delta.text, last=delta.finish_reason is not None)
        fields = {"content": text, "tool_calls": calls}
        return {name: value for name, value in fields.items() if value}


class HarmonyReader:
    """Channels: text is already what is meant for the user, the rest is read from the tokens."""

    def __init__(self, stream: HarmonyStream) -> None:
        self._stream = stream
        self._calls: dict[int, int] = {}

    @property
    def called(self) -> bool:
        return bool(self._calls)

    @property
    def problem(self) -> str:
        return self._stream.broken

    def read(self, delta: Delta) -> Json:
        parts = self._stream.push(delta.tokens)
        if delta.finish_reason is not None:
            parts += self._stream.finish()
        calls = [self._call(part) for part in parts if part.called]
        thought = "".join(p.text for p in parts if not (p.called or p.shown))
        fields = {"content": delta.text, "reasoning_content": thought, "tool_calls": calls}
        return {name: value for name, value in fields.items() if value}

    def _call(self, part: Part) -> Json:
        known = part.message in self._calls
        index = self._calls.setdefault(part.message, len(self._calls))
        if known:
            return {"index": index, "function": {"arguments": part.text}}
        function = {"name": part.called, "arguments": part.text}
        return {"index": index, "id": call_id(), "type": "function", "function": function}


def whole_calls(pieces: list[Json]) -> list[Json]:
    """Calls without their indices, each in one piece."""
    calls: list[Json] = []
    for piece in pieces:
        if "id" in piece:
            calls.append({k: v for k, v in piece.items() if k != "index"})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return calls

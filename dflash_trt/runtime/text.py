"""Tokens to text and back: chat template, tokenizer, incremental detokenisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dflash_trt.errors import InputError

Message = Mapping[str, Any]


class TextCodec:
    """The tokenizer and chat template of an engine directory. stop_ids: what the chat format itself
    ends an answer with, next to the model's own."""

    stop_ids: tuple[int, ...] = ()

    def __init__(self, folder: Path, chat_arguments: Mapping[str, Any]) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        self._template = environment.from_string((folder / "chat_template.jinja").read_text())
        self._arguments = dict(chat_arguments)

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `messages` with the assistant's turn open behind them."""
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, **self._arguments
            )
        except TemplateError as error:
            raise InputError(f"the chat template refuses these messages: {error}") from None
        return self.ids(text)

    def ids(self, text: str) -> list[int]:
        """Token ids of `text` as it is; special tokens in it count as such."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """A reader of the answer to `prompt`."""
        return TextStream(self._tokenizer)


class TextStream:
    """Text of tokens as they come; never half a character, never taken back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._emitted = ""
        self._ids: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        self._ids += ids
        new = "".join(self._stream.step(self._tokenizer, i) or "" for i in ids)
        self._emitted += new
        return new

    def finish(self) -> str:
        """What was held back: a last incomplete character shows as the replacement character."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole.removeprefix(self._emitted) if whole.startswith(self._emitted) else ""


class StopFinder:
    """Finds stop texts in text that comes in pieces, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that is safe to show, the stop text that was found or None).

        Where several are found the one that begins first ends the text, before it. Not `armed`:
        nothing is searched or held back.
        """
        text, self._held = self._held + piece, ""
        if not armed:
            return text, None
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            position, stop = min(found)
            return text[:position], stop
        shown = len(text) - self._undecided(text)
        self._held = text[shown:]
        return text[:shown], None

    def finish(self) -> str:
        """What was held back and became no stop text."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop text begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

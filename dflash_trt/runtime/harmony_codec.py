"""The text of an engine whose chat format is Harmony: prompts from messages, the user's part of answers.

The vocabulary of the format is the model's own, so the file that the package `openai-harmony` reads is
made of the engine directory's `tokenizer.json`. Where TIKTOKEN_ENCODINGS_BASE is set, that is used.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.errors import InputError
from dflash_trt.runtime.harmony import VOCABULARY, VOCABULARY_FOLDER, HarmonyChat, HarmonyStream
from dflash_trt.runtime.text import Message, TextCodec, TextStream

_OPEN_TURN = "<|start|>assistant"


class HarmonyCodec(TextCodec):
    """A `TextCodec` whose chats are Harmony's. Text is what is meant for the user; `chat` reads the
    other channels from the tokens."""

    def __init__(self, folder: Path, chat_arguments: Mapping[str, Any]) -> None:
        super().__init__(folder, chat_arguments)
        self.chat = _load_chat(folder, self._tokenizer)
        self.stop_ids = self.chat.stop_ids
        self._open_turn = self.chat.encode(_OPEN_TURN)
        if self._open_turn[0] != self._tokenizer.token_to_id("<|start|>"):
            raise InputError(f"{folder}/tokenizer.json: its '<|start|>' is not Harmony's")

    def chat_ids(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), effort: str | None = None
    ) -> list[int]:
        """As `TextCodec.chat_ids`. effort: of reasoning, the engine's own unless given."""
        usual = self._arguments.get("reasoning_effort", "medium")
        return self.chat.prompt(messages, tools, effort or usual, f"{datetime.now():%Y-%m-%d}")

    def stream(self, prompt: Sequence[int] = ()) -> TextStream | HarmonyText:  # type: ignore[override]
        """A prompt that opens the assistant's turn is answered in channels, others in plain text."""
        if list(prompt[-len(self._open_turn) :]) != self._open_turn:
            return super().stream(prompt)
        return HarmonyText(self.chat.stream())


class HarmonyText:
    """Like `TextStream`, with what is meant for the user only."""

    def __init__(self, stream: HarmonyStream) -> None:
        self._stream = stream

    def push(self, ids: Sequence[int]) -> str:
        return "".join(delta.text for delta in self._stream.push(ids) if delta.shown)

    def finish(self) -> str:
        return "".join(delta.text for delta in self._stream.finish() if delta.shown)


def _load_chat(folder: Path, tokenizer: Tokenizer) -> HarmonyChat:
    if os.environ.get(VOCABULARY_FOLDER):
        return HarmonyChat()
    with TemporaryDirectory() as made:
        write_vocabulary(tokenizer, Path(made) / VOCABULARY, f"{folder}/tokenizer.json")
        return HarmonyChat(Path(made))


def write_vocabulary(tokenizer: Tokenizer, path: Path, origin: str) -> None:
    """A byte-level tokenizer's tokens in tiktoken's format: bytes in base64 and id, by id."""
    special = tokenizer.get_added_tokens_decoder()
    tokens = tokenizer.get_vocab(with_added_tokens=False).items()
    byte_of = _bytes_of_characters()
    try:
        lines = [
            b"%s %d\n" % (b64encode(bytes(map(byte_of.__getitem__, token))), i)
            for i, token in sorted((i, token) for token, i in tokens if i not in special)
        ]
    except KeyError as error:
        raise InputError(f"{origin}: is not byte-level, it holds {error}") from None
    path.write_bytes(b"".join(lines))


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level tokenizers write printable Latin-1 as itself and other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}

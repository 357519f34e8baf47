"""Harmony, the chat format of gpt-oss: prompts from messages, channels and tool calls from tokens.

All of the format is the package `openai-harmony`; here it takes messages as the OpenAI API has them,
and blocks of several tokens at a time, as speculative decoding commits them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_trt.errors import InputError

EFFORTS = ("low", "medium", "high")
VOCABULARY = "o200k_base.tiktoken"
VOCABULARY_FOLDER = "TIKTOKEN_ENCODINGS_BASE"  # read by the package when it loads an encoding


@dataclass(frozen=True)
class Delta:
    """Text of one message: `channel` is analysis, commentary or final; `recipient` names the tool
    that a call is for, as `functions.name`, and is empty otherwise; `message` counts from 0."""

    message: int
    channel: str
    recipient: str
    text: str

    @property
    def called(self) -> str:
        """The name of the function that is called; empty where none is."""
        name = self.recipient.removeprefix("functions.")
        return name if name != self.recipient else ""

    @property
    def shown(self) -> bool:
        """Meant for the user: the answer itself, or what is said before tools are called."""
        return self.channel == "final" or (self.channel == "commentary" and not self.recipient)


def whole_messages(deltas: Iterable[Delta]) -> list[Delta]:
    """Deltas of one message as one, in the order in which messages began."""
    whole: dict[int, Delta] = {}
    for delta in deltas:
        before = whole[delta.message].text if delta.message in whole else ""
        whole[delta.message] = replace(delta, text=before + delta.text)
    return list(whole.values())


class HarmonyChat:
    """The encoding, loaded once. `vocabulary`: a folder with `o200k_base.tiktoken`; without it the
    package looks where the variable TIKTOKEN_ENCODINGS_BASE says, or fetches that file."""

    def __init__(self, vocabulary: Path | None = None) -> None:
        try:
            self._library: Any = importlib.import_module("openai_harmony")
        except ImportError:
            raise InputError(
                "the chat format of gpt-oss needs the package openai-harmony: "
                "pip install 'dflash-trt[harmony]'"
            ) from None
        name = self._library.HarmonyEncodingName.HARMONY_GPT_OSS
        try:
            with _folder(vocabulary):
                self._encoding = self._library.load_harmony_encoding(name)
        except Exception as error:  # the package raises what its Rust half raises
            raise InputError(
                f"the vocabulary o200k_base of the Harmony format cannot be loaded ({error}); set "
                f"{VOCABULARY_FOLDER} to a folder that holds {VOCABULARY}"
            ) from error

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn: an answer is complete, or a tool is called."""
        return tuple(sorted(self._encoding.stop_tokens_for_assistant_actions()))

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        effort: str = "medium",
        date: str = "",
    ) -> list[int]:
        """Tokens up to where the assistant begins. `messages` and `tools` as in the OpenAI chat API;
        system messages become the developer's instructions; what was thought (`reasoning_content`)
        is kept where tools were called; `date` as 2026-01-31."""
        if effort not in EFFORTS:
            raise InputError(f"reasoning effort '{effort}': {', '.join(EFFORTS)} are known")
        lib = self._library
        system = lib.SystemContent.new().with_reasoning_effort(lib.ReasoningEffort(effort.title()))
        if date:
            system = system.with_conversation_start_date(date)
        parts = [lib.Message.from_role_and_content(lib.Role.SYSTEM, system)]
        developer = self._developer(messages, tools)
        if developer is not None:
            parts.append(lib.Message.from_role_and_content(lib.Role.DEVELOPER, developer))
        calls: dict[str, str] = {}
        for message in messages:
            parts += self._turn(message, calls)
        conversation = lib.Conversation.from_messages(parts)
        tokens = self._encoding.render_conversation_for_completion(conversation, lib.Role.ASSISTANT)
        return [int(token) for token in tokens]

    def stream(self) -> HarmonyStream:
        """A reader of one answer."""
        return HarmonyStream(self._library, self._encoding)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that may hold Harmony's special tokens."""
        return list(self._encoding.encode(text, allowed_special="all"))

    def _developer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Any:
        roles = ("system", "developer")
        texts = [str(m.get("content") or "") for m in messages if m.get("role") in roles]
        if not texts and not tools:
            return None
        content = self._library.DeveloperContent.new()
        if texts:
            content = content.with_instructions("\n\n".join(texts))
        if tools:
            content = content.with_function_tools([self._tool(tool) for tool in tools])
        return content

    def _tool(self, tool: Mapping[str, Any]) -> Any:
        function = tool.get("function", tool)
        if "name" not in function:
            raise InputError("a tool has no 'name'")
        description = function.get("description") or ""
        parameters = function.get("parameters")
        new = self._library.ToolDescription.new
        return new(function["name"], description, parameters=parameters)

    def _turn(self, message: Mapping[str, Any], calls: dict[str, str]) -> list[Any]:
        """The messages of one turn; `calls` maps ids of tool calls to the tools' names."""
        lib, text = self._library, str(message.get("content") or "")
        match message.get("role"):
            case "system" | "developer":
                return []
            case "user":
                return [lib.Message.from_role_and_content(lib.Role.USER, text)]
            case "assistant":
                return self._assistant(message, text, calls)
            case "tool":
                name = str(message.get("name") or calls.get(message.get("tool_call_id", ""), ""))
                if not name:
                    raise InputError("a tool's message names no call of the conversation")
                author = lib.Author.new(lib.Role.TOOL, f"functions.{name}")
                made = lib.Message.from_author_and_content(author, text)
                return [made.with_channel("commentary").with_recipient("assistant")]
            case role:
                raise InputError(f"a message has the role '{role}'")

    def _assistant(self, message: Mapping[str, Any], text: str, calls: dict[str, str]) -> list[Any]:
        lib, made = self._library, []
        new = lib.Message.from_role_and_content
        if message.get("reasoning_content") and message.get("tool_calls"):
            thought = new(lib.Role.ASSISTANT, str(message["reasoning_content"]))
            made.append(thought.with_channel("analysis"))
        if text:
            made.append(new(lib.Role.ASSISTANT, text).with_channel("final"))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            calls[call.get("id", "")] = function["name"]
            asked = new(lib.Role.ASSISTANT, function["arguments"]).with_channel("commentary")
            asked = asked.with_recipient(f"functions.{function['name']}")
            made.append(asked.with_content_type("<|constrain|>json"))
        return made


@dataclass
class HarmonyStream:
    """Reads an answer as it is committed; `broken` is set where the tokens leave the format."""

    library: Any
    encoding: Any
    broken: str = ""
    _done: bool = False
    _sent: str = ""  # of the message that is being written
    _parser: Any = field(init=False)

    def __post_init__(self) -> None:
        self._parser = self.library.StreamableParser(
            self.encoding, role=self.library.Role.ASSISTANT
        )

    def push(self, tokens: Sequence[int]) -> list[Delta]:
        """What `tokens`, any number of them, add; consecutive text of one message is one delta."""
        found: list[Delta] = []
        for token in tokens:
            for delta in self._guarded(partial(self._parser.process, token)):
                if found and _same(found[-1], delta):
                    delta = replace(delta, text=found.pop().text + delta.text)
                found.append(delta)
        return found

    def finish(self) -> list[Delta]:
        """What was held back of an answer that ends without its last token."""
        if self._done:
            return []
        self._done = True
        return list(self._guarded(self._parser.process_eos))

    def _guarded(self, advance: Callable[[], object]) -> Iterator[Delta]:
        """The text that one step of the parser adds; nothing behind what it cannot read."""
        if self.broken:
            return
        p = self._parser
        number, header = len(p.messages), (p.current_channel, p.current_recipient)
        try:
            advance()
        except self.library.HarmonyError as error:
            self.broken = str(error)
            return
        if len(p.messages) > number:  # ended: a character whose bytes were cut off comes now
            text = "".join(part.text for part in p.messages[-1].content)[len(self._sent) :]
            self._sent = ""
        else:
            text, header = p.last_content_delta or "", (p.current_channel, p.current_recipient)
            self._sent += text
        if text:
            yield Delta(number, header[0] or "final", header[1] or "", text)


def _same(a: Delta, b: Delta) -> bool:
    return (a.message, a.channel, a.recipient) == (b.message, b.channel, b.recipient)


@contextmanager
def _folder(vocabulary: Path | None) -> Iterator[None]:
    """Where the package looks for its vocabulary, while it loads it."""
    if vocabulary is None:
        yield
        return
    before = os.environ.get(VOCABULARY_FOLDER)
    os.environ[VOCABULARY_FOLDER] = str(vocabulary)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VOCABULARY_FOLDER]
        else:
            os.environ[VOCABULARY_FOLDER] = before
